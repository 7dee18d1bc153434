"""The reference of attention in float64, and its tolerance."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from tlhub.specs import Problem
from tlhub_attention.contracts.forward import FLOAT8
from tlhub_attention.references.rows import ROUNDOFF, SMALLEST, Array, Rows, blocks, rounded, size, slopes, weigh, wide

_CUT = 2.0**-13  # of the largest of the numbers that a tensor core adds up where these are products of float8
_KEYS = 128  # of which it may keep a sum


class _Softmax(Rows):
    """Rows with their ``weights``, the ``peak`` and ``total`` of their logits, and ``lse``."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        rows, keys = self.logits.shape
        peak = self.logits.max(axis=1, keepdims=True) if keys else np.zeros((rows, 1), like=self.logits) - np.inf
        self.peak = np.where(peak == -np.inf, 0.0, peak)
        weights = np.where(self.seen, np.exp(self.logits - self.peak), 0.0)
        self.total = weights.sum(axis=1, keepdims=True)
        self.weights = np.where(self.total != 0.0, weights / np.where(self.total != 0.0, self.total, 1.0), 0.0)
        self.lse = (self.peak + np.log(self.total))[:, 0]

    def output(self, v: Array) -> Array:
        """Return weights v, in which keys that a query does not see take no part."""
        return weigh(self.weights, self.seen & (self.total != 0.0), v)


def _rows(
    problem: Problem, inputs: Mapping[str, Array], scalars: Mapping[str, float]
) -> Iterator[tuple[int, int, slice, _Softmax, Array]]:
    """Yield the rows of each head, where they are (batch, head, queries), and the values (S_kv, D_v) that they see."""
    x = wide(inputs)
    q, k, v = (x[n] for n in "qkv")
    for b, h, g, at in blocks(q, k):
        rows = _Softmax(problem, scalars, q[b, at, h], k[b, :, g], x["slopes"][h], at.start, q.shape[1])
        yield b, h, at, rows, v[b, :, g]


def attend(problem: Problem, inputs: Mapping[str, Array], scalars: Mapping[str, float]) -> tuple[Array, Array]:
    """Return o (B, S, H, D_v) and lse (B, H, S) in float64. *inputs*: as the contract lays them out."""
    q, v = inputs["q"], inputs["v"]
    o = np.zeros((*q.shape[:3], v.shape[3]), like=q)
    lse = np.zeros((q.shape[0], q.shape[2], q.shape[1]), like=q)
    with np.errstate(all="ignore"):
        for b, h, at, rows, values in _rows(problem, inputs, scalars):
            o[b, at, h], lse[b, h, at] = rows.output(values), rows.lse
    return o, lse


def reference(problem: Problem, inputs: Mapping[str, Array], scalars: Mapping[str, float]) -> tuple[Array, ...]:
    """Return (o,) of shape (B, S, H, D_v), or (o, lse) with lse of shape (B, H, S), in float64."""
    o, lse = attend(problem, inputs, scalars)
    return (o, lse) if problem.option["lse"] else (o,)


def prepare(
    problem: Problem, inputs: Mapping[str, Array], scalars: Mapping[str, float], rng: np.random.Generator | None = None
) -> dict[str, Array]:
    """Return factors and slopes, where the problem has some; factors are 1 in a measurement, which has no *rng*."""

    def factors(x: Array) -> Array:
        return np.ones(x.shape) if rng is None else np.asarray(rng.uniform(0.5, 2.0, x.shape))

    return {name: factors(x) for name, x in inputs.items() if name.endswith("_scale")} | slopes(problem)


def tolerance(
    problem: Problem, inputs: Mapping[str, Array], scalars: Mapping[str, float], outputs: tuple[Array, ...]
) -> tuple[Array, ...]:
    """Return the largest errors allowed, element-wise and absolute, of arrays shaped like *outputs*.

    First order, with u the accumulator's unit roundoff (float32's, or float64's for float64 inputs), u_v that of v's
    dtype, w the weights, n the keys that a query sees. Each is gemm's bound (Higham, Accuracy and Stability of
    Numerical Algorithms, section 3.1: an inner product of K terms errs by at most K u (|a||b|)) with gemm's factor 2:

    - a logit s_j = p_j + b_j errs by e_j = 2 (D + 4) u scale (|q||k_j|) + 4 u (|p_j| + |b_j| + |s_j - max s|): the
      product with its scales, then the soft cap, the bias, the change of base and the subtraction of the maximum.
      tanh does not enlarge an error.
    - products of two float8 a tensor core adds up 32 at a time, to a sum that it keeps so: each of the 33 numbers is
      cut towards 0 at c = 2^-13 of the largest. So e_j has (D + D / 32) c scale (|q||k_j|) besides;
    - so a weight errs by w_j e_j, and o by sum_j w_j e_j |v_j - o|, for the weights are divided by their sum;
    - the two sums over the keys add 2 (n + 8) u (sum_j w_j |v_j| + |o|), with the exponential's 2 ulp, and where v is
      float8 as above (m + m / 32) c sum_j w_j |v_j|: a tensor core is to keep sums of at most m = 128 keys;
    - weights may be rounded to v's dtype for the second product, as tensor cores take them, when the largest is 1: by
      u_v w_j, and by half of the dtype's least subnormal, for a weight of one among many keys is small;
    - the result is rounded: u_out |o|, and the least subnormal of its dtype.

    lse errs by sum_j w_j e_j + 2 (n + 8) u, and is rounded to float32 with one product by ln 2.
    """
    dtypes = dict(problem.dtypes)
    u = ROUNDOFF["float64" if dtypes["q"] == "float64" else "float32"]
    cut = _CUT if {dtypes["q"], dtypes["k"]} <= set(FLOAT8) else 0.0
    cut_v = _CUT if dtypes["v"] in FLOAT8 else 0.0
    o = outputs[0]
    bound = np.zeros(o.shape, like=o)
    lse_bound = np.zeros((o.shape[0], o.shape[2], o.shape[1]), like=o)
    with np.errstate(all="ignore"):
        for b, h, at, rows, values in _rows(problem, inputs, scalars):
            logits = np.where(rows.seen & np.isfinite(rows.logits), rows.logits, 0.0)
            channels = rows.q.shape[1]
            error = (2 * (channels + 4) * u + 33 / 32 * channels * cut) * rows.reach()
            error += 4 * u * (size(rows.products) + size(rows.bias))
            error += 4 * u * np.where(rows.seen, np.abs(logits - rows.peak), 0.0)
            error = np.where(rows.weights > 0.0, rows.weights * error, 0.0)
            seen = rows.seen.sum(axis=1)[:, None]
            mean = rows.weights @ size(values)
            out = np.abs(o[b, at, h])
            taken = rows.seen & (rows.total != 0.0)
            rounding = rounded(rows.weights, taken, dtypes["v"], 1 / rows.total)
            moved = (error + rounding) @ size(values) + error.sum(axis=1, keepdims=True) * out
            sums = 2 * (seen + 8) * u * (mean + out) + 33 / 32 * np.minimum(seen, _KEYS) * cut_v * mean
            bound[b, at, h] = moved + sums + ROUNDOFF[dtypes["o"]] * out + SMALLEST[dtypes["o"]]
            lse_bound[b, h, at] = error.sum(axis=1) + 2 * (seen[:, 0] + 8) * u
            lse_bound[b, h, at] += 4 * ROUNDOFF["float32"] * size(rows.lse)
    return (bound, lse_bound) if problem.option["lse"] else (bound,)
