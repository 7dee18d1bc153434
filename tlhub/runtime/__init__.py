"""Loading and calling: the only part of tlhub that imports tvm-ffi, and only when a kernel is loaded."""

from __future__ import annotations

from tlhub.runtime.kernel import CompiledKernel
from tlhub.runtime.load import Library, load_entry, load_library

__all__ = ["CompiledKernel", "Library", "load_entry", "load_library"]
