"""A blocked product: a thread packs the blocks of A and B that its part of C needs, and runs register tiles.

A part is a run of panels of rows (of all batches, one after another) in one or more groups of columns; with
one group every thread sees all columns, and each pair of a part's blocks is packed once.
"""

from __future__ import annotations

from tvm import tirx
from tvm.tirx.script.builder import ir as T

from tlhub.cpu.ir import (
    Expr,
    Function,
    bind,
    ceil_div,
    i64,
    local,
    loop,
    maximum,
    minimum,
    when,
)
from tlhub_gemm.cpu_call import (
    SLICES,
    Numbers,
    Operands,
    Task,
    cut,
    operands,
    pointers,
    read,
    share,
    span,
    task,
)
from tlhub_gemm.cpu_tiles import RUN, Plan, fetch, multiply, pack_a, pack_b, panel_size

_ONE = 0x3FF0000000000000
"""The bits of 1.0."""

MOST_THREADS = 512
"""With more, C is cut as for this many; every thread still has its part."""


def blocked(plan: Plan, close: Function) -> tuple[Task, list[Function]]:
    """Return the task and the functions that it calls, besides *close* (``cpu_tiles.finish``).

    It is cut into functions of a loop or two each, for TVM's passes take much longer over deeper ones.
    """
    product, load_a, load_b, gather = multiply(plan), pack_a(plan), pack_b(plan), fetch(plan)
    tiles = _tiles(plan, product, gather, close)
    panels = _panels(plan, load_a, load_b, tiles)
    mr, nr, width, tile = plan.mr, plan.nr, plan.width, plan.mr * plan.nr

    def measure(f: Numbers, part: Numbers) -> Numbers:
        rows, columns = bind(ceil_div(f["m"], i64(mr))), bind(ceil_div(f["n"], i64(width)))
        bands = bind(f["batch"] * rows)
        groups = _groups(plan, bands, columns, part["count"])
        blocks = bind(maximum(ceil_div(f["k"], i64(plan.kc)), i64(1)))
        # whole rounds of the inner loop, but for the last block
        depth = bind(ceil_div(f["k"], blocks * i64(RUN)) * i64(RUN))
        widest = bind(minimum(ceil_div(columns, groups), i64(plan.nc)))
        left = bind(minimum(rows, i64(plan.mc)) * panel_size(plan, depth))
        right = bind(widest * depth * i64(nr))
        slots = i64(1)
        if not plan.in_place:
            # where C cannot hold partial sums, they have a place of their own for each tile
            mine = minimum(share(groups * bands, part["count"]) + i64(2), rows)
            slots = bind(tirx.Select(blocks > i64(1), mine * widest, i64(1)))
        at_right = bind(_aligned(left))
        at_sums = bind(_aligned(at_right + right))
        size = (at_sums + slots * i64(tile)) * i64(plan.size)
        parts = {"groups": groups, "blocks": blocks, "depth": depth, "widest": widest}
        return {"bytes": size, **parts, "right": at_right, "sums": at_sums}

    def run(o: Operands, f: Numbers, part: Numbers) -> None:
        rows, columns = bind(ceil_div(f["m"], i64(mr))), bind(ceil_div(f["n"], i64(width)))
        groups = part["groups"]
        first, stop = span(groups * f["batch"] * rows, part)
        with loop(tirx.truncdiv(first, rows), ceil_div(stop, rows)) as band:
            group, batch = bind(tirx.truncdiv(band, f["batch"])), bind(tirx.truncmod(band, f["batch"]))
            top = bind(maximum(first - band * rows, i64(0)))
            bottom = bind(minimum(stop - band * rows, rows))
            begin, end = cut(i64(0), columns, group, groups)
            strips = bind(ceil_div(end - begin, i64(plan.nc)))
            with loop(0, strips) as strip:
                j0, j1 = cut(begin, end, strip, strips)
                panels(*o.pointers, batch, top, bottom, j0, j1)

    made = task(plan, "blocked", (plan.a, plan.b), measure, run)
    return made, [product, load_a, load_b, *([gather] if plan.in_place else []), tiles, panels]


def _panels(plan: Plan, load_a: Function, load_b: Function, tiles: Function) -> Function:
    """The panels of rows top .. bottom and of columns j0 .. j1 of C, a block of K at a time."""
    mr, width = plan.mr, plan.width

    def body(*args: Expr) -> None:
        o, (batch, top, bottom, j0, j1) = operands(args)
        f = read(("m", "n", "k", "a_at", "a_b", "a_m", "a_k", "b_at", "b_b", "b_k", "b_n"), o.call)
        part = read(("blocks", "depth", "right"), o.part)
        blocks, depth = part["blocks"], part["depth"]
        with loop(0, blocks) as block:
            k0 = bind(block * depth)
            deep = bind(maximum(minimum(depth, f["k"] - k0), i64(0)))
            more = bind(tirx.Select(block > i64(0), i64(1), i64(0)))
            last = bind(tirx.Select(tirx.EQ(block, blocks - i64(1)), i64(1), i64(0)))
            load_b(
                o.b,
                f["b_at"] + batch * f["b_b"] + k0 * f["b_k"] + j0 * i64(width) * f["b_n"],
                *(f["b_k"], f["b_n"], deep, minimum((j1 - j0) * i64(width), f["n"] - j0 * i64(width)), f["n"]),
                *(o.scratch, part["right"]),
            )
            stacks = bind(ceil_div(bottom - top, i64(plan.mc)))
            with loop(0, stacks) as stack:
                i0, i1 = cut(top, bottom, stack, stacks)
                load_a(
                    o.a,
                    f["a_at"] + batch * f["a_b"] + i0 * i64(mr) * f["a_m"] + k0 * f["a_k"],
                    *(f["a_m"], f["a_k"], minimum((i1 - i0) * i64(mr), f["m"] - i0 * i64(mr)), deep),
                    *(o.scratch, 0),
                )
                tiles(*o.pointers, batch, i0, i1, j0, j1, top, deep, more, last)

    numbers = ("batch", "top", "bottom", "j0", "j1")
    return Function("panels", [*pointers(plan, (plan.a, plan.b)), *((n, "int64") for n in numbers)], body)


