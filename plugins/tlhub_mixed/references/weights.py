"""The reference of gemm_w4a16 and gemm_w8a16 in float64, and its tolerance."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tlhub.formats import ROUNDOFF
from tlhub.specs import Problem
from tlhub.testing.data import Array
from tlhub.testing.epilogue import bound, double, finish
from tlhub_mixed.contracts.weights import MIDDLE

_EPS = ROUNDOFF["float32"]


def reference(problem: Problem, inputs: Mapping[str, Array], scalars: Mapping[str, float]) -> tuple[Array]:
    """Return ``(c,)`` in float64, not yet rounded to c's dtype, but saturated where c's dtype saturates."""
    return (finish(problem, _product(double(inputs["a"]), weights(problem, inputs)), inputs, scalars),)


def tolerance(
    problem: Problem, inputs: Mapping[str, Array], scalars: Mapping[str, float], outputs: tuple[Array, ...]
) -> tuple[Array]:
    """Return the largest error allowed of each element of c.

    Let S be the sum of |a| |w| over K. A weight may be rounded to the type of a once, which loses eps_a S; K additions
    in float32, in any order, lose at most K eps S, eps = 2^-24, to first order (Higham, "Accuracy and Stability of
    Numerical Algorithms", 3.1), and twice that is allowed. It is a bound that needs no luck; ``epilogue.bound`` has the
    rest.
    """
    a, w = double(inputs["a"]), weights(problem, inputs)
    size, depth = _product(abs(a), abs(w)), int(problem.dim["K"])
    error = (ROUNDOFF[problem.dtype] + 2 * (depth + 1) * _EPS) * size
    return (bound(problem, _product(a, w), error, inputs, scalars),)


def prepare(
    problem: Problem, inputs: Mapping[str, Array], scalars: Mapping[str, float], rng: np.random.Generator | None
) -> dict[str, Array]:
    """Return scales that make weights of about 1, and zero points within the range of codes."""
    rng, largest = rng or np.random.default_rng(0), 15 if _packed(problem) else 255
    shape = inputs["scale"].shape
    found: dict[str, Array] = {"scale": 4 * np.exp2(rng.uniform(-1, 1, shape)) / largest}
    if problem.option["zero_point"]:
        found["zero"] = np.asarray(rng.integers(0, largest, shape))
    return found


def weights(problem: Problem, inputs: Mapping[str, Array]) -> Array:
    """Return w (N, K) in float64, without any rounding. Of two codes in a byte the lower half is the first."""
    codes = double(inputs["w"])
    if _packed(problem):
        low, (rows, size) = codes % 16, codes.shape
        codes = np.stack([low, (codes - low) / 16], axis=-1).reshape(rows, 2 * size)[:, : int(problem.dim["K"])]
    group = int(problem.option["group"] or 0) or codes.shape[1]

    def spread(x: Array) -> Array:
        return np.repeat(double(x), group, axis=1)[:, : codes.shape[1]]

    middle = spread(inputs["zero"]) if problem.option["zero_point"] else MIDDLE if _packed(problem) else 0
    with np.errstate(invalid="ignore"):
        found: Array = (codes - middle) * spread(inputs["scale"])
    return found


def _packed(problem: Problem) -> bool:
    return problem.kernel == "gemm_w4a16"


def _product(a: Array, w: Array) -> Array:
    with np.errstate(all="ignore"):
        return a @ w.T
