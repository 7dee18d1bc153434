"""The CPU programs of gemm_w4a16 and gemm_w8a16: weights become float32 where panels are packed. For workers only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tvm import tirx
from tvm.tirx.script.builder import ir as T

from tlhub.cpu.elements import vector
from tlhub.cpu.ir import Expr, Function, bind, ceil_div, const, i64, loop, minimum, splat, view
from tlhub.specs import Problem
from tlhub_mixed.contracts.weights import MIDDLE
from tlhub_mixed.cpu.plan import DEPTH, Plan
from tlhub_mixed.cpu.product import build, epilogue_axes
from tlhub_mixed.cpu.tiles import GROUP, numbers, turn


def program(problem: Problem, config: Mapping[str, Any], arch: str) -> Any:
    """Return the IRModule for *problem*; the knobs of *config* are described in ``tlhub_mixed.cpu.schedules``."""
    group, along = int(problem.option["group"] or 0), "K_2" if problem.kernel == "gemm_w4a16" else "K"
    packed = {"w": ("N", along), "scale": ("N", "G")}
    if problem.option["zero_point"]:
        packed["zero"] = ("N", "G")
    plan = Plan.of(problem, {"a": ("M", "K"), **packed, **epilogue_axes(problem)}, config, "float32")

    def demands(dims: Mapping[str, Expr]) -> Sequence[tuple[Expr, str, str]]:
        if not group:
            return ()
        whole = tirx.EQ(tirx.truncmod(dims["K"], i64(group)), i64(0))
        return ((whole, "a", f"a K that is a multiple of group={group}"),)

    return build(plan, _pack(plan, list(packed), group or DEPTH, bool(group)), list(packed), demands=demands)


def _pack(plan: Plan, arrays: Sequence[str], run: int, grouped: bool) -> Function:
    """Pack *deep* of K from *k0* on, of the rows of w from *j0* on to before *end*, into a panel at *to*.

    *run*: so many consecutive k have one scale, within DEPTH.
    """
    lanes, nr = plan.lanes, plan.nr
    half = "K_2" in plan.axes["w"]
    codes, wide = (2, "K_2") if half else (1, "K")

    def body(*args: Expr) -> None:
        x = dict(zip((name for name, _ in params), args, strict=True))
        call, target = x["call"], view(x["scratch"], plan.acc)
        source, step = view(x["w"], plan.element("w").storage), plan.step(call, "w", wide)

        def read(name: str, column: Expr, k: Expr) -> Expr:
            """Return what array *name* has for the group of *k*."""
            element, number = plan.element(name), tirx.truncdiv(k, i64(run)) if grouped else i64(0)
            return bind(
                element.load(view(x[name], element.storage), plan.place(call, name, N=column, G=number), 1, plan.acc)
            )

        with loop(0, nr // GROUP) as g, loop(0, ceil_div(x["deep"], i64(run))) as part:
            first = bind(part * i64(run))
            count, k0 = bind(minimum(x["deep"] - first, i64(run))), bind(x["k0"] + first)
            columns = [bind(minimum(x["j0"] + g * i64(GROUP) + i64(c), x["end"] - i64(1))) for c in range(GROUP)]
            scales = [read("scale", column, k0) for column in columns]
            zeros = [read("zero", column, k0) for column in columns] if plan.problem.option["zero_point"] else None
            lines = [plan.place(call, "w", N=column) for column in columns]
            to = bind(x["to"] + g * i64(GROUP) + first * i64(nr))

            def value(code: Expr, c: int, width: int) -> Expr:
                number = T.cast(code, vector(plan.acc, width))
                if zeros:
                    number = number - splat(zeros[c], width)
                elif half:
                    number = number - const(MIDDLE, plan.acc, width)
                return number * splat(scales[c], width)

            even = bind(tirx.Select(tirx.EQ(step, i64(1)), tirx.truncdiv(count, i64(codes * lanes)), i64(0)))
            at = bind(tirx.truncdiv(k0, i64(codes)))
            with loop(0, even) as v:
                words = [bind(source.load(line + at + v * i64(lanes), lanes)) for line in lines]
                for slot in range(codes):
                    xs = [bind(value(_code(word, slot, half, lanes), c, lanes)) for c, word in enumerate(words)]
                    turn(plan, xs, target, to + (v * i64(codes * lanes) + i64(slot)) * i64(nr), codes * nr)
            with loop(even * i64(codes * lanes), count) as k:
                for c, line in enumerate(lines):
                    word = bind(source.load(line + (at + tirx.truncdiv(k, i64(codes))) * step))
                    code = word
                    if half:
                        odd = tirx.EQ(tirx.truncmod(k, i64(2)), i64(1))
                        code = tirx.Select(odd, _code(word, 1, True, 1), _code(word, 0, True, 1))
                    target.store(to + k * i64(nr) + i64(c), value(code, c, 1))

    params = [(name, f"*{plan.element(name).storage}") for name in arrays]
    params += [("call", "*int64"), *numbers("j0", "end", "k0", "deep"), ("scratch", f"*{plan.acc}"), ("to", "int64")]
    return Function("pack_weights", params, body)


def _code(word: Expr, slot: int, half: bool, lanes: int) -> Expr:
    """Return code *slot* of bytes: all of each, or a half."""
    if not half:
        return word
    wide = bind(T.cast(word, vector("int32", lanes)))
    return wide >> const(4, "int32", lanes) if slot else wide & const(15, "int32", lanes)
