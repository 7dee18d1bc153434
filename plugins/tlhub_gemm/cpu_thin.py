"""Products of a few rows and a large matrix: bound by reading the matrix, which is streamed once, unpacked."""

from __future__ import annotations

from tvm import tirx

from tlhub.cpu.elements import Element
from tlhub.cpu.ir import (
    Expr,
    Function,
    bind,
    ceil_div,
    const,
    i64,
    local,
    loop,
    maximum,
    minimum,
    splat,
    view,
    when,
)
from tlhub_gemm.cpu_call import Numbers, Operands, Task, cut, span, task
from tlhub_gemm.cpu_tiles import Plan

FEW = 4
"""The most rows for which streaming pays."""

WIDTH = 4096
"""Columns whose sums are kept in the first-level cache: long pieces of a row, for the prefetchers stop at pages."""

GRAIN = 64
"""Columns that a thread takes at least: more than a cache line of any dtype, and than a vector."""

DEPTH = 8
"""Rows of the matrix that are read side by side."""

BREADTH = 4
"""Columns of a matrix in Fortran order that are read side by side."""


def thin(plan: Plan, few: Element, large: Element, close: Function, name: str) -> tuple[Task, list[Function]]:
    """X Y, for X of at most FEW rows and a Y that has a unit stride and at least a vector of columns.

    The fields of the call are those of a product A B with A = X and B = Y. Returns the task and the functions that
    it calls, besides *close* (``cpu_tiles.finish``).
    """
    down, along = _down(plan, large, f"{name}_down"), _along(plan, large, f"{name}_along")

    def measure(f: Numbers, part: Numbers) -> Numbers:
        at_sums = bind(tirx.truncdiv(f["m"] * f["k"] + i64(15), i64(16)) * i64(16))
        return {"bytes": (at_sums + f["m"] * i64(plan.halves * WIDTH)) * i64(plan.size), "sums": at_sums}

    def run(o: Operands, f: Numbers, part: Numbers) -> None:
        source, work = view(o.a, few.storage), view(o.scratch, plan.acc)
        grains = bind(maximum(tirx.truncdiv(f["n"], i64(GRAIN)), i64(1)))
        first, stop = span(grains * f["batch"], part)
        with loop(tirx.truncdiv(first, grains), ceil_div(stop, grains)) as batch:
            with loop(0, f["m"]) as i, loop(0, f["k"]) as k:
                at = f["a_at"] + batch * f["a_b"] + i * f["a_m"] + k * f["a_k"]
                work.store(i * f["k"] + k, few.load(source, at, 1, plan.acc))
            begin = bind(maximum(first - batch * grains, i64(0)) * i64(GRAIN))
            beyond = bind(minimum(stop - batch * grains, grains))
            # the last grain has the columns that are left over
            end = bind(tirx.Select(tirx.EQ(beyond, grains), f["n"], beyond * i64(GRAIN)))
            strips = bind(ceil_div(end - begin, i64(WIDTH)))
            with loop(0, strips) as strip:
                j0, j1 = cut(begin, end, strip, strips)
                wide = bind(j1 - j0)
                base = bind(f["b_at"] + batch * f["b_b"] + j0 * f["b_n"])
                given, next_sums = (o.scratch, o.b, f["m"], f["k"]), bind(f["m"] * i64(WIDTH))
                unit = tirx.EQ(f["b_n"], i64(1))
                with loop(0, plan.halves) as half:
                    rest = (bind(base + half * f["n"] * f["b_n"]), wide, part["sums"] + half * next_sums)
                    with when(unit):
                        down(*given, f["b_k"], *rest)
                    with when(tirx.Not(unit)):
                        along(*given, f["b_n"], *rest)
                close(
                    *(o.scratch, part["sums"], next_sums, WIDTH, f["m"], wide, f["alpha"], f["out_scale"]),
                    *(o.c, f["c_at"] + batch * f["c_b"] + j0 * f["c_n"], f["c_m"], f["c_n"]),
                    *(o.bias, f["bias_at"] + j0 * f["bias_n"], f["bias_m"], f["bias_n"], f["n"] * f["bias_n"]),
                    *(o.residual, f["r_at"] + batch * f["r_b"] + j0 * f["r_n"], f["r_m"], f["r_n"]),
                )

    return task(plan, name, (few, large), measure, run), [down, along]


