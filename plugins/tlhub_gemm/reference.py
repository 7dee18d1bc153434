"""The reference of gemm in float64, and its tolerance."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tlhub.formats import ROUNDOFF, SMALLEST
from tlhub.specs import Problem
from tlhub.testing.data import Array
from tlhub.testing.epilogue import bound, double, finish, halves
from tlhub.testing.numbers import UNKNOWN

_STEP, _ADDED = 16, 4
"""Products of a step of a tensor core that sums in float16, and the fewest of them that one may add at a time."""
_LARGEST = float(np.finfo(np.float16).max)


def reference(problem: Problem, inputs: Mapping[str, Array], scalars: Mapping[str, float]) -> tuple[Array]:
    """Return ``(c,)`` in float64, not yet rounded to c's dtype, but saturated where c's dtype saturates."""
    return (finish(problem, _product(problem, inputs, scalars), inputs, scalars),)


def tolerance(
    problem: Problem, inputs: Mapping[str, Array], scalars: Mapping[str, float], outputs: tuple[Array, ...]
) -> tuple[Array]:
    """Return the largest error allowed of each element of c, a bound that needs no luck.

    Adding up K products in precision eps_accum, in any order, errs by at most K eps_accum (|A| |B|) to first
    order (Higham, "Accuracy and Stability of Numerical Algorithms", 3.1); twice that is allowed, and what tensor cores
    may lose besides. Integer sums are exact, and those in float16 have a bound of their own, which is UNKNOWN where one
    may overflow. alpha is rounded, and multiplied; ``epilogue.bound`` has the rest.
    """
    accum, depth = str(problem.option["accum"]), inputs["a"].shape[-2 if problem.option["trans_a"] else -1]
    real = {"int32": "float64", "float16": "float32"}.get(accum, accum)
    sums = 2 * depth * ROUNDOFF[real] + _tensor_core_error(problem, depth) if real == accum else 0.0
    with np.errstate(all="ignore"):
        size = abs(_product(problem, {name: abs(double(inputs[name])) for name in ("a", "b")}, scalars))
        error, x = (sums + 2 * ROUNDOFF[real]) * size, _product(problem, inputs, scalars)
        if accum != "float16":
            return (bound(problem, x, error, inputs, scalars, real),)
        lost, over = _float16_sums(*_operands(problem, inputs))
        found = bound(problem, x, error + abs(float(scalars["alpha"])) * lost, inputs, scalars, real)
    gate, value = halves(problem, over)
    return (np.where(gate | value, UNKNOWN, found),)


def _float16_sums(a: Array, b: Array) -> tuple[Array, Array]:
    """Return what a tensor core may lose of a @ b by sums in float16, and where one of them may overflow.

    In each step of K the sum is rounded at most _STEP / _ADDED times, and is then at most what it was before plus the
    sizes of the products of the step. A rounding loses 2^-11 of it, or half of the least float16; twice that is
    allowed, for one that truncates.
    """
    shape = (*a.shape[:-1], b.shape[-1])
    total, lost, over = np.zeros(shape, like=a), np.zeros(shape, like=a), np.zeros(shape, bool, like=a)
    for first in range(0, a.shape[-1], _STEP):
        x, y = a[..., first : first + _STEP], b[..., first : first + _STEP, :]
        most = abs(total) + abs(x) @ abs(y)
        lost = lost + _STEP / _ADDED * (2 * ROUNDOFF["float16"] * most + SMALLEST["float16"])
        over = over | (np.isfinite(most) & (most + lost > _LARGEST))
        total = total + x @ y
    return lost, over


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


def _product(problem: Problem, inputs: Mapping[str, Array], scalars: Mapping[str, float]) -> Array:
    """Return alpha op(A) op(B) in float64."""
    a, b = _operands(problem, inputs)
    with np.errstate(all="ignore"):
        return float(scalars["alpha"]) * (a @ b)


def _operands(problem: Problem, inputs: Mapping[str, Array]) -> tuple[Array, Array]:
    """Return op(A) and op(B) in float64."""
    a, b = double(inputs["a"]), double(inputs["b"])
    a = a.swapaxes(-1, -2) if problem.option["trans_a"] else a
    b = b.swapaxes(-1, -2) if problem.option["trans_b"] else b
    return a, b
