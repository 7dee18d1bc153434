"""The CPU program of quantize: two passes over each block, by vectors where rows have unit stride.

Imported in workers only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script.builder import ir as T

from tlhub.cpu.elements import Element, vector
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
    loop_parallel,
    minimum,
    module,
    splat,
    stepping,
    tight,
    view,
)
from tlhub.formats import RANGE
from tlhub.specs import Problem
from tlhub_mixed.contracts.quantize import BLOCK, E8M0, SCALES
from tlhub_mixed.cpu.entry import Operand, declare

_PARTS = 64
"""Parts of the work that are dealt out to threads."""

_ALONE = 1 << 15
"""Elements below which one thread does it all."""


class _Plan(NamedTuple):
    """What is fixed when the program is made. ``rows``, ``columns``: of a block; 0 is all columns."""

    x: Element
    q: Element
    scale: Element
    lanes: int
    rows: int
    columns: int
    given: bool


def program(problem: Problem, config: Mapping[str, Any], arch: str) -> Any:
    """Return the IRModule for *problem*. *config*: ``lanes`` of float32 in a vector; ``half``: it converts float16."""
    option, dtypes, half = problem.option, dict(problem.dtypes), bool(config["half"])
    scaling = str(option["scaling"])
    # a row at a time has one scale for all of x, too: the steps to the next one are 0
    rows, columns = {"1x128": (1, BLOCK), "128x128": (BLOCK, BLOCK)}.get(scaling, (1, 0))
    x, q, scale = (Element(dtypes[name], half) for name in ("x", "q", "scale"))
    plan = _Plan(x, q, scale, int(config["lanes"]), rows, columns, bool(option["given"]))
    order = ("x", "scale", "q") if plan.given else ("x", "q", "scale")
    axes = {"x": ("M", "K"), "q": ("M", "K"), "scale": SCALES[scaling]}
    largest, convert = _largest(plan), _convert(plan)
    scaler = _scaler(plan)
    blocks = _blocks(plan, largest, scaler, convert)
    whole = scaling == "tensor" and not plan.given
    with IRBuilder() as builder:
        with T.prim_func():
            T.func_name("quantize")
            T.func_attr({"global_symbol": "quantize"})
            dims, arrays = declare(problem, {name: axes[name] for name in order}, half)
            with stepping():
                if whole:
                    _whole(dims, arrays, largest, scaler, convert)
                else:
                    _deal(plan, dims, arrays, blocks)
    functions = [convert, *([] if plan.given else [largest, scaler]), *([] if whole else [blocks])]
    return module("quantize", builder.get(), functions)


# -- the entry: who does what ----------------------------------------------------------------------


def _in_parts(elements: Expr, work: Callable[[Expr, Expr], None]) -> None:
    """Do *work(part, of how many)*: all of it here where there are few *elements*, else on all threads."""

    def on_all() -> None:
        with loop_parallel(_PARTS) as part:
            work(part, i64(_PARTS))

    branch(elements < i64(_ALONE), lambda: work(i64(0), i64(1)), on_all)


def _whole(
    dims: Mapping[str, Expr], arrays: Mapping[str, Operand], largest: Function, scaler: Function, convert: Function
) -> None:
    """One scale for all: the parts' largest magnitudes, the scale, the parts again."""
    m, k, x, q, scale = dims["M"], dims["K"], arrays["x"], arrays["q"], arrays["scale"]
    found, made = local(_PARTS, "uint32"), local(1, "float32")
    with tight(0, _PARTS) as part:
        found.store(part, tirx.const(0, "uint32"))

    def rows(part: Expr, parts: Expr) -> tuple[Expr, Expr]:
        first = bind(tirx.truncdiv(m * part, parts))
        return first, bind(tirx.truncdiv(m * (part + i64(1)), parts) - first)

    def look(part: Expr, parts: Expr) -> None:
        first, count = rows(part, parts)
        largest(x.data, x.at + first * x.strides["M"], x.strides["M"], x.strides["K"], count, k, found.pointer, part)

    def write(part: Expr, parts: Expr) -> None:
        first, count = rows(part, parts)
        convert(
            *(x.data, x.at + first * x.strides["M"], x.strides["M"], x.strides["K"]),
            *(q.data, q.at + first * q.strides["M"], q.strides["M"], q.strides["K"]),
            *(count, k, made.pointer),
        )

    _in_parts(m * k, look)
    scaler(found.pointer, _PARTS, made.pointer, scale.data, scale.at)
    _in_parts(m * k, write)


