"""The CPU program of gemm_scaled. Imported in workers only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tvm import tirx

from tlhub.cpu.ir import Expr, Function, i64, loop, minimum, view
from tlhub.specs import Problem
from tlhub_mixed.contracts.quantize import BLOCK
from tlhub_mixed.cpu.plan import Plan
from tlhub_mixed.cpu.product import build, epilogue_axes, layout
from tlhub_mixed.cpu.tiles import numbers, pack_columns


def program(problem: Problem, config: Mapping[str, Any], arch: str) -> Any:
    """Return the IRModule for *problem*; the knobs of *config* are described in ``tlhub_mixed.cpu.schedules``."""
    scaling, turned = problem.option["scaling"], bool(problem.option["trans_b"])
    blocks = ("N_128", "K_128") if turned else ("K_128", "N_128")
    rows, columns = {"tensor": ((), ()), "row": (("M",), ("N",)), "block": (("M", "K_128"), blocks)}[str(scaling)]
    axes = {"a": ("M", "K"), "b": ("N", "K") if turned else ("K", "N"), "a_scale": rows, "b_scale": columns}
    plan = Plan.of(
        problem,
        {**axes, **epilogue_axes(problem)},
        config,
        "int32" if problem.dtype == "int8" else "float32",
        rescale=scaling == "block",
        closing=scaling != "block",
    )
    return build(plan, pack_columns(plan), ["b"], _scales(plan) if plan.rescale else None)


def _scales(plan: Plan) -> Function:
    """Gather the scales of *block* along K: of *high* rows from *i0* on, and of the nr columns from *j0* on."""
    at = layout(plan)

    def body(*args: Expr) -> None:
        x = dict(zip((name for name, _ in params), args, strict=True))
        target = view(x["scratch"], plan.acc)

        def read(name: str, **index: Expr) -> Expr:
            element = plan.element(name)
            return element.load(view(x[name], element.storage), plan.place(x["call"], name, **index), 1, "float32")

        with loop(0, x["high"]) as i:
            row = x["i0"] + minimum(i, x["rows"] - i64(1))
            target.store(i64(at["by"]) + i, read("a_scale", M=row, K_128=x["block"]))
        with loop(0, plan.nr) as j:
            column = minimum(x["j0"] + j, x["end"] - i64(1))
            value = read("b_scale", N_128=tirx.truncdiv(column, i64(BLOCK)), K_128=x["block"])
            target.store(i64(at["times"]) + j, value)

    params = [*plan.pointers, *numbers("i0", "rows", "high", "j0", "end", "block"), ("scratch", f"*{plan.acc}")]
    return Function("scales", params, body)