def _tiles(plan: Plan, product: Function, gather: Function, close: Function) -> Function:
    """The tiles of the packed blocks: panels i0 .. i1 of A by j0 .. j1 of B, *deep* along K.

    *more*: partial sums are there already. *last*: this block of K is the last. *top*: the first panel of rows
    for which partial sums are kept.
    """
    mr, nr, width, tile = plan.mr, plan.nr, plan.width, plan.mr * plan.nr
    names = (
        *("m", "n", "c_at", "c_b", "c_m", "c_n", "bias_at", "bias_m", "bias_n"),
        *("r_at", "r_b", "r_m", "r_n", "alpha", "out_scale"),
    )

    def body(*args: Expr) -> None:
        o, (batch, i0, i1, j0, j1, top, deep, more, last) = operands(args)
        f, part = read(names, o.call), read(("blocks", "widest", "right", "sums"), o.part)
        apart = i64(0) if plan.in_place else bind(tirx.Select(part["blocks"] > i64(1), i64(tile), i64(0)))
        size = bind(panel_size(plan, deep))
        with loop(j0, j1) as j, loop(i0, i1) as i:
            have_m, row = bind(minimum(f["m"] - i * i64(mr), i64(mr))), bind(i * i64(mr))
            have_n, column = bind(minimum(f["n"] - j * i64(width), i64(width))), bind(j * i64(width))
            place = bind(f["c_at"] + batch * f["c_b"] + row * f["c_m"] + column * f["c_n"])
            slot = bind(part["sums"] + ((i - top) * part["widest"] + (j - j0)) * apart)
            at, bt = bind((i - i0) * size), bind(part["right"] + (j - j0) * deep * i64(nr))
            factor = bind(tirx.Select(tirx.NE(last, i64(0)), f["alpha"], i64(_ONE)))
            # each tile fetches a part of the next panel of B, a cache line a round
            ahead = bind(bt + deep * i64(nr) + (i - i0) * deep * i64(64 // plan.size // RUN))
            args = (o.scratch, o.c, at, bt, ahead, deep, more, slot)
            if plan.in_place:
                # a full tile of bare sums goes straight to C
                whole = tirx.And(tirx.EQ(have_m, i64(mr)), tirx.EQ(have_n, i64(nr)))
                bare = tirx.And(tirx.EQ(f["c_n"], i64(1)), tirx.EQ(factor, i64(_ONE)))
                direct = bind(T.cast(tirx.And(whole, bare), "int64"))
                closing = tirx.EQ(direct, i64(0))
                with when(tirx.And(closing, tirx.NE(more, i64(0)))):
                    gather(o.c, place, f["c_m"], f["c_n"], have_m, have_n, o.scratch, slot)
                product(*args, direct, place, f["c_m"])
            else:
                closing = tirx.NE(last, i64(0))
                product(*args)
            with when(closing):
                close(
                    *(o.scratch, slot, width, i64(nr), have_m, have_n, factor, f["out_scale"]),
                    *(o.c, place, f["c_m"], f["c_n"]),
                    *(o.bias, f["bias_at"] + column * f["bias_n"], f["bias_m"], f["bias_n"], f["n"] * f["bias_n"]),
                    *(o.residual, f["r_at"] + batch * f["r_b"] + row * f["r_m"] + column * f["r_n"]),
                    *(f["r_m"], f["r_n"]),
                )

    numbers = ("batch", "i0", "i1", "j0", "j1", "top", "deep", "more", "last")
    return Function("tiles", [*pointers(plan, (plan.a, plan.b)), *((n, "int64") for n in numbers)], body)


def _aligned(elements: Expr) -> Expr:
    """Return *elements* rounded up to 64 bytes of any dtype, and some room: vectors may be longer than a row."""
    return tirx.truncdiv(elements + i64(31), i64(16)) * i64(16)


def _groups(plan: Plan, rows: Expr, columns: Expr, count: Expr) -> Expr:
    """Return into how many groups of columns C is cut: a divisor of the number of threads.

    For each, a thread's time is that of its tiles and its packing, in cycles for each k; every thread comes to
    the same result.
    """
    threads = bind(minimum(tirx.truncdiv(i64(SLICES) + tirx.truncdiv(count, i64(2)), count), i64(MOST_THREADS)))
    best, least = local(1, "int64"), local(1, "int64")
    best.store(0, i64(1))
    least.store(0, i64((1 << 63) - 1))
    cycles = plan.mr * plan.nr // (2 * plan.lanes)
    with loop(1, threads + i64(1)) as t:
        with when(tirx.EQ(tirx.truncmod(threads, t), i64(0))):
            tall, wide = bind(ceil_div(rows * t, threads)), bind(ceil_div(columns, t))
            cost = bind(tall * wide * i64(cycles) + tall * i64(plan.mr) + wide * i64(plan.nr))
            with when(cost < least.load(0)):
                least.store(0, cost)
                best.store(0, t)
    return bind(best.load(0))
