"""The epilogue of a product in float64, and how far a result may be off by it: what references share.

Of a product x (..., M, N), by the options ``epilogue`` (act), ``glu``, ``bias`` and ``residual``:

    y = act(x + bias)
    y = act(x_0 + bias_0) (x_1 + bias_1)    with ``glu``, where x_0 is the first N/2 columns, and x_1 the others
    c = (y + residual) out_scale

Arrays of ml_dtypes' types are NumPy arrays too; every input converts to float64 exactly. Arrays of CuPy, which follow
NumPy's protocols, give arrays of CuPy.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tlhub.formats import RANGE, ROUNDOFF, SMALLEST
from tlhub.specs import Problem
from tlhub.testing.activations import SLOPE, activate
from tlhub.testing.data import Array
from tlhub.testing.numbers import UNKNOWN

_EVALUATION = {"none": 0.0, "relu": 0.0, "gelu": 8.0, "gelu_tanh": 8.0, "silu": 8.0}
"""Roundoffs of x by which an evaluated activation may be off: they are x times a weight from 0 to 1."""


def finish(problem: Problem, x: Array, inputs: Mapping[str, Array], scalars: Mapping[str, float]) -> Array:
    """Return c in float64, of the product *x*, not yet rounded, but saturated where its dtype saturates."""
    c, out = _result(problem, x, inputs, scalars), dict(problem.dtypes)["c"]
    if out not in RANGE:
        return c
    c = np.clip(c, *RANGE[out])
    return np.nan_to_num(np.rint(c), nan=0.0) if out.startswith("int") else c


def bound(
    problem: Problem,
    x: Array,
    error: Array,
    inputs: Mapping[str, Array],
    scalars: Mapping[str, float],
    accum: str = "float32",
) -> Array:
    """Return the largest error allowed of c, where the product *x* may be off by *error*.

    Each step carries the error on by its slope, and rounds once in *accum*. The last rounding, to c's dtype, may lose
    half a unit of c in its last place, or half of the least value; an integer may be as far off as the error pushes
    it over a half way. What is infinite is exact: it may become a number again, as 0 of relu's, or a saturated one. Of
    an infinity times what may be of either sign, or 0, the bound is UNKNOWN.
    """
    option, out, eps = problem.option, dict(problem.dtypes)["c"], ROUNDOFF[accum]
    kind, scale = str(option["epilogue"]), float(scalars["out_scale"])
    with np.errstate(all="ignore"):
        y = _biased(problem, x, inputs)
        error = _of_numbers(error + (eps * abs(y) if option["bias"] else 0), y)
        gate, value = halves(problem, y)
        gate_error, value_error = halves(problem, error)
        error = _of_numbers(SLOPE[kind] * gate_error + _EVALUATION[kind] * eps * abs(gate), gate)
        unsure = np.zeros(gate.shape, bool, like=gate)
        if option["glu"]:
            gate = activate(kind, gate)
            unsure = _no_sign(gate, error) & np.isinf(value) | _no_sign(value, value_error) & np.isinf(gate)
            error = abs(gate) * value_error + (abs(value) + value_error) * error + eps * abs(gate * value)
        c = _result(problem, x, inputs, scalars)
        if option["residual"]:
            error = error + eps * (abs(c / scale) if scale else 0 * c)
        # out_scale is rounded too
        error = _of_numbers(abs(scale) * error + (2 * eps * abs(c) if scale != 1 else 0), c)
        if out.startswith("int"):
            to_half = abs(abs(c - np.floor(c)) - 0.5)
            near = (to_half <= error) & (error > 0)
            found = np.where(near, np.ceil(error), np.floor(error)) + 0.25
        else:
            result = np.clip(c, *RANGE[out]) if out in RANGE else c
            found = (1 + ROUNDOFF[out]) * error + ROUNDOFF[out] * _of_numbers(abs(result), result) + SMALLEST[out] / 2
        return np.where(unsure, UNKNOWN, found)


def _of_numbers(error: Array, x: Array) -> Array:
    """Return the *error* of *x* where that is finite, and 0 where it is not."""
    found: Array = np.where(np.isfinite(x), error, 0.0)
    return found


def _no_sign(x: Array, error: Array) -> Array:
    """Return where *x*, which is not 0, is so small that with its *error* it may be."""
    found: Array = (abs(x) <= error) & (x != 0)
    return found


def double(x: Array) -> Array:
    """Return *x* in float64; of ml_dtypes' types too."""
    return x.astype(np.float64)


def halves(problem: Problem, y: Array) -> tuple[Array, Array]:
    """Return the gates and the values; without ``glu`` all of *y* twice."""
    if not problem.option["glu"]:
        return y, y
    middle = y.shape[-1] // 2
    return y[..., :middle], y[..., middle:]


def _biased(problem: Problem, x: Array, inputs: Mapping[str, Array]) -> Array:
    return x + double(inputs["bias"]) if problem.option["bias"] else x


def _result(problem: Problem, x: Array, inputs: Mapping[str, Array], scalars: Mapping[str, float]) -> Array:
    with np.errstate(all="ignore"):
        gate, value = halves(problem, _biased(problem, x, inputs))
        y = activate(str(problem.option["epilogue"]), gate)
        if problem.option["glu"]:
            y = y * value
        if problem.option["residual"]:
            y = y + double(inputs["residual"])
        return y * float(scalars["out_scale"])
