"""PyTorch's products, which bench times those of mixed precision against: they compute the same, or there is none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tlhub import testing
from tlhub.problem import make
from tlhub.specs import Kernel
from tlhub.testing.data import function
from tlhub_mixed.contracts.scaled import SCALED
from tlhub_mixed.contracts.weights import W4A16, W8A16

E4M3 = "float8_e4m3fn"


@pytest.fixture(autouse=True)
def _torch() -> None:
    pytest.importorskip("torch")


def peer(kernel: Kernel, dtype: Any, options: dict[str, Any], **scalars: float) -> tuple[Any, Any, Any]:
    """Return what the peer gives, what the reference says, and its bounds."""
    problem = make(kernel, (32, 48, 256), dtype, options)
    arrays, values = testing.inputs(kernel, problem), testing.default_scalars(kernel, problem, scalars)
    got = function(kernel.peers["torch"])(problem, arrays, values)()
    want = function(kernel.reference)(problem, arrays, values)
    return got.float().numpy(), want[0], function(kernel.tolerance)(problem, arrays, values, want)[0]


@pytest.mark.parametrize(
    ("kernel", "dtype", "options"),
    [
        (SCALED, E4M3, {"trans_b": True}),
        (SCALED, E4M3, {"scaling": "row", "bias": True}),
        (W4A16, "bfloat16", {"zero_point": True, "group": 32}),
        (W4A16, "float16", {"bias": True}),
        (W8A16, "bfloat16", {"group": 0}),
    ],
)
def test_it_computes_the_same(kernel: Kernel, dtype: str, options: dict[str, Any]) -> None:
    got, want, bounds = peer(kernel, dtype, options)
    np.testing.assert_array_less(abs(got - want), 2 * bounds)  # PyTorch may round the product before it adds the bias


@pytest.mark.parametrize(
    ("kernel", "dtype", "options"),
    [
        (SCALED, E4M3, {"scaling": "block"}),
        (SCALED, E4M3, {"scaling": "row", "out_dtype": "float16"}),
        (SCALED, E4M3, {"glu": True}),
        (SCALED, "int8", {}),
        (W4A16, "float16", {"epilogue": "silu"}),
        (W8A16, "float16", {"out_dtype": "float32"}),
    ],
)
def test_there_is_none_where_it_computes_something_else(kernel: Kernel, dtype: str, options: dict[str, Any]) -> None:
    with pytest.raises(NotImplementedError):
        peer(kernel, dtype, options)


def test_there_is_none_for_an_output_scale() -> None:
    with pytest.raises(NotImplementedError, match="no epilogue but a bias"):
        peer(W4A16, "float16", {}, out_scale=2.0)
