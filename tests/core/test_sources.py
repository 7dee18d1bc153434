"""Source digests: what a program's bytes are, and nothing of where, when or by whom they were put there."""

from __future__ import annotations

import importlib
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tlhub import sources
from tlhub.errors import PluginError
from tlhub.specs import Schedule

pytestmark = pytest.mark.light


@pytest.fixture
def digest(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """``digest(folder)``: of the schedule of a package in *folder*, as a new process sees it."""

    def read(folder: Path, *more: str) -> str:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "path", [str(folder), *sys.path])
            importlib.invalidate_caches()
            sources._digest.cache_clear()
            return sources.digest(Schedule("s", "k", 1, 1, ("cpu",), "tvm", "program_of_a_test:make", sources=more))

    return read


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "one"
    made.mkdir()
    (made / "program_of_a_test.py").write_text("def make(): ...\n")
    return made


def test_a_copy_elsewhere_of_another_day_is_the_same(digest: Callable[..., str], folder: Path, tmp_path: Path) -> None:
    first = digest(folder)
    file = shutil.copytree(folder, tmp_path / "two") / "program_of_a_test.py"
    os.utime(file, (1, 1))
    file.chmod(0o600)
    assert digest(tmp_path / "two") == first
    (tmp_path / "link").symlink_to(folder)
    assert digest(tmp_path / "link") == first


def test_an_edit_of_the_same_size_and_date_is_another(digest: Callable[..., str], folder: Path) -> None:
    file, first = folder / "program_of_a_test.py", digest(folder)
    stamp = file.stat()
    file.write_text("def made(): ...\n")
    os.utime(file, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert digest(folder) != first


def test_where_one_module_ends_and_the_next_begins_counts(digest: Callable[..., str], folder: Path) -> None:
    (folder / "helper_of_a_test.py").write_text("x = 1\ny = 2\n")
    names = ("program_of_a_test", "helper_of_a_test")
    first = digest(folder, *names)
    assert first not in (digest(folder), digest(folder, *reversed(names)))
    (folder / "program_of_a_test.py").write_text("def make(): ...\nx = 1\n")
    (folder / "helper_of_a_test.py").write_text("y = 2\n")
    assert digest(folder, *names) != first


def test_what_is_missing_is_named(digest: Callable[..., str], folder: Path) -> None:
    with pytest.raises(PluginError, match="source 'no_such_module' of a schedule cannot be found"):
        digest(folder, "no_such_module")
