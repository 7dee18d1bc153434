"""The program of attention_decode on Hopper: kernels by the number of rows that share a kv head, and one for rows."""

from __future__ import annotations

import math
from pathlib import Path

from tlhub.build.program import Branch, CudaProgram, Launch, Parameter
from tlhub.cuda import tensor_cores
from tlhub.specs import Config, Problem
from tlhub_attention.cuda import code
from tlhub_attention.hopper.decode_plan import KEYS, Plan
from tlhub_attention.hopper.forward_plan import ITEM

_LEAST_PART, _SYMBOLIC_PART = 8, 16  # positions of a page that are copied at once
_SLOTS = 4  # rows that a block of the kernel that adds up parts does at once
_FILES: tuple[str | Path, ...] = (
    *("rows.cuh", tensor_cores.FILE, "softmax.cuh", "forward_hopper.cuh"),
    *(f"decode_{part}.cuh" for part in ("call", "units", "tile", "combine", "hopper")),
)

_SERVED = f"H_kv > 0 && H % H_kv == 0 && S < {code.MOST} && S_kv < {code.MOST}"
"""The condition that there are heads, and that positions are ints. S_kv: how many keys a sequence has room for."""


def program(problem: Problem, config: Config, arch: str) -> CudaProgram:
    """Return the program of the plans in *config*; what tensor maps cannot take is computed row by row."""
    chosen = [Plan.parse(text) for text in str(config["plans"]).split()]
    channels = int(problem.dim["D"]), int(problem.dim["D_v"])
    source = [
        f"constexpr bool PAGED = {str(problem.option['paged']).lower()};",
        f"constexpr int PART = {_part(problem)};",
        code.source(problem, *_FILES),
        *(f"HOPPER_DECODE({plan.shared(*channels)}, {', '.join(map(str, plan))})\n" for plan in chosen),
    ]
    branches = (_branch(problem, plan, last=plan == chosen[-1]) for plan in chosen)
    return CudaProgram(
        "\n".join(source),
        (*branches, Branch((_rows(problem),), _SERVED)),
        values={"S_kv": "L * page"} if problem.option["paged"] else {},
    )


def _branch(problem: Problem, plan: Plan, last: bool) -> Branch:
    """Return the branch of a plan: its kernel, and the one that adds up the parts of tiles."""
    d, d_v = int(problem.dim["D"]), int(problem.dim["D_v"])
    rows = "S * (H / H_kv)"
    units = f"B * H_kv * CEIL_DIV({rows}, {plan.rows}) * (CEIL_DIV(S_kv, {KEYS}) + 1)"
    fits = [_SERVED, *(code.mappable(name, ITEM) for name in "kv"), f"{units} < {code.MOST}"]
    values = (Parameter("void *", "WORKSPACE"), *_parameters(problem))
    maps = tuple(code.tensor_map(problem, name, (64, _part(problem))) for name in "kv")
    launches = (
        Launch(
            kernel=f"decode_{plan.rows}",
            grid=("SMS", 1, 1),
            block=(plan.threads, 1, 1),
            parameters=(*maps, *values),
            shared=plan.shared(d, d_v),
            programmatic=True,
        ),
        Launch(
            kernel=f"combine_{plan.rows}",
            grid=("SMS", f"({rows} < {plan.rows} ? CEIL_DIV({rows}, {_SLOTS}) : {plan.rows // _SLOTS})", 1),
            block=(64 * _SLOTS, 1, 1),
            parameters=values,
            programmatic=True,
        ),
    )
    when = [*fits, *_whole_parts(problem), *([] if last else [f"{rows} <= {plan.rows}"])]
    return Branch(launches, " && ".join(when), workspace=plan.scratch(d_v))


def _rows(problem: Problem) -> Launch:
    rows = "CEIL_DIV(B * H * S, 4)"
    grid = (f"({rows} < SMS * 16 ? {rows} : SMS * 16)", 1, 1)
    return Launch("decode_rows", grid, (128, 1, 1), _parameters(problem))


def _part(problem: Problem) -> int:
    """Return how many keys a bulk copy brings: all of a unit's, or as many as are of one page."""
    if not problem.option["paged"]:
        return KEYS
    page = problem.dim["page"]
    return max(_LEAST_PART, math.gcd(page, KEYS)) if isinstance(page, int) else _SYMBOLIC_PART


def _whole_parts(problem: Problem) -> list[str]:
    """Return the condition that no part lies in two pages."""
    return [f"page > 0 && page % {_part(problem)} == 0"] if problem.option["paged"] else []


def _parameters(problem: Problem) -> tuple[Parameter, ...]:
    """Return the values of decode_call.cuh's DECODE_PARAMETERS."""
    table = ("DATA(table)", "STRIDE(table, 0)", "STRIDE(table, 1)", "page") if problem.option["paged"] else ("0",) * 4
    return (
        *code.parameters(problem),
        Parameter("void *", "DATA(lengths)"),
        Parameter("int64_t", "STRIDE(lengths, 0)"),
        *map(Parameter, ("void *", "int64_t", "int64_t", "int"), table),
    )
