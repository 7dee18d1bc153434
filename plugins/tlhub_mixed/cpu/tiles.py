"""Packing, and the register tile. Imported in workers only.

Packed blocks, in elements of the accumulator's dtype: rows of A one after another, DEPTH apart; a panel of B
``[depth][nr]``. What a last panel lacks is filled with copies of its last row or column, so tiles are always full; what
they compute there is never written.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm import tirx

from tlhub.cpu.ir import Expr, Function, View, bind, branch, const, i64, local, loop, minimum, splat, tight, view
from tlhub_mixed.cpu.plan import DEPTH, Plan

GROUP = 4
"""Columns that are turned into rows together."""


def numbers(*names: str) -> list[tuple[str, str]]:
    """Return int64 parameters."""
    return [(name, "int64") for name in names]


def pack_rows(plan: Plan) -> Function:
    """Pack *deep* of K from *k0* on, of *rows* rows of a from *i0* on, into *high* rows from *to* on."""
    element, lanes = plan.element("a"), plan.lanes

    def body(*args: Expr) -> None:
        x = dict(zip((name for name, _ in params), args, strict=True))
        source, target = view(x["a"], element.storage), view(x["scratch"], plan.acc)
        step = plan.step(x["call"], "a", "K")
        even = bind(tirx.Select(tirx.EQ(step, i64(1)), tirx.truncdiv(x["deep"], i64(lanes)), i64(0)))
        with loop(0, x["high"]) as i:
            line = plan.place(x["call"], "a", M=x["i0"] + minimum(i, x["rows"] - i64(1)), K=x["k0"])
            row = bind(x["to"] + i * i64(DEPTH))
            with loop(0, even) as v:
                value = element.load(source, line + v * i64(lanes), lanes, plan.acc)
                target.store(row + v * i64(lanes), value, lanes)
            with loop(even * i64(lanes), x["deep"]) as k:
                target.store(row + k, element.load(source, line + k * step, 1, plan.acc))

    params = [("a", f"*{element.storage}"), ("call", "*int64"), *numbers("i0", "rows", "high", "k0", "deep")]
    params += [("scratch", f"*{plan.acc}"), ("to", "int64")]
    return Function("pack_rows", params, body)


def pack_columns(plan: Plan) -> Function:
    """Pack *deep* of K from *k0* on, of the columns of b from *j0* on to before *end*, into a panel at *to*."""
    element, lanes, nr = plan.element("b"), plan.lanes, plan.nr

    def body(*args: Expr) -> None:
        x = dict(zip((name for name, _ in params), args, strict=True))
        source, target = view(x["b"], element.storage), view(x["scratch"], plan.acc)
        s_k, s_n = plan.step(x["call"], "b", "K"), plan.step(x["call"], "b", "N")

        def along_rows() -> None:
            base = plan.place(x["call"], "b", N=x["j0"], K=x["k0"])
            with loop(0, x["deep"]) as k:
                for j in range(0, nr, lanes):
                    value = element.load(source, base + k * s_k + i64(j), lanes, plan.acc)
                    target.store(x["to"] + k * i64(nr) + i64(j), value, lanes)

        def down_columns() -> None:
            even = bind(tirx.Select(tirx.EQ(s_k, i64(1)), tirx.truncdiv(x["deep"], i64(lanes)), i64(0)))
            with loop(0, nr // GROUP) as g:
                columns = [minimum(x["j0"] + g * i64(GROUP) + i64(c), x["end"] - i64(1)) for c in range(GROUP)]
                lines = [plan.place(x["call"], "b", N=column, K=x["k0"]) for column in columns]
                to = bind(x["to"] + g * i64(GROUP))
                with loop(0, even) as v:
                    at = bind(v * i64(lanes))
                    xs = [bind(element.load(source, line + at, lanes, plan.acc)) for line in lines]
                    turn(plan, xs, target, to + at * i64(nr), nr)
                with loop(even * i64(lanes), x["deep"]) as k:
                    for c, line in enumerate(lines):
                        value = element.load(source, line + k * s_k, 1, plan.acc)
                        target.store(to + k * i64(nr) + i64(c), value)

        whole = tirx.And(tirx.EQ(s_n, i64(1)), x["j0"] + i64(nr) <= x["end"])
        branch(whole, along_rows, down_columns)

    params = [("b", f"*{element.storage}"), ("call", "*int64"), *numbers("j0", "end", "k0", "deep")]
    params += [("scratch", f"*{plan.acc}"), ("to", "int64")]
    return Function("pack_columns", params, body)


def turn(plan: Plan, xs: Sequence[Expr], target: View, to: Expr, step: int) -> None:
    """Store the first lanes of all *xs*, of GROUP columns, side by side from *to* on, the others *step* apart."""
    for lane in range(plan.lanes):
        row = tirx.Shuffle(xs, [c * plan.lanes + lane for c in range(GROUP)])
        target.store(to + i64(lane * step), row, GROUP)


def multiply(plan: Plan) -> Function:
    """The register tile: mr x nr sums of products of packed rows and a panel, over *deep* of K.

    They are written from *to* on, rows nc apart; with *more*, added to what is there. Where sums are rescaled, each is
    multiplied with its row's scale, from *by* on, times its column's, from *times* on.
    """
    mr, nr, lanes, acc = plan.mr, plan.nr, plan.lanes, plan.acc
    vectors = range(0, nr, lanes)

    def body(scratch: Expr, at: Expr, bt: Expr, deep: Expr, more: Expr, to: Expr, *factors: Expr) -> None:
        packed = view(scratch, acc)
        sums = [[local(lanes, acc) for _ in vectors] for _ in range(mr)]
        for row in sums:
            for total in row:
                total.store(0, const(0, acc, lanes), lanes)
        with tight(0, deep) as k:
            bs = [bind(packed.load(bt + k * i64(nr) + i64(j), lanes)) for j in vectors]
            for i in range(mr):
                x = splat(packed.load(at + k + i64(i * DEPTH)), lanes)
                for total, b in zip(sums[i], bs, strict=True):
                    total.store(0, total.load(0, lanes) + x * b, lanes)
        if plan.rescale:
            by, times = factors
            for i in range(mr):
                x = bind(splat(packed.load(by + i64(i)), lanes))
                for total, j in zip(sums[i], vectors, strict=True):
                    total.store(0, total.load(0, lanes) * (x * packed.load(times + i64(j), lanes)), lanes)

        def write(add: bool) -> None:
            for i in range(mr):
                for total, j in zip(sums[i], vectors, strict=True):
                    there = to + i64(i * plan.nc + j)
                    value = total.load(0, lanes)
                    packed.store(there, packed.load(there, lanes) + value if add else value, lanes)

        branch(tirx.NE(more, i64(0)), lambda: write(True), lambda: write(False))

    params = [("scratch", f"*{acc}"), *numbers("at", "bt", "deep", "more", "to")]
    return Function("multiply", [*params, *(numbers("by", "times") if plan.rescale else [])], body)
