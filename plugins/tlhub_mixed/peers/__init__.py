"""Other libraries' kernels, which bench times those of mixed precision against."""
