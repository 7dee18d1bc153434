"""What gemm is measured against: the products of NumPy, PyTorch and CuPy.

Each is called as ``peer(problem, inputs, scalars)``, and returns a call of one product; what is none raises
NotImplementedError.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tlhub.specs import Problem

Array = np.ndarray[Any, Any]


def numpy_product(problem: Problem, inputs: Mapping[str, Array], scalars: Mapping[str, float]) -> Callable[[], object]:
    """Return a call of NumPy's matmul, with an output of its own: OpenBLAS for float32 and float64.

    Raises NotImplementedError for what NumPy has no fast product or no single call for.
    """
    dtypes = dict(problem.dtypes)
    kind, c = dtypes["a"], dtypes["c"]
    if kind not in ("float32", "float64") or c != kind:
        raise NotImplementedError(f"NumPy multiplies float32 and float64 by BLAS, not {kind} to {c}")
    a, b = _matrices(problem, inputs)
    out = np.empty((*a.shape[:-1], b.shape[-1]), a.dtype)
    return lambda: np.matmul(a, b, out=out)


def torch_product(problem: Problem, inputs: Mapping[str, Any], scalars: Mapping[str, float]) -> Callable[[], object]:
    """Return a call of PyTorch's product of its tensors: cuBLAS on a GPU, of float8 cuBLASLt.

    Raises NotImplementedError for what is no single call.
    """
    import torch

    option, dtypes = problem.option, dict(problem.dtypes)
    if dtypes["a"].startswith("float8"):
        return _scaled_mm(problem, inputs)
    if dtypes["a"] == "int8":
        a, b = _matrices(problem, inputs, ("int8", "int8", "int32"))
        return lambda: torch._int_mm(a, b)
    a, b = _matrices(problem, inputs)
    out = torch.empty((*a.shape[:-1], b.shape[-1]), dtype=a.dtype, device=a.device)
    if option["accum"] == "float16":
        switch, on = "allow_fp16_accumulation", True
        if not hasattr(torch.backends.cuda.matmul, switch):
            raise NotImplementedError("PyTorch adds up in float16 from its release 2.7 on")
    elif dtypes["a"] == "float32" and a.is_cuda:
        # cuBLAS has nothing of three products
        switch, on = "allow_tf32", option["compute"] == "tf32"
    else:
        return lambda: torch.matmul(a, b, out=out)

    def multiply() -> object:
        """With float32 as tf32, and sums in float16, where that is asked for."""
        before = getattr(torch.backends.cuda.matmul, switch)
        setattr(torch.backends.cuda.matmul, switch, on)
        try:
            return torch.matmul(a, b, out=out)
        finally:
            setattr(torch.backends.cuda.matmul, switch, before)

    return multiply


def _scaled_mm(problem: Problem, inputs: Mapping[str, Any]) -> Callable[[], object]:
    """Return a call of PyTorch's product of float8 matrices, of which the second lies by columns."""
    import torch

    option, dtypes = problem.option, dict(problem.dtypes)
    a, b = _matrices(problem, inputs, tuple(dtypes[name] for name in "abc"))
    if option["accum"] != "float32" or not a.is_contiguous() or not b.T.is_contiguous():
        raise NotImplementedError("PyTorch multiplies float8 matrices by rows and by columns, and adds up in float32")
    if any(extent % 16 for extent in b.shape):
        raise NotImplementedError(f"_scaled_mm takes b by multiples of 16, not {' x '.join(map(str, b.shape))}")
    one = torch.ones((), device=a.device)
    how = {"out_dtype": getattr(torch, dtypes["c"]), "use_fast_accum": bool(option["fast_accum"])}
    return lambda: torch._scaled_mm(a, b, one, one, **how)


def cupy_product(problem: Problem, inputs: Mapping[str, Any], scalars: Mapping[str, float]) -> Callable[[], object]:
    """Return a call of CuPy's matmul, which is cuBLAS, with an output of its own.

    Raises NotImplementedError for what is no single call.
    """
    import cupy

    a, b = _matrices(problem, inputs)
    out = cupy.empty((*a.shape[:-1], b.shape[-1]), a.dtype)
    return lambda: cupy.matmul(a, b, out=out)


def _matrices(problem: Problem, inputs: Mapping[str, Any], kinds: Sequence[str] = ()) -> tuple[Any, Any]:
    """Return op(A) and op(B) as views, without a batch of one. *kinds*: the dtypes of a, b and c that are multiplied,
    by default any three of a kind. Raises NotImplementedError for others, and for more than a product."""
    option, dtypes = problem.option, dict(problem.dtypes)
    if any(option[name] not in ("none", False) for name in ("epilogue", "glu", "bias", "residual")):
        raise NotImplementedError("a product of matrices has no epilogue")
    if tuple(dtypes[name] for name in "abc") != tuple(kinds or [dtypes["a"]] * 3):
        raise NotImplementedError(f"its operands and its result have one dtype, not {', '.join(dtypes.values())}")
    a = inputs["a"].swapaxes(-1, -2) if option["trans_a"] else inputs["a"]
    b = inputs["b"].swapaxes(-1, -2) if option["trans_b"] else inputs["b"]
    return (a[0], b[0]) if a.ndim == 3 and a.shape[0] == 1 else (a, b)
