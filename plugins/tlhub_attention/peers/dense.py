"""PyTorch's kernels and FlashAttention-4, which bench times attention and its backward against."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from typing import Any

import numpy as np

from tlhub.specs import Problem
from tlhub_attention.contracts.forward import FLOAT8
from tlhub_attention.references.rows import Array

Call = Callable[[], Any]


def torch_attention(problem: Problem, inputs: Mapping[str, Array], scalars: Mapping[str, float]) -> Call:
    """Return a call of PyTorch's scaled_dot_product_attention on the inputs' memory.

    Raises NotImplementedError where PyTorch's does something else, ImportError where there is no PyTorch.
    """
    _refuse(problem, scalars)
    return _attention(problem, tensors(problem, inputs, "qkv"), scalars)


def torch_gpu_attention(problem: Problem, inputs: Mapping[str, Any], scalars: Mapping[str, float]) -> Call:
    """Return a call of PyTorch's scaled_dot_product_attention on its tensors: cuDNN's, or where that has none
    FlashAttention-2.

    Raises NotImplementedError where PyTorch's does something else.
    """
    _refuse(problem, scalars)
    return by_backend(_attention(problem, [inputs[n] for n in "qkv"], scalars), "CUDNN_ATTENTION", "FLASH_ATTENTION")


def torch_gpu_flash(problem: Problem, inputs: Mapping[str, Any], scalars: Mapping[str, float]) -> Call:
    """Return what ``torch_gpu_attention`` does, by FlashAttention-2 even where cuDNN can. Raises as that does."""
    _refuse(problem, scalars)
    return by_backend(_attention(problem, [inputs[n] for n in "qkv"], scalars), "FLASH_ATTENTION")


def flash4(problem: Problem, inputs: Mapping[str, Any], scalars: Mapping[str, float]) -> Call:
    """Return a call of FlashAttention-4 on PyTorch's tensors, whose result is (B, H, S, D) as PyTorch's own are.

    Raises NotImplementedError where that does something else or refuses, ImportError without its package, flash-attn-4.
    """
    _refuse(problem, scalars)
    import torch
    from flash_attn.cute import flash_attn_func

    given, how = [inputs[n] for n in "qkv"], {"softmax_scale": scalars["scale"], "causal": problem.option["causal"]}

    def call() -> Any:
        return flash_attn_func(*given, **how)[0].transpose(1, 2)

    try:
        call()
    except (TypeError, torch.cuda.OutOfMemoryError):  # a call or a problem that is at fault
        raise
    except Exception as error:  # an assertion of what it is for, or what its compiler raises
        raise NotImplementedError(f"FlashAttention-4: {str(error) or type(error).__name__}") from error
    call.package = f"flash-attn-4 {metadata.version('flash-attn-4')}"  # type: ignore[attr-defined]
    return call


def torch_backward(problem: Problem, inputs: Mapping[str, Array], scalars: Mapping[str, float]) -> Call:
    """Return a call of the backward of PyTorch's scaled_dot_product_attention, whose forward has run.

    It returns dq, dk, dv as the contract lays them out. Raises as ``torch_attention`` does.
    """
    import torch

    _refuse(problem, scalars)
    dout, *leaves = tensors(problem, inputs, ("dout", *"qkv"))
    for leaf in leaves:
        leaf.requires_grad_()
    o, gradient = _attention(problem, leaves, scalars)(), dout.transpose(1, 2)
    return lambda: torch.autograd.grad(o, leaves, gradient, retain_graph=True)


def torch_gpu_backward(problem: Problem, inputs: Mapping[str, Any], scalars: Mapping[str, float]) -> Call:
    """Return a call of cuDNN's backward through PyTorch, on its tensors; cuDNN's forward has run.

    It returns dq, dk, dv as (B, H, S, D). The operator itself, for autograd runs on the stream of the forward, and what
    runs there is in no graph. Raises NotImplementedError where cuDNN has none.
    """
    import torch

    _refuse(problem, scalars)
    q, k, v, gradient = (inputs[n].transpose(1, 2) for n in ("q", "k", "v", "dout"))
    causal, scale = problem.option["causal"], scalars["scale"]
    forward = torch.ops.aten._scaled_dot_product_cudnn_attention
    backward = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
    try:
        o, lse, starts_q, starts_k, longest_q, longest_k, seed, offset, _ = forward(
            q, k, v, None, True, 0.0, causal, False, scale=scale
        )
    except RuntimeError as error:
        raise NotImplementedError(f"cuDNN: {error}") from error
    rest = (seed, offset, None, starts_q, starts_k, longest_q, longest_k, 0.0, causal)
    return lambda: backward(gradient, q, k, v, o, lse, *rest, scale=scale)


def torch_gpu_flash_backward(problem: Problem, inputs: Mapping[str, Any], scalars: Mapping[str, float]) -> Call:
    """Return what ``torch_gpu_backward`` does, by FlashAttention-2. Raises as that does."""
    import torch

    _refuse(problem, scalars)
    q, k, v, gradient = (inputs[n].transpose(1, 2) for n in ("q", "k", "v", "dout"))
    causal, scale = problem.option["causal"], scalars["scale"]
    try:
        *kept, seed, offset, _ = torch.ops.aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, causal, False, scale=scale
        )
    except RuntimeError as error:
        raise NotImplementedError(f"FlashAttention-2: {error}") from error
    backward = torch.ops.aten._scaled_dot_product_flash_attention_backward
    return lambda: backward(gradient, q, k, v, *kept, 0.0, causal, seed, offset, scale=scale)


def by_backend(call: Call, *names: str) -> Call:
    """Return *call*, by the first of these backends of scaled_dot_product_attention that can.

    Raises NotImplementedError where none does.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def chosen() -> object:
        with sdpa_kernel([getattr(SDPBackend, name) for name in names], set_priority=True):
            return call()

    try:
        chosen()
    except RuntimeError as error:
        raise NotImplementedError(str(error)) from error
    return chosen


