"""The reference against plain loops, and a tolerance that a wrong kernel does not pass."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from tlhub import problem, testing
from tlhub.specs import Problem
from tlhub_attention.contracts.forward import ATTENTION
from tlhub_attention.references.forward import reference, tolerance
from tlhub_attention.references.rows import weigh

pytestmark = pytest.mark.light

Array = np.ndarray[Any, Any]


def make(dtype: str = "float32", **given: Any) -> Problem:
    dims = {"B": 1, "S": 4, "H": 1, "D": 8} | {k: v for k, v in given.items() if k[0].isupper()}
    return problem.make(ATTENTION, dims, dtype, {k: v for k, v in given.items() if k[0].islower()})


def scalars(made: Problem, **given: float) -> dict[str, float]:
    return testing.default_scalars(ATTENTION, made, given)


def plain(made: Problem, arrays: dict[str, Array], scale: float, window: int, softcap: float) -> tuple[Array, Array]:
    """Attention, one query, head, key and channel at a time."""
    dim = made.dim
    o = np.zeros((dim["B"], dim["S"], dim["H"], dim["D_v"]))
    lse = np.full((dim["B"], dim["H"], dim["S"]), -np.inf)
    for b, i, h in np.ndindex(o.shape[:3]):
        g = h // (dim["H"] // dim["H_kv"])  # type: ignore[operator]
        place = i + dim["S_kv"] - dim["S"]  # type: ignore[operator]
        weights: dict[int, float] = {}
        for j in range(dim["S_kv"]):  # type: ignore[arg-type]
            if (made.option["causal"] or window) and j > place:
                continue
            if window and j <= place - window:
                continue
            logit = scale * sum(
                float(x) * float(y) for x, y in zip(arrays["q"][b, i, h], arrays["k"][b, j, g], strict=True)
            )
            if softcap:
                logit = softcap * math.tanh(logit / softcap)
            if "slopes" in arrays:
                logit -= float(arrays["slopes"][h]) * abs(place - j)
            weights[j] = math.exp(logit)
        if weights:
            total = sum(weights.values())
            lse[b, h, i] = math.log(total)
            o[b, i, h] = sum(w / total * arrays["v"][b, j, g].astype(float) for j, w in weights.items())
    return o, lse


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("window", "softcap", "scale"), [(0, 0.0, 0.3), (2, 0.0, -0.7), (0, 1.5, 1.0), (3, 0.4, 0.3)])
@pytest.mark.parametrize(("queries", "keys"), [(4, 4), (2, 5), (5, 2), (3, 0)])
def test_it_is_softmax_of_the_masked_logits(
    causal: bool, window: int, softcap: float, scale: float, queries: int, keys: int
) -> None:
    made = make("float64", B=2, S=queries, S_kv=keys, H=4, H_kv=2, D=3, D_v=5, causal=causal, lse=True)
    arrays = testing.inputs(ATTENTION, made, seed=1)
    o, lse = reference(made, arrays, {"scale": scale, "window": window, "softcap": softcap})
    want_o, want_lse = plain(made, arrays, scale, window, softcap)
    np.testing.assert_allclose(o, want_o, rtol=1e-13, atol=1e-14)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("softcap", [0.0, -0.4])
def test_alibi_adds_what_falls_with_the_distance_after_the_soft_cap(causal: bool, softcap: float) -> None:
    made = make("float64", B=2, S=4, S_kv=6, H=4, H_kv=2, D=3, causal=causal, lse=True, alibi=True)
    arrays = testing.inputs(ATTENTION, made, seed=1)
    assert arrays["slopes"].tolist() == [2**-2, 2**-4, 2**-6, 2**-8]
    o, lse = reference(made, arrays, {"scale": 0.3, "window": 0, "softcap": softcap})
    want_o, want_lse = plain(made, arrays, 0.3, 0, softcap)
    np.testing.assert_allclose(o, want_o, rtol=1e-13, atol=1e-14)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-13, atol=1e-14)


def test_factors_of_float8_multiply_what_they_belong_to() -> None:
    shape = {"B": 2, "S": 4, "S_kv": 6, "H": 4, "H_kv": 2, "D": 3}
    made = make("float8_e4m3fn", **shape, scaled=True)
    arrays = testing.inputs(ATTENTION, made, seed=1)
    factors = {n: arrays[f"{n}_scale"].astype(np.float64) for n in "qkv"}
    assert all((f > 0).all() and len(np.unique(f)) > 1 for f in factors.values())
    wide = {n: arrays[n].astype(np.float64) * factors[n][:, None, :, None] for n in "qkv"}
    (o,) = reference(made, arrays, scalars(made))
    (want,) = reference(make("float64", **shape), wide, scalars(made))
    np.testing.assert_array_equal(o, want)
    (bound,), (narrow,) = (
        tolerance(m, x, scalars(m), (o,)) for m, x in ((made, arrays), (make("float64", **shape), wide))
    )
    assert (bound > narrow).all()


def test_logits_of_ten_thousand_do_not_overflow() -> None:
    made = make(D=1, S=1, S_kv=2, D_v=1, lse=True)
    arrays = {"q": np.full((1, 1, 1, 1), 1e4), "k": np.array([1.0, 0.9999]), "v": np.array([1.0, 2.0])}
    arrays = {n: a.reshape(1, -1, 1, 1) for n, a in arrays.items()}
    o, lse = reference(made, arrays, {"scale": 1.0, "window": 0, "softcap": 0.0})
    assert o[0, 0, 0, 0] == pytest.approx(1 + 1 / (1 + math.e), rel=1e-12)
    assert lse[0, 0, 0] == pytest.approx(1e4 + math.log1p(math.exp(-1)), rel=1e-15)


def test_a_key_that_is_not_seen_may_hold_anything() -> None:
    made = make("float64", S=3, causal=True)
    arrays = testing.inputs(ATTENTION, made)
    (want,) = reference(made, arrays, scalars(made))
    for name in "kv":
        spoilt = {n: a.copy() for n, a in arrays.items()}
        spoilt[name][0, 2] = np.nan
        (o,) = reference(made, spoilt, scalars(made))
        np.testing.assert_allclose(o[0, :2], want[0, :2], rtol=1e-12)
        assert np.isnan(o[0, 2]).all()


# -- the tolerance ---------------------------------------------------------------------------------


def long(dtype: str, **options: Any) -> tuple[Problem, dict[str, Array], Array, Array]:
    """A problem whose sums are long, its data, reference and bound."""
    made = make(dtype, S=24, S_kv=500, D=64, **options)
    arrays = testing.inputs(ATTENTION, made, seed=5)
    (want,) = reference(made, arrays, scalars(made))
    (bound,) = tolerance(made, arrays, scalars(made), (want,))
    return made, arrays, want, bound


def passes(o: Array, want: Array, bound: Array) -> bool:
    try:
        return testing.compare(o, want, bound) <= 1
    except AssertionError:
        return False


def parts(arrays: dict[str, Array], scale: float, dtype: Any) -> tuple[Array, Array]:
    """Weights before the division, and the values, as *dtype*."""
    q, k, v = (arrays[n][0, :, 0].astype(dtype) for n in "qkv")
    logits = (q @ k.T).astype(np.float64) * scale
    return np.exp(logits - logits.max(axis=1, keepdims=True)), v


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_a_float32_accumulator_passes(dtype: str) -> None:
    _, arrays, want, bound = long(dtype)
    weights, v = parts(arrays, 1 / 8, np.float32)
    weights = weights.astype(np.float32)
    o = (weights @ v) / weights.sum(axis=1, dtype=np.float32, keepdims=True)
    assert passes(o.astype(arrays["v"].dtype)[None, :, None], want, bound)


def test_weights_in_the_dtype_of_v_pass() -> None:
    _, arrays, want, bound = long("float16")
    weights, v = parts(arrays, 1 / 8, np.float32)
    o = (weights.astype(np.float16).astype(np.float32) @ v) / weights.sum(axis=1, keepdims=True)
    assert passes(o.astype(np.float16)[None, :, None], want, bound)


def test_a_float16_accumulator_fails() -> None:
    _, arrays, want, bound = long("float16")
    weights, v = parts(arrays, 1 / 8, np.float32)
    total = np.zeros((len(weights), v.shape[1]), np.float16)
    for j in range(len(v)):
        total = (total + weights[:, j : j + 1].astype(np.float16) * v[j].astype(np.float16)).astype(np.float16)
    o = total.astype(np.float64) / weights.sum(axis=1, keepdims=True)
    assert not passes(o.astype(np.float16)[None, :, None], want, bound)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("factor", [0.97, 1.03])
def test_a_wrong_scale_fails(dtype: str, factor: float) -> None:
    made, arrays, want, bound = long(dtype)
    (o,) = reference(made, arrays, scalars(made, scale=factor / 8))
    assert not passes(o.astype(arrays["v"].dtype), want, bound)


@pytest.mark.parametrize("window", [19, 21])
def test_a_window_off_by_one_fails(window: int) -> None:
    made, arrays, *_ = long("bfloat16")
    (want,) = reference(made, arrays, scalars(made, window=20))
    (bound,) = tolerance(made, arrays, scalars(made, window=20), (want,))
    (o,) = reference(made, arrays, scalars(made, window=window))
    assert not passes(o.astype(arrays["v"].dtype), want, bound)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_truncating_conversion_fails(dtype: str) -> None:
    made = make(dtype, S=64, S_kv=1, D=8, D_v=64, H=1, out_dtype=dtype)
    arrays = testing.inputs(ATTENTION, made)
    values = np.linspace(1, 2, 64)  # halfway between and near the next number of the dtype
    bits = values.astype(np.float32).view(np.uint32)
    cut = (bits & np.uint32(0xFFFF0000 if dtype == "bfloat16" else 0xFFFFE000)).view(np.float32)
    want = np.broadcast_to(values, (1, 64, 1, 64))
    alone = tolerance(made, {**arrays, "v": np.zeros_like(arrays["v"])}, scalars(made), (want,))[0]
    assert not passes(np.broadcast_to(cut, want.shape), want, alone)
    assert passes(np.broadcast_to(values.astype(arrays["v"].dtype), want.shape), want, alone)


def test_a_lost_key_a_swapped_row_and_a_lost_channel_fail() -> None:
    made, arrays, want, bound = long("bfloat16")
    fewer = make("bfloat16", S=24, S_kv=499, D=64)
    (o,) = reference(fewer, {n: a[:, :499] if n != "q" else a for n, a in arrays.items()}, scalars(made))
    assert not passes(o.astype(arrays["v"].dtype), want, bound)
    assert not passes(want[:, ::-1].astype(arrays["v"].dtype), want, bound)
    narrow = {n: a[..., :63] if n != "v" else a for n, a in arrays.items()}
    (o,) = reference(make("bfloat16", S=24, S_kv=500, D=63, D_v=64), narrow, scalars(made))
    assert not passes(o.astype(arrays["v"].dtype), want, bound)


def test_an_lse_of_another_base_fails() -> None:
    made = make("float32", S=5, S_kv=9, lse=True)
    arrays = testing.inputs(ATTENTION, made)
    outputs = reference(made, arrays, scalars(made))
    bounds = tolerance(made, arrays, scalars(made), outputs)
    assert passes(outputs[1].astype(np.float32), outputs[1], bounds[1])
    assert not passes(outputs[1] / math.log(2), outputs[1], bounds[1])


@pytest.mark.parametrize("seed", range(5))
def test_a_weighed_sum_has_what_its_terms_have_and_none_of_what_takes_no_part(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(100):
        rows, keys, channels = rng.integers(1, 7, 3)
        weights, x = rng.standard_normal((rows, keys)), rng.standard_normal((keys, channels))
        live = rng.random((rows, keys)) < 0.7
        for array in (weights, x):
            for value in (np.nan, np.inf, -np.inf, 0, 0):
                if rng.random() < 0.6:
                    array[tuple(rng.integers(array.shape))] = value
        expected = np.zeros((rows, channels))
        with np.errstate(all="ignore"):
            for i, j in np.argwhere(live):
                expected[i] += weights[i, j] * x[j]
            found = weigh(np.where(live, weights, 0), live, x)
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)
