"""Activations in float64, and how much of an error they carry on: for references and tolerances of fused epilogues.

Arrays of CuPy, which follow NumPy's protocols, give arrays of CuPy.
"""

from __future__ import annotations

from math import erfc

import numpy as np

from tlhub.testing.data import Array

SLOPE = {"none": 1.0, "relu": 1.0, "gelu": 1.13, "gelu_tanh": 1.13, "silu": 1.1}
"""The largest derivative: by how much an activation can widen the error of its argument."""


def activate(kind: str, x: Array) -> Array:
    """Return the activation of *x* in float64: x, or x times a weight, so an infinite x times 0 is NaN."""
    with np.errstate(all="ignore"):
        if kind == "none":
            return x
        if kind == "relu":
            return np.where(x < 0, 0.0, x)
        if kind == "silu":
            return x * _sigmoid(x)
        if kind == "gelu":
            return x * _normal_cdf(x)
        # (1 + tanh u) / 2 = sigmoid(2 u)
        return x * _sigmoid(2 * np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))


def _sigmoid(x: Array) -> Array:
    decay = np.exp(-np.abs(x))
    return np.where(x < 0, decay, 1.0) / (1.0 + decay)


def _normal_cdf(x: Array) -> Array:
    flat = [0.5 * erfc(-v * 0.5**0.5) for v in x.ravel().tolist()]
    return np.asarray(flat, dtype=np.float64, like=x).reshape(x.shape)
