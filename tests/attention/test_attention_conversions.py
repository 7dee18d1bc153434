"""The conversions that the CPU kernels of attention make, of every number there is."""

from __future__ import annotations

import platform
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from attention_lab import SYMBOLIC

import tlhub
from tlhub_cpu.arch import features, native


def get(dtype: str, **options: Any) -> Any:
    return tlhub.get("attention", SYMBOLIC, dtype, device="cpu", **options)


@pytest.mark.parametrize(("out", "tie"), [("bfloat16", 2.0**-8), ("float16", 2.0**-11)])
@pytest.mark.parametrize("sign", [1, -1])
def test_float64_is_rounded_once(out: str, tie: float, sign: int) -> None:
    values = sign * np.array([1 + tie, 1 + tie + 2.0**-40, 1 + tie - 2.0**-40, 1 + 3 * tie, np.nan, np.inf])
    q = np.zeros((6, 1, 1, 1))
    o = get("float64", out_dtype=out)(q, q, values.reshape(6, 1, 1, 1))
    want = sign * np.array([1, 1 + 2 * tie, 1, 1 + 4 * tie, np.nan, np.inf])
    np.testing.assert_array_equal(o.astype(np.float64).ravel(), want)


@pytest.mark.parametrize("arch", ["x86-64-v2", "x86-64-v3"])
def test_every_float16_is_converted_right_with_and_without_instructions_for_it(arch: str) -> None:
    if (native(platform.machine(), features()) or "") < arch:  # of aarch64 as well
        pytest.skip(f"this machine does not run {arch}")
    kernel = tlhub.get("attention", SYMBOLIC, "float16", device="cpu", arch=f"cpu:{arch}")
    every = np.arange(2**16, dtype=np.uint16).view(np.float16).reshape(-1, 1, 1, 1)
    q = np.zeros_like(every)
    np.testing.assert_array_equal(kernel(q, q, every), every)
    wide = tlhub.get("attention", SYMBOLIC, "float32", device="cpu", arch=f"cpu:{arch}", out_dtype="float16")
    rng = np.random.default_rng(0)
    values = (rng.standard_normal(2**16) * 2.0 ** rng.integers(-27, 18, 2**16)).astype(np.float32)
    values[:6] = [65504, 65519, 65520, 65536, 2.0**-25, 2.0**-24 + 2.0**-25]
    values = values.reshape(-1, 1, 1, 1)
    q = np.zeros_like(values)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(wide(q, q, values), values.astype(np.float16))


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_every_float8_is_what_it_stands_for(dtype: str) -> None:
    every = np.arange(2**8, dtype=np.uint8).view(getattr(ml_dtypes, dtype)).reshape(-1, 1, 1, 1)
    for width in (1, 4):  # of single items, and of whole tiles
        values = np.repeat(every, width, axis=3)
        q = np.zeros_like(values)
        o = get(dtype, out_dtype="float32")(q, q, values)
        np.testing.assert_array_equal(o, values.astype(np.float32))
