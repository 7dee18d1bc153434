"""The program of the CPU schedule of the backward of sequences end to end. Imported in workers only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tlhub.specs import Problem
from tlhub_attention.cpu.backward import Backward
from tlhub_attention.cpu.entry import build
from tlhub_attention.cpu.frames import Starts
from tlhub_attention.cpu.ir import Expr, Frame, Memory


def program(problem: Problem, config: Mapping[str, Any], arch: str) -> Any:
    """Return the module of *problem*, whose entry takes the arrays in the contract's order, scale, window, softcap.

    *config*: that of attention.
    """
    return build(_Varlen, problem, config, arch)


class _Varlen(Starts, Backward):
    """A task takes a block of queries, or of keys, of one sequence."""

    numbers = (*Backward.numbers, *Starts.numbers)

    def _place(
        self, arrays: Mapping[str, Memory], own: Frame, axis: str, b: Expr, row0: Expr, count: Expr
    ) -> tuple[Expr, Expr, Expr]:
        placed = super()._place(arrays, own, axis, b, row0, count)
        own.put("saved_B", own["first"])
        return placed
