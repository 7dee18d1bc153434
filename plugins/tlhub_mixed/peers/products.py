"""PyTorch's products, which bench times those of mixed precision against."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tlhub.specs import Problem
from tlhub.testing.data import Array
from tlhub_mixed.contracts.epilogue import FLOAT8
from tlhub_mixed.packing import Weights, dequantize

Call = Callable[[], Any]


def torch_scaled(problem: Problem, inputs: Mapping[str, Array], scalars: Mapping[str, float]) -> Call:
    """Return a call of PyTorch's ``_scaled_mm`` on the inputs' memory; with a gate or activation there is none.

    Raises NotImplementedError where PyTorch's does something else, ImportError where there is no PyTorch.
    """
    return torch_gpu_scaled(problem, {name: _tensor(x) for name, x in inputs.items()}, scalars)


def torch_gpu_scaled(problem: Problem, inputs: Mapping[str, Any], scalars: Mapping[str, float]) -> Call:
    """Return a call of PyTorch's ``_scaled_mm`` on its tensors, cuBLAS on a GPU. Raises NotImplementedError."""
    import torch

    _refuse(problem, scalars)
    option, out = problem.option, dict(problem.dtypes)["c"]
    if problem.dtype not in FLOAT8 or option["scaling"] == "block":
        raise NotImplementedError(f"_scaled_mm has no {problem.dtype} with scaling={option['scaling']!r}")
    if out in FLOAT8 or out == "int8" or (option["scaling"] == "row" and out != "bfloat16"):
        raise NotImplementedError(f"_scaled_mm has no {out} with scaling={option['scaling']!r}")
    a, b, a_scale, b_scale = (inputs[name] for name in ("a", "b", "a_scale", "b_scale"))
    if any(extent % 16 for extent in b.shape):
        raise NotImplementedError(f"_scaled_mm takes b by multiples of 16, not {' x '.join(map(str, b.shape))}")
    b = b.t() if option["trans_b"] else b.t().contiguous().t()  # it takes columns that lie side by side
    if option["scaling"] == "row":
        a_scale, b_scale = a_scale.contiguous()[:, None], b_scale.contiguous()[None]
    given = {"scale_a": a_scale, "scale_b": b_scale, "bias": inputs.get("bias"), "out_dtype": getattr(torch, out)}
    return lambda: torch._scaled_mm(a, b, **given, use_fast_accum=bool(option["fast_accum"]))


def torch_linear(problem: Problem, inputs: Mapping[str, Array], scalars: Mapping[str, float]) -> Call:
    """Return a call of PyTorch's ``linear`` with the weights in the type of a, as they would be without packing.

    Raises NotImplementedError where PyTorch's does something else, ImportError where there is no PyTorch.
    """
    return torch_gpu_linear(problem, {name: _tensor(x) for name, x in inputs.items()}, scalars)


def torch_gpu_linear(problem: Problem, inputs: Mapping[str, Any], scalars: Mapping[str, float]) -> Call:
    """Return a call of PyTorch's ``linear`` on its tensors, cuBLAS on a GPU. Raises NotImplementedError."""
    import torch

    _refuse(problem, scalars)
    if dict(problem.dtypes)["c"] != problem.dtype:
        raise NotImplementedError(f"linear gives {problem.dtype}, not {dict(problem.dtypes)['c']}")
    a, bits = inputs["a"], 4 if problem.kernel == "gemm_w4a16" else 8
    zero = inputs["zero"].cpu().numpy() if problem.option["zero_point"] else None
    scale = inputs["scale"].float().cpu().numpy()
    group, depth = int(problem.option["group"] or 0), int(problem.dim["K"])
    packed = Weights(inputs["w"].cpu().numpy(), scale, zero, group, bits, depth)
    w = torch.from_numpy(dequantize(packed)).to(a.device, a.dtype)
    return lambda: torch.nn.functional.linear(a, w, inputs.get("bias"))


def _refuse(problem: Problem, scalars: Mapping[str, float]) -> None:
    """Raise NotImplementedError for what is more than a product with a bias."""
    option = problem.option
    if option["epilogue"] != "none" or option["glu"] or option["residual"] or scalars["out_scale"] != 1:
        raise NotImplementedError("PyTorch's products have no epilogue but a bias")


def _tensor(x: Array) -> Any:
    """Return a tensor of PyTorch's on the memory of *x*; types of ml_dtypes go by their bits."""
    import torch

    if x.dtype.type.__module__.partition(".")[0] != "ml_dtypes":
        return torch.from_numpy(np.ascontiguousarray(x))
    bits = np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}")
    return torch.from_numpy(bits).view(getattr(torch, x.dtype.name))
