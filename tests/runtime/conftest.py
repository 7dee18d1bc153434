"""The programs and the small kernels are those of the tests of building."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "build"))


@pytest.fixture(scope="module")
def add():
    import lab

    return lab.compiled("add")
