"""The CPU schedules, by TVM."""
