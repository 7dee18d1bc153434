"""The parts of a blocked product: packing, the register tile, and the way from a tile to C.

After Goto and van de Geijn, "Anatomy of high-performance matrix multiplication" (2008), and Van Zee and
van de Geijn, "BLIS" (2015). Each part is a private function of the module, so its code is there once.

Layouts of packed panels, in elements of the accumulator's dtype: A ``[panel][depth / RUN][mr][RUN]``, so that rows
are copied by vectors and read in one stream; B ``[panel][depth][nr]``. What a last panel lacks is filled with copies
of its last row or column, so tiles are always full; what they compute there is never written.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from tvm import tirx
from tvm.tirx.script.builder import ir as T

from tlhub.cpu.elements import Element, activate, vector
from tlhub.cpu.ir import (
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
    tight,
    view,
)

RUN = 4
"""Elements of a row of A that stay together in a panel; the inner loop does as many steps of k at a time."""

FETCH = 28
"""Rounds of the inner loop, of RUN steps each, before whose end it begins to fetch C."""

GROUP = 4
"""Panels of B that are packed side by side, so that a row of B is read in longer pieces."""


@dataclass(frozen=True)
class Plan:
    """What is fixed when the program is made.

    ``acc``: the dtype of sums and panels. ``beside``: the element of bias and residual. ``lanes``: of sums in a vector
    register. ``mr``, ``nr``: the register tile. ``kc``: the longest block of K. ``mc``, ``nc``: panels of A and B in a
    block.
    """

    acc: str
    a: Element
    b: Element
    c: Element
    beside: Element
    epilogue: str
    glu: bool
    bias: bool
    residual: bool
    lanes: int
    mr: int
    nr: int
    kc: int
    mc: int
    nc: int

    @property
    def size(self) -> int:
        """Bytes of a sum."""
        return 8 if self.acc == "float64" else 4

    @property
    def width(self) -> int:
        """Columns of C of a register tile."""
        return self.nr // 2 if self.glu else self.nr

    @property
    def halves(self) -> int:
        """Parts of B's columns that make one of C: gates and values, or all."""
        return 2 if self.glu else 1

    @property
    def plain(self) -> bool:
        """Whether C is the product, but for a factor."""
        return self.epilogue == "none" and not self.glu and not self.bias and not self.residual

    @property
    def in_place(self) -> bool:
        """Whether partial sums are kept in C: they are what C holds."""
        return self.c.dtype == self.acc and self.plain

    @property
    def math(self) -> str:
        """The dtype of the epilogue: sums of integers are scaled in float64, exactly."""
        return "float64" if self.acc == "int32" else self.acc


def pack_a(plan: Plan) -> Function:
    """Pack *rows* rows and *depth* columns of A."""
    mr = plan.mr

    def body(src: Expr, at: Expr, s_m: Expr, s_k: Expr, rows: Expr, depth: Expr, dst: Expr, to: Expr) -> None:
        source, target = view(src, plan.a.storage), view(dst, plan.acc)
        # whole runs along k where that has unit stride, or across m where that has; elements elsewhere
        runs = bind(tirx.truncdiv(depth, i64(RUN)))
        along = bind(tirx.Select(tirx.EQ(s_k, i64(1)), runs, i64(0)))
        across = bind(tirx.Select(tirx.And(tirx.EQ(s_m, i64(1)), tirx.NE(s_k, i64(1))), runs, i64(0)))
        size = bind(panel_size(plan, depth))
        with loop(0, ceil_div(rows, i64(mr))) as p:
            panel, first = bind(to + p * size), bind(p * i64(mr))
            with loop(0, mr) as i:
                line = bind(at + minimum(first + i, rows - i64(1)) * s_m)
                with tight(0, along) as r:
                    x = plan.a.load(source, line + r * i64(RUN), RUN, plan.acc)
                    target.store(panel + (r * i64(mr) + i) * i64(RUN), x, RUN)
            turned = bind(tirx.Select(rows - first >= i64(mr), across, i64(0)))
            with loop(0, turned) as r:
                column, row = bind(at + first + r * i64(RUN) * s_k), bind(panel + r * i64(mr * RUN))
                for start in range(0, mr, RUN):
                    width = min(RUN, mr - start)
                    steps = [column + i64(u) * s_k + i64(start) for u in range(RUN)]
                    xs = [bind(plan.a.load(source, step, width, plan.acc)) for step in steps]
                    for i in range(width):
                        x = tirx.Shuffle(xs, [u * width + i for u in range(RUN)])
                        target.store(row + i64((start + i) * RUN), x, RUN)
            with loop(maximum(along, turned) * i64(RUN), depth) as k:
                row = bind(panel + tirx.truncdiv(k, i64(RUN)) * i64(mr * RUN) + tirx.truncmod(k, i64(RUN)))
                with loop(0, mr) as i:
                    place = bind(at + minimum(first + i, rows - i64(1)) * s_m + k * s_k)
                    target.store(row + i * i64(RUN), plan.a.load(source, place, 1, plan.acc))

    params = [("src", f"*{plan.a.storage}"), *_numbers("at", "s_m", "s_k", "rows", "depth")]
    return Function("pack_a", [*params, ("dst", f"*{plan.acc}"), ("to", "int64")], body)


