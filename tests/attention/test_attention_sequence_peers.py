"""PyTorch's kernels, which bench times decoding and sequences end to end against."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tlhub import problem, testing
from tlhub.specs import Kernel, Problem
from tlhub.testing.data import function
from tlhub_attention.contracts.decode import DECODE
from tlhub_attention.contracts.varlen import VARLEN
from tlhub_attention.peers import sequences as sequence_peers


@pytest.fixture(autouse=True)
def _torch() -> None:
    pytest.importorskip("torch")


DIMS = {
    "attention_decode": {"B": 3, "S": 2, "H": 4, "D": 8, "H_kv": 2, "S_kv": 40},
    "paged": {"B": 3, "S": 2, "H": 4, "D": 8, "H_kv": 2, "P": 30, "page": 16, "L": 3},
    "attention_varlen": {"T": 50, "H": 4, "D": 8, "N1": 4, "H_kv": 2, "T_kv": 70},
}


def make(kernel: Kernel, dtype: str = "float32", **given: Any) -> Problem:
    dims = DIMS["paged" if given.get("paged") else kernel.name] | {k: v for k, v in given.items() if k[0].isupper()}
    return problem.make(kernel, dims, dtype, {k: v for k, v in given.items() if k[0].islower()})


def data(kernel: Kernel, made: Problem, **scalars: float) -> tuple[dict[str, Any], dict[str, float]]:
    return testing.inputs(kernel, made, whole=True), testing.default_scalars(kernel, made, scalars)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("kernel", "options"), [(DECODE, {}), (DECODE, {"paged": True}), (VARLEN, {})])
def test_they_compute_the_same(kernel: Kernel, options: dict[str, Any], dtype: str, causal: bool) -> None:
    made = make(kernel, dtype, causal=causal, **options)
    arrays, scalars = data(kernel, made)
    (want,) = function(kernel.reference)(made, arrays, scalars)
    got = [x.transpose(1, 2).float().numpy() for x in function(kernel.peers["torch"])(made, arrays, scalars)()]
    joined = np.concatenate(got, axis=0) if kernel is DECODE else np.concatenate(got, axis=1)[0]
    np.testing.assert_allclose(joined, want, atol=3e-2 if dtype == "bfloat16" else 4e-3)


@pytest.mark.parametrize("kernel", [DECODE, VARLEN])
@pytest.mark.parametrize(
    ("given", "scalars", "said"),
    [
        ({"lse": True}, {}, "no lse"),
        ({}, {"window": 3}, "no window"),
        ({}, {"softcap": 1.0}, "no window or softcap"),
        ({"dtype": "float8_e5m2"}, {}, "does not take"),
        ({"out_dtype": "float64"}, {}, "does not take"),
        ({"causal": True, "S_kv": 1, "T_kv": 3}, {}, "no number for a query that sees no key"),
    ],
)
def test_they_are_left_out_where_they_compute_something_else(
    kernel: Kernel, given: dict[str, Any], scalars: dict[str, float], said: str
) -> None:
    dims = [d.name for d in kernel.dims]
    made = make(kernel, **{k: v for k, v in given.items() if k[0].islower() or k in dims})
    with pytest.raises(NotImplementedError, match=said):
        function(kernel.peers["torch"])(made, *data(kernel, made, **scalars))


@pytest.mark.parametrize("peer", [sequence_peers.torch_gpu_decode, sequence_peers.torch_gpu_flash_decode])
def test_those_of_gpus_for_decoding_take_sequences_of_one_length(peer: Any) -> None:
    """PyTorch's CPU has a flash kernel too, which stands for the GPU's."""
    import torch

    made = make(DECODE, S=1, H_kv=4)
    arrays, scalars = data(DECODE, made)
    tensors = {name: torch.from_numpy(x) for name, x in arrays.items()}
    got = peer(made, tensors, scalars)()
    assert isinstance(got, torch.Tensor)
    (want,) = function(DECODE.reference)(made, arrays, scalars)
    np.testing.assert_allclose(got.transpose(1, 2).numpy(), want, atol=4e-3)
    for other, said in (
        (make(DECODE, lse=True), "no lse"),
        (make(DECODE, paged=True), "no pages"),
        (make(DECODE), "aligned at the start"),
    ):
        with pytest.raises(NotImplementedError, match=said):
            peer(other, tensors, scalars)
    tensors["lengths"][1] = 3
    with pytest.raises(NotImplementedError, match="one length"):
        peer(made, tensors, scalars)


def test_that_of_gpus_for_sequences_is_flash_attention_2(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    made, told = make(VARLEN, causal=True, lse=True), []
    arrays, scalars = data(VARLEN, made)
    tensors = {name: torch.from_numpy(x) for name, x in arrays.items()}
    monkeypatch.setattr(
        torch.ops.aten, "_flash_attention_forward", lambda *given, **named: told.append((given, named)), raising=False
    )
    sequence_peers.torch_gpu_varlen(made, tensors, scalars)()
    (((*_, longest, longest_kv, dropout, causal, debug), named),) = told
    assert (longest, longest_kv, dropout, causal, debug, named["scale"]) == (17, 24, 0.0, True, False, scalars["scale"])
    with pytest.raises(NotImplementedError, match="as many channels"):
        sequence_peers.torch_gpu_varlen(make(VARLEN, D_v=16), tensors, scalars)
    tensors["starts"][0] = 1
    with pytest.raises(NotImplementedError, match="every query"):
        sequence_peers.torch_gpu_varlen(made, tensors, scalars)
