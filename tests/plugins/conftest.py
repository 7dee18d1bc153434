"""Fake distributions: a dist-info folder and modules, on the path for one test."""

from __future__ import annotations

import importlib
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

KERNEL = """
from tlhub.hooks import hookimpl
from tlhub.specs import Arg, Dim, Kernel, Schedule

def kernel(name, revision=1):
    return Kernel(name=name, revision=revision, dims=(Dim("N"),), inputs=(Arg("x", ("N",)),),
                  outputs=(Arg("y", ("N",)),), dtypes=("float32",), reference="m:r", tolerance="m:t",
                  flops=lambda dims: dims["N"])

def schedule(kernel, name="plain"):
    return Schedule(name=name, kernel=kernel, kernel_revision=1, revision=1, targets=("cpu",), toolchain="tvm",
                    program="m:p")
"""


class Site:
    """A folder like site-packages, that ``add`` installs into."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.modules: list[str] = []

    def add(self, distribution: str, source: str, *, version: str = "1.0", points: str | None = None) -> str:
        """Install *distribution*: one module with *source* after ``kernel`` and ``schedule``. Returns its name."""
        module = f"fake_{distribution.replace('-', '_')}"
        self.modules.append(module)
        (self.folder / f"{module}.py").write_text(KERNEL + textwrap.dedent(source), "utf-8")
        self.list(distribution, points or f"{distribution} = {module}", version=version)
        return module

    def list(self, distribution: str, points: str, *, version: str = "1.0", folder: Path | None = None) -> None:
        """Install the metadata of *distribution*, with *points* as the entry points of the group ``tlhub``."""
        info = (folder or self.folder) / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n", "utf-8")
        (info / "entry_points.txt").write_text(f"[tlhub]\n{points}\n", "utf-8")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", str(folder))  # for the commands that a test starts
    importlib.invalidate_caches()
    made = Site(folder)
    yield made
    for name in made.modules:
        sys.modules.pop(name, None)
