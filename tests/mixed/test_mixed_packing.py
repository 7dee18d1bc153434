"""Packing: the layout of codes, and weights of GPTQ's and AWQ's layouts, which are written here word by word."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tlhub.errors import ArgumentError
from tlhub_mixed import packing

pytestmark = pytest.mark.light

Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(0)
N, K, G = 16, 128, 4


def drawn(bits: int = 4, least: int = 0) -> tuple[Array, Array, Array]:
    """Return codes (K, N), zero points (G, N) and scales (G, N), as checkpoints have them."""
    codes, zero = RNG.integers(0, 2**bits, (K, N)), RNG.integers(least, 2**bits, (G, N))
    return codes, zero, RNG.standard_normal((G, N)).astype(np.float16)


def real(codes: Array, zero: Array, scales: Array) -> Array:
    """Return w (N, K), by the formula of both formats."""
    spread = [np.repeat(x.astype(np.float32), K // G, axis=0) for x in (zero, scales)]
    return ((codes - spread[0]) * spread[1]).T


def words(codes: Array, bits: int, order: tuple[int, ...]) -> Array:
    """Return *codes* along the last axis as int32 words: code number order[i] of each run in the i-th lowest bits."""
    per = 32 // bits
    made = np.zeros((*codes.shape[:-1], codes.shape[-1] // per), np.uint32)
    for place in np.ndindex(*made.shape):
        for i, number in enumerate(order):
            made[place] |= np.uint32(int(codes[(*place[:-1], place[-1] * per + number)]) << (bits * i))
    return made.view(np.int32)


def test_the_lower_half_of_a_byte_comes_first() -> None:
    assert packing.pack(np.array([[1, 2, 15, 0, 7]])).tolist() == [[0x21, 0x0F, 0x07]]
    assert packing.unpack(np.array([[0x21, 0x0F, 0xF7]], np.uint8)).tolist() == [[1, 2, 15, 0, 7, 15]]


@pytest.mark.parametrize("k", [0, 1, 7, 64])
def test_unpack_undoes_pack(k: int) -> None:
    codes = RNG.integers(0, 16, (5, k))
    packed = packing.pack(codes)
    assert packed.shape == (5, -(-k // 2)) and packed.dtype == np.uint8
    np.testing.assert_array_equal(packing.unpack(packed, k), codes)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("minus_one", [True, False])
def test_gptq(bits: int, minus_one: bool) -> None:
    codes, zero, scales = drawn(bits, least=int(minus_one))
    straight = tuple(range(32 // bits))
    stored = words(zero - int(minus_one), bits, straight)
    qweight = words(codes.T, bits, straight).T
    made = packing.from_gptq(
        qweight, stored, scales, bits=bits, minus_one=minus_one, g_idx=np.arange(K, dtype=np.int32) // (K // G)
    )
    assert made.options == {"group": 32, "zero_point": True}
    np.testing.assert_array_equal(packing.dequantize(made), real(codes, zero, scales))


def test_gptq_s_stored_15_stands_for_16() -> None:
    codes, zero, scales = drawn()
    zero[:] = 16
    made = packing.from_gptq(words(codes.T, 4, tuple(range(8))).T, words(zero - 1, 4, tuple(range(8))), scales)
    assert (made.zero == 16).all()
    np.testing.assert_array_equal(packing.dequantize(made), real(codes, zero, scales))


def test_awq() -> None:
    codes, zero, scales = drawn()
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    made = packing.from_awq(words(codes, 4, order), words(zero, 4, order), scales)
    assert made.w.shape == (N, K // 2) and made.options == {"group": 32, "zero_point": True}
    np.testing.assert_array_equal(packing.dequantize(made), real(codes, zero, scales))


def test_codes_without_zero_points_are_around_8_or_signed() -> None:
    codes, scale = np.array([[0, 8, 15] + [8] * 29]), np.array([[2.0]], np.float16)
    made = packing.assemble(codes, scale)
    assert made.options == {"group": 0, "zero_point": False}
    assert packing.dequantize(made)[0, :3].tolist() == [-16, 0, 14]
    signed = packing.assemble(np.array([[-128, 127]]), scale, bits=8)
    assert signed.w.dtype == np.int8 and packing.dequantize(signed).tolist() == [[-256, 254]]


CODES, SCALE = np.zeros((2, 96), np.int64), np.ones((2, 3), np.float16)


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: packing.pack(np.array([[16]])), "'codes': expected integers from 0 to 15, got 16 to 16"),
        (lambda: packing.pack(np.array([[-1]])), "'codes': expected integers from 0 to 15, got -1 to -1"),
        (lambda: packing.pack(np.array([[1.0]])), "'codes': expected integers from 0 to 15, of two dims, got float64"),
        (lambda: packing.unpack(np.zeros((2, 3), np.int32)), "'packed': expected bytes"),
        (
            lambda: packing.assemble(CODES, SCALE, np.full((2, 3), -1)),
            "'zero': expected integers from 0 to 16, got -1 to -1",
        ),
        (
            lambda: packing.assemble(CODES, SCALE, np.zeros((2, 2), int)),
            r"'zero': expected the shape of scale, \(2, 3\)",
        ),
        (lambda: packing.assemble(CODES, np.ones((2, 4))), "'scale': expected groups of 32, 64 or 128 of K=96, or one"),
        (
            lambda: packing.assemble(CODES, np.ones((3, 3))),
            r"'scale': expected \(N, G\) for codes \(N, K\), got \(3, 3\)",
        ),
        (lambda: packing.assemble(CODES, SCALE, bits=3), "'bits': expected 4 or 8, got 3"),
        (lambda: packing.pack([[1, 2]]), "'codes': expected an array of NumPy, got list"),
        (lambda: packing.unpack(np.zeros((2, 3), np.uint8), 7), "'k': expected 0 to 6, two codes of each byte, got 7"),
        (
            lambda: packing.from_gptq(np.zeros((8, 16), np.int32), None, np.ones((2, 16))),
            "'qzeros': expected an array of NumPy, got NoneType",
        ),
        (
            lambda: packing.from_gptq(
                np.zeros((8, 16), np.int32), np.zeros((2, 2), np.int32), np.ones((2, 16)), g_idx=np.arange(63)
            ),
            "'g_idx': expected k / group for each k",
        ),
        (  # of 8 bits, read as 4: a K twice as long, in groups that the kernels have
            lambda: packing.from_gptq(np.zeros((16, 16), np.int32), np.zeros((2, 4), np.int32), np.ones((2, 16))),
            r"'qzeros': expected \(G, N/8\) for qweight \(K/8, N\), N=16, got \(2, 4\)",
        ),
        (
            lambda: packing.from_gptq(np.zeros((8, 16), np.int32), np.zeros((2, 2), np.int32), np.ones((1, 16))),
            r"'scales': expected \(G, N\), \(2, 16\) for qweight and qzeros, got \(1, 16\)",
        ),
        (
            lambda: packing.from_awq(np.zeros((32, 2), np.int64), np.zeros((1, 2), np.int32), np.ones((1, 16))),
            "'qweight': expected two dims of int32, got int64",
        ),
        (
            lambda: packing.from_awq(np.zeros((32, 2), np.int32), np.zeros((1, 2), np.int32), np.ones((16, 1))),
            r"'scales': expected \(G, N\), \(1, 16\) for qweight \(K, N/8\), got \(16, 1\)",
        ),
        (
            lambda: packing.from_gptq(
                np.zeros((8, 16), np.int32), np.zeros((2, 2), np.int32), np.ones((2, 16)), g_idx=np.arange(64) % 2
            ),
            r"'g_idx': expected k / group for each k, got another order: groups are not consecutive \(desc_act\)",
        ),
    ],
)
def test_what_is_out_of_range_or_of_another_layout_is_refused(call: Any, told: str) -> None:
    with pytest.raises(ArgumentError, match=told):
        call()
