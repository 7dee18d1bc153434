"""A product, whatever its operands: c is cut into tasks, which pack, multiply and finish. Imported in workers only.

A task takes a block of c. For each DEPTH along K it packs its rows of a, and, a panel at a time, its columns of the
other operand, converted to the accumulator's dtype; the panel stays in the first-level cache while all rows meet it.
Narrow operands are so converted once for many products, and sums are always in the order of K: the same bits with any
number of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script.builder import ir as T

from tlhub.cpu.ir import (
    Expr,
    Function,
    bind,
    branch,
    ceil_div,
    const,
    i64,
    loop,
    minimum,
    module,
    stepping,
    view,
    when,
    workspace,
)
from tlhub.specs import Problem
from tlhub_mixed.cpu.entry import declare, demand
from tlhub_mixed.cpu.finish import finish
from tlhub_mixed.cpu.plan import DEPTH, Plan
from tlhub_mixed.cpu.tiles import multiply, pack_rows

_FEW = 32
"""Tasks below which they are cut smaller, so that every core gets some."""

_NARROW = 64
"""Columns of such a smaller task."""

_ALONE = 1_000_000
"""Products below which one thread computes them all: it is done before another would have woken up."""

_ROOM = 64
"""Elements between the parts of scratch memory: vectors may reach beyond the last column."""


def build(
    plan: Plan,
    pack: Function,
    packed: Sequence[str],
    scales: Function | None = None,
    demands: Callable[[Mapping[str, Expr]], Sequence[tuple[Expr, str, str]]] = lambda dims: (),
) -> Any:
    """Return the IRModule of a product of a and the operand of which *pack* makes panels, from the arrays *packed*.

    *scales* gathers the scales of a block along K. *demands* are conditions on dims, the argument that one is about,
    and what is expected of it.
    """
    load, tile, close = pack_rows(plan), multiply(plan), finish(plan)
    task = _task(plan, load, pack, packed, tile, scales, close)
    name = plan.problem.kernel
    with IRBuilder() as builder:
        with T.prim_func():
            T.func_name("product")
            T.func_attr({"global_symbol": "product"})
            dims, arrays = declare(plan.problem, plan.axes, plan.half)
            factor = T.arg("out_scale", T.float64())
            for condition, argument, expected in demands(dims):
                demand(condition, name, argument, expected)
            if plan.glu:
                demand(tirx.EQ(tirx.truncmod(dims["N"], i64(2)), i64(0)), name, packed[0], "an even number of columns")
            with stepping():
                columns = dims["N_2"] if plan.glu else dims["N"]
                down = ceil_div(dims["M"], i64(plan.mc))
                few = down * ceil_div(columns, i64(plan.nc)) < i64(_FEW)
                wide = bind(tirx.Select(few, i64(_NARROW), i64(plan.nc)))
                across = bind(ceil_div(columns, wide))
                values = {**dims, "columns": columns, "wide": wide, "across": across}
                values["out_scale"] = T.reinterpret("int64", factor)
                for array, operand in arrays.items():
                    values[f"{array}_at"] = operand.at
                    values |= {f"{array}_{axis}": step for axis, step in operand.strides.items()}
                call, count = plan.fields.store(values), bind(down * across)
                pointers = [a.data for a in arrays.values()]

                def run(index: Expr) -> None:
                    with workspace(T.cast(i64(_size(plan) * 4), "uint64"), plan.acc) as scratch:
                        task(*pointers, call, index, scratch)

                def on_all() -> None:
                    with T.parallel(i64(0), count) as index:
                        run(index)

                def here() -> None:
                    with loop(0, count) as index:
                        run(index)

                most = i64((1 << 31) - 1)
                branch(minimum(dims["M"] * dims["N"], most) * dims["K"] < i64(_ALONE), here, on_all)
    functions = [load, pack, tile, close, task, *([scales] if scales else [])]
    return module("product", builder.get(), functions)


def epilogue_axes(problem: Problem) -> dict[str, tuple[str, ...]]:
    """Return the dims of the arrays that an epilogue takes, and of c."""
    result = ("M", "N_2" if problem.option["glu"] else "N")
    axes: dict[str, tuple[str, ...]] = {"bias": ("N",)} if problem.option["bias"] else {}
    return {**axes, **({"residual": result} if problem.option["residual"] else {}), "c": result}


def layout(plan: Plan) -> dict[str, int]:
    """Return where the parts of a task's scratch memory begin, in elements: rows, panel, scales, sums."""
    ends = {"rows": plan.mc * DEPTH, "panel": DEPTH * plan.nr, "by": plan.mc, "times": plan.nr}
    places, at = {}, 0
    for name, size in ends.items():
        places[name] = at
        at += size + _ROOM
    return {**places, "sums": at}


def _sums(plan: Plan) -> int:
    """Return the elements of the sums of a task, of one half of the columns."""
    return plan.mc * plan.nc


def _size(plan: Plan) -> int:
    return layout(plan)["sums"] + (2 if plan.glu else 1) * _sums(plan) + _ROOM


def _task(
    plan: Plan,
    load: Function,
    pack: Function,
    packed: Sequence[str],
    tile: Function,
    scales: Function | None,
    close: Function,
) -> Function:
    """The task of number *index*: a block of c."""
    at = layout(plan)

    def body(*args: Expr) -> None:
        x = dict(zip((name for name, _ in params), args, strict=True))
        call, scratch, arrays = x["call"], x["scratch"], [x[name] for name in plan.axes]
        wanted = ("M", "N", "K", "columns", "wide", "across")
        m, n, depth, all_columns, wide, across = plan.fields.read(call, *wanted)
        i0 = bind(tirx.truncdiv(x["index"], across) * i64(plan.mc))
        j0 = bind(tirx.truncmod(x["index"], across) * wide)
        rows, columns = bind(minimum(m - i0, i64(plan.mc))), bind(minimum(all_columns - j0, wide))
        high = bind(ceil_div(rows, i64(plan.mr)) * i64(plan.mr))
        with when(tirx.EQ(depth, i64(0))), loop(0, (2 if plan.glu else 1) * _sums(plan)) as i:
            view(scratch, plan.acc).store(i64(at["sums"]) + i, const(0, plan.acc))
        with loop(0, ceil_div(depth, i64(DEPTH))) as block:
            k0 = bind(block * i64(DEPTH))
            deep = bind(minimum(depth - k0, i64(DEPTH)))
            load(x["a"], call, i0, rows, high, k0, deep, scratch, at["rows"])
            for half in range(2 if plan.glu else 1):
                first = bind(j0 + all_columns) if half else j0
                sums = at["sums"] + half * _sums(plan)
                with loop(0, ceil_div(columns, i64(plan.nr))) as panel:
                    j = bind(first + panel * i64(plan.nr))
                    pack(*[x[name] for name in packed], call, j, n, k0, deep, scratch, at["panel"])
                    if scales:
                        scales(*arrays, call, i0, rows, high, j, n, block, scratch)
                    with loop(0, tirx.truncdiv(high, i64(plan.mr))) as t:
                        place = i64(sums) + t * i64(plan.mr * plan.nc) + panel * i64(plan.nr)
                        row = i64(at["rows"]) + t * i64(plan.mr * DEPTH)
                        factors = (i64(at["by"]) + t * i64(plan.mr), at["times"]) if scales else ()
                        tile(scratch, row, at["panel"], deep, block, place, *factors)
        close(*arrays, call, scratch, at["sums"], _sums(plan), i0, j0, rows, columns)

    params = [*plan.pointers, ("index", "int64"), ("scratch", f"*{plan.acc}")]
    return Function("task", params, body)
