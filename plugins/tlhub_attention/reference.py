"""The reference of attention in float64, its tolerance, and PyTorch's kernels as peers.

Arrays of ml_dtypes' types are NumPy arrays too; every input converts to float64 exactly. Arrays of CuPy, which follow
NumPy's protocols, give arrays of CuPy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tlhub.specs import Problem
from tlhub_attention.contract import FLOAT8

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


_LOGITS = 1 << 26
"""Logits that are computed at a time, at least a row."""


class _Rows:
    """Queries of a head in float64, from number *first* of *queries* on, with what the tolerance needs."""

    def __init__(
        self, problem: Problem, q: Array, k: Array, v: Array, scalars: Mapping[str, float], first: int, queries: int
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
        logits = (q * scale) @ k.T if q.shape[1] else np.zeros((rows, keys), like=q)
        if cap:
            logits = cap * np.tanh(logits / cap)
        self.logits = np.where(self.seen, logits, -np.inf)
        peak = self.logits.max(axis=1, keepdims=True) if keys else np.zeros((rows, 1), like=q) - np.inf
        self.peak = np.where(peak == -np.inf, 0.0, peak)
        weights = np.where(self.seen, np.exp(self.logits - self.peak), 0.0)
        total = weights.sum(axis=1, keepdims=True)
        self.weights = np.where(total != 0.0, weights / np.where(total != 0.0, total, 1.0), 0.0)
        self.lse = (self.peak + np.log(total))[:, 0]
        self.total, self.q, self.k, self.v, self.scale = total, q, k, v, abs(scale)

    def output(self) -> Array:
        """Return weights v, in which keys that a query does not see take no part, even where v is NaN."""
        if np.isfinite(self.v).all():
            return self.weights @ self.v
        out = np.zeros((len(self.q), self.v.shape[1]), like=self.v)
        for i, seen in enumerate(self.seen):
            out[i] = self.weights[i, seen] @ self.v[seen] if self.total[i, 0] != 0.0 else 0.0
        return out


def _rows(
    problem: Problem, inputs: Mapping[str, Array], scalars: Mapping[str, float]
) -> Iterator[tuple[int, int, slice, _Rows]]:
    """Yield the rows of each head, and where they are: batch, head, queries."""
    q, k, v = (inputs[n].astype(np.float64) for n in ("q", "k", "v"))
    group, queries = q.shape[2] // max(k.shape[2], 1), q.shape[1]
    step = max(1, _LOGITS // max(k.shape[1], 1))
    for b in range(q.shape[0]):
        for h in range(q.shape[2]):
            for first in range(0, queries, step):
                at = slice(first, first + step)
                yield (
                    b,
                    h,
                    at,
                    _Rows(problem, q[b, at, h], k[b, :, h // group], v[b, :, h // group], scalars, first, queries),
                )


def reference(problem: Problem, inputs: Mapping[str, Array], scalars: Mapping[str, float]) -> tuple[Array, ...]:
    """Return (o,) of shape (B, S, H, D_v), or (o, lse) with lse of shape (B, H, S), in float64.

    *inputs*: q, k, v as the contract lays them out.
    """
    q, v = inputs["q"], inputs["v"]
    o = np.zeros((*q.shape[:3], v.shape[3]), like=q)
    lse = np.zeros((q.shape[0], q.shape[2], q.shape[1]), like=q)
    with np.errstate(all="ignore"):
        for b, h, at, rows in _rows(problem, inputs, scalars):
            o[b, at, h], lse[b, h, at] = rows.output(), rows.lse
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
    bound = np.zeros(o.shape, like=o)
    lse_bound = np.zeros((o.shape[0], o.shape[2], o.shape[1]), like=o)
    with np.errstate(all="ignore"):
        for b, h, at, rows in _rows(problem, inputs, scalars):
            products = rows.scale * (np.abs(rows.q) @ np.abs(rows.k).T)
            logits = np.where(rows.seen & np.isfinite(rows.logits), rows.logits, 0.0)
            error = 2 * (rows.q.shape[1] + 4) * u * products
            error += 4 * u * (np.abs(logits) + np.where(rows.seen, np.abs(logits - rows.peak), 0.0))
            error = np.where(rows.weights > 0.0, rows.weights * error, 0.0)
            size, seen = np.where(np.isfinite(rows.v), np.abs(rows.v), 0.0), rows.seen.sum(axis=1)[:, None]
            mean = rows.weights @ size
            out = np.abs(o[b, at, h])
            moved = error @ size + error.sum(axis=1, keepdims=True) * out
            sums = 2 * (seen + 8) * u * (mean + out)
            bound[b, at, h] = moved + sums + u_v * mean + ROUNDOFF[dtypes["o"]] * out + _SMALLEST[dtypes["o"]]
            rounding = 4 * ROUNDOFF["float32"] * np.abs(np.where(np.isfinite(rows.lse), rows.lse, 0.0))
            lse_bound[b, h, at] = error.sum(axis=1) + 2 * (seen[:, 0] + 8) * u + rounding
    return (bound, lse_bound) if problem.option["lse"] else (bound,)


def torch_attention(problem: Problem, inputs: Mapping[str, Array], scalars: Mapping[str, float]) -> Callable[[], Any]:
    """Return a call of PyTorch's scaled_dot_product_attention on the inputs' memory.

    Raises NotImplementedError where PyTorch's does something else, ImportError where there is no PyTorch.
    """
    import torch

    _refuse(problem, scalars, torch)
    return _attention(problem, [tensor(inputs[n]) for n in "qkv"], scalars)


def tensor(array: Array) -> Any:
    """Return PyTorch's tensor on the memory of *array*."""
    import torch

    name = array.dtype.name
    if name in ("bfloat16", *FLOAT8):  # NumPy knows no such number
        return torch.from_numpy(array.view(f"int{8 * array.itemsize}")).view(getattr(torch, name))
    return torch.from_numpy(array)


def torch_gpu_attention(
    problem: Problem, inputs: Mapping[str, Any], scalars: Mapping[str, float]
) -> Callable[[], object]:
    """Return a call of PyTorch's scaled_dot_product_attention on its tensors: cuDNN's, or where that has none
    FlashAttention-2.

    Raises NotImplementedError where PyTorch's does something else.
    """
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    _refuse(problem, scalars, torch)
    call = _attention(problem, [inputs[n] for n in "qkv"], scalars)

    def chosen() -> object:
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
            return call()

    return chosen


def _refuse(problem: Problem, scalars: Mapping[str, float], torch: Any) -> None:
    """Raise NotImplementedError where PyTorch's attention does something else."""
    option, dim, dtypes = problem.option, problem.dim, dict(problem.dtypes)
    if option["lse"] or scalars["window"] > 0 or scalars["softcap"]:
        raise NotImplementedError("it has no lse, window or softcap")
    if option["causal"] and dim["S"] != dim["S_kv"]:
        raise NotImplementedError("its causal mask is aligned at the start")
    if len(set(dtypes.values())) > 1 or not hasattr(torch, dtypes["q"]):
        raise NotImplementedError(f"it does not take {', '.join(f'{n} {d}' for n, d in dtypes.items())}")


def _attention(problem: Problem, tensors: Sequence[Any], scalars: Mapping[str, float]) -> Callable[[], Any]:
    """Return the call on q, k and v, which PyTorch takes as (B, H, S, D)."""
    import torch

    q, k, v = (x.transpose(1, 2) for x in tensors)
    how = {"is_causal": problem.option["causal"], "enable_gqa": problem.dim["H"] != problem.dim["H_kv"]}
    return lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=scalars["scale"], **how)