def _deal(plan: _Plan, dims: Mapping[str, Expr], arrays: Mapping[str, Operand], blocks: Function) -> None:
    """A run of blocks for each part."""
    m, k, x, q, scale = dims["M"], dims["K"], arrays["x"], arrays["q"], arrays["scale"]
    down = m if plan.rows == 1 else ceil_div(m, i64(plan.rows))
    along = bind(ceil_div(k, i64(plan.columns)) if plan.columns else i64(1))
    count = bind(down * along)

    def work(part: Expr, parts: Expr) -> None:
        blocks(
            *(x.data, x.at, x.strides["M"], x.strides["K"], q.data, q.at, q.strides["M"], q.strides["K"]),
            *(scale.data, scale.at, *(scale.strides.get(d, i64(0)) for d in _axes(plan))),
            *(m, k, along, tirx.truncdiv(count * part, parts), tirx.truncdiv(count * (part + i64(1)), parts)),
        )

    _in_parts(m * k, work)


def _axes(plan: _Plan) -> tuple[str, str]:
    """Return the dims of the scales, whether there are such or not."""
    return ("M_128" if plan.rows == BLOCK else "M"), "K_128"


# -- a block ---------------------------------------------------------------------------------------


def _numbers(*names: str) -> list[tuple[str, str]]:
    return [(name, "int64") for name in names]


def _blocks(plan: _Plan, largest: Function, scaler: Function, convert: Function) -> Function:
    """The blocks *first* up to *stop*, counted along the rows of blocks, *along* of them in a row."""

    def body(*args: Expr) -> None:
        f = dict(zip((name for name, _ in params), args, strict=True))
        bits, scale = local(1, "uint32"), local(1, "float32")
        with loop(f["first"], f["stop"]) as block:
            i, j = bind(tirx.truncdiv(block, f["along"])), bind(tirx.truncmod(block, f["along"]))
            row = i * i64(plan.rows)
            column, columns = (j * i64(plan.columns), i64(plan.columns)) if plan.columns else (i64(0), f["k"])
            high, wide = bind(minimum(i64(plan.rows), f["m"] - row)), bind(minimum(columns, f["k"] - column))
            source = (f["x"], bind(f["x_at"] + row * f["x_m"] + column * f["x_k"]), f["x_m"], f["x_k"])
            target = (f["q"], f["q_at"] + row * f["q_m"] + column * f["q_k"], f["q_m"], f["q_k"])
            place = bind(f["s_at"] + i * f["s_m"] + j * f["s_k"])
            if plan.given:
                scale.store(0, plan.scale.load(view(f["s"], plan.scale.storage), place, 1, "float32"))
            else:
                largest(*source, high, wide, bits.pointer, 0)
                scaler(bits.pointer, 1, scale.pointer, f["s"], place)
            convert(*source, *target, high, wide, scale.pointer)

    params = [("x", f"*{plan.x.storage}"), *_numbers("x_at", "x_m", "x_k")]
    params += [("q", f"*{plan.q.storage}"), *_numbers("q_at", "q_m", "q_k")]
    params += [("s", f"*{plan.scale.storage}"), *_numbers("s_at", "s_m", "s_k", "m", "k", "along", "first", "stop")]
    return Function("blocks", params, body)