def panel_size(plan: Plan, depth: Expr) -> Expr:
    """Return the elements of a panel of A."""
    return ceil_div(depth, i64(RUN)) * i64(plan.mr * RUN)


def pack_b(plan: Plan) -> Function:
    """Pack *depth* rows and *columns* columns of B; of gates and values as many each, *apart* columns from another."""
    nr, width, lanes = plan.nr, plan.width, plan.lanes

    def body(*args: Expr) -> None:
        src, at, s_k, s_n, depth, columns, apart, dst, to = args
        source, target = view(src, plan.b.storage), view(dst, plan.acc)
        # whole vectors along n where it has unit stride, elements elsewhere
        even = bind(tirx.Select(tirx.EQ(s_n, i64(1)), tirx.truncdiv(columns, i64(width)), i64(0)))

        def rows(p: Expr, panels: int) -> None:
            with loop(0, depth) as k:
                line, row = at + p * i64(width) + k * s_k, to + (p * depth + k) * i64(nr)
                for half, j in product(range(plan.halves), range(0, panels * width, lanes)):
                    place = row + depth * i64(j // width * nr) + i64(half * width + j % width)
                    start = line + apart + i64(j) if half else line + i64(j)
                    target.store(place, plan.b.load(source, start, lanes, plan.acc), lanes)

        groups = bind(tirx.truncdiv(even, i64(GROUP)))
        with loop(0, groups) as g:
            rows(g * i64(GROUP), GROUP)
        with loop(groups * i64(GROUP), even) as p:
            rows(p, 1)
        with loop(even, ceil_div(columns, i64(width))) as p:
            with loop(0, plan.halves) as half, loop(0, width) as j:
                line = bind(at + (half * apart + minimum(p * i64(width) + j, columns - i64(1))) * s_n)
                column = bind(to + p * depth * i64(nr) + half * i64(width) + j)
                with loop(0, depth) as k:
                    target.store(column + k * i64(nr), plan.b.load(source, line + k * s_k, 1, plan.acc))

    params = [("src", f"*{plan.b.storage}"), *_numbers("at", "s_k", "s_n", "depth", "columns", "apart")]
    return Function("pack_b", [*params, ("dst", f"*{plan.acc}"), ("to", "int64")], body)


def multiply(plan: Plan) -> Function:
    """The register tile: mr x nr sums of products of a panel of A and one of B, over *deep* of K.

    With *direct*, they are written to c, rows *ld* apart, else to the tile at *slot*; with *more*, added to what
    is there. B's next panels are fetched from *ahead* on. The sums live in mr * nr / lanes vector registers over
    the whole block of K; each step of k loads nr / lanes vectors of B and mr elements of A.
    """
    mr, nr, lanes = plan.mr, plan.nr, plan.lanes
    vectors = range(0, nr, lanes)

    def body(*args: Expr) -> None:
        scratch, c, at, bt, ahead, deep, more, slot, *place = args
        panels = view(scratch, plan.acc)
        sums = [[local(lanes, plan.acc) for _ in vectors] for _ in range(mr)]
        for row in sums:
            for total in row:
                total.store(0, const(0, plan.acc, lanes), lanes)

        def step(row: Expr, column: Expr) -> None:
            """One k, from *row* on in the panel of B and *column* on in that of A."""
            bs = [bind(panels.load(row + i64(j), lanes)) for j in vectors]
            for i in range(mr):
                x = splat(panels.load(column + i64(i * RUN)), lanes)
                for total, b in zip(sums[i], bs, strict=True):
                    total.store(0, total.load(0, lanes) + x * b, lanes)

        def write(target: View, to: Expr, ld: Expr) -> None:
            def put(add: bool) -> None:
                for i in range(mr):
                    for total, j in zip(sums[i], vectors, strict=True):
                        there = to + ld * i64(i) + i64(j)
                        value = total.load(0, lanes)
                        target.store(there, target.load(there, lanes) + value if add else value, lanes)

            branch(tirx.NE(more, i64(0)), lambda: put(True), lambda: put(False))

        rounds = bind(tirx.truncdiv(deep, i64(RUN)))
        if plan.in_place:
            target, (direct, to, ld) = view(c, plan.acc), place
        with tight(0, rounds) as r:
            panels.prefetch(ahead + r * i64(64 // plan.size), level=2)
            if plan.in_place:
                # C's lines are fetched one after another near the end: earlier, with rows a power of two apart, the
                # panels would displace them again
                near = bind(to + ld * minimum(maximum(r - rounds + i64(FETCH), i64(0)), i64(mr - 1)))
                target.prefetch(near)
                target.prefetch(near + i64(nr - 1))
            for u in range(RUN):
                step(bt + (r * i64(RUN) + i64(u)) * i64(nr), at + r * i64(mr * RUN) + i64(u))
        with loop(rounds * i64(RUN), deep) as k:
            step(bt + k * i64(nr), at + rounds * i64(mr * RUN - RUN) + k)
        if plan.in_place:
            branch(tirx.NE(direct, i64(0)), lambda: write(target, to, ld), lambda: write(panels, slot, i64(nr)))
        else:
            write(panels, slot, i64(nr))

    params = [
        ("scratch", f"*{plan.acc}"),
        ("c", f"*{plan.c.storage}"),
        *_numbers("at", "bt", "ahead", "deep", "more", "slot"),
    ]
    return Function("multiply", [*params, *(_numbers("direct", "to", "ld") if plan.in_place else ())], body)


def fetch(plan: Plan) -> Function:
    """Partial sums of an incomplete or strided tile: from C to *tile*, rows nr apart."""

    def body(c: Expr, at: Expr, c_m: Expr, c_n: Expr, rows: Expr, columns: Expr, tile: Expr, to: Expr) -> None:
        source, target = view(c, plan.acc), view(tile, plan.acc)
        with loop(0, rows) as i, loop(0, columns) as j:
            place = at + i * c_m + j * c_n
            target.store(to + i * i64(plan.nr) + j, source.load(place))

    params = [("c", f"*{plan.acc}"), *_numbers("at", "c_m", "c_n", "rows", "columns")]
    return Function("fetch", [*params, ("tile", f"*{plan.acc}"), ("to", "int64")], body)


def finish(plan: Plan) -> Function:
    """From a tile (rows *pitch* apart) to C; *alpha* and *out_scale* by their bits.

    Values are *next* behind their gates in the tile, and *bias_next* in the bias.
    """
    # erfc comes from the C library, one at a time
    width = 1 if plan.math == "float64" and plan.epilogue == "gelu" else plan.lanes

    def body(*args: Expr) -> None:
        x = dict(zip((name for name, _ in params), args, strict=True))
        source, target = view(x["tile"], plan.acc), view(x["c"], plan.c.storage)
        biases, residuals = (view(x[name], plan.beside.storage) for name in ("bias", "residual"))
        alpha, out_scale = (
            bind(T.cast(T.reinterpret("float64", x[name]), plan.math)) for name in ("alpha", "out_scale")
        )
        unit = tirx.EQ(x["c_n"], i64(1))
        for present, step in ((plan.bias, "bias_n"), (plan.residual, "r_n")):
            if present:
                unit = tirx.And(unit, tirx.EQ(x[step], i64(1)))
        even = i64(0)
        if width > 1:
            even = bind(tirx.Select(unit, tirx.truncdiv(x["columns"], i64(width)), i64(0)))

        def put(i: Expr, j: Expr, lanes: int) -> None:
            place = bind(x["to"] + i * x["c_m"] + j * x["c_n"])

            def linear(half: int) -> Expr:
                at = x["at"] + i * x["pitch"] + j + (x["next"] if half else i64(0))
                value = T.cast(source.load(at, lanes), vector(plan.math, lanes)) * splat(alpha, lanes)
                if not plan.bias:
                    return value
                at = x["bias_at"] + i * x["bias_m"] + j * x["bias_n"] + (x["bias_next"] if half else i64(0))
                return value + plan.beside.load(biases, at, lanes, plan.math)

            value = activate(plan.epilogue, linear(0), plan.math, lanes)
            if plan.glu:
                value = bind(value) * linear(1)
            if plan.residual:
                at = x["residual_at"] + i * x["r_m"] + j * x["r_n"]
                value = value + plan.beside.load(residuals, at, lanes, plan.math)
            plan.c.store(target, place, value if plan.plain else value * splat(out_scale, lanes), lanes)

        with loop(0, x["rows"]) as i:
            if width > 1:
                with loop(0, even) as v:
                    put(i, v * i64(width), width)
            with loop(even * i64(width), x["columns"]) as j:
                put(i, j, 1)

    beside = f"*{plan.beside.storage}"
    params = [("tile", f"*{plan.acc}"), *_numbers("at", "next", "pitch", "rows", "columns", "alpha", "out_scale")]
    params += [("c", f"*{plan.c.storage}"), *_numbers("to", "c_m", "c_n")]
    # absent operands are passed as another array, and never read
    params += [("bias", beside), *_numbers("bias_at", "bias_m", "bias_n", "bias_next")]
    params += [("residual", beside), *_numbers("residual_at", "r_m", "r_n")]
    return Function("finish", params, body)


def _numbers(*names: str) -> list[tuple[str, str]]:
    return [(n, "int64") for n in names]
