"""Programs whose kernels do nothing, which compile at once: for tests of which of them a call takes."""

from __future__ import annotations

import re
from dataclasses import replace

from tlhub.build.program import CudaProgram
from tlhub.specs import Config, Problem
from tlhub_mixed.hopper import weights_program
from tlhub_mixed.mma import program

_BODIES = r"^ +(weights::multiply|weights::multiply_tile)<.*\(.*\); +\\$"


def weights(problem: Problem, config: Config, arch: str) -> CudaProgram:
    """Return the program of Hopper's schedules of narrow weights."""
    made = weights_program.program(problem, config, arch)
    source, count = re.subn(_BODIES, r"\\", made.source, flags=re.MULTILINE)
    assert count == 2
    return replace(made, source=source)


def products(problem: Problem, config: Config, arch: str) -> CudaProgram:
    """Return the program of products by mma.sync."""
    made = program.program(problem, config, arch)
    source, count = re.subn(r"^ +product::run<.*\); +\\$", r"\\", made.source, flags=re.MULTILINE)
    assert count == 1
    return replace(made, source=source)
