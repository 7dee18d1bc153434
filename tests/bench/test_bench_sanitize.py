"""benchmarks/sanitize.py: what it calls under compute-sanitizer, and what it takes for a fault."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tlhub.workload import Item

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def sanitize(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("sanitize")


def test_small_problems_are_called_and_of_symbolic_dims_the_last_that_is_small(sanitize: Any) -> None:
    def dims(shape: Any) -> list[tuple[Any, ...]]:
        return [p.dim["M"] for p in sanitize.small(Item("gemm", shape, "float32", {}), 2.0 * 64**3)]

    assert dims((64, 64, 64)) == [64]
    assert dims((65, 64, 64)) == []
    assert dims({"M": "M", "N": 64, "K": 64}) == [33]


CALLED = "echo '64x64x64 float32 at 64x64x64: error 0.1'"


@pytest.mark.parametrize(
    ("said", "fault"),
    [
        (f"{CALLED}; echo '========= ERROR SUMMARY: 0 errors'", False),
        (f"{CALLED}; echo '========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)'", False),
        ("echo '========= ERROR SUMMARY: 0 errors'", True),  # and nothing was called
        (f"{CALLED}; echo '========= ERROR SUMMARY: 12 errors'", True),
        (f"{CALLED}; echo '========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)'", True),
        (f"{CALLED}; echo '========= ERROR SUMMARY: 0 errors'; exit 1", True),  # what was called failed
        ("true", True),  # and the tool itself
        ("exec sleep 60", True),
    ],
)
def test_what_a_tool_reports_is_a_fault(
    sanitize: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, fault: bool
) -> None:
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(f"#!/bin/sh\n{said}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    options = SimpleNamespace(store="s", operations=1e6, workload=None, seconds=0.5 if "sleep" in said else 60)
    assert sanitize.sanitize("memcheck", "gemm/simt", options) is fault
