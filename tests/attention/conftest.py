"""Processes with a fake CUDA driver, as the tests of the target have them."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "cuda"))
import cuda_lab


@pytest.fixture(scope="session")
def driver():
    """A process with the fake driver, which remembers what was loaded."""
    made = cuda_lab.Driver(cuda_lab.fake_driver())
    yield made
    made.close()
