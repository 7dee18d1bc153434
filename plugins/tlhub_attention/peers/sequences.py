"""PyTorch's kernels as peers of decoding and of attention over sequences of various lengths."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tlhub.specs import Problem
from tlhub_attention.peers.dense import by_backend, refuse, tensors
from tlhub_attention.references import decode as decode_reference
from tlhub_attention.references import varlen as varlen_reference
from tlhub_attention.references.rows import Array
from tlhub_attention.references.sequences import Split


def torch_decode(problem: Problem, inputs: Mapping[str, Array], scalars: Mapping[str, float]) -> Callable[[], Any]:
    """Return calls of PyTorch's scaled_dot_product_attention, one a sequence, on keys that are contiguous already.

    Raises NotImplementedError where PyTorch's does something else, ImportError where there is no PyTorch.
    """
    return _one_by_one(decode_reference.split, problem, inputs, scalars)


def torch_varlen(problem: Problem, inputs: Mapping[str, Array], scalars: Mapping[str, float]) -> Callable[[], Any]:
    """Return calls of PyTorch's scaled_dot_product_attention, one a sequence. Raises what ``torch_decode`` does."""
    return _one_by_one(varlen_reference.split, problem, inputs, scalars)


def torch_gpu_decode(problem: Problem, inputs: Mapping[str, Any], scalars: Mapping[str, float]) -> Callable[[], object]:
    """Return a call of PyTorch's scaled_dot_product_attention on its tensors, in which every length is the longest:
    cuDNN's, or where that has none FlashAttention-2.

    Raises NotImplementedError where PyTorch's does something else.
    """
    return by_backend(_decode(problem, inputs, scalars), "CUDNN_ATTENTION", "FLASH_ATTENTION")


def torch_gpu_flash_decode(
    problem: Problem, inputs: Mapping[str, Any], scalars: Mapping[str, float]
) -> Callable[[], object]:
    """Return what ``torch_gpu_decode`` does, by FlashAttention-2 even where cuDNN can. Raises as that does."""
    return by_backend(_decode(problem, inputs, scalars), "FLASH_ATTENTION")


def torch_gpu_varlen(problem: Problem, inputs: Mapping[str, Any], scalars: Mapping[str, float]) -> Callable[[], object]:
    """Return a call of the FlashAttention-2 that PyTorch has, on its tensors; it computes lse as well.

    Raises NotImplementedError where that does something else.
    """
    import torch

    refuse(problem, scalars, lse=True)
    if problem.dim["D"] != problem.dim["D_v"]:
        raise NotImplementedError("it takes values with as many channels as keys")
    starts, starts_kv = inputs["starts"], inputs["starts_kv"]
    if not starts[-1] == len(inputs["q"]) or starts[0]:
        raise NotImplementedError("every query is of a sequence")
    longest, longest_kv = (int(s.diff().max()) if len(s) > 1 else 0 for s in (starts, starts_kv))
    given = (*(inputs[n] for n in "qkv"), starts, starts_kv, longest, longest_kv, 0.0, problem.option["causal"], False)
    return lambda: torch.ops.aten._flash_attention_forward(*given, scale=scalars["scale"])


def _decode(problem: Problem, inputs: Mapping[str, Any], scalars: Mapping[str, float]) -> Callable[[], object]:
    """Return the call on tensors of a GPU, without a choice of backends. Raises as ``torch_gpu_decode`` does."""
    import torch

    refuse(problem, scalars)
    if problem.option["paged"]:
        raise NotImplementedError("it has no pages")
    if (inputs["lengths"] != problem.dim["S_kv"]).any():
        raise NotImplementedError("it takes sequences of one length")
    if problem.option["causal"] and problem.dim["S"] != 1:
        raise NotImplementedError("its causal mask is aligned at the start")
    q, k, v = (inputs[n].transpose(1, 2) for n in "qkv")
    how = {"scale": scalars["scale"], "enable_gqa": problem.dim["H"] != problem.dim["H_kv"]}
    return lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, **how)


def _one_by_one(
    split: Split, problem: Problem, inputs: Mapping[str, Array], scalars: Mapping[str, float]
) -> Callable[[], Any]:
    """Return the calls for each sequence with queries and keys, which return their outputs (1, H, S, D_v)."""
    import torch

    refuse(problem, scalars)
    grouped, calls = problem.dim["H"] != problem.dim["H_kv"], []
    for one, _ in split(problem, inputs, (inputs["q"],)):
        contiguous = {name: np.ascontiguousarray(array) for name, array in one.items()}
        q, k, v = (x.transpose(1, 2) for x in tensors(problem, contiguous, "qkv"))
        queries, keys = q.shape[2], k.shape[2]
        if problem.option["causal"] and keys < queries:
            raise NotImplementedError("it gives no number for a query that sees no key")
        how = {"scale": scalars["scale"], "enable_gqa": grouped}
        if problem.option["causal"] and queries > 1:
            mask = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
            how |= {"is_causal": True} if queries == keys else {"attn_mask": mask}
        calls.append((q, k, v, how))
    attend = torch.nn.functional.scaled_dot_product_attention
    return lambda: [attend(q, k, v, **how) for q, k, v, how in calls if q.numel() and k.numel()]
