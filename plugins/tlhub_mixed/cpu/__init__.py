"""The CPU schedules of mixed precision, and their programs."""
