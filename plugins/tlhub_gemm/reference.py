"""The reference of gemm in float64, and its tolerance.

Arrays of ml_dtypes' types are NumPy arrays too; every input converts to float64 exactly. Arrays of CuPy, which follow
NumPy's protocols, give arrays of CuPy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tlhub.formats import RANGE, ROUNDOFF, SMALLEST
from tlhub.specs import Problem
from tlhub.testing.activations import SLOPE, activate

Array = np.ndarray[Any, Any]

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
            error = SLOPE[kind] * error + _ACTIVATION_ERROR * eps * total
        final = np.abs(_epilogue(problem, inputs, scalars))
        if option["residual"]:
            error = error + eps * (final + error)
        if out in RANGE and out.startswith("int"):
            # an integer is as far off as its error can push it over a half way; exact sums not at all
            exact = _epilogue(problem, inputs, scalars)
            to_half = np.abs(np.abs(exact - np.floor(exact)) - 0.5)
            near = (to_half <= error) & (error > 0)
            return (np.where(near, np.ceil(error), np.floor(error)) + 0.25,)
        return ((1 + eps_out) * error + eps_out * np.abs(outputs[0]) + SMALLEST[out] / 2,)


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


def _saturate(problem: Problem, c: Array) -> Array:
    out = dict(problem.dtypes)["c"]
    if out not in RANGE:
        return c
    c = np.clip(c, *RANGE[out])
    return np.rint(c) if out.startswith("int") else c
