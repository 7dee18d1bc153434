"""Faults that kernels of others had: the ids are those of the project's list of edge cases."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tlhub
from tlhub.errors import ArgumentError


def get(dtype: str = "float32", **options: object) -> Any:
    return tlhub.get("gemm", dict(zip("BMNK", "BMNK", strict=True)), dtype, device="cpu", **options)


def test_a01_every_k_counts() -> None:
    kernel = get("float16")
    for k in range(1, 41):
        b = np.ones((k, 64), np.float16)
        b[16:] = 100
        want = min(k, 16) + 100 * max(k - 16, 0)
        np.testing.assert_array_equal(kernel(np.ones((64, k), np.float16), b), np.full((64, 64), want, np.float16))


def test_a02_the_overhang_of_a_row_is_not_written() -> None:
    room = np.full((33, 160), -7, np.float16)
    b = np.broadcast_to(np.arange(130, dtype=np.float16), (16, 130))
    get("float16")(np.ones((33, 16), np.float16), b, out=room[:, :130])
    np.testing.assert_array_equal(room[:, :130], np.broadcast_to(16 * np.arange(130), (33, 130)))
    assert (room[:, 130:] == -7).all()


def test_a03_nan_stays_in_its_row() -> None:
    a = np.full((32, 33), np.nan, ml_dtypes.bfloat16)
    a[0] = 1
    c = get("bfloat16")(a, np.ones((33, 64), ml_dtypes.bfloat16)).astype(np.float32)
    assert (c[0] == 33).all() and np.isnan(c[1:]).all()


@pytest.mark.parametrize("k", [64, 1000])
def test_a04_old_contents_of_the_output_do_not_matter(k: int) -> None:
    out = np.full((64, 64), np.nan, np.float32)
    get("float32")(np.ones((64, k), np.float32), np.ones((k, 64), np.float32), out=out)
    np.testing.assert_array_equal(out, np.full((64, 64), k))


@pytest.mark.parametrize("shape", [(4, 4), (1, 4), (4, 1), (130, 70)])
def test_a05_an_empty_sum_is_zero(shape: tuple[int, int]) -> None:
    kernel = get("float32")
    for _ in range(10):
        out = np.full(shape, np.nan, np.float32)
        kernel(np.empty((shape[0], 0), np.float32), np.empty((0, shape[1]), np.float32), out=out)
        np.testing.assert_array_equal(out, np.zeros(shape))


@pytest.mark.parametrize("rows", [1, 7])
def test_a06_strides_are_honoured(rows: int) -> None:
    base = np.full((8, 80), 1000, np.float32)
    base[:, :64] = 1
    c = get("float32", trans_b=True)(np.ones((rows, 64), np.float32), base[:, :64])
    np.testing.assert_array_equal(c, np.full((rows, 8), 64))


@pytest.mark.parametrize("start", [1, 64])
def test_a08_a_storage_offset_is_no_reason_to_refuse(start: int) -> None:
    buffer = (np.arange(4160) % 97).astype(np.float16)
    v = buffer[start : start + 4096].reshape(64, 64)
    np.testing.assert_array_equal(get("float16")(v, np.eye(64, dtype=np.float16)), v)


def test_a09_strides_of_dims_of_one_mean_nothing() -> None:
    x = np.lib.stride_tricks.as_strided(np.ones(77, np.float32), (1, 77), (4, 4))
    np.testing.assert_array_equal(get("float32")(x, np.ones((77, 5), np.float32)), np.full((1, 5), 77))


def test_a10_a_broadcast_batch_is_an_input() -> None:
    left = np.broadcast_to(np.ones((1, 32, 32), np.float32), (32, 32, 32))
    c = get("float32")(left, np.ones((32, 32, 32), np.float32))
    np.testing.assert_array_equal(c, np.full((32, 32, 32), 32))


@pytest.mark.parametrize("shape", [(32, 32), (1, 32)])
def test_a13_results_repeat_bit_for_bit(shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(0)
    a = rng.standard_normal((shape[0], 16384)).astype(np.float16)
    b = rng.standard_normal((16384, shape[1])).astype(np.float16)
    kernel = get("float16")
    assert len({kernel(a, b).tobytes() for _ in range(20)}) == 1


@pytest.mark.parametrize("shape", [(16, 16), (1, 16), (16, 1)])
def test_a14_small_addends_are_not_lost(shape: tuple[int, int]) -> None:
    c = get("float16")(np.ones((shape[0], 4096), np.float16), np.ones((4096, shape[1]), np.float16))
    np.testing.assert_array_equal(c, np.full(shape, 4096))


def test_a16_int8_results_saturate() -> None:
    kernel = get("int8", out_dtype="int8")
    assert kernel(np.array([[100]], np.int8), np.array([[2, -2]], np.int8)).tolist() == [[127, -128]]


def test_a21_bfloat16_is_rounded_not_cut() -> None:
    a = np.array([[3, 0.125, 0.01171875]], ml_dtypes.bfloat16)
    c = get("bfloat16")(a, np.ones((3, 1), ml_dtypes.bfloat16))
    assert float(c[0, 0]) == 3.140625


def test_a22_an_output_that_is_an_input_is_refused_untouched() -> None:
    t = np.ones((64, 64), np.float32)
    with pytest.raises(ArgumentError) as caught:
        get("float32")(t, np.eye(64, dtype=np.float32), out=t)
    assert caught.value.argument in ("c", "out", "a")
    assert (t == 1).all()


def test_infinities_go_where_ieee_says() -> None:
    kernel = get("float32")
    a, b = np.ones((7, 40), np.float32), np.ones((40, 33), np.float32)
    a[2, 39], b[39, 5] = np.inf, 0
    want = np.full((7, 33), 40, np.float32)
    want[:, 5], want[2], want[2, 5] = 39, np.inf, np.nan
    np.testing.assert_array_equal(kernel(a, b), want)
