"""References and tolerances of the kernels of mixed precision."""
