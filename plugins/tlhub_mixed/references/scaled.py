"""The reference of gemm_scaled in float64, and its tolerance."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tlhub.formats import ROUNDOFF
from tlhub.specs import Problem
from tlhub_mixed.contracts.quantize import BLOCK
from tlhub_mixed.references.epilogue import Array, bound, double, finish

_EPS = ROUNDOFF["float32"]
_CORE = 2.0**-13
"""The unit of a tensor core's sums of float8 products, of the largest of what is added."""
_STEP = 32
"""Products that a tensor core adds at a time."""


def reference(problem: Problem, inputs: Mapping[str, Array], scalars: Mapping[str, float]) -> tuple[Array]:
    """Return ``(c,)`` in float64, not yet rounded to c's dtype, but saturated where c's dtype saturates."""
    return (finish(problem, _product(problem, inputs), inputs, scalars),)


def tolerance(
    problem: Problem, inputs: Mapping[str, Array], scalars: Mapping[str, float], outputs: tuple[Array, ...]
) -> tuple[Array]:
    """Return the largest error allowed of each element of c.

    Let S be the sum of |a a_scale| |b b_scale| over K. Sums of int8 products are exact. Of float8:

    - in float32, K additions in any order are off by at most K eps S, eps = 2^-24, to first order (Higham, "Accuracy
      and Stability of Numerical Algorithms", 3.1); twice that is allowed, a bound that needs no luck;
    - a tensor core adds 32 products to a sum at once, all cut to 13 bits below the largest of them: each addition loses
      about 2^-13 of the products' sum, where they are of like size, and as much of the sum so far. There are 4 before
      the sum goes on in float32, or K/32 with ``fast_accum``: 2^-13 (1 + 4) S and 2 K/128 eps S. One product that
      outweighs 32 others by far may lose more.

    Scales round three times for each block; ``epilogue.bound`` has the rest.
    """
    option, depth = problem.option, int(problem.dim["K"])
    with np.errstate(all="ignore"):
        size = _product(problem, {n: abs(double(x)) for n, x in inputs.items() if n in _OPERANDS})
    steps, blocks = -(-depth // _STEP), -(-depth // BLOCK)
    if problem.dtype == "int8":
        sums = 0.0
    elif option["tensor_core"] is False:
        sums = 2 * depth * _EPS
    elif option["fast_accum"]:
        sums = (1 + steps) * _CORE
    else:
        sums = (1 + min(steps, BLOCK // _STEP)) * _CORE + 2 * blocks * _EPS
    scaling = (3 + (2 * blocks if option["scaling"] == "block" else 0)) * _EPS
    x = _product(problem, inputs)
    return (bound(problem, x, (sums + scaling) * size, inputs, scalars),)


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


def _product(problem: Problem, inputs: Mapping[str, Any]) -> Array:
    """Return (a a_scale) (b b_scale) in float64."""
    a, b, a_scale, b_scale = (double(inputs[name]) for name in _OPERANDS)
    if problem.option["trans_b"]:
        b = b.T
    with np.errstate(all="ignore"):
        if problem.option["scaling"] == "tensor":
            return (a @ b) * a_scale * b_scale
        if problem.option["scaling"] == "row":
            return (a @ b) * a_scale[:, None] * b_scale
        b_scale = b_scale.T if problem.option["trans_b"] else b_scale
        rows = np.repeat(b_scale, BLOCK, axis=1)[:, : b.shape[1]]
        total = np.zeros((a.shape[0], b.shape[1]), like=a)
        for block in range(a_scale.shape[1]):
            part = slice(block * BLOCK, (block + 1) * BLOCK)
            total = total + (a[:, part] @ b[part]) * a_scale[:, block, None] * rows[block]
        return total
