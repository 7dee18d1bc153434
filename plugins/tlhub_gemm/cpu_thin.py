"""Products of a few rows and a large matrix: bound by reading the matrix, which is streamed once, unpacked."""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx

from tlhub_gemm.cpu_call import Numbers, Operands, Task, cut, span, task
from tlhub_gemm.cpu_convert import Element
from tlhub_gemm.cpu_ir import (
    Expr,
    Function,
    View,
    bind,
    branch,
    ceil_div,
    const,
    i64,
    local,
    loop,
    maximum,
    minimum,
    splat,
    view,
)
from tlhub_gemm.cpu_tiles import Plan

FEW = 4
"""The most rows for which streaming pays."""

WIDTH = 4096
"""Columns whose sums are kept in the first-level cache: long pieces of a row, for the prefetchers stop at pages."""

GRAIN = 64
"""Columns that a thread takes at least: more than a cache line of any dtype, and than a vector."""

DEPTH = 4
"""Rows of the matrix that are read side by side."""

BREADTH = 4
"""Columns of a matrix in Fortran order that are read side by side."""


def thin(plan: Plan, few: Element, large: Element, close: Function, name: str) -> Task:
    """X Y, for X of at most FEW rows and a Y that has a unit stride and at least a vector of columns.

    The fields of the call are those of a product A B with A = X and B = Y.
    """

    def measure(f: Numbers, part: Numbers) -> Numbers:
        at_sums = bind(tirx.truncdiv(f["m"] * f["k"] + i64(15), i64(16)) * i64(16))
        return {"bytes": (at_sums + f["m"] * i64(WIDTH)) * i64(plan.size), "sums": at_sums}

    def run(o: Operands, f: Numbers, part: Numbers) -> None:
        source, matrix, work = view(o.a, few.storage), view(o.b, large.storage), view(o.scratch, plan.acc)
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
                stream = _Stream(plan, large, f, work, matrix, base, wide, part["sums"])
                branch(tirx.EQ(f["b_n"], i64(1)), stream.down, stream.along)
                close(
                    *(o.scratch, part["sums"], WIDTH, f["m"], wide, f["alpha"]),
                    *(o.c, f["c_at"] + batch * f["c_b"] + j0 * f["c_n"], f["c_m"], f["c_n"]),
                    *(o.bias, f["bias_at"] + j0 * f["bias_n"], f["bias_m"], f["bias_n"]),
                    *(o.residual, f["r_at"] + batch * f["r_b"] + j0 * f["r_n"], f["r_m"], f["r_n"]),
                )

    return task(plan, name, (few, large), measure, run)


@dataclass(frozen=True)
class _Stream:
    """A strip of *wide* columns of Y, from offset *base* on; *work* holds X, and from *sums* on the sums."""

    plan: Plan
    large: Element
    f: Numbers
    work: View
    matrix: View
    base: Expr
    wide: Expr
    sums: Expr

    def down(self) -> None:
        """Y in C order: sums += x[k .. k + DEPTH] Y[k .. k + DEPTH, :], a few rows of Y at a time.

        The last vector ends with the last column and may begin within the one before; until the end its sums
        stand where a vector of their own would.
        """
        f, lanes = self.f, self.plan.lanes
        vectors = bind(ceil_div(self.wide, i64(lanes)))
        rounds = bind(tirx.truncdiv(f["k"], i64(DEPTH)))
        with loop(0, f["m"]) as i, loop(0, vectors) as v:
            self.work.store(self.sums + i * i64(WIDTH) + v * i64(lanes), const(0, self.plan.acc, lanes), lanes)
        with loop(0, rounds) as r:
            self._rows(bind(r * i64(DEPTH)), DEPTH, vectors)
        with loop(rounds * i64(DEPTH), f["k"]) as k:
            self._rows(k, 1, vectors)
        with loop(0, f["m"]) as i:
            row = bind(self.sums + i * i64(WIDTH))
            last = bind(self.work.load(row + (vectors - i64(1)) * i64(lanes), lanes))
            self.work.store(row + self.wide - i64(lanes), last, lanes)

    def _rows(self, k: Expr, depth: int, vectors: Expr) -> None:
        f, acc, lanes = self.f, self.plan.acc, self.plan.lanes
        with loop(0, f["m"]) as i:
            xs = [bind(self.work.load(i * f["k"] + k + i64(u))) for u in range(depth)]
            lines = [bind(self.base + (k + i64(u)) * f["b_k"]) for u in range(depth)]
            target = bind(self.sums + i * i64(WIDTH))
            with loop(0, vectors) as v:
                j = bind(minimum(v * i64(lanes), self.wide - i64(lanes)))
                total = self.work.load(target + v * i64(lanes), lanes)
                for x, line in zip(xs, lines, strict=True):
                    total = total + splat(x, lanes) * self.large.load(self.matrix, line + j, lanes, acc)
                self.work.store(target + v * i64(lanes), total, lanes)

    def along(self) -> None:
        """Y in Fortran order: dot products along its columns, BREADTH columns at a time.

        The last few may meet a column twice, with the same result.
        """
        f, acc, lanes = self.f, self.plan.acc, self.plan.lanes
        even = bind(tirx.truncdiv(f["k"], i64(lanes)))
        with loop(0, ceil_div(self.wide, i64(BREADTH))) as r, loop(0, f["m"]) as i:
            columns = [bind(minimum(r * i64(BREADTH) + i64(g), self.wide - i64(1))) for g in range(BREADTH)]
            lines = [bind(self.base + column * f["b_n"]) for column in columns]
            row = bind(i * f["k"])
            parts = [local(lanes, acc) for _ in lines]
            totals = [local(1, acc) for _ in lines]
            for part in parts:
                part.store(0, const(0, acc, lanes), lanes)
            with loop(0, even) as v:
                k = v * i64(lanes)
                x = bind(self.work.load(row + k, lanes))
                for part, line in zip(parts, lines, strict=True):
                    product = x * self.large.load(self.matrix, line + k, lanes, acc)
                    part.store(0, part.load(0, lanes) + product, lanes)
            for part, total in zip(parts, totals, strict=True):
                value = part.load(0)
                for lane in range(1, lanes):
                    value = value + part.load(lane)
                total.store(0, value)
            with loop(even * i64(lanes), f["k"]) as k:
                x = bind(self.work.load(row + k))
                for total, line in zip(totals, lines, strict=True):
                    total.store(0, total.load(0) + x * self.large.load(self.matrix, line + k, 1, acc))
            for column, total in zip(columns, totals, strict=True):
                self.work.store(self.sums + i * i64(WIDTH) + column, total.load(0))
