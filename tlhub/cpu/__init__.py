"""What kernels for CPUs may share: words to write TIR in, for schedules by the toolchain ``tvm``. For workers only."""
