"""The reference of attention in float64, its tolerance, and PyTorch's kernel as a peer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
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
_SMALLEST = {"float64": 2.0**-1074, "float32": 2.0**-149, "float16": 2.0**-24, "bfloat16": 2.0**-133}


class _Head:
    """One query head of one batch in float64, with what the tolerance needs."""

    def __init__(self, problem: Problem, q: Array, k: Array, v: Array, scalars: Mapping[str, float]) -> None:
        scale, cap, window = float(scalars["scale"]), float(scalars["softcap"]), int(scalars["window"])
        queries, keys = len(q), len(k)
        last = np.arange(queries)[:, None] + (keys - queries)
        place = np.arange(keys)[None, :]
        self.seen = np.ones((queries, keys), dtype=bool)
        if problem.option["causal"] or window > 0:
            self.seen &= place <= last
        if window > 0:
            self.seen &= place > last - window
        logits = (q * scale) @ k.T if q.shape[1] else np.zeros((queries, keys))
        if cap:
            logits = cap * np.tanh(logits / cap)
        self.logits = np.where(self.seen, logits, -np.inf)
        peak = self.logits.max(axis=1, initial=-np.inf, keepdims=True)
        self.peak = np.where(peak == -np.inf, 0.0, peak)
        weights = np.where(self.seen, np.exp(self.logits - self.peak), 0.0)
        total = weights.sum(axis=1, keepdims=True)
        self.weights = np.divide(weights, total, out=np.zeros_like(weights), where=total != 0.0)
        self.lse = (self.peak + np.log(total))[:, 0]
        self.total, self.q, self.k, self.v, self.scale = total, q, k, v, abs(scale)

    def output(self) -> Array:
        """Return weights v, in which keys that a query does not see take no part, even where v is NaN."""
        if np.isfinite(self.v).all():
            return self.weights @ self.v
        out = np.zeros((len(self.q), self.v.shape[1]))
        for i, seen in enumerate(self.seen):
            out[i] = self.weights[i, seen] @ self.v[seen] if self.total[i, 0] != 0.0 else 0.0
        return out


def _heads(
    problem: Problem, inputs: Mapping[str, Array], scalars: Mapping[str, float]
) -> Iterator[tuple[int, int, _Head]]:
    q, k, v = (np.asarray(inputs[n]).astype(np.float64) for n in ("q", "k", "v"))
    group = q.shape[2] // max(k.shape[2], 1)
    for b in range(q.shape[0]):
        for h in range(q.shape[2]):
            yield b, h, _Head(problem, q[b, :, h], k[b, :, h // group], v[b, :, h // group], scalars)


def reference(problem: Problem, inputs: Mapping[str, Array], scalars: Mapping[str, float]) -> tuple[Array, ...]:
    """Return (o,) of shape (B, S, H, D_v), or (o, lse) with lse of shape (B, H, S), in float64.

    *inputs*: q, k, v as the contract lays them out. Takes memory of S S_kv numbers for a head at a time.
    """
    q, v = inputs["q"], inputs["v"]
    o = np.zeros((*q.shape[:3], v.shape[3]))
    lse = np.zeros((q.shape[0], q.shape[2], q.shape[1]))
    with np.errstate(all="ignore"):
        for b, h, head in _heads(problem, inputs, scalars):
            o[b, :, h], lse[b, h] = head.output(), head.lse
    return (o, lse) if problem.option["lse"] else (o,)


def tolerance(
    problem: Problem, inputs: Mapping[str, Array], scalars: Mapping[str, float], outputs: tuple[Array, ...]
) -> tuple[Array, ...]:
    """Return the largest errors allowed, element-wise and absolute, of arrays shaped like *outputs*.

    First order, with u the accumulator's unit roundoff (float32's, or float64's for float64 inputs), u_v that of v's
    dtype, w the weights, n the keys that a query sees. Each is gemm's bound (Higham, Accuracy and Stability of
    Numerical Algorithms, section 3.1: an inner product of K terms errs by at most K u (|a||b|)) with gemm's factor 2:

    - a logit errs by e_j = 2 (D + 4) u scale (|q||k_j|) + 4 u (|s_j| + |s_j - max s|): the product with its scale,
      then the soft cap, the change of base and the subtraction of the maximum. tanh does not enlarge an error.
    - so a weight errs by w_j e_j, and o by sum_j w_j e_j |v_j - o|, for the weights are divided by their sum;
    - the two sums over the keys add 2 (n + 8) u (sum_j w_j |v_j| + |o|), with the exponential's 2 ulp;
    - weights may be rounded to v's dtype for the second product, as tensor cores take them: u_v sum_j w_j |v_j|;
    - the result is rounded: u_out |o|, and the least subnormal of its dtype.

    lse errs by sum_j w_j e_j + 2 (n + 8) u, and is rounded to float32 with one product by ln 2.
    """
    dtypes = dict(problem.dtypes)
    u = ROUNDOFF["float64" if dtypes["q"] == "float64" else "float32"]
    u_v = ROUNDOFF[dtypes["v"]] if dtypes["v"] not in ("float64", "float32") else 0.0
    o = outputs[0]
    bound, lse_bound = np.zeros(o.shape), np.zeros((o.shape[0], o.shape[2], o.shape[1]))
    with np.errstate(all="ignore"):
        for b, h, head in _heads(problem, inputs, scalars):
            products = head.scale * (np.abs(head.q) @ np.abs(head.k).T)
            logits = np.where(head.seen & np.isfinite(head.logits), head.logits, 0.0)
            error = 2 * (head.q.shape[1] + 4) * u * products
            error += 4 * u * (np.abs(logits) + np.where(head.seen, np.abs(logits - head.peak), 0.0))
            error = np.where(head.weights > 0.0, head.weights * error, 0.0)
            size, seen = np.where(np.isfinite(head.v), np.abs(head.v), 0.0), head.seen.sum(axis=1)[:, None]
            mean = head.weights @ size
            out = np.abs(o[b, :, h])
            moved = error @ size + error.sum(axis=1, keepdims=True) * out
            sums = 2 * (seen + 8) * u * (mean + out)
            bound[b, :, h] = moved + sums + u_v * mean + ROUNDOFF[dtypes["o"]] * out + _SMALLEST[dtypes["o"]]
            rounding = 4 * ROUNDOFF["float32"] * np.abs(np.where(np.isfinite(head.lse), head.lse, 0.0))
            lse_bound[b, h] = error.sum(axis=1) + 2 * (seen[:, 0] + 8) * u + rounding
    return (bound, lse_bound) if problem.option["lse"] else (bound,)


def torch_attention(problem: Problem, inputs: Mapping[str, Array], scalars: Mapping[str, float]) -> Callable[[], Any]:
    """Return a call of PyTorch's scaled_dot_product_attention on the inputs' memory.

    Raises NotImplementedError where PyTorch's does something else, ImportError where there is no PyTorch.
    """
    import torch

    option, dim, dtypes = problem.option, problem.dim, dict(problem.dtypes)
    if option["lse"] or scalars["window"] > 0 or scalars["softcap"]:
        raise NotImplementedError("it has no lse, window or softcap")
    if option["causal"] and dim["S"] != dim["S_kv"]:
        raise NotImplementedError("its causal mask is aligned at the start")
    if len(set(dtypes.values())) > 1 or not hasattr(torch, dtypes["q"]):
        raise NotImplementedError(f"it does not take {', '.join(f'{n} {d}' for n, d in dtypes.items())}")
    integers = {1: np.uint8, 2: np.int16}

    def tensor(array: Array) -> Any:
        """Share the array's memory, as (B, H, S, D)."""
        if array.dtype.kind == "V" or dtypes["q"] == "bfloat16":  # NumPy knows no such number
            made = torch.from_numpy(array.view(integers[array.dtype.itemsize])).view(getattr(torch, dtypes["q"]))
        else:
            made = torch.from_numpy(array)
        return made.transpose(1, 2)

    q, k, v = (tensor(inputs[n]) for n in ("q", "k", "v"))
    call = torch.nn.functional.scaled_dot_product_attention
    return lambda: call(q, k, v, is_causal=option["causal"], scale=scalars["scale"], enable_gqa=dim["H"] != dim["H_kv"])
