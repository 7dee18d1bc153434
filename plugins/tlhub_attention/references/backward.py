"""The reference of attention's backward in float64, its tolerance, and inputs that fit together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from tlhub.specs import Problem
from tlhub_attention.references.forward import attend
from tlhub_attention.references.rows import (
    NORMAL,
    ROUNDOFF,
    SMALLEST,
    Array,
    Rows,
    blocks,
    rounded,
    size,
    slopes,
    weigh,
    wide,
)


class _Gradients(Rows):
    """Rows with what their outputs' gradients come to.

    ``live``: the pairs that take part, those that the mask shows of a query whose lse is not -inf. ``weights`` of the
    forward, the ``pull`` dout v^T - delta on each, the ``slope`` of the soft cap, and ``ds``, their product: the
    gradient of the logits before scale and cap. *x*: what the names of the contract are for this block.
    """

    def __init__(
        self,
        problem: Problem,
        scalars: Mapping[str, float],
        x: Mapping[str, Array],
        slope: float,
        first: int,
        queries: int,
    ) -> None:
        super().__init__(problem, scalars, x["q"], x["k"], slope, first, queries)
        self.dout, self.o, self.v, self.lse = x["dout"], x["o"], x["v"], x["lse"][:, None]
        self.live = self.seen & (self.lse != -np.inf)
        self.weights = np.where(self.live, np.exp(self.logits - self.lse), 0.0)
        delta = (self.dout * self.o).sum(axis=1, keepdims=True)
        self.pull = np.where(self.live, self.dout @ self.v.T - delta, 0.0)
        self.slope = np.where(self.live, 1.0 - (self.products / self.cap) ** 2 if self.cap else 1.0, 0.0)
        self.ds = self.weights * self.pull * self.slope


class _Place(NamedTuple):
    """Where a block lies: its batch and head, the head of its keys, its queries."""

    b: int
    h: int
    g: int
    at: slice


def _rows(
    problem: Problem, inputs: Mapping[str, Array], scalars: Mapping[str, float]
) -> Iterator[tuple[_Place, _Gradients]]:
    given = wide(inputs)
    q, k, v = (given[n] for n in "qkv")
    for b, h, g, at in blocks(q, k):
        x = {name: given[name][b, at, h] for name in ("dout", "q", "o")}
        x |= {"k": k[b, :, g], "v": v[b, :, g], "lse": given["lse"][b, h, at]}
        yield _Place(b, h, g, at), _Gradients(problem, scalars, x, given["slopes"][h], at.start, q.shape[1])


def reference(problem: Problem, inputs: Mapping[str, Array], scalars: Mapping[str, float]) -> tuple[Array, ...]:
    """Return dq, dk and dv in float64, of the shapes of q, k and v.

    *inputs*: as the contract lays them out; o and lse are taken as they are given.
    """
    dq, dk, dv = (np.zeros(inputs[n].shape, like=inputs[n]) for n in "qkv")
    scale = float(scalars["scale"])
    with np.errstate(all="ignore"):
        for (b, h, g, at), rows in _rows(problem, inputs, scalars):
            dq[b, at, h] = scale * weigh(rows.ds, rows.live, rows.k)
            dk[b, :, g] += scale * weigh(rows.ds.T, rows.live.T, rows.q)
            dv[b, :, g] += weigh(rows.weights.T, rows.live.T, rows.dout)
    return dq, dk, dv


def prepare(
    problem: Problem, inputs: Mapping[str, Array], scalars: Mapping[str, float], rng: np.random.Generator | None = None
) -> dict[str, Array]:
    """Return slopes, where there are some, and o and lse of the forward in float64: what the others determine."""
    given = slopes(problem)
    o, lse = attend(problem, {**inputs, **given}, scalars)
    return {"o": o, "lse": lse, **given}


def tolerance(
    problem: Problem, inputs: Mapping[str, Array], scalars: Mapping[str, float], outputs: tuple[Array, ...]
) -> tuple[Array, ...]:
    """Return the largest errors allowed of dq, dk and dv, element-wise and absolute.

    First order and with gemm's factor 2, as the forward's. u is the accumulator's unit roundoff, u_x that of x's dtype,
    P the weights, a = dout v^T - delta, p the logits before the bias b, c the soft cap's slope 1 - (p / softcap)^2 (1
    without one), dS = P a c; n the keys that a query sees, m the queries that see a key, of all heads that share it. o
    and lse are taken as given.

    - the product of a pair errs by e = 2 (D + 4) u scale (|q||k|), its logit with the bias, the change of base and the
      subtraction of lse by e' = e + 4 u (|p| + |b| + |lse| + 1), the exponential's 2 ulp among them, and so P by P e';
      below the accumulator's least normal number it may be taken as 0, and so may dS;
    - a errs by f = 2 (D_v + 4) u (|dout||v| + |dout||o|) + 2 u |a|: two products of D_v terms and a subtraction;
    - c errs by g = 2 c e / |softcap| + 16 u: c' = -2 t (1 - t^2) / softcap for t = tanh, |t| <= 1, and a tanh within a
      few ulp, squared near 1; without a soft cap by 0;
    - so dS errs by d = c (P e' |a| + P f) + P |a| g + 2 u |dS|;
    - dS may be rounded to the dtype of the array it is multiplied by, and P to that of dout, as tensor cores take
      them: r_x(w) = u_x w and half the least subnormal of the dtype, for a weight of one among many keys is small;
    - dq errs by scale sum_j ((d + r_k(|dS|)) |k_j| + 2 (n + 8) u |dS| |k_j|), dk the same over the queries, with q
      and m, dv by sum_i ((P e' + r_dout(P)) |dout_i| + 2 (m + 8) u P |dout_i|);
    - each is rounded: u_out of its size, and the least number of its dtype, or normal one of the accumulator's.
    """
    dtypes, scale = dict(problem.dtypes), abs(float(scalars["scale"]))
    acc = "float64" if dtypes["q"] == "float64" else "float32"
    u = ROUNDOFF[acc]
    kinds = [dtypes[name] for name in ("dq", "dk", "dv")]
    least = [max(SMALLEST[kind], NORMAL[acc]) for kind in kinds]
    bounds = [ROUNDOFF[kind] * size(x) + y for kind, x, y in zip(kinds, outputs, least, strict=True)]
    # of each key: what moves its results, the sums of absolute values, and the pairs that take part
    moved, sums = ([np.zeros(x.shape, like=x) for x in outputs[1:]] for _ in range(2))
    pairs = np.zeros((*outputs[1].shape[:3], 1), like=outputs[1])
    with np.errstate(all="ignore"):
        for (b, h, g, at), rows in _rows(problem, inputs, scalars):
            weight_error, ds_error = _errors(rows, acc)
            q, k, dout = size(rows.q), size(rows.k), size(rows.dout)
            weights, ds, live = size(rows.weights), size(rows.ds), rows.live
            count = live.sum(axis=1)[:, None]
            bounds[0][b, at, h] += scale * ((ds_error + rounded(ds, live, dtypes["k"])) @ k)
            bounds[0][b, at, h] += scale * 2 * (count + 8) * u * (ds @ k)
            moved[0][b, :, g] += scale * ((ds_error + rounded(ds, live, dtypes["q"])).T @ q)
            moved[1][b, :, g] += (weight_error + rounded(weights, live, dtypes["dout"])).T @ dout
            sums[0][b, :, g] += scale * (ds.T @ q)
            sums[1][b, :, g] += weights.T @ dout
            pairs[b, :, g] += live.sum(axis=0)[:, None]
    changes = (change + 2 * (pairs + 8) * u * total for change, total in zip(moved, sums, strict=True))
    return bounds[0], *(bound + change for bound, change in zip(bounds[1:], changes, strict=True))


def _errors(rows: _Gradients, acc: str) -> tuple[Array, Array]:
    """Return by how much the weights and ds of *rows* err, as ``tolerance`` says."""
    u, least = ROUNDOFF[acc], np.where(rows.live, NORMAL[acc], 0.0)
    weights, pull, slope = size(rows.weights), size(rows.pull), size(rows.slope)
    dout, v, o = size(rows.dout), size(rows.v), size(rows.o)
    product = np.where(rows.live, 2 * (rows.q.shape[1] + 4) * u * rows.reach(), 0.0)
    logit = product + 4 * u * (size(rows.products) + size(rows.bias) + size(rows.lse) + 1)
    weight = size(weights * logit) + least
    reach = dout @ v.T + (dout * o).sum(axis=1, keepdims=True)
    moved = 2 * (rows.v.shape[1] + 4) * u * reach + 2 * u * pull
    bend = 2 * slope * product / abs(rows.cap) + 16 * u if rows.cap else 0.0
    ds = slope * (weight * pull + weights * moved) + weights * pull * bend + 2 * u * size(rows.ds)
    return weight, size(ds) + least
