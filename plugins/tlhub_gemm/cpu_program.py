"""The CPU program of gemm: one binary for every size and stride, on any number of threads.

A product of a few rows (or columns) with a large matrix is bound by reading that matrix, which is then
streamed (``cpu_thin``); every other product is blocked (``cpu_blocks``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script.builder import ir as T

from tlhub.cpu.elements import Element
from tlhub.cpu.ir import Expr, bind, branch, i64, local, minimum, module, stepping
from tlhub.specs import Problem
from tlhub_gemm.cpu_blocks import blocked
from tlhub_gemm.cpu_call import FIELDS, Task, choose, run_alone, run_shared
from tlhub_gemm.cpu_thin import FEW, thin
from tlhub_gemm.cpu_tiles import Plan, finish


def program(problem: Problem, config: Mapping[str, Any], arch: str) -> Any:
    """Return the IRModule for *problem*; the knobs of *config* are described in ``tlhub_gemm.cpu``."""
    plan = make_plan(problem, config)
    close = finish(plan)
    blocks, parts = blocked(plan, close)
    few_rows, streams = thin(plan, plan.a, plan.b, close, "few_rows")
    few_columns = None if plan.glu else few_rows
    if few_columns and plan.a != plan.b:
        few_columns, more = thin(plan, plan.b, plan.a, close, "few_columns")
        streams += more
    every = choose(plan, (blocks, few_rows), few_columns)
    tasks = {t.run.name: t for t in (blocks, few_rows, few_columns, every) if t}
    functions = [*parts, *streams, close, *(f for t in tasks.values() for f in (t.measure, t.run))]
    return module("gemm", _entry(problem, plan, int(config["alone"]), every), functions)


def make_plan(problem: Problem, config: Mapping[str, Any]) -> Plan:
    """Return what is fixed for *problem* under *config*."""
    option, dtypes = problem.option, dict(problem.dtypes)
    half = bool(config["half"])
    return Plan(
        acc=str(option["accum"]),
        a=Element(dtypes["a"], half),
        b=Element(dtypes["b"], half),
        c=Element(dtypes["c"], half),
        beside=Element(dtypes.get("bias") or dtypes.get("residual") or dtypes["c"], half),
        epilogue=str(option["epilogue"]),
        glu=bool(option["glu"]),
        bias=bool(option["bias"]),
        residual=bool(option["residual"]),
        **{knob: int(config[knob]) for knob in ("lanes", "mr", "nr", "kc", "mc", "nc")},
    )


def _entry(problem: Problem, plan: Plan, alone: int, task: Task) -> Any:
    """The function that the host shim calls: inputs, c, the scalars. Below *alone* products it uses no other thread.

    *task* has the kinds: blocked, few rows, few columns.
    """
    trans_a, trans_b = bool(problem.option["trans_a"]), bool(problem.option["trans_b"])
    with IRBuilder() as builder:
        with T.prim_func():
            T.func_name("gemm")
            T.func_attr({"global_symbol": "gemm"})
            names = ["a", "b", *(["bias"] if plan.bias else []), *(["residual"] if plan.residual else []), "c"]
            handles = {name: T.arg(name, T.handle()) for name in names}
            alpha, out_scale = T.arg("alpha", T.float64()), T.arg("out_scale", T.float64())
            batch, m, n, k = (T.int64() for _ in range(4))
            columns = T.int64() if plan.glu else n
            shapes = {
                "a": (batch, k, m) if trans_a else (batch, m, k),
                "b": (batch, n, k) if trans_b else (batch, k, n),
                "bias": (n,),
                "residual": (batch, m, columns),
                "c": (batch, m, columns),
            }
            elements = {"a": plan.a, "b": plan.b, "bias": plan.beside, "residual": plan.beside, "c": plan.c}
            strides = {name: [T.int64() for _ in shapes[name]] for name in names}
            buffers = {
                name: T.match_buffer(
                    handles[name],
                    shapes[name],
                    elements[name].storage,
                    strides=strides[name],
                    align=elements[name].size,
                    offset_factor=1,
                    layout=None,
                )
                for name in names
            }
            if plan.glu:
                message = "gemm: argument 'b': expected an even number of columns, got others"
                with T.Assert(tirx.EQ(n, columns * i64(2)), message, "ValueError"):
                    pass
            values = {"batch": batch, "m": m, "n": columns, "k": k}
            values["alpha"] = T.reinterpret("int64", alpha * out_scale if plan.plain else alpha)
            values["out_scale"] = T.reinterpret("int64", out_scale)
            values |= {f"{x}_at": buffers[x].elem_offset for x in ("a", "b", "c")}
            values |= zip(("a_b", "a_k" if trans_a else "a_m", "a_m" if trans_a else "a_k"), strides["a"], strict=True)
            values |= zip(("b_b", "b_n" if trans_b else "b_k", "b_k" if trans_b else "b_n"), strides["b"], strict=True)
            values |= zip(("c_b", "c_m", "c_n"), strides["c"], strict=True)
            values |= {name: i64(0) for name in FIELDS if name not in values}
            if plan.bias:
                values |= {"bias_at": buffers["bias"].elem_offset, "bias_n": strides["bias"][0]}
            if plan.residual:
                values |= zip(("r_b", "r_m", "r_n"), strides["residual"], strict=True)
                values["r_at"] = buffers["residual"].elem_offset

            def streams(few: Expr, many: Expr, *steps: str) -> Expr:
                shape = tirx.And(few <= i64(FEW), many >= i64(plan.lanes))
                return tirx.And(shape, tirx.Or(*(tirx.EQ(values[step], i64(1)) for step in steps)))

            short, narrow = tirx.And(m <= n, streams(m, columns, "b_n", "b_k")), streams(n, m, "a_m", "a_k")
            blocks = i64(0) if plan.glu else tirx.Select(narrow, i64(2), i64(0))
            kind = bind(tirx.Select(short, i64(1), blocks))
            values["kind"] = kind
            call = local(len(FIELDS), "int64")
            for i, name in enumerate(FIELDS):
                turned = values[_mirror(name)]
                same = turned is values[name]
                call.store(i, turned if same else tirx.Select(tirx.EQ(kind, i64(2)), turned, values[name]))
            beside = buffers.get("bias", buffers.get("residual", buffers["c"]))
            ends = [buffers.get(name, beside).data for name in ("c", "bias", "residual")]
            args = (buffers["a"].data, buffers["b"].data, *ends)
            most = i64((1 << 31) - 1)
            with stepping():
                branch(
                    minimum(m * n, most) * minimum(batch * k, most) < i64(alone),
                    lambda: run_alone(task, plan.acc, args, call.pointer),
                    lambda: run_shared(task, plan.acc, args, call.pointer),
                )
    return builder.get()


def _mirror(field: str) -> str:
    """Return the field that takes the place of *field* in C^T = B^T A^T."""
    swaps = {"m": "n", "n": "m", "a": "b", "b": "a"}
    head, line, tail = field.partition("_")
    if not line:
        return swaps.get(head, head)
    operand = swaps.get(head, head) if head in ("a", "b") else head
    return f"{operand}_{swaps[tail] if tail in ('m', 'n') else tail}"
