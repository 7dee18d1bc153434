"""Running the command line in this process, as a user sees it: stdout, stderr and the exit code apart."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cache_commands import KINDS
from click.testing import CliRunner, Result

from tlhub.cli import cli


class Outcome:
    def __init__(self, result: Result) -> None:
        self.code, self.stdout, self.stderr = result.exit_code, result.stdout, result.stderr

    @property
    def json(self) -> Any:
        def refuse(name: str) -> None:
            raise ValueError(f"{name} is no JSON")

        return json.loads(self.stdout, parse_constant=refuse)


@pytest.fixture
def tlhub() -> Callable[..., Outcome]:
    """``tlhub("get", "gemm", ...)``"""

    def run(*args: str, stdin: str | None = None) -> Outcome:
        return Outcome(CliRunner().invoke(cli, args, input=stdin, prog_name="tlhub"))

    return run


@pytest.fixture
def wrong(tlhub: Callable[..., Outcome]) -> Callable[..., str]:
    """Run what must be refused as wrongly typed, and return what stderr says."""

    def run(*args: str) -> str:
        outcome = tlhub(*args)
        assert outcome.code == 2, (args, outcome.code, outcome.stderr)
        assert outcome.stdout == ""
        assert outcome.stderr.startswith("error: ") and "Traceback" not in outcome.stderr
        assert len(outcome.stderr.splitlines()) <= 3, outcome.stderr
        return outcome.stderr

    return run


@pytest.fixture(scope="session")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder with one small kernel a dtype, built once; tests get copies."""
    from click.testing import CliRunner

    from tlhub import hub
    from tlhub.cli import cli

    folder = tmp_path_factory.mktemp("filled") / "cache"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TLHUB_CACHE_DIR", str(folder))
        hub.forget()
        for dtype in KINDS:
            done = CliRunner().invoke(cli, ["cache", "prewarm", "gemm", "8,8,8", "--dtype", dtype])
            assert done.exit_code == 0, done.stderr
    return folder


@pytest.fixture
def store(filled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    shutil.copytree(filled, folder)
    monkeypatch.setenv("TLHUB_CACHE_DIR", str(folder))
    return folder
