"""The program of attention_decode on Hopper: kernels by the number of rows that share a kv head, and one for rows."""

from __future__ import annotations

import math

from tlhub.build.program import Branch, CudaProgram, Launch, Parameter
from tlhub.specs import Config, Problem
from tlhub_attention import cuda_code, tensor_cores
from tlhub_attention.hopper_decode_plan import KEYS, Plan
from tlhub_attention.hopper_plan import ITEM

_LEAST_PART, _SYMBOLIC_PART = 8, 16  # positions of a page that are copied at once
_ROWS_AT_ONCE = 16  # of a tile, each by a block of the kernel that adds up parts


def program(problem: Problem, config: Config, arch: str) -> CudaProgram:
    """Return the program of the plans in *config*; what tensor maps cannot take is computed row by row."""
    chosen = [Plan.parse(text) for text in str(config["plans"]).split()]
    channels = int(problem.dim["D"]), int(problem.dim["D_v"])
    text = cuda_code.source(problem, "row.cuh", "decode_call.cuh", tensor_cores.FILE, "softmax.cuh")
    kernels = cuda_code.read("hopper_decode.cuh")
    instances = [f"HOPPER_DECODE({p.shared(*channels)}, {', '.join(map(str, p))})" for p in chosen]
    source = "\n".join([text, f"constexpr int PART = {_part(problem)};\n", kernels, *instances, ""])
    branches = (_branch(problem, plan, last=plan == chosen[-1]) for plan in chosen)
    return CudaProgram(source, (*branches, Branch((_rows(problem),), _served(problem))))


def _branch(problem: Problem, plan: Plan, last: bool) -> Branch:
    """Return the branch of a plan: its kernel, and the one that adds up the parts of tiles."""
    d, d_v = int(problem.dim["D"]), int(problem.dim["D_v"])
    rows = "S * (H / H_kv)"
    fits = [_served(problem), *(cuda_code.mappable(name, ITEM) for name in "kv"), *_aligned_pages(problem)]
    values = (Parameter("void *", "WORKSPACE"), *_parameters(problem))
    maps = tuple(cuda_code.tensor_map(problem, name, (64, _part(problem))) for name in "kv")
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
            grid=("SMS", f"({rows} < {_ROWS_AT_ONCE} ? {rows} : {_ROWS_AT_ONCE})", 1),
            block=(128, 1, 1),
            parameters=values,
            programmatic=True,
        ),
    )
    when = [*fits, *([] if last else [f"{rows} <= {plan.rows}"])]
    return Branch(launches, " && ".join(when), workspace=plan.scratch(d_v))


def _rows(problem: Problem) -> Launch:
    rows = "CEIL_DIV(B * H * S, 4)"
    grid = (f"({rows} < SMS * 16 ? {rows} : SMS * 16)", 1, 1)
    return Launch("decode_rows", grid, (128, 1, 1), _parameters(problem))


def _served(problem: Problem) -> str:
    """Return the condition that there are heads, and that positions are ints."""
    return f"H_kv > 0 && H % H_kv == 0 && S < {cuda_code.MOST} && {_room(problem)} < {cuda_code.MOST}"


def _room(problem: Problem) -> str:
    """Return how many keys a sequence has room for."""
    return "L * page" if problem.option["paged"] else "S_kv"


def _part(problem: Problem) -> int:
    """Return how many keys a bulk copy brings: all of a unit's, or as many as are of one page."""
    if not problem.option["paged"]:
        return KEYS
    page = problem.dim["page"]
    return max(_LEAST_PART, math.gcd(page, KEYS)) if isinstance(page, int) else _SYMBOLIC_PART


def _aligned_pages(problem: Problem) -> list[str]:
    """Return the condition that no part lies in two pages."""
    return [f"page > 0 && page % {_part(problem)} == 0"] if problem.option["paged"] else []


def _parameters(problem: Problem) -> tuple[Parameter, ...]:
    """Return the values of decode_call.cuh's DECODE_PARAMETERS."""
    table = ("DATA(table)", "STRIDE(table, 0)", "STRIDE(table, 1)", "page") if problem.option["paged"] else ("0",) * 4
    return (
        *cuda_code.parameters(problem, _room(problem)),
        Parameter("void *", "DATA(lengths)"),
        Parameter("int64_t", "STRIDE(lengths, 0)"),
        *map(Parameter, ("void *", "int64_t", "int64_t", "int"), table),
    )
