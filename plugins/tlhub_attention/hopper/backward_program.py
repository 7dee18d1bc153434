"""The program of attention's gradients on Hopper's tensor cores: for plain logits, for capped ones, and by rows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tlhub.build.program import Branch, CudaProgram, Launch, Parameter
from tlhub.cuda import tensor_cores
from tlhub.specs import Config, Problem
from tlhub_attention.cuda import backward_code, code
from tlhub_attention.hopper import ragged
from tlhub_attention.hopper.backward_plan import ITEM, PART, THREADS, Plan, plans, round_up

FILES: tuple[str | Path, ...] = (
    *("rows.cuh", tensor_cores.FILE),
    *(f"backward_{part}.cuh" for part in ("call", "rows", "tiles", "begin", "memory")),
    *(f"backward_{part}.cuh" for part in ("steps", "hopper", "wide", "kernel", "ends")),
)
"""What follows call.cuh."""

_SERVED = f"H_kv > 0 && H % H_kv == 0 && S < {code.MOST} && S_kv < {code.MOST}"
_ENDS = 256  # threads of a block of the kernels before and after


def program(problem: Problem, config: Config, arch: str) -> CudaProgram:
    """Return the program; what tensor maps cannot take is computed row by row."""
    plain, capped = plans(int(problem.dim["D"]), int(problem.dim["D_v"]))
    kernels = (_Kernel(problem, plain, False), _Kernel(problem, capped, True))
    used = dict.fromkeys(kernel.plan for kernel in kernels)
    dtype, wide = dict(problem.dtypes)["q"], round_up(int(problem.dim["D_v"]), 64)
    source = "\n".join(
        [
            f"constexpr bool DETERMINISTIC = {str(problem.option['deterministic']).lower()};",
            code.source(problem, *FILES),
            tensor_cores.from_shared(dtype, [64, *(plan.queries for plan in used)]),
            tensor_cores.from_registers(dtype, [wide, *(plan.channels for plan in used)]),
            *(f"BACKWARD_ENDS({_begin(plan)}, {_end(plan)}, {plan.arguments})" for plan in used),
            *(kernel.instance() for kernel in kernels),
            "",
        ]
    )
    rows = backward_code.rows(problem, Parameter("void *", 0), True)
    tiles = {_tiles(plan): f"B * H * {_count(problem, 'S', plan.queries)}" for plan in used}
    return CudaProgram(
        source, (*_branches(problem, kernels), Branch((rows,), _SERVED)), values=code.values(problem) | tiles
    )


def _branches(problem: Problem, kernels: tuple[_Kernel, _Kernel]) -> Iterator[Branch]:
    """Yield the branches of plain and of capped logits; dk and dv by bulk copies, or element by element where no tensor
    map can be made of one."""
    fits = " && ".join([_SERVED, *(_mappable(problem, name) for name in ("q", "k", "v", "dout"))])
    bulk = " && ".join(_mappable(problem, name) for name in ("dk", "dv"))
    for kernel in kernels:
        small = f"{_tiles(kernel.plan)} < {code.MOST} && {kernel.blocks} < {code.MOST}"
        when = f"{fits} && {small} && softcap {'!=' if kernel.capped else '=='} 0"
        yield Branch(kernel.launches(direct=False), f"{when} && {bulk}", kernel.scratch)
        yield Branch(kernel.launches(direct=True), when, kernel.scratch)


class _Kernel(NamedTuple):
    """A kernel of *plan*, and those before and after it; ``capped``: for logits with a soft cap."""

    problem: Problem
    plan: Plan
    capped: bool

    @property
    def name(self) -> str:
        return f"backward_{self.plan.queries}" + ("_capped" if self.capped else "")

    @property
    def shared(self) -> int:
        return self.plan.shared(int(self.problem.dim["D_v"]))

    @property
    def blocks(self) -> str:
        plan = self.plan
        return f"B * H_kv * {_count(self.problem, 'S_kv', plan.keys * plan.cluster)} * {plan.cluster}"

    @property
    def scratch(self) -> str:
        """Bytes of scratch memory: sums, stats and counts, as Scratch has them."""
        return f"{_tiles(self.plan)} * {self.plan.parts * (PART + 4) + self.plan.stats} + 8"

    def instance(self) -> str:
        """Return the kernel's source, to follow backward_kernel.cuh."""
        return f"BACKWARD({self.name}, {self.shared}, {str(self.capped).lower()}, {self.plan.arguments})"

    def launches(self, direct: bool) -> tuple[Launch, ...]:
        """Return a call's; *direct*: dk and dv are stored element by element."""
        tiles, plan = _tiles(self.plan), self.plan
        scratch = [
            Parameter("void *", f"((char *)WORKSPACE + {tiles} * {offset})")
            for offset in (0, plan.parts * PART, plan.parts * PART + plan.stats)
        ]
        call = backward_code.parameters(self.problem)

        def end(kernel: str, array: str) -> Launch:
            whole = Parameter("int", f"({_mappable(self.problem, array)})")
            return Launch(kernel, (tiles, 1, 1), (_ENDS, 1, 1), (whole, *scratch, *call), programmatic=True)

        tensor_map = (ragged if code.varlen(self.problem) else code).tensor_map
        boxes = {"q": plan.queries, "k": plan.keys, "v": plan.keys, "dout": plan.queries}
        stored = ("q", "q") if direct else ("dk", "dv")
        products = Launch(
            kernel=self.name,
            grid=(self.blocks, 1, 1),
            block=(THREADS, 1, 1),
            parameters=(
                *(tensor_map(self.problem, name, (64, rows)) for name, rows in boxes.items()),
                *(tensor_map(self.problem, name, (64, 16)) for name in stored),
                Parameter("int", int(direct)),
                *scratch,
                *call,
            ),
            shared=self.shared,
            cluster=(plan.cluster, 1, 1),
            programmatic=True,
        )
        rows = backward_code.rows(self.problem, scratch[2], True)
        return end(_begin(plan), "o"), products, end(_end(plan), "dq"), rows


def _mappable(problem: Problem, name: str) -> str:
    """Return the condition that an array can have a tensor map."""
    return code.mappable(name, ITEM, code.rank(problem))


def _count(problem: Problem, positions: str, size: int) -> str:
    """Return the number of tiles of a head; of sequences end to end that of numbers that they may have, as
    backward_tiles.cuh has it."""
    return f"({positions} / {size} + N1 + 1)" if code.varlen(problem) else f"CEIL_DIV({positions}, {size})"


def _tiles(plan: Plan) -> str:
    """Return the name of the number of tiles of queries, of all heads."""
    return f"tiles_{plan.queries}"


def _begin(plan: Plan) -> str:
    return f"begin_{plan.queries}"


def _end(plan: Plan) -> str:
    return f"end_{plan.queries}"