def _params(plan: Plan, large: Element) -> list[tuple[str, str]]:
    """Of a stream: X (at 0) and the sums (at *sums*) in *work*; a strip of *wide* columns of Y from *base* on."""
    numbers = ("rows", "depth", "stride", "base", "wide", "sums")
    return [("work", f"*{plan.acc}"), ("y", f"*{large.storage}"), *((n, "int64") for n in numbers)]


def _down(plan: Plan, large: Element, name: str) -> Function:
    """Y in C order, rows *stride* apart: sums += x[k .. k + DEPTH] Y[k .. k + DEPTH, :], a few rows at a time.

    The last vector ends with the last column and may begin within the one before; until the end its sums stand
    where a vector of their own would.
    """
    acc, lanes = plan.acc, plan.lanes

    def body(scratch: Expr, y: Expr, rows: Expr, depth: Expr, stride: Expr, base: Expr, wide: Expr, sums: Expr) -> None:
        work, matrix = view(scratch, acc), view(y, large.storage)
        vectors = bind(ceil_div(wide, i64(lanes)))
        rounds = bind(tirx.truncdiv(depth, i64(DEPTH)))

        def add(i: Expr, k: Expr, count: int) -> None:
            xs = [bind(work.load(i * depth + k + i64(u))) for u in range(count)]
            lines = [bind(base + (k + i64(u)) * stride) for u in range(count)]
            row = bind(sums + i * i64(WIDTH))
            with loop(0, vectors) as v:
                j, place = bind(minimum(v * i64(lanes), wide - i64(lanes))), row + v * i64(lanes)
                total = work.load(place, lanes)
                for x, line in zip(xs, lines, strict=True):
                    total = total + splat(x, lanes) * large.load(matrix, line + j, lanes, acc)
                work.store(place, total, lanes)

        with loop(0, rows) as i, loop(0, vectors) as v:
            work.store(sums + i * i64(WIDTH) + v * i64(lanes), const(0, acc, lanes), lanes)
        with loop(0, rounds) as r, loop(0, rows) as i:
            add(i, bind(r * i64(DEPTH)), DEPTH)
        with loop(rounds * i64(DEPTH), depth) as k, loop(0, rows) as i:
            add(i, k, 1)
        with loop(0, rows) as i:
            row = bind(sums + i * i64(WIDTH))
            last = bind(work.load(row + (vectors - i64(1)) * i64(lanes), lanes))
            work.store(row + wide - i64(lanes), last, lanes)

    return Function(name, _params(plan, large), body)


def _along(plan: Plan, large: Element, name: str) -> Function:
    """Y in Fortran order, columns *stride* apart: dot products along them, BREADTH columns at a time.

    The last few may meet a column twice, with the same result.
    """
    acc, lanes = plan.acc, plan.lanes

    def body(scratch: Expr, y: Expr, rows: Expr, depth: Expr, stride: Expr, base: Expr, wide: Expr, sums: Expr) -> None:
        work, matrix = view(scratch, acc), view(y, large.storage)
        even = bind(tirx.truncdiv(depth, i64(lanes)))
        with loop(0, ceil_div(wide, i64(BREADTH))) as r, loop(0, rows) as i:
            columns = [bind(minimum(r * i64(BREADTH) + i64(g), wide - i64(1))) for g in range(BREADTH)]
            lines = [bind(base + column * stride) for column in columns]
            row = bind(i * depth)
            parts = [local(lanes, acc) for _ in lines]
            totals = [local(1, acc) for _ in lines]
            for part in parts:
                part.store(0, const(0, acc, lanes), lanes)
            with loop(0, even) as v:
                k = v * i64(lanes)
                x = bind(work.load(row + k, lanes))
                for part, line in zip(parts, lines, strict=True):
                    product = x * large.load(matrix, line + k, lanes, acc)
                    part.store(0, part.load(0, lanes) + product, lanes)
            for part, total in zip(parts, totals, strict=True):
                value = part.load(0)
                for lane in range(1, lanes):
                    value = value + part.load(lane)
                total.store(0, value)
            with loop(even * i64(lanes), depth) as k:
                x = bind(work.load(row + k))
                for total, line in zip(totals, lines, strict=True):
                    total.store(0, total.load(0) + x * large.load(matrix, line + k, 1, acc))
            for column, total in zip(columns, totals, strict=True):
                work.store(sums + i * i64(WIDTH) + column, total.load(0))

    return Function(name, _params(plan, large), body)
