"""One missing kernel, many processes that want it at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


def ask(count: int, cache: Path, donor: str = "") -> list[Any]:
    command = [sys.executable, str(HERE / "stampede_children.py"), str(count), *([donor] if donor else [])]
    environ = {**os.environ, "TLHUB_CACHE_DIR": str(cache), "TLHUB_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    found: list[Any] = json.loads(done.stdout)
    return found


def folders(cache: Path) -> list[Path]:
    return [path.parent for path in cache.glob("v1/*/*/*/*/entry.json")]


@pytest.fixture(scope="module")
def stampede(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    cache = tmp_path_factory.mktemp("stampede") / "cache"
    return cache, ask(64, cache)


def test_sixty_four_processes_build_once(stampede: tuple[Path, list[Any]]) -> None:
    cache, found = stampede
    assert Counter(map(tuple, found)) == {("built", True, True): 1, ("cache", True, True): 63}
    assert len(folders(cache)) == 1
    assert os.listdir(cache / "v1" / ".staging") == []


def test_without_locks_all_build_and_one_entry_is_seen(stampede: tuple[Path, list[Any]], tmp_path: Path) -> None:
    (donor,) = folders(stampede[0])
    found = ask(16, tmp_path / "cache", str(donor))
    assert all(published and right for _, published, right in found) and len(found) == 16
    assert sum(origin == "built" for origin, _, _ in found) > 1, "there was a race"
    (entry,) = folders(tmp_path / "cache")
    assert entry.name == donor.name and os.listdir(tmp_path / "cache" / "v1" / ".staging") == []
