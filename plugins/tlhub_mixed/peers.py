"""What the kernels of mixed precision are measured against: PyTorch's products of float8, which are cuBLASLt's.

Each is called as ``peer(problem, inputs, scalars)``, and returns a call of one product; what PyTorch has no single call
for raises NotImplementedError.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tlhub.specs import Problem


def torch_scaled(problem: Problem, inputs: Mapping[str, Any], scalars: Mapping[str, float]) -> Callable[[], object]:
    """Return a call of PyTorch's scaled product of float8 matrices, of which the second lies by columns."""
    import torch

    option, dtypes = problem.option, dict(problem.dtypes)
    scaling, plain = str(option["scaling"]), not any(option[name] for name in ("glu", "bias", "residual"))
    if not plain or option["epilogue"] != "none" or float(scalars["out_scale"]) != 1:
        raise NotImplementedError("PyTorch's scaled product has no epilogue")
    if dtypes["a"] == "int8" or scaling == "block":
        raise NotImplementedError(f"PyTorch has no scaled product of {dtypes['a']} with scaling={scaling!r}")
    if scaling == "row" and dtypes["c"] != "bfloat16":
        raise NotImplementedError("PyTorch's product with scales of rows is of bfloat16")
    a, b = inputs["a"], inputs["b"].T if option["trans_b"] else inputs["b"]
    if not a.is_contiguous() or not b.T.is_contiguous():
        raise NotImplementedError("PyTorch multiplies float8 matrices by rows and by columns")
    of_a, of_b = inputs["a_scale"], inputs["b_scale"]
    if scaling == "row":
        of_a, of_b = of_a[:, None].contiguous(), of_b[None, :].contiguous()
    how = {"out_dtype": getattr(torch, dtypes["c"]), "use_fast_accum": bool(option["fast_accum"])}
    return lambda: torch._scaled_mm(a, b, of_a, of_b, **how)
