"""The schedules on Hopper's tensor cores, in CUDA C++: which plan, and the program of it."""
