"""The reference of gemm in float64, and its tolerance.

Arrays of ml_dtypes' types are NumPy arrays too; every input converts to float64 exactly. Arrays of CuPy, which follow
NumPy's protocols, give arrays of CuPy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tlhub.specs import Problem

Array = np.ndarray[Any, Any]

ROUNDOFF = {
    # half a unit in the last place of 1: the largest relative error of a rounding to nearest
    "float64": 2.0**-53,
    "float32": 2.0**-24,
    "float16": 2.0**-11,
    "bfloat16": 2.0**-8,
    "float8_e4m3fn": 2.0**-4,
    "float8_e5m2": 2.0**-3,
    "int32": 0.0,
}
_SMALLEST = {
    # the least value above 0, of which a rounding may lose a half where relative errors say nothing
    "float64": 2.0**-1074,
    "float32": 2.0**-149,
    "float16": 2.0**-24,
    "bfloat16": 2.0**-133,
    "float8_e4m3fn": 2.0**-9,
    "float8_e5m2": 2.0**-16,
    "int8": 1.0,
    "int32": 1.0,
}
_RANGE = {
    "float8_e4m3fn": (-448.0, 448.0),
    "float8_e5m2": (-57344.0, 57344.0),
    "int8": (-128.0, 127.0),
    "int32": (-(2.0**31), 2.0**31 - 1),
}
_SLOPE = {"none": 1.0, "relu": 1.0, "gelu": 1.13, "gelu_tanh": 1.13, "silu": 1.1}
"""The largest derivative: by how much an activation can widen the error of its argument."""

_ACTIVATION_ERROR = 8.0
"""Roundoffs of x by which an evaluated activation may be off: they are x times a weight from 0 to 1."""


def reference(problem: Problem, inputs: Mapping[str, Array], scalars: Mapping[str, float]) -> tuple[Array]:
    """Return ``(c,)`` in float64, not yet rounded to c's dtype, but saturated where c's dtype saturates."""
    return (_saturate(problem, _epilogue(problem, inputs, scalars)),)


def tolerance(
    problem: Problem, inputs: Mapping[str, Array], scalars: Mapping[str, float], outputs: tuple[Array, ...]
) -> tuple[Array]:
    """Return the largest error allowed of each element of c, a bound that needs no luck.

    Adding up K products in precision eps_accum, in any order, errs by at most K eps_accum (|A| |B|) to first
    order (Higham, "Accuracy and Stability of Numerical Algorithms", 3.1); twice that is allowed, and what tensor cores
    may lose besides. The error goes through alpha, the bias and the activation's slope, each step adding its own
    rounding in eps_accum; the last rounding, to c's dtype, allows eps_out |c|, or half of its least value. Integer sums
    are exact.
    """
    option, out = problem.option, dict(problem.dtypes)["c"]
    accum, eps_out = str(option["accum"]), ROUNDOFF.get(out, 0.0)
    integer = accum == "int32"
    eps = ROUNDOFF["float64"] if integer else ROUNDOFF[accum]
    alpha = abs(float(scalars["alpha"]))
    a, b = _operands(problem, inputs)
    with np.errstate(all="ignore"):
        depth = a.shape[-1]
        size = alpha * abs(a) @ abs(b)
        error = 0.0 * size if integer else (2 * depth * eps + _tensor_core_error(problem, depth)) * size
        total = np.abs(_linear(problem, inputs, scalars))
        # alpha is rounded, multiplied, and the bias is added
        error = error + 2 * eps * size + eps * total
        kind = str(option["epilogue"])
        if kind != "none":
            error = _SLOPE[kind] * error + _ACTIVATION_ERROR * eps * total
        final = np.abs(_epilogue(problem, inputs, scalars))
        if option["residual"]:
            error = error + eps * (final + error)
        if out in _RANGE and out.startswith("int"):
            # an integer is as far off as its error can push it over a half way; exact sums not at all
            exact = _epilogue(problem, inputs, scalars)
            to_half = np.abs(np.abs(exact - np.floor(exact)) - 0.5)
            near = (to_half <= error) & (error > 0)
            return (np.where(near, np.ceil(error), np.floor(error)) + 0.25,)
        return ((1 + eps_out) * error + eps_out * np.abs(outputs[0]) + _SMALLEST[out] / 2,)


def _tensor_core_error(problem: Problem, depth: int) -> float:
    """Return what tensor cores may lose of *depth* products, relative to the sum of their sizes.

    float8: a step adds 32 products to a sum, aligned to the largest of them, and keeps 13 bits below its first; four
    steps are a sum, or with ``fast_accum`` all of K is one. tf32 keeps 10 bits of an operand, and truncates; in three
    products what is lost of an operand is the last of two such roundings, and the product of the two low parts.
    """
    option, a = problem.option, dict(problem.dtypes)["a"]
    if option["compute"] != "ieee":
        return 2 * 2.0**-10 + depth * 2.0**-24 if option["compute"] == "tf32" else 4 * 2.0**-22
    if not a.startswith("float8") or option["tensor_core"] is False or option["accum"] != "float32":
        return 0.0
    return 4 * 2.0**-13 + (depth / 32 * 2.0**-13 if option["fast_accum"] else 0.0)


# -- the parts of it -------------------------------------------------------------------------------


def _operands(problem: Problem, inputs: Mapping[str, Array]) -> tuple[Array, Array]:
    """Return op(A) and op(B) in float64."""
    a, b = (inputs[name].astype(np.float64) for name in ("a", "b"))
    a = a.swapaxes(-1, -2) if problem.option["trans_a"] else a
    return a, b.swapaxes(-1, -2) if problem.option["trans_b"] else b


def _linear(problem: Problem, inputs: Mapping[str, Array], scalars: Mapping[str, float]) -> Array:
    """Return alpha op(A) op(B) + bias."""
    a, b = _operands(problem, inputs)
    with np.errstate(all="ignore"):
        total: Array = float(scalars["alpha"]) * (a @ b)
        if problem.option["bias"]:
            total = total + inputs["bias"].astype(np.float64)
    return total


def _epilogue(problem: Problem, inputs: Mapping[str, Array], scalars: Mapping[str, float]) -> Array:
    with np.errstate(all="ignore"):
        total = activate(str(problem.option["epilogue"]), _linear(problem, inputs, scalars))
        if problem.option["residual"]:
            total = total + inputs["residual"].astype(np.float64)
    return total


def activate(kind: str, x: Array) -> Array:
    """Return the activation of *x* in float64: x, or x times a weight, so an infinite x times 0 is NaN."""
    with np.errstate(all="ignore"):
        if kind == "none":
            return x
        if kind == "relu":
            return np.where(x < 0, 0.0, x)
        if kind == "silu":
            return x * _sigmoid(x)
        if kind == "gelu":
            return x * _normal_cdf(x)
        # (1 + tanh u) / 2 = sigmoid(2 u)
        return x * _sigmoid(2 * np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))


def _sigmoid(x: Array) -> Array:
    decay = np.exp(-np.abs(x))
    return np.where(x < 0, decay, 1.0) / (1.0 + decay)


def _normal_cdf(x: Array) -> Array:
    from math import erfc

    flat = [0.5 * erfc(-v * 0.5**0.5) for v in x.ravel().tolist()]
    return np.asarray(flat, dtype=np.float64, like=x).reshape(x.shape)


def _saturate(problem: Problem, c: Array) -> Array:
    out = dict(problem.dtypes)["c"]
    if out not in _RANGE:
        return c
    c = np.clip(c, *_RANGE[out])
    return np.rint(c) if out.startswith("int") else c
