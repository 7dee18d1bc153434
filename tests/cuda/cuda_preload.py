"""What a process with the driver needs, imported once: others are forked from the one that did."""

import sys

sys.modules["torch"] = None  # type: ignore[assignment]  # tvm-ffi would import it

import cuda_lab  # noqa: E402, F401
import numpy  # noqa: E402, F401
import tvm_ffi  # noqa: E402, F401
