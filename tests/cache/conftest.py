from __future__ import annotations

from pathlib import Path

import pytest

from tlhub.cache.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store("user", tmp_path / "root")
