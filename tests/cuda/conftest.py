"""Processes with a fake CUDA driver."""

import sys
import tempfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import cuda_lab
from cuda_driver import driver

__all__ = ["driver"]


@pytest.fixture(scope="session", autouse=True)
def _temporary_files(tmp_path_factory: pytest.TempPathFactory):
    """Logs of builds that fail stay where they are told: for tests that is a folder of the session's."""
    before, tempfile.tempdir = tempfile.tempdir, str(tmp_path_factory.mktemp("temporary"))
    yield
    tempfile.tempdir = before


@pytest.fixture
def fresh():
    """Make processes with the fake driver, in which nothing was called."""
    made = []

    def start(folder=None, **environment):
        made.append(cuda_lab.Driver(folder or cuda_lab.fake_driver(), **environment))
        return made[-1]

    yield start
    for process in made:
        process.close()
