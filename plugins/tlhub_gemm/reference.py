"""The reference of gemm in float64, its tolerance, and the products of NumPy, PyTorch and CuPy as peers.

Arrays of ml_dtypes' types are NumPy arrays too; every input converts to float64 exactly. Arrays of CuPy, which follow
NumPy's protocols, give arrays of CuPy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tlhub.formats import RANGE, ROUNDOFF, SMALLEST
from tlhub.specs import Problem
from tlhub.testing.activations import SLOPE, activate

Array = np.ndarray[Any, Any]

_ACTIVATION_ERROR = 8.0
"""Roundoffs of x by which an evaluated activation may be off: they are x times a weight from 0 to 1."""


def reference(problem: Problem, inputs: Mapping[str, Array], scalars: Mapping[str, float]) -> tuple[Array]:
    """Return ``(c,)`` in float64, not yet rounded to c's dtype, but saturated where c's dtype saturates."""
    return (_saturate(problem, _epilogue(problem, inputs, scalars)),)


def tolerance(
    problem: Problem, inputs: Mapping[str, Array], scalars: Mapping[str, float], outputs: tuple[Array, ...]
) -> tuple[Array]:
    """Return the largest error allowed of each element of c, a bound that needs no luck.

    Adding up K products in precision eps_accum, in any order, errs by at most K eps_accum (|A| |B|) to first
    order (Higham, "Accuracy and Stability of Numerical Algorithms", 3.1); twice that is allowed. The error goes
    through alpha, the bias and the activation's slope, each step adding its own rounding in eps_accum; the
    last rounding, to c's dtype, allows eps_out |c|, or half of its least value. Integer sums are exact.
    """
    option, out = problem.option, dict(problem.dtypes)["c"]
    accum, eps_out = str(option["accum"]), ROUNDOFF.get(out, 0.0)
    integer = accum == "int32"
    eps = ROUNDOFF["float64"] if integer else ROUNDOFF[accum]
    alpha = abs(float(scalars["alpha"]))
    a, b = _operands(problem, inputs)
    with np.errstate(all="ignore"):
        depth = a.shape[-1]
        size = alpha * abs(a) @ abs(b)
        error = 0.0 * size if integer else 2 * depth * eps * size
        total = np.abs(_linear(problem, inputs, scalars))
        # alpha is rounded, multiplied, and the bias is added
        error = error + 2 * eps * size + eps * total
        kind = str(option["epilogue"])
        if kind != "none":
            error = SLOPE[kind] * error + _ACTIVATION_ERROR * eps * total
        final = np.abs(_epilogue(problem, inputs, scalars))
        if option["residual"]:
            error = error + eps * (final + error)
        if out in RANGE and out.startswith("int"):
            # an integer is as far off as its error can push it over a half way; exact sums not at all
            exact = _epilogue(problem, inputs, scalars)
            to_half = np.abs(np.abs(exact - np.floor(exact)) - 0.5)
            near = (to_half <= error) & (error > 0)
            return (np.where(near, np.ceil(error), np.floor(error)) + 0.25,)
        return ((1 + eps_out) * error + eps_out * np.abs(outputs[0]) + SMALLEST[out] / 2,)


def numpy_product(problem: Problem, inputs: Mapping[str, Array], scalars: Mapping[str, float]) -> Callable[[], object]:
    """Return a call of NumPy's matmul, with an output of its own: OpenBLAS for float32 and float64.

    Raises NotImplementedError for what NumPy has no fast product or no single call for.
    """
    dtypes = dict(problem.dtypes)
    kinds = {dtypes[name] for name in ("a", "b", "c")}
    if kinds not in ({"float32"}, {"float64"}):
        raise NotImplementedError(f"NumPy multiplies float32 and float64 by BLAS, not {', '.join(sorted(kinds))}")
    a, b = _matrices(problem, inputs)
    out = np.empty((*a.shape[:-1], b.shape[-1]), a.dtype)
    return lambda: np.matmul(a, b, out=out)


def torch_product(problem: Problem, inputs: Mapping[str, Any], scalars: Mapping[str, float]) -> Callable[[], object]:
    """Return a call of PyTorch's matmul on its tensors, with an output of its own: cuBLAS on a GPU.

    Raises NotImplementedError for what is no single call.
    """
    import torch

    a, b = _matrices(problem, inputs)
    out = torch.empty((*a.shape[:-1], b.shape[-1]), dtype=a.dtype, device=a.device)
    return lambda: torch.matmul(a, b, out=out)


def cupy_product(problem: Problem, inputs: Mapping[str, Any], scalars: Mapping[str, float]) -> Callable[[], object]:
    """Return a call of CuPy's matmul, which is cuBLAS, with an output of its own.

    Raises NotImplementedError for what is no single call.
    """
    import cupy

    a, b = _matrices(problem, inputs)
    out = cupy.empty((*a.shape[:-1], b.shape[-1]), a.dtype)
    return lambda: cupy.matmul(a, b, out=out)


def _matrices(problem: Problem, inputs: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return op(A) and op(B) as views, without a batch of one. Raises NotImplementedError for more than a product."""
    option, dtypes = problem.option, dict(problem.dtypes)
    if option["epilogue"] != "none" or option["bias"] or option["residual"]:
        raise NotImplementedError("a product of matrices has no epilogue")
    if dtypes["c"] != dtypes["a"] or dtypes["a"] != dtypes["b"]:
        raise NotImplementedError(f"its operands and its result have one dtype, not {', '.join(dtypes.values())}")
    a = inputs["a"].swapaxes(-1, -2) if option["trans_a"] else inputs["a"]
    b = inputs["b"].swapaxes(-1, -2) if option["trans_b"] else inputs["b"]
    return (a[0], b[0]) if a.ndim == 3 and a.shape[0] == 1 else (a, b)


# -- the parts of it -------------------------------------------------------------------------------


def _operands(problem: Problem, inputs: Mapping[str, Array]) -> tuple[Array, Array]:
    """Return op(A) and op(B) in float64."""
    a, b = (inputs[name].astype(np.float64) for name in ("a", "b"))
    a = a.swapaxes(-1, -2) if problem.option["trans_a"] else a
    return a, b.swapaxes(-1, -2) if problem.option["trans_b"] else b


def _linear(problem: Problem, inputs: Mapping[str, Array], scalars: Mapping[str, float]) -> Array:
    """Return alpha op(A) op(B) + bias."""
    a, b = _operands(problem, inputs)
    with np.errstate(all="ignore"):
        total: Array = float(scalars["alpha"]) * (a @ b)
        if problem.option["bias"]:
            total = total + inputs["bias"].astype(np.float64)
    return total


def _epilogue(problem: Problem, inputs: Mapping[str, Array], scalars: Mapping[str, float]) -> Array:
    with np.errstate(all="ignore"):
        total = activate(str(problem.option["epilogue"]), _linear(problem, inputs, scalars))
        if problem.option["residual"]:
            total = total + inputs["residual"].astype(np.float64)
    return total


def _saturate(problem: Problem, c: Array) -> Array:
    out = dict(problem.dtypes)["c"]
    if out not in RANGE:
        return c
    c = np.clip(c, *RANGE[out])
    return np.rint(c) if out.startswith("int") else c