def refuse(problem: Problem, scalars: Mapping[str, float], lse: bool = False) -> None:
    """Raise NotImplementedError where PyTorch's attention, in any form, does something else. *lse*: it has that."""
    import torch

    dtypes = {name: dtype for name, dtype in problem.dtypes if name in ("dout", "q", "k", "v", "o")}
    if scalars["window"] > 0 or scalars["softcap"]:
        raise NotImplementedError("it has no window or softcap")
    if problem.option["alibi"]:
        raise NotImplementedError("it has no bias by distance")
    if problem.option.get("lse") and not lse:
        raise NotImplementedError("it has no lse")
    if len(set(dtypes.values())) > 1 or dtypes["q"] in FLOAT8 or not hasattr(torch, dtypes["q"]):
        raise NotImplementedError(f"it does not take {', '.join(f'{n} {d}' for n, d in dtypes.items())}")


def _refuse(problem: Problem, scalars: Mapping[str, float]) -> None:
    """Raise NotImplementedError where scaled_dot_product_attention of whole arrays does something else."""
    refuse(problem, scalars)
    if problem.option["causal"] and problem.dim["S"] != problem.dim["S_kv"]:
        raise NotImplementedError("its causal mask is aligned at the start")


def tensors(problem: Problem, inputs: Mapping[str, Array], names: Sequence[str]) -> list[Any]:
    """Return tensors of the memory of inputs, which have the problem's dtype."""
    import torch

    integers = {1: np.uint8, 2: np.int16}

    def tensor(array: Array) -> Any:
        if array.dtype.kind == "V" or problem.dtype == "bfloat16":  # NumPy knows no such number
            return torch.from_numpy(array.view(integers[array.dtype.itemsize])).view(getattr(torch, problem.dtype))
        return torch.from_numpy(array)

    return [tensor(inputs[n]) for n in names]


def _attention(problem: Problem, tensors: Sequence[Any], scalars: Mapping[str, float]) -> Call:
    """Return the call on q, k and v, which PyTorch takes as (B, H, S, D)."""
    import torch

    q, k, v = (x.transpose(1, 2) for x in tensors)
    how = {"is_causal": problem.option["causal"], "enable_gqa": problem.dim["H"] != problem.dim["H_kv"]}
    return lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=scalars["scale"], **how)