def _largest(plan: _Plan) -> Function:
    """The bits of the largest magnitude: as integers they are in order, and a NaN is above infinity."""
    lanes = plan.lanes

    def body(x: Expr, at: Expr, s_m: Expr, s_k: Expr, rows: Expr, columns: Expr, out: Expr, to: Expr) -> None:
        source, target, best = view(x, plan.x.storage), view(out, "uint32"), local(lanes, "uint32")
        most = local(1, "uint32")

        def meet(held: View, index: Expr, width: int) -> None:
            bits = T.reinterpret(vector("uint32", width), plan.x.load(source, index, width, "float32"))
            size = bits & splat(tirx.const(0x7FFFFFFF, "uint32"), width)
            held.store(0, tirx.max(held.load(0, width), size), width)

        best.store(0, const(0, "uint32", lanes), lanes)
        most.store(0, tirx.const(0, "uint32"))
        even = bind(tirx.Select(tirx.EQ(s_k, i64(1)), tirx.truncdiv(columns, i64(lanes)), i64(0)))
        with loop(0, rows) as i:
            line = bind(at + i * s_m)
            with loop(0, even) as v:
                meet(best, line + v * i64(lanes), lanes)
            with loop(even * i64(lanes), columns) as j:
                meet(most, line + j * s_k, 1)
        for lane in range(lanes):
            most.store(0, tirx.max(most.load(0), best.load(lane)))
        target.store(to, most.load(0))

    params = [("x", f"*{plan.x.storage}"), *_numbers("at", "s_m", "s_k", "rows", "columns")]
    return Function("largest", [*params, ("out", "*uint32"), ("to", "int64")], body)


def _scaler(plan: _Plan) -> Function:
    """From the largest of *count* magnitudes to the scale, as a float32 for the division and as it is stored."""

    def body(found: Expr, count: Expr, made: Expr, out: Expr, to: Expr) -> None:
        source, target, most = view(found, "uint32"), view(out, plan.scale.storage), local(1, "uint32")
        most.store(0, tirx.const(0, "uint32"))
        with loop(0, count) as i:
            most.store(0, tirx.max(most.load(0), source.load(i)))
        amax = T.reinterpret("float32", most.load(0))
        scale = bind(amax / tirx.const(RANGE[plan.q.dtype][1], "float32"))
        scale = bind(tirx.Select(scale < tirx.const(2.0**-126, "float32"), tirx.const(1.0, "float32"), scale))
        if plan.scale.dtype == E8M0:
            bits = bind(T.reinterpret("uint32", scale))
            whole = tirx.EQ(bits & tirx.const(0x7FFFFF, "uint32"), tirx.const(0, "uint32"))
            up = tirx.Select(whole, tirx.const(0, "uint32"), tirx.const(1, "uint32"))
            power = bind(tirx.min((bits >> tirx.const(23, "uint32")) + up, tirx.const(255, "uint32")))
            target.store(to, T.cast(power, "uint8"))
            view(made, "float32").store(0, plan.scale.load(target, to, 1, "float32"))
        else:
            target.store(to, scale)
            view(made, "float32").store(0, scale)

    params = [("found", "*uint32"), ("count", "int64"), ("made", "*float32"), ("out", f"*{plan.scale.storage}")]
    return Function("scaler", [*params, ("to", "int64")], body)


def _convert(plan: _Plan) -> Function:
    """q = x / scale."""
    lanes = plan.lanes

    def body(
        x: Expr, at: Expr, s_m: Expr, s_k: Expr,
        q: Expr, to: Expr, q_m: Expr, q_k: Expr,
        rows: Expr, columns: Expr, made: Expr,
    ) -> None:  # fmt: skip
        source, target = view(x, plan.x.storage), view(q, plan.q.storage)
        scale = bind(view(made, "float32").load(0))

        def put(index: Expr, place: Expr, width: int) -> None:
            ratio = bind(plan.x.load(source, index, width, "float32") / splat(scale, width))
            plan.q.store(target, place, ratio, width)

        unit = tirx.And(tirx.EQ(s_k, i64(1)), tirx.EQ(q_k, i64(1)))
        even = bind(tirx.Select(unit, tirx.truncdiv(columns, i64(lanes)), i64(0)))
        with loop(0, rows) as i:
            line, row = bind(at + i * s_m), bind(to + i * q_m)
            with loop(0, even) as v:
                put(line + v * i64(lanes), row + v * i64(lanes), lanes)
            with loop(even * i64(lanes), columns) as j:
                put(line + j * s_k, row + j * q_k, 1)

    params = [("x", f"*{plan.x.storage}"), *_numbers("at", "s_m", "s_k")]
    params += [("q", f"*{plan.q.storage}"), *_numbers("to", "q_m", "q_k", "rows", "columns")]
    return Function("convert", [*params, ("made", "*float32")], body)
