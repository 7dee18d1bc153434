"""An epilogue in float64, and how far a result may be off by it: what the references share.

Arrays of ml_dtypes' types are NumPy arrays too; every input converts to float64 exactly. Arrays of CuPy, which follow
NumPy's protocols, give arrays of CuPy.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import erfc
from typing import Any

import numpy as np

from tlhub.formats import RANGE, ROUNDOFF, SMALLEST
from tlhub.specs import Problem

Array = np.ndarray[Any, Any]

_SLOPE = {"none": 1.0, "relu": 1.0, "gelu": 1.13, "gelu_tanh": 1.13, "silu": 1.1}
"""The largest derivative: by how much an activation can widen the error of its argument."""

_EVALUATION = {"none": 0.0, "relu": 0.0, "gelu": 8.0, "gelu_tanh": 8.0, "silu": 8.0}
"""Roundoffs of x by which an evaluated activation may be off: they are x times a weight from 0 to 1."""

_EPS = ROUNDOFF["float32"]


def finish(problem: Problem, x: Array, inputs: Mapping[str, Array], scalars: Mapping[str, float]) -> Array:
    """Return c in float64, of the product *x*, not yet rounded, but saturated where its dtype saturates."""
    c, out = _result(problem, x, inputs, scalars), dict(problem.dtypes)["c"]
    if out not in RANGE:
        return c
    c = np.clip(c, *RANGE[out])
    return np.nan_to_num(np.rint(c), nan=0.0) if out == "int8" else c


def bound(
    problem: Problem,
    x: Array,
    error: Array,
    inputs: Mapping[str, Array],
    scalars: Mapping[str, float],
) -> Array:
    """Return the largest error allowed of c, where the product *x* may be off by *error*.

    Each step carries the error on by its slope, and rounds once in float32. The last rounding, to c's dtype, may lose
    half a unit of c in its last place, or half of the least value; an integer may be as far off as the error pushes
    it over a half way.
    """
    option, out = problem.option, dict(problem.dtypes)["c"]
    kind, scale = str(option["epilogue"]), float(scalars["out_scale"])
    with np.errstate(all="ignore"):
        y = _biased(problem, x, inputs)
        error = error + (_EPS * abs(y) if option["bias"] else 0)
        gate, value = _halves(problem, y)
        gate_error, value_error = _halves(problem, error)
        error = _SLOPE[kind] * gate_error + _EVALUATION[kind] * _EPS * abs(gate)
        if option["glu"]:
            gate = activate(kind, gate)
            error = abs(gate) * value_error + (abs(value) + value_error) * error + _EPS * abs(gate * value)
        c = _result(problem, x, inputs, scalars)
        if option["residual"]:
            error = error + _EPS * (abs(c / scale) if scale else 0 * c)
        # out_scale is rounded too
        error = abs(scale) * error + 2 * _EPS * abs(c)
        if out == "int8":
            to_half = abs(abs(c - np.floor(c)) - 0.5)
            near = (to_half <= error) & (error > 0)
            return np.where(near, np.ceil(error), np.floor(error)) + 0.25
        result = np.clip(c, *RANGE[out]) if out in RANGE else c
        return (1 + ROUNDOFF[out]) * error + ROUNDOFF[out] * abs(result) + SMALLEST[out] / 2


def double(x: Array) -> Array:
    """Return *x* in float64; of ml_dtypes' types too."""
    return x.astype(np.float64)


def activate(kind: str, x: Array) -> Array:
    """Return the activation of *x* in float64: x, or x times a weight, so an infinite x times 0 is NaN."""
    if kind == "none":
        return x
    if kind == "relu":
        return np.where(x < 0, 0.0, x)
    if kind == "silu":
        return x * _sigmoid(x)
    if kind == "gelu":
        flat = [0.5 * erfc(-v * 0.5**0.5) for v in x.ravel().tolist()]
        return x * np.asarray(flat, dtype=np.float64, like=x).reshape(x.shape)
    # (1 + tanh u) / 2 = sigmoid(2 u)
    return x * _sigmoid(2 * np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))


def _sigmoid(x: Array) -> Array:
    decay = np.exp(-abs(x))
    return np.where(x < 0, decay, 1.0) / (1.0 + decay)


def _biased(problem: Problem, x: Array, inputs: Mapping[str, Array]) -> Array:
    return x + double(inputs["bias"]) if problem.option["bias"] else x


def _halves(problem: Problem, y: Array) -> tuple[Array, Array]:
    """Return the gates and the values; without ``glu`` all of *y* twice."""
    if not problem.option["glu"]:
        return y, y
    middle = y.shape[1] // 2
    return y[:, :middle], y[:, middle:]


def _result(problem: Problem, x: Array, inputs: Mapping[str, Array], scalars: Mapping[str, float]) -> Array:
    with np.errstate(all="ignore"):
        gate, value = _halves(problem, _biased(problem, x, inputs))
        y = activate(str(problem.option["epilogue"]), gate)
        if problem.option["glu"]:
            y = y * value
        if problem.option["residual"]:
            y = y + double(inputs["residual"])
        return y * float(scalars["out_scale"])
