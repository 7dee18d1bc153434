"""Lookups where nothing takes long: builds are made up."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

sys.path.insert(0, str(Path(__file__).parent))
import serving_lab


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, cold_cache: str) -> Iterator[serving_lab.Compiler]:
    """A stand-in for the compilers, and an empty cache."""
    from tlhub import hub

    yield serving_lab.install(monkeypatch)
    hub.forget()


@pytest.fixture
def cli() -> Callable[..., Result]:
    """``cli("cache", "check", ..)``: the command line in this process."""
    from tlhub.cli import cli

    return lambda *words: CliRunner().invoke(cli, [str(w) for w in words], prog_name="tlhub")
