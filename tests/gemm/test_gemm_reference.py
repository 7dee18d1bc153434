"""The reference against plain loops, and a tolerance that a wrong kernel does not pass."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tlhub import problem, testing
from tlhub.specs import Problem
from tlhub_gemm import peers, reference
from tlhub_gemm.contract import GEMM

Array = np.ndarray[Any, Any]
PLAIN = {"alpha": 1.0, "out_scale": 1.0}


def make(m: int, n: int, k: int, dtype: str = "float32", batch: int = 1, **options: object) -> Problem:
    return problem.make(GEMM, {"B": batch, "M": m, "N": n, "K": k}, dtype, options)


def activation(kind: str, x: float) -> float:
    if kind == "relu":
        return max(x, 0.0)
    if kind == "silu":
        return x / (1 + math.exp(-x))
    if kind == "gelu":
        return 0.5 * x * (1 + math.erf(x / math.sqrt(2)))
    if kind == "gelu_tanh":
        return 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return x


@pytest.mark.parametrize("epilogue", ["none", "relu", "gelu", "gelu_tanh", "silu"])
@pytest.mark.parametrize(("trans_a", "trans_b"), [(False, False), (True, True)])
def test_it_is_the_sum_over_k_and_the_epilogue(epilogue: str, trans_a: bool, trans_b: bool) -> None:
    made = make(3, 4, 5, "float64", 2, trans_a=trans_a, trans_b=trans_b, epilogue=epilogue, bias=True, residual=True)
    given = testing.inputs(GEMM, made, seed=3)
    (c,) = reference.reference(made, given, {"alpha": 0.75, "out_scale": 1.0})
    a, b = given["a"], given["b"]
    for z in range(2):
        for i in range(3):
            for j in range(4):
                total = 0.0
                for k in range(5):
                    total += (a[z, k, i] if trans_a else a[z, i, k]) * (b[z, j, k] if trans_b else b[z, k, j])
                want = activation(epilogue, 0.75 * total + given["bias"][j]) + given["residual"][z, i, j]
                assert c[z, i, j] == pytest.approx(want, rel=1e-14, abs=1e-14)


@pytest.mark.parametrize("epilogue", ["none", "silu"])
def test_gates_weigh_their_values_and_the_result_is_scaled(epilogue: str) -> None:
    made = make(2, 6, 3, "float64", 2, epilogue=epilogue, glu=True, bias=True, residual=True)
    given = testing.inputs(GEMM, made, seed=5)
    (c,) = reference.reference(made, given, {"alpha": 0.75, "out_scale": -2.0})
    assert c.shape == (2, 2, 3)
    for z in range(2):
        for i in range(2):
            for j in range(3):
                gate, value = (
                    0.75 * sum(given["a"][z, i, k] * given["b"][z, k, n] for k in range(3)) + given["bias"][n]
                    for n in (j, j + 3)
                )
                want = -2 * (activation(epilogue, gate) * value + given["residual"][z, i, j])
                assert c[z, i, j] == pytest.approx(want, rel=1e-14, abs=1e-14)


def test_a_value_of_another_gate_fails() -> None:
    made = make(16, 32, 64, glu=True, epilogue="silu")
    given = testing.inputs(GEMM, made)
    want = reference.reference(made, given, PLAIN)
    assert ratio(made, given, want[0].astype(np.float32)) <= 1
    turned = dict(given, b=np.roll(given["b"], 16, axis=-1))
    assert ratio(made, given, reference.reference(made, turned, PLAIN)[0]) > 1


def test_results_that_saturate_are_clipped_and_nan_stays() -> None:
    made = make(1, 4, 1, out_dtype="float8_e4m3fn")
    given = {"a": np.ones((1, 1, 1), np.float32), "b": np.array([[[1000.0, -np.inf, np.nan, 3.0]]], np.float32)}
    (c,) = reference.reference(made, given, PLAIN)
    np.testing.assert_array_equal(c, [[[448.0, -448.0, np.nan, 3.0]]])


def test_integer_results_are_rounded_and_saturated() -> None:
    made = make(1, 4, 1, "int8", out_dtype="int8")
    given = {"a": np.array([[[100]]], np.int8), "b": np.array([[[2, -2, 1, 0]]], np.int8)}
    assert reference.reference(made, given, PLAIN)[0].tolist() == [[[127, -128, 100, 0]]]
    given["b"] = np.array([[[1, 3, -1, 0]]], np.int8)
    assert reference.reference(made, given, {"alpha": 0.005, "out_scale": 1.0})[0].tolist() == [[[0, 2, 0, 0]]]


# -- the tolerance ---------------------------------------------------------------------------------


def ratio(made: Problem, given: dict[str, Array], c: Array, alpha: float = 1.0) -> float:
    """Return the largest error of *c* in units of the tolerance."""
    scalars = {"alpha": alpha, "out_scale": 1.0}
    want = reference.reference(made, given, scalars)
    (bound,) = reference.tolerance(made, given, scalars, want)
    return float(np.max(np.abs(c.astype(np.float64) - want[0]) / bound))


def exact(given: dict[str, Array]) -> Array:
    product: Array = given["a"].astype(np.float64) @ given["b"].astype(np.float64)
    return product


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_an_honest_product_passes(dtype: str) -> None:
    made = make(17, 19, 70, dtype)
    given = testing.inputs(GEMM, made)
    total = np.zeros((1, 17, 19), np.float32)
    for k in range(70):
        total += given["a"][:, :, k, None].astype(np.float32) * given["b"][:, None, k].astype(np.float32)
    out = ml_dtypes.bfloat16 if dtype.startswith("float8") or dtype == "bfloat16" else np.dtype(dtype)
    assert ratio(made, given, total.astype(out)) <= 1


def test_a_float16_accumulator_fails() -> None:
    made = make(16, 16, 512, "float16")
    given = testing.inputs(GEMM, made)
    total = np.zeros((1, 16, 16), np.float16)
    for k in range(512):
        total += given["a"][:, :, k, None] * given["b"][:, None, k]
    assert ratio(made, given, total) > 1


def in_float16(a: Array, b: Array, added: int, truncate: bool = False) -> Array:
    """Return a @ b with *added* products at a time added to a sum in float16, as a tensor core does."""
    total: Array = np.zeros((*a.shape[:-1], b.shape[-1]), np.float16)
    with np.errstate(all="ignore"):
        for k in range(0, a.shape[-1], added):
            part = slice(k, k + added)
            exact_sum = total + a[..., part].astype(np.float64) @ b[..., part, :].astype(np.float64)
            total = exact_sum.astype(np.float16)
            if truncate:
                total = np.where(abs(total) > abs(exact_sum), np.nextafter(total, np.float16(0)), total)
    return total


@pytest.mark.parametrize("k", [1, 40, 512])
@pytest.mark.parametrize(("added", "truncate"), [(4, False), (4, True), (8, False), (16, False)])
@pytest.mark.parametrize("scale", [1.0, 1e-4])
def test_a_tensor_core_that_sums_in_float16_passes(k: int, added: int, truncate: bool, scale: float) -> None:
    made = make(32, 32, k, "float16", accum="float16", out_dtype="float32")
    given = testing.inputs(GEMM, made, scale=scale)
    c = in_float16(**given, added=added, truncate=truncate).astype(np.float32)
    assert ratio(made, given, c) <= 1 and ratio(made, given, -3 * c, alpha=-3.0) <= 1


def test_what_is_wrong_fails_beside_sums_in_float16() -> None:
    made = make(32, 32, 144, "float16", accum="float16")
    given = testing.inputs(GEMM, made)
    a, b, c = given["a"], given["b"], in_float16(**given, added=8)
    assert ratio(made, given, c) <= 1
    assert ratio(made, given, c[:, [1, 0, *range(2, 32)]]) > 1
    assert ratio(made, given, in_float16(a[..., :128], b[:, :128], added=8)) > 1
    narrow = np.zeros((1, 32, 32), ml_dtypes.float8_e4m3fn)
    for k in range(0, 144, 8):
        narrow = (narrow + exact({"a": a[..., k : k + 8], "b": b[:, k : k + 8]})).astype(narrow.dtype)
    assert ratio(made, given, narrow) > 1


def test_sums_that_float16_does_not_hold_may_be_infinite_and_no_others() -> None:
    made = make(1, 5, 64, "float16", accum="float16", out_dtype="float32")
    a, b = np.full((1, 1, 64), 8, np.float16), np.full((1, 64, 5), 8, np.float16)
    b[:, :, 0] = 1000  # beyond
    b[:, :48, 1], b[:, 48:, 1] = 200, -400  # on the way, and back
    b[:, :24, 2], b[:, 24:48, 2] = 200, -200  # far, and not beyond
    b[:, 5, 3] = np.inf
    given = {"a": a, "b": b}
    want = reference.reference(made, given, PLAIN)
    (bound,) = reference.tolerance(made, given, PLAIN, want)
    assert (bound == testing.numbers.UNKNOWN).tolist() == [[[True, True, False, False, False]]]
    c = in_float16(**given, added=8)
    assert np.isinf(c[0, 0, [0, 1, 3]]).all() and testing.compare(c, want[0], bound) <= 1
    assert testing.compare(want[0].astype(np.float32), want[0], bound) <= 1
    for place in (2, 3, 4):
        wrong = c.astype(np.float32)
        wrong[..., place] = -np.inf
        with pytest.raises(AssertionError, match=f"{place}] is -inf"):
            testing.compare(wrong, want[0], bound)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_truncating_conversion_fails(dtype: str) -> None:
    made = make(32, 32, 64, dtype)
    given = testing.inputs(GEMM, made)
    bits = exact(given).astype(np.float32).view(np.uint32)
    kept = np.uint32(0xFFFF0000 if dtype == "bfloat16" else 0xFFFFE000)
    assert ratio(made, given, (bits & kept).view(np.float32)) > 1


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
def test_a_lost_tail_of_k_fails(dtype: str) -> None:
    made = make(16, 16, 129, dtype)
    given = testing.inputs(GEMM, made)
    lost = given["a"][:, :, :128].astype(np.float64) @ given["b"][:, :128].astype(np.float64)
    assert ratio(made, given, exact(given)) <= 1e-3 or dtype != "int8"
    assert ratio(made, given, lost) > 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_swapped_row_fails(dtype: str) -> None:
    made = make(16, 16, 64, dtype)
    given = testing.inputs(GEMM, made)
    c = exact(given)
    c[:, [3, 4]] = c[:, [4, 3]]
    assert ratio(made, given, c) > 1


@pytest.mark.parametrize("epilogue", ["relu", "gelu", "gelu_tanh", "silu"])
def test_the_bound_goes_through_the_epilogue(epilogue: str) -> None:
    made = make(16, 16, 64, epilogue=epilogue, bias=True, residual=True)
    given = testing.inputs(GEMM, made)
    want = reference.reference(made, given, PLAIN)
    (bound,) = reference.tolerance(made, given, PLAIN, want)
    assert ratio(made, given, want[0].astype(np.float32)) <= 1
    # and stays of the size of what float32 can do
    assert float(bound.max()) < 1e-3
    without = dict(given, residual=np.zeros_like(given["residual"]))
    assert ratio(made, given, reference.reference(made, without, PLAIN)[0]) > 1


def test_of_an_empty_sum_only_the_epilogue_may_err() -> None:
    made = make(4, 4, 0)
    given = testing.inputs(GEMM, made)
    want = reference.reference(made, given, PLAIN)
    (bound,) = reference.tolerance(made, given, PLAIN, want)
    assert not want[0].any() and float(bound.max()) < 1e-44


def test_an_exact_integer_may_not_be_off_by_one() -> None:
    made = make(4, 4, 9, "int8")
    given = testing.inputs(GEMM, made)
    want = reference.reference(made, given, PLAIN)
    (bound,) = reference.tolerance(made, given, PLAIN, want)
    assert float(bound.max()) < 1


def test_an_integer_next_to_a_half_may_fall_to_either_side() -> None:
    made = make(1, 1, 1, "int8", out_dtype="int8")
    given = {"a": np.array([[[5]]], np.int8), "b": np.array([[[1]]], np.int8)}
    want = reference.reference(made, given, {"alpha": 0.1, "out_scale": 1.0})
    (bound,) = reference.tolerance(made, given, {"alpha": 0.1, "out_scale": 1.0}, want)
    assert 1 <= float(bound.max()) < 2


def test_numpy_is_the_peer_where_it_has_blas() -> None:
    made = make(5, 6, 7, trans_a=True, trans_b=True)
    given = testing.inputs(GEMM, made)
    run = peers.numpy_product(made, given, PLAIN)
    (want,) = reference.reference(made, given, PLAIN)
    np.testing.assert_allclose(run(), want[0], rtol=1e-4, atol=1e-5)  # type: ignore[arg-type]
    for other, told in (
        (make(5, 6, 7, "float16"), "float16 to float16"),
        (make(5, 6, 7, out_dtype="int8"), "32 to int8"),
    ):
        with pytest.raises(NotImplementedError, match=f"not .*{told}"):
            peers.numpy_product(other, given, PLAIN)
