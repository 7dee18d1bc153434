"""The program of attention_decode by mma.sync: kernels by the number of rows that share a kv head, and one for rows."""

from __future__ import annotations

from tlhub.build.program import Branch, CudaProgram, Launch, Parameter
from tlhub.specs import Config, Problem
from tlhub_attention.cuda import code, decode_code, served
from tlhub_attention.cuda.decode_plan import Plan

_PROGRAMMATIC = 90  # the least architecture with launches that begin early


def program(problem: Problem, config: Config, arch: str) -> CudaProgram:
    """Return the program of the plans in *config*; what cannot be copied 16 bytes at a time is computed row by row."""
    chosen = [Plan.parse(text) for text in str(config["plans"]).split()]
    channels = int(problem.dim["D"]), int(problem.dim["D_v"])
    source = [
        decode_code.flags(problem),
        code.source(problem, *decode_code.FILES, "decode_mma.cuh"),
        *(f"MMA_DECODE({plan.shared(*channels)}, {', '.join(map(str, plan))})\n" for plan in chosen),
    ]
    early = served.capability(arch) >= _PROGRAMMATIC
    branches = (_branch(problem, plan, channels, early, last=plan == chosen[-1]) for plan in chosen)
    by_rows, when = decode_code.rows(problem)
    return CudaProgram("\n".join(source), (*branches, Branch((by_rows,), when)), values=decode_code.values(problem))


def _branch(problem: Problem, plan: Plan, channels: tuple[int, int], early: bool, last: bool) -> Branch:
    """Return the branch of a plan; *last*: it is for any number of rows."""
    launch = Launch(
        kernel=f"decode_{plan.rows}",
        grid=(plan.grid, 1, 1),
        block=(32 * plan.warps, 1, 1),
        parameters=(Parameter("void *", "WORKSPACE"), *decode_code.parameters(problem)),
        shared=plan.shared(*channels),
        programmatic=early,
    )
    when = " && ".join([*decode_code.served(plan, last), *map(_copyable, "kv")])
    return Branch((launch,), when, workspace=plan.scratch(channels[1]))


def _copyable(name: str) -> str:
    """Return the condition that rows of array *name* lie at multiples of 16 bytes, their channels side by side."""
    steps = (f"(EXTENT({name}, {dim}) == 1 || STRIDE({name}, {dim}) % 8 == 0)" for dim in range(3))
    return " && ".join([f"STRIDE({name}, 3) == 1", f"ALIGNED(DATA({name}), 16)", *steps])
