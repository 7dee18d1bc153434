"""Processes with a fake CUDA driver, as the tests of the target have them."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "cuda"))
from cuda_driver import driver

__all__ = ["driver"]
