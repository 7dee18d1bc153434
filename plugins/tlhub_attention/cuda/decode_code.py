"""What the programs that decode on tensor cores share: which problems they take, and the parts of their branches."""

from __future__ import annotations

from pathlib import Path

from tlhub.build.program import Launch, Parameter
from tlhub.cuda import tensor_cores, warp_mma
from tlhub.specs import Problem
from tlhub_attention.cuda import code
from tlhub_attention.cuda.decode_plan import Plan

FILES: tuple[str | Path, ...] = (
    *("rows.cuh", tensor_cores.FILE, warp_mma.FILE, "softmax.cuh"),
    *(f"decode_{part}.cuh" for part in ("call", "units", "tile", "parts")),
)
"""The text before a schedule's own."""

SOURCES = (
    *(f"tlhub_attention.cuda.{name}" for name in ("code", "decode_code", "decode_plan", "served")),
    *(f"tlhub.cuda.{name}" for name in ("tensor_cores", "warp_mma")),
    *(f"tlhub/cuda/{name}.cuh" for name in ("tensor_cores", "warp_mma")),
    *(f"tlhub_attention/cuda/{name}.cuh" for name in ("call", "rows", "softmax")),
    *(f"tlhub_attention/cuda/decode_{part}.cuh" for part in ("call", "units", "tile", "parts")),
)
"""The ``sources`` of a schedule beside its own."""

SYMBOLIC = ("B", "S", "H", "H_kv", "S_kv", "P", "page", "L")
"""Dims that may be symbolic: all but the channels."""

ITEM = 2
"""Bytes of an element of q, k and v."""

ROWS = "S * (H / H_kv)"
"""The rows of a kv head: queries of the heads that share it."""

_MOST_QUERIES = 16  # of a sequence, as the contract of decoding has it
_SERVED = f"H_kv > 0 && H % H_kv == 0 && S <= {_MOST_QUERIES} && S_kv < {code.MOST}"
"""The condition that there are heads, few queries, and positions that are ints. S_kv: how many keys have room."""


def flags(problem: Problem) -> str:
    """Return what decode_call.cuh takes of the problem's options."""
    return f"constexpr bool PAGED = {str(problem.option['paged']).lower()};"


def values(problem: Problem) -> dict[str, str]:
    """Return the values that expressions may name: S_kv, how many keys there is room for, in pages too."""
    return {"S_kv": "L * page"} if problem.option["paged"] else {}


def tiles(plan: Plan) -> str:
    """Return the tiles of a plan that a kv head has, as a C expression."""
    return f"CEIL_DIV({ROWS}, {plan.rows})"


def served(plan: Plan, last: bool) -> list[str]:
    """Return the conditions for *plan*, whose units are ints; *last*: it is for any number of rows."""
    units = f"B * H_kv * {tiles(plan)} * (CEIL_DIV(S_kv, {plan.keys}) + 1)"
    return [_SERVED, f"{units} < {code.MOST}", *([] if last else [f"{ROWS} <= {plan.rows}"])]


def rows(problem: Problem) -> tuple[Launch, str]:
    """Return the launch that computes row by row, whatever the layout, and its condition."""
    count = "CEIL_DIV(B * H * S, 4)"
    grid = (f"({count} < SMS * 16 ? {count} : SMS * 16)", 1, 1)
    return Launch("decode_rows", grid, (128, 1, 1), parameters(problem)), _SERVED


def parameters(problem: Problem) -> tuple[Parameter, ...]:
    """Return the values of decode_call.cuh's DECODE_PARAMETERS."""
    table = ("DATA(table)", "STRIDE(table, 0)", "STRIDE(table, 1)", "page") if problem.option["paged"] else ("0",) * 4
    return (
        *code.parameters(problem),
        Parameter("void *", "DATA(lengths)"),
        Parameter("int64_t", "STRIDE(lengths, 0)"),
        *map(Parameter, ("void *", "int64_t", "int64_t", "int"), table),
    )
