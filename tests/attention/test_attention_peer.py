"""PyTorch's kernels and FlashAttention-4, which bench times attention and its backward against."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tlhub import problem, testing
from tlhub.specs import Kernel, Problem
from tlhub_attention.contracts.backward import ATTENTION_BWD
from tlhub_attention.contracts.forward import ATTENTION
from tlhub_attention.peers.dense import (
    flash4,
    torch_attention,
    torch_backward,
    torch_gpu_attention,
    torch_gpu_backward,
    torch_gpu_flash,
    torch_gpu_flash_backward,
)
from tlhub_attention.references import backward as backward_reference
from tlhub_attention.references.forward import reference


@pytest.fixture(autouse=True)
def _torch() -> None:
    pytest.importorskip("torch")


def make(dtype: str = "float32", kernel: Kernel = ATTENTION, **given: Any) -> Problem:
    dims = {"B": 2, "S": 33, "H": 4, "D": 16, "H_kv": 2} | {k: v for k, v in given.items() if k[0].isupper()}
    return problem.make(kernel, dims, dtype, {k: v for k, v in given.items() if k[0].islower()})


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("causal", [False, True])
def test_it_computes_the_same(dtype: str, causal: bool) -> None:
    made = make(dtype, causal=causal)
    arrays, scalars = testing.inputs(ATTENTION, made), testing.default_scalars(ATTENTION, made)
    (want,) = reference(made, arrays, scalars)
    got = torch_attention(made, arrays, scalars)().transpose(1, 2).float().numpy()
    np.testing.assert_allclose(got, want, atol=3e-2 if dtype == "bfloat16" else 4e-3)


@pytest.mark.parametrize("options", [{"lse": True}, {"causal": True, "S_kv": 7}, {"dtype": "float8_e5m2"}])
def test_it_is_left_out_where_it_computes_something_else(options: dict[str, Any]) -> None:
    made = make(**options)
    with pytest.raises(NotImplementedError):
        torch_attention(made, testing.inputs(ATTENTION, made), testing.default_scalars(ATTENTION, made))


@pytest.mark.parametrize("peer", [torch_gpu_attention, torch_gpu_flash])
@pytest.mark.parametrize("causal", [False, True])
def test_those_of_gpus_take_tensors_as_they_are(causal: bool, peer: Any) -> None:
    """PyTorch's CPU has a flash kernel too, which stands for the GPU's."""
    import torch

    made = make("float32", causal=causal, H_kv=4)
    arrays, scalars = testing.inputs(ATTENTION, made), testing.default_scalars(ATTENTION, made)
    got = peer(made, {name: torch.from_numpy(a) for name, a in arrays.items()}, scalars)()
    assert isinstance(got, torch.Tensor)
    np.testing.assert_allclose(got.transpose(1, 2).numpy(), reference(made, arrays, scalars)[0], atol=4e-3)
    with pytest.raises(NotImplementedError, match="no lse"):
        peer(make(lse=True), {}, scalars)


@pytest.mark.parametrize("causal", [False, True])
def test_flash_attention_4_is_given_arrays_as_they_are(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's CPU stands for its package, which takes (B, S, H, D)."""
    import torch

    def attend(q: Any, k: Any, v: Any, *, softmax_scale: float, causal: bool) -> tuple[Any, None]:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        attention = torch.nn.functional.scaled_dot_product_attention
        return attention(q, k, v, is_causal=causal, scale=softmax_scale, enable_gqa=True).transpose(1, 2), None

    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", SimpleNamespace(flash_attn_func=attend))
    monkeypatch.setattr("importlib.metadata.version", lambda name: f"{name[-1]}.0")
    made, scalars = make("float32", causal=causal), {**testing.default_scalars(ATTENTION, make()), "scale": 0.3}
    arrays = testing.inputs(ATTENTION, made)
    call = flash4(made, {name: torch.from_numpy(a) for name, a in arrays.items()}, scalars)
    assert call.package == "flash-attn-4 4.0"  # type: ignore[attr-defined]
    got = call()
    np.testing.assert_allclose(got.transpose(1, 2).numpy(), reference(made, arrays, scalars)[0], atol=4e-3)
    with pytest.raises(NotImplementedError, match="no lse"):
        flash4(make(lse=True), {}, scalars)


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (AssertionError("no such capability"), pytest.raises(NotImplementedError, match="-4: no such capability")),
        (AssertionError(), pytest.raises(NotImplementedError, match="-4: AssertionError")),
        (TypeError("no such keyword"), pytest.raises(TypeError)),  # a fault, not a refusal
    ],
)
def test_flash_attention_4_is_left_out_where_it_refuses(
    raised: Exception, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def attend(q: Any, k: Any, v: Any, **how: Any) -> Any:
        raise raised

    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", SimpleNamespace(flash_attn_func=attend))
    made = make("float16")
    with expected:
        flash4(made, dict.fromkeys("qkv"), testing.default_scalars(ATTENTION, made))


# -- the backward ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("causal", [False, True])
def test_its_backward_computes_the_same(dtype: str, causal: bool) -> None:
    made = make(dtype, ATTENTION_BWD, causal=causal, D_v=24)
    arrays, scalars = testing.inputs(ATTENTION_BWD, made), testing.default_scalars(ATTENTION_BWD, made)
    want = backward_reference.reference(made, arrays, scalars)
    call = torch_backward(made, arrays, scalars)
    for _ in range(2):  # the forward's results serve again
        for got, right in zip(call(), want, strict=True):
            np.testing.assert_allclose(got.float().numpy(), right, atol=6e-2 if dtype == "bfloat16" else 8e-3)


def test_its_backward_is_left_out_where_it_computes_something_else() -> None:
    made = make("float32", ATTENTION_BWD)
    arrays, scalars = testing.inputs(ATTENTION_BWD, made), testing.default_scalars(ATTENTION_BWD, made)
    for peer in (torch_backward, torch_gpu_backward, torch_gpu_flash_backward):
        with pytest.raises(NotImplementedError, match="no window or softcap"):
            peer(made, arrays, {**scalars, "softcap": 1.0})
        with pytest.raises(NotImplementedError, match="aligned at the start"):
            peer(make("float32", ATTENTION_BWD, S_kv=7, causal=True), arrays, scalars)


@pytest.mark.parametrize("peer", [torch_gpu_backward, torch_gpu_flash_backward])
def test_the_backwards_of_gpus_hand_on_what_is_taken(peer: Any) -> None:
    """PyTorch's operators on tensors without memory: they check arguments and tell shapes."""
    import torch

    made = make("float16", ATTENTION_BWD, causal=True)
    arrays, scalars = testing.inputs(ATTENTION_BWD, made), testing.default_scalars(ATTENTION_BWD, made)
    tensors = {name: torch.from_numpy(a).to("meta") for name, a in arrays.items()}
    got = peer(made, tensors, scalars)()
    assert [(x.dtype, tuple(x.shape)) for x in got] == [
        (torch.float16, tuple(arrays[n].transpose(0, 2, 1, 3).shape)) for n in "qkv"
    ]
