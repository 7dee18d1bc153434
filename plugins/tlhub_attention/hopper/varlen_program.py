"""The program of attention over sequences end to end on Hopper: before each kernel one that puts them in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tlhub.build.program import CudaProgram, Launch, Parameter
from tlhub.specs import Config, Problem
from tlhub_attention.cuda import code
from tlhub_attention.hopper.forward_program import Kernel, compose

_THREADS = 1024  # of the kernel before
_SEQUENCES = "(N1 + 1)"
"""Sequences, and two of the queries that are of none."""


def program(problem: Problem, config: Config, arch: str) -> CudaProgram:
    """Return the program of the plans in *config*; what tensor maps cannot take is computed row by row."""
    return compose(problem, config, _Sequences)


@dataclass(frozen=True)
class _Sequences(Kernel):
    """A kernel whose blocks draw tiles of sequences, and the one that puts these in order."""

    FILES: ClassVar[tuple[str, ...]] = (*Kernel.FILES, "forward_sequences.cuh")
    KEYS: ClassVar[str] = "(N1 > 2 ? S_kv / (N1 - 1) : S_kv)"
    BESIDE: ClassVar[int] = 144

    @property
    def tiles(self) -> str:
        return f"H * (S / {self.plan.queries} + {_SEQUENCES})"

    @property
    def workspace(self) -> str:
        """Bytes of scratch memory, as Order has them."""
        return f"(4 + 5 * {_SEQUENCES} + {self.tiles}) * 4"

    def instance(self) -> str:
        return f"HOPPER_SEQUENCES(arrange_{self.name}, {self.name}, {self.arguments})"

    def launches(self, direct: bool) -> tuple[Launch, ...]:
        order = (Parameter("void *", "WORKSPACE"), Parameter("int", self.tiles))
        arrange = Launch(
            f"arrange_{self.name}",
            (1, 1, 1),
            (_THREADS, 1, 1),
            (*order, *code.parameters(self.problem)),
            programmatic=True,
        )
        return arrange, self.launch(direct, *order)
