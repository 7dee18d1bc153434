"""A block of queries in float64 with the logits of the keys that they see: what the references share.

Arrays of ml_dtypes' types are NumPy arrays too; every input converts to float64 exactly. Arrays of CuPy, which follow
NumPy's protocols, give arrays of CuPy.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from tlhub.specs import Problem

Array = np.ndarray[Any, Any]

# Half a unit in the last place of 1: the largest relative error of a rounding to nearest.
ROUNDOFF = {
    "float64": 2.0**-53,
    "float32": 2.0**-24,
    "float16": 2.0**-11,
    "bfloat16": 2.0**-8,
    "float8_e4m3fn": 2.0**-4,
    "float8_e5m2": 2.0**-3,
}
# The least normal number, below which results may be taken as 0, and the least number.
NORMAL = {"float64": 2.0**-1022, "float32": 2.0**-126}
SMALLEST = {
    "float64": 2.0**-1074,
    "float32": 2.0**-149,
    "float16": 2.0**-24,
    "bfloat16": 2.0**-133,
    "float8_e4m3fn": 2.0**-9,
    "float8_e5m2": 2.0**-16,
}

_LOGITS = 1 << 26
"""Logits that are computed at a time, at least a row."""


class Rows:
    """Queries q (rows, D) of a head, from number *first* of *queries* on, and its keys k (S_kv, D).

    *slope*: what the head's logits lose with each place of distance. ``seen`` (rows, S_kv): whether the mask shows the
    key; ``products``: scale q k^T, capped; ``bias``: what is added to those; ``logits``: -inf where the mask hides.
    """

    def __init__(
        self,
        problem: Problem,
        scalars: Mapping[str, float],
        q: Array,
        k: Array,
        slope: float,
        first: int,
        queries: int,
    ) -> None:
        scale, cap, window = float(scalars["scale"]), float(scalars["softcap"]), int(scalars["window"])
        rows, keys = len(q), len(k)
        last = np.arange(first, first + rows, like=q)[:, None] + (keys - queries)
        place = np.arange(keys, like=q)[None, :]
        self.seen = ~np.zeros((rows, keys), dtype=bool, like=q)
        if problem.option["causal"] or window > 0:
            self.seen &= place <= last
        if window > 0:
            self.seen &= place > last - window
        self.products = (q * scale) @ k.T if q.shape[1] else np.zeros((rows, keys), like=q)
        if cap:
            self.products = cap * np.tanh(self.products / cap)
        self.bias = -slope * np.abs(last - place) if problem.option["alibi"] else np.zeros((), like=q)
        self.logits = np.where(self.seen, self.products + self.bias, -np.inf)
        self.q, self.k, self.scale, self.cap = q, k, scale, cap

    def reach(self) -> Array:
        """Return |scale| |q| |k|^T, what the rounding of products grows with."""
        return abs(self.scale) * (np.abs(self.q) @ np.abs(self.k).T)


def blocks(q: Array, k: Array) -> Iterator[tuple[int, int, int, slice]]:
    """Yield batch, head, head of the keys, and queries of each block of rows of *q*, whose logits fit in memory."""
    group, queries = q.shape[2] // max(k.shape[2], 1), q.shape[1]
    step = max(1, _LOGITS // max(k.shape[1], 1))
    for b in range(q.shape[0]):
        for h in range(q.shape[2]):
            for first in range(0, queries, step):
                yield b, h, h // group, slice(first, first + step)


def wide(inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Return *inputs* in float64: arrays that have factors times these, and slopes of 0 where there are none."""
    found = {name: x.astype(np.float64) for name, x in inputs.items()}
    for name in "qkv":
        if f"{name}_scale" in found:
            found[name] *= found[f"{name}_scale"][:, None, :, None]
    return {"slopes": np.zeros(inputs["q"].shape[2]), **found}


def weigh(weights: Array, live: Array, x: Array) -> Array:
    """Return weights x, in which rows of *x* take no part where they are not *live*, even if they are NaN.

    Terms that are not finite are counted by kind, which products of arrays of truths do.
    """
    if np.isfinite(x).all():
        return weights @ x
    w, up, down = np.where(live, weights, 0.0), np.inf, -np.inf
    finite = np.where(np.isfinite(w), w, 0.0) @ np.where(np.isfinite(x), x, 0.0)
    rises = _meet((w > 0, x == up), (w < 0, x == down), (w == up, x > 0), (w == down, x < 0))
    falls = _meet((w > 0, x == down), (w < 0, x == up), (w == up, x < 0), (w == down, x > 0))
    fails = _meet((live, np.isnan(x)), (np.isnan(w), x == x), (live & (w == 0), np.isinf(x)), (np.isinf(w), x == 0))
    return np.where(fails | (rises & falls), np.nan, np.where(rises, up, np.where(falls, down, finite)))


def _meet(*pairs: tuple[Array, Array]) -> Array:
    """Return where rows of the first and columns of the second of *pairs*, arrays of truths, are true at one place."""
    counts = (a.astype(np.float32) @ b.astype(np.float32) for a, b in pairs)
    found: Array = functools.reduce(operator.add, counts) > 0
    return found


def rounded(weights: Array, live: Array, dtype: str, unit: Array | float = 1.0) -> Array:
    """Return by how much *weights* err that are rounded to *dtype* for a product. *unit*: what is 1 then."""
    if dtype in ("float64", "float32"):
        return np.zeros(weights.shape, like=weights)
    return ROUNDOFF[dtype] * weights + np.where(live, unit * (SMALLEST[dtype] / 2), 0.0)


def slopes(problem: Problem) -> dict[str, Array]:
    """Return the usual slopes by name, 2^(-8 h / H) for head h from 1 on, where the problem has some."""
    heads = int(problem.dim["H"])
    usual = np.exp2(-8.0 * np.arange(1, heads + 1) / max(heads, 1)).astype(np.float32)
    return {"slopes": usual} if problem.option["alibi"] else {}


def size(x: Array) -> Array:
    """Return the size of each number, 0 for what is no finite one."""
    return np.where(np.isfinite(x), np.abs(x), 0.0)
