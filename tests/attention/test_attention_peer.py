"""PyTorch's kernel, which bench times attention against."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tlhub import problem, testing
from tlhub.specs import Problem
from tlhub_attention.contract import ATTENTION
from tlhub_attention.peers import torch_attention, torch_gpu_attention
from tlhub_attention.reference import reference


@pytest.fixture(autouse=True)
def _torch() -> None:
    pytest.importorskip("torch")


def make(dtype: str = "float32", **given: Any) -> Problem:
    dims = {"B": 2, "S": 33, "H": 4, "D": 16, "H_kv": 2} | {k: v for k, v in given.items() if k[0].isupper()}
    return problem.make(ATTENTION, dims, dtype, {k: v for k, v in given.items() if k[0].islower()})


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


@pytest.mark.parametrize("causal", [False, True])
def test_that_of_gpus_takes_tensors_as_they_are(causal: bool) -> None:
    """PyTorch's CPU has a flash kernel too, which stands for the GPU's."""
    import torch

    made = make("float32", causal=causal, H_kv=4)
    arrays, scalars = testing.inputs(ATTENTION, made), testing.default_scalars(ATTENTION, made)
    got = torch_gpu_attention(made, {name: torch.from_numpy(a) for name, a in arrays.items()}, scalars)()
    assert isinstance(got, torch.Tensor)
    np.testing.assert_allclose(got.transpose(1, 2).numpy(), reference(made, arrays, scalars)[0], atol=4e-3)
    with pytest.raises(NotImplementedError, match="no lse"):
        torch_gpu_attention(make(lse=True), {}, scalars)
