"""The fixture of tests that call kernels where there is no GPU."""

import cuda_lab
import pytest


@pytest.fixture(scope="session")
def driver():
    """A process with the fake driver, which remembers what was loaded."""
    made = cuda_lab.Driver(cuda_lab.fake_driver())
    yield made
    made.close()
