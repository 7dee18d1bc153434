"""What programs of attention's gradients share: the values of backward_call.cuh's parameters, and the rows' launch."""

from __future__ import annotations

from dataclasses import replace

from tlhub.build.program import Launch, Parameter
from tlhub.specs import Problem
from tlhub_attention.cuda import code

GRADIENTS = ("dout", "dq", "dk", "dv")
"""The arrays besides attention's, in the order of backward_call.cuh's GRADIENT_PARAMETERS."""


def parameters(problem: Problem) -> tuple[Parameter, ...]:
    """Return the values of GRADIENT_PARAMETERS: those of attention with lse, and the gradients'."""
    attention = replace(problem, options=(*problem.options, ("lse", True)))
    gradients = (parameter for name in GRADIENTS for parameter in code.array(problem, name))
    return (*code.parameters(attention), *gradients)


def tiles(problem: Problem, positions: str, size: int) -> str:
    """Return how many tiles of *size* a head's *positions* have, by backward_tiles.cuh's numbers."""
    return f"({positions} / {size} + N1 + 1)" if code.varlen(problem) else f"CEIL_DIV({positions}, {size})"


def rows(problem: Problem, lost: Parameter, programmatic: bool) -> Launch:
    """Return the launch of all rows, or of those that are *lost*: by backward_rows.cuh."""
    count = "CEIL_DIV(B * (H * S + H_kv * S_kv), 4)"
    grid = (f"({count} < SMS * 16 ? {count} : SMS * 16)", 1, 1)
    return Launch("gradient_rows", grid, (128, 1, 1), (lost, *parameters(problem)), programmatic=programmatic)
