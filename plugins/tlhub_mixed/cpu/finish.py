"""From the sums of a task to c: scales, bias, activation, gate, residual, output scale. Imported in workers only."""

from __future__ import annotations

from tvm import tirx
from tvm.tirx.script.builder import ir as T

from tlhub.cpu.elements import activate, vector
from tlhub.cpu.ir import Expr, Function, bind, i64, loop, splat, view
from tlhub_mixed.cpu.plan import Plan
from tlhub_mixed.cpu.tiles import numbers

_BY_COLUMN = ("b_scale", "bias", "residual", "c")
"""Arrays that are read or written along a row of c."""


def finish(plan: Plan) -> Function:
    """Write *rows* by *columns* of c from (*i0*, *j0*) on; the sums begin at *at*, those of values *next* behind."""
    option, lanes, axis = plan.problem.option, plan.lanes, "N_2" if plan.glu else "N"

    def body(*args: Expr) -> None:
        x = dict(zip((name for name, _ in params), args, strict=True))
        call, sums, target = x["call"], view(x["scratch"], plan.acc), view(x["c"], plan.element("c").storage)
        (bits,) = plan.fields.read(call, "out_scale")
        factor = bind(T.cast(T.reinterpret("float64", bits), "float32"))
        steps = [plan.step(call, name, dim) for name in _BY_COLUMN if name in plan.axes for dim in ("N", "N_2")]
        unit = tirx.const(True, "bool")
        for step in steps:
            unit = unit if step is None else tirx.And(unit, tirx.EQ(step, i64(1)))
        even = bind(tirx.Select(unit, tirx.truncdiv(x["columns"], i64(lanes)), i64(0)))

        def read(name: str, width: int, **index: Expr) -> Expr:
            """Return what array *name* has there, in every lane where it has no columns."""
            wide = width if {"N", "N_2"} & set(plan.axes[name]) else 1
            element = plan.element(name)
            value = element.load(view(x[name], element.storage), plan.place(call, name, **index), wide, "float32")
            return value if wide == width else splat(bind(value), width)

        def product(i: Expr, j: Expr, half: int, width: int) -> Expr:
            """Return the scaled product and the bias, in one half of the columns."""
            column = bind(x["j0"] + j + (plan.fields.read(call, "N_2")[0] if half else i64(0)))
            value = sums.load(x["at"] + i * i64(plan.nc) + j + (x["next"] if half else i64(0)), width)
            value = T.cast(value, vector("float32", width))
            if plan.closing:
                value = value * read("a_scale", width, M=x["i0"] + i) * read("b_scale", width, N=column)
            return value + read("bias", width, N=column) if option["bias"] else value

        def put(i: Expr, j: Expr, width: int) -> None:
            value = activate(str(option["epilogue"]), product(i, j, 0, width), "float32", width)
            if plan.glu:
                value = bind(value) * product(i, j, 1, width)
            place = {"M": x["i0"] + i, axis: x["j0"] + j}
            if option["residual"]:
                value = value + read("residual", width, **place)
            plan.element("c").store(target, plan.place(call, "c", **place), value * splat(factor, width), width)

        with loop(0, x["rows"]) as i:
            with loop(0, even) as v:
                put(i, v * i64(lanes), lanes)
            with loop(even * i64(lanes), x["columns"]) as j:
                put(i, j, 1)

    params = [*plan.pointers, ("scratch", f"*{plan.acc}"), *numbers("at", "next", "i0", "j0", "rows", "columns")]
    return Function("finish", params, body)
