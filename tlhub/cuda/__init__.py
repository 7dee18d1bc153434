"""What kernels in CUDA C++ may share: text of their sources, for schedules by the toolchain ``cuda``."""
