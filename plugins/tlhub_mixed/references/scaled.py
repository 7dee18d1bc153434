"""The reference of gemm_scaled in float64, and its tolerance."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from tlhub.formats import ROUNDOFF
from tlhub.specs import Problem
from tlhub.testing.data import Array
from tlhub.testing.epilogue import bound, double, finish, halves
from tlhub.testing.numbers import UNKNOWN
from tlhub_mixed.contracts.quantize import BLOCK

_EPS = ROUNDOFF["float32"]
_STEP, _UNIT = 32, 2.0**-13
"""Products that a tensor core adds at a time, and what it cuts off, of the largest of what it adds."""


def reference(problem: Problem, inputs: Mapping[str, Array], scalars: Mapping[str, float]) -> tuple[Array]:
    """Return ``(c,)`` in float64, not yet rounded to c's dtype, but saturated where c's dtype saturates."""
    return (finish(problem, _product(problem, inputs), inputs, scalars),)


def tolerance(
    problem: Problem, inputs: Mapping[str, Array], scalars: Mapping[str, float], outputs: tuple[Array, ...]
) -> tuple[Array]:
    """Return the largest error allowed of each element of c, a bound that needs no luck, to first order.

    Sums of int8 products are exact. With S the sum of |a a_scale| |b b_scale| over K, K additions in float32, in any
    order, err by at most K eps S, eps = 2^-24 (Higham, "Accuracy and Stability of Numerical Algorithms", 3.1); twice
    that is allowed. A tensor core adds 32 products of float8 to its sum at once, each of the 33 cut off at 2^-13 of the
    largest, M: it loses 33 2^-13 M with each such addition. M is at most the larger of the sum so far and the root of
    the sum of the squares of the 32. It begins anew after 128 of K, or with ``fast_accum`` never, and what it has then
    is added up in float32. Scales round three times for each block; ``epilogue.bound`` has the rest.
    Where an infinite scale meets a sum that may be of either sign, or 0, the bound is UNKNOWN.
    """
    option, depth = problem.option, int(problem.dim["K"])
    size = _product(problem, {**inputs, **{name: abs(double(inputs[name])) for name in _OPERANDS}})
    blocks = -(-depth // BLOCK)
    error = (3 + (2 * blocks if option["scaling"] == "block" else 0)) * _EPS * size
    if problem.dtype != "int8" and option["tensor_core"] is False:
        error = error + 2 * depth * _EPS * size
    elif problem.dtype != "int8":
        error = error + 2 * blocks * _EPS * size + _cut_off(problem, inputs)
    found = bound(problem, _product(problem, inputs), error, inputs, scalars)
    return (np.where(_unsure(problem, inputs), UNKNOWN, found),)


def prepare(
    problem: Problem, inputs: Mapping[str, Array], scalars: Mapping[str, float], rng: np.random.Generator | None
) -> dict[str, Array]:
    """Return scales that are positive, of about 1 for float8 and 1/16 for int8; in UE8M0 powers of two."""
    rng, middle = rng or np.random.default_rng(0), -4 if problem.dtype == "int8" else 0
    found = {}
    for name in ("a_scale", "b_scale"):
        exponent = middle + rng.uniform(-1, 1, np.shape(inputs[name]))
        power = np.rint(exponent) if problem.option["scale_dtype"] != "float32" else exponent
        found[name] = np.asarray(np.exp2(power), np.float32)
    return found


_OPERANDS = ("a", "b", "a_scale", "b_scale")


def _parts(problem: Problem, inputs: Mapping[str, Array]) -> Iterator[tuple[Array, Array, Array]]:
    """Yield a (M, k), b (k, N) and the factor of their product, of each part of K with scales of its own."""
    a, b, a_scale, b_scale = (double(inputs[name]) for name in _OPERANDS)
    if problem.option["trans_b"]:
        b = b.T
    if problem.option["scaling"] != "block":
        yield a, b, (a_scale[:, None] if problem.option["scaling"] == "row" else a_scale) * b_scale
        return
    b_scale = b_scale.T if problem.option["trans_b"] else b_scale
    for block in range(a_scale.shape[1]):
        part = slice(block * BLOCK, (block + 1) * BLOCK)
        yield a[:, part], b[part], a_scale[:, block, None] * np.repeat(b_scale[block], BLOCK)[: b.shape[1]]


def _product(problem: Problem, inputs: Mapping[str, Array]) -> Array:
    """Return (a a_scale) (b b_scale) in float64."""
    total = np.zeros((int(problem.dim["M"]), int(problem.dim["N"])), like=inputs["a"])
    with np.errstate(all="ignore"):
        for a, b, factor in _parts(problem, inputs):
            total = total + (a @ b) * factor
    return total


def _cut_off(problem: Problem, inputs: Mapping[str, Array]) -> Array:
    """Return what a tensor core may lose by cutting off what it adds."""
    lost = np.zeros((int(problem.dim["M"]), int(problem.dim["N"])), like=inputs["a"])
    with np.errstate(all="ignore"):
        for a, b, factor in _parts(problem, inputs):
            lost = lost + _cut_off_sums(a, b, bool(problem.option["fast_accum"])) * abs(factor)
    return lost


def _cut_off_sums(a: Array, b: Array, fast_accum: bool) -> Array:
    """Return what a tensor core may lose of a @ b."""
    sums = lost = np.zeros((a.shape[0], b.shape[1]), like=a)
    for first in range(0, a.shape[1], _STEP):
        if first % BLOCK == 0 and not fast_accum:
            sums = 0 * lost
        x, y = a[:, first : first + _STEP], b[first : first + _STEP]
        lost = lost + (_STEP + 1) * _UNIT * np.maximum(np.sqrt(x**2 @ y**2), abs(sums))
        sums = sums + x @ y
    return lost


def _unsure(problem: Problem, inputs: Mapping[str, Array]) -> Array:
    """Tell of which elements nothing can be said: an infinite scale takes the sign of a sum that may be of either."""
    unsure = np.zeros((int(problem.dim["M"]), int(problem.dim["N"])), bool, like=inputs["a"])
    fast_accum = bool(problem.option["fast_accum"])
    if problem.dtype != "int8" and any(np.isinf(double(inputs[name])).any() for name in ("a_scale", "b_scale")):
        with np.errstate(all="ignore"):
            for a, b, factor in _parts(problem, inputs):
                error = 2 * a.shape[1] * _EPS * (abs(a) @ abs(b)) + _cut_off_sums(a, b, fast_accum)
                unsure = unsure | (np.isinf(factor) & (abs(a @ b) <= error))
    gate, value = halves(problem, unsure)
    return gate | value
