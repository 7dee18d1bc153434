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
        (f"case \"$*\" in *' --cleared') {CALLED};; esac; echo '========= ERROR SUMMARY: 0 errors'", False),
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
    seconds = 0.5 if "sleep" in said else 60
    options = SimpleNamespace(store="s", operations=1e6, workload=None, seconds=seconds, cleared=True)
    assert sanitize.sanitize("memcheck", "gemm/simt", options) is fault


def test_scratch_memory_that_is_cleared_holds_zeros_in_each_call(sanitize: Any) -> None:
    class Kernel:
        arch, problem = "cpu:x86_64", "its own"

        def workspace(self, *inputs: Any, **scalars: Any) -> int:
            return len(inputs)

        def __call__(self, *inputs: Any, workspace: Any, **given: Any) -> Any:
            return inputs, workspace is not None and workspace.tolist(), given

    kernel = sanitize.Cleared(Kernel())
    assert kernel.problem == "its own"
    assert kernel(1, 2, out=3, alpha=0.5) == ((1, 2), [0, 0], {"out": 3, "alpha": 0.5})
    assert kernel(out=3) == ((), False, {"out": 3})
