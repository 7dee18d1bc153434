"""The program of gemm that TVM schedules: two blocks of TIR, and dlight's rule for products on the CUDA cores.

One binary for every size and stride.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import pi
from typing import Any

import tvm
from tvm import tirx
from tvm.s_tir import dlight
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script.builder import ir as T

from tlhub.specs import DTYPES, Problem

_CORES = {"kind": "cuda", "arch": "sm_61"}
"""What the rule is asked for: from sm_70 on it reaches for tensor cores, and fails on symbolic extents."""


def program(problem: Problem, config: Mapping[str, Any], arch: str) -> Any:
    """Return the scheduled IRModule for *problem*; the knobs of *config* are described in ``tlhub_gemm.dlight``."""
    module = tvm.IRModule({"gemm": _gemm(problem)})
    with tvm.target.Target(_CORES):
        return dlight.ApplyDefaultSchedule(_Matmul(config))(module)


class _Matmul(dlight.gpu.Matmul):
    """dlight's rule with the knobs of a config."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._knobs = dict(config)

    def get_configs(self, target: Any) -> Any:
        return dlight.gpu.Matmul.Config(vector_size=2, storage_align=True, **self._knobs)


def _gemm(problem: Problem) -> Any:
    """Return the function: c = (act(alpha op(a) op(b) + bias) + residual) out_scale, the product in a block apart."""
    option, dtypes = problem.option, dict(problem.dtypes)
    accum = str(option["accum"])
    with IRBuilder() as builder:
        with T.prim_func(s_tir=True):
            T.func_name("gemm")
            T.func_attr({"global_symbol": "gemm"})
            handles = {name: T.arg(name, T.handle()) for name in dtypes}
            alpha, out_scale = T.arg("alpha", T.float64()), T.arg("out_scale", T.float64())
            batch, m, n, k = (tirx.Var(name, "int64") for name in ("batch", "m", "n", "k"))
            shapes = {
                "a": (batch, k, m) if option["trans_a"] else (batch, m, k),
                "b": (batch, n, k) if option["trans_b"] else (batch, k, n),
                "bias": (n,),
            }
            arrays = {
                name: _array(name, handles[name], shapes.get(name, (batch, m, n)), dtype)
                for name, dtype in dtypes.items()
            }
            product = T.sblock_alloc_buffer((batch, m, n), accum)
            with T.grid(batch, m, n, k) as loops, T.sblock("product"):
                z, i, j, s = T.axis.remap("SSSR", list(loops))
                with T.init():
                    T.buffer_store(product, tirx.const(0, accum), [z, i, j])
                a = arrays["a"][(z, s, i) if option["trans_a"] else (z, i, s)]
                b = arrays["b"][(z, j, s) if option["trans_b"] else (z, s, j)]
                T.buffer_store(product, product[z, i, j] + T.Cast(accum, a) * T.Cast(accum, b), [z, i, j])
            with T.grid(batch, m, n) as loops, T.sblock("c"):
                z, i, j = T.axis.remap("SSS", list(loops))
                value = product[z, i, j] * T.Cast(accum, alpha)
                if option["bias"]:
                    value = value + T.Cast(accum, arrays["bias"][j])
                value = _ACTIVATIONS[str(option["epilogue"])](value)
                if option["residual"]:
                    value = value + T.Cast(accum, arrays["residual"][z, i, j])
                value = value * T.Cast(accum, out_scale)
                T.buffer_store(arrays["c"], T.Cast(dtypes["c"], value), [z, i, j])
    return builder.get()


def _array(name: str, handle: Any, shape: tuple[Any, ...], dtype: str) -> Any:
    """Return the buffer of an argument, with any strides."""
    strides = [tirx.Var(f"{name}_{axis}", "int64") for axis in range(len(shape))]
    buffer = T.match_buffer(handle, shape, dtype, strides=strides, align=DTYPES[dtype][1] // 8, offset_factor=1)
    IRBuilder.name(name, buffer)
    return buffer


def _sigmoid(x: Any) -> Any:
    decay = T.exp(-tirx.abs(x))
    return tirx.Select(x < _like(0, x), decay, _like(1, x)) / (_like(1, x) + decay)


def _like(value: float, x: Any) -> Any:
    return tirx.const(value, _dtype(x))


def _dtype(x: Any) -> str:
    return str(x.dtype if hasattr(x, "dtype") else x.ty.dtype)


_ACTIVATIONS: Mapping[str, Callable[[Any], Any]] = {
    # of a NaN all are NaN; an infinite x times a weight of 0 is too
    "none": lambda x: x,
    "relu": lambda x: tirx.Select(x < _like(0, x), _like(0, x), x),
    "silu": lambda x: x * _sigmoid(x),
    "gelu": lambda x: x * (_like(0.5, x) + _like(0.5, x) * tirx.erf(x * _like(0.5**0.5, x))),
    "gelu_tanh": lambda x: x * _sigmoid(_like((8 / pi) ** 0.5, x) * (x + _like(0.044715, x) * x * x * x)),
}
