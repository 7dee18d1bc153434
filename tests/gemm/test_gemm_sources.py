"""What makes the digest of a schedule for GPUs: all that decides what runs there, or a certificate would outlive it."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path

import pytest

import tlhub_gemm

FOLDER = Path(tlhub_gemm.__file__).parent
CUDA = [s for s in tlhub_gemm.tlhub_schedules() if "cuda" in s.targets]
CONTRACT = {"tlhub_gemm.contract", "tlhub_gemm.reference"}  # of the kernel, which has a revision of its own


def source(module: str) -> str:
    return (FOLDER / f"{module.partition('.')[2]}.py").read_text("utf-8")


def imported(module: str) -> set[str]:
    """Return the modules of tlhub_gemm that *module* imports."""
    found = set()
    for node in ast.walk(ast.parse(source(module))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tlhub_gemm"):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (
                {name for name in names if importlib.util.find_spec(name)}
                if node.module == "tlhub_gemm"
                else {node.module}
            )
    return found


def reached(*modules: str) -> set[str]:
    """Return *modules* and all of tlhub_gemm that they import, however far."""
    found: set[str] = set()
    more = set(modules)
    while more:
        found |= more
        more = {name for module in more for name in imported(module)} - found
    return found


@pytest.mark.parametrize("schedule", CUDA, ids=lambda s: s.name)
def test_a_digest_covers_what_decides_and_what_makes_the_program(schedule):
    decide = [schedule.supports.__module__, *([schedule.configs.__module__] if schedule.configs else [])]
    ours = {name for name in decide if name.startswith("tlhub_gemm.")}
    modules = reached(*ours, schedule.program.partition(":")[0]) - CONTRACT
    assert modules <= set(schedule.sources)
    files = {name for module in modules for name in re.findall(r'"([a-z_]+\.cuh)"', source(module))}
    ours = {name for name in files if (FOLDER / "cuda" / name).exists()}
    assert {f"tlhub_gemm/cuda/{name}" for name in ours} <= set(schedule.sources)
    assert {f"tlhub/cuda/{name}" for name in files - ours} <= set(schedule.sources)
    assert len(set(schedule.sources)) == len(schedule.sources)


def test_every_file_of_the_kernels_is_in_a_digest():
    covered = {name for schedule in CUDA for name in schedule.sources}
    assert {f"tlhub_gemm/cuda/{path.name}" for path in (FOLDER / "cuda").iterdir()} <= covered


def test_the_kernels_for_few_rows_are_not_held_to_those_of_many():
    """An edit of hopper's epilogue leaves skinny's certificate valid."""
    (skinny,) = (s for s in CUDA if s.name == "skinny")
    assert not [name for name in skinny.sources if name.rpartition("/")[2] == "hopper.cuh" or "hopper_plan" in name]


def test_what_lists_the_schedules_loads_no_program():
    modules = reached("tlhub_gemm.hopper", "tlhub_gemm.skinny", *(s.supports.__module__ for s in CUDA if s.supports))
    assert not [name for name in modules if name.endswith(("_program", "cuda_code"))]
