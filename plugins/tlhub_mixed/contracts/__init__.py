"""What the kernels of mixed precision compute."""
