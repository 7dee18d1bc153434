"""The backward's contract, its reference against numerical derivatives, a tolerance that a wrong kernel fails."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tlhub import problem, testing
from tlhub.errors import ArgumentError
from tlhub.specs import Problem
from tlhub_attention.contracts.backward import ATTENTION_BWD, flops
from tlhub_attention.contracts.forward import ATTENTION
from tlhub_attention.contracts.forward import flops as forward_flops
from tlhub_attention.references.backward import prepare, reference, tolerance
from tlhub_attention.references.forward import attend

pytestmark = pytest.mark.light

Array = np.ndarray[Any, Any]


def make(dtype: Any = "float32", **given: Any) -> Problem:
    dims = {"B": 1, "S": 4, "H": 1, "D": 8} | {k: v for k, v in given.items() if k[0].isupper()}
    return problem.make(ATTENTION_BWD, dims, dtype, {k: v for k, v in given.items() if k[0].islower()})


def scalars(made: Problem, **given: float) -> dict[str, float]:
    return testing.default_scalars(ATTENTION_BWD, made, given)


def data(made: Problem, seed: int = 0, **given: float) -> dict[str, Array]:
    return testing.inputs(ATTENTION_BWD, made, seed, scalars=given)


# -- the contract ----------------------------------------------------------------------------------


def test_every_gradient_is_like_its_input() -> None:
    mixed = {"q": "float32", "k": "bfloat16", "v": "float16", "o": "float32", "dout": "float16"}
    made = make(mixed, H=4, H_kv=2, S_kv=7, D_v=3)
    sign = problem.signature(ATTENTION_BWD, made)
    inputs = {t.name: (t.extents, t.dtype) for t in sign.inputs}
    assert [t.name for t in sign.inputs] == ["dout", "q", "k", "v", "o", "lse"]
    assert {t.name: (t.extents, t.dtype) for t in sign.outputs} == {f"d{n}": inputs[n] for n in "qkv"}
    assert inputs["dout"][0] == inputs["o"][0] == (1, 4, 4, 3)
    assert inputs["lse"] == ((1, 4, 4), "float32")


def test_it_refuses_what_the_forward_refuses() -> None:
    with pytest.raises(ArgumentError, match="H=3 .*H_kv=2"):
        make(H=3, H_kv=2)
    with pytest.raises(ArgumentError, match="float64 does not mix"):
        make({"dout": "float64", "q": "float64", "k": "float64", "v": "float64", "o": "float32"})
    with pytest.raises(ArgumentError, match="float8_e5m2"):
        make("float8_e5m2")


def test_it_is_five_products_where_the_forward_is_two() -> None:
    dims = {"B": 2, "S": 3, "H": 5, "D": 7, "H_kv": 1, "S_kv": 11, "D_v": 7}
    for more in ({}, {"causal": True}):
        assert flops({**dims, **more}) == forward_flops({**dims, **more}) / 2 * 5


def test_random_inputs_are_those_of_a_forward() -> None:
    made = make("bfloat16", S=9, S_kv=3, causal=True)
    arrays = data(made, window=2, softcap=0.7)
    o, lse = attend(made, arrays, scalars(made, window=2, softcap=0.7))
    assert arrays["lse"].dtype == np.float32 and (arrays["lse"] == lse.astype(np.float32)).all()
    assert (arrays["o"] == o.astype(arrays["o"].dtype)).all() and np.isinf(arrays["lse"]).any()
    again = {n: a for n, a in arrays.items() if n in "qkv"}
    assert (prepare(made, again, scalars(made, window=2, softcap=0.7))["o"] == o).all()


# -- the reference ---------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("window", "softcap", "scale"), [(0, 0.0, 0.3), (2, 0.0, -0.7), (0, 1.5, 1.0), (3, -0.4, 0.3)])
@pytest.mark.parametrize(("queries", "keys"), [(4, 4), (2, 5), (5, 2), (3, 0), (0, 3)])
@pytest.mark.parametrize("alibi", [False, True])
def test_it_is_the_numerical_derivative(
    causal: bool, window: int, softcap: float, scale: float, queries: int, keys: int, alibi: bool
) -> None:
    made = make("float64", B=2, S=queries, S_kv=keys, H=4, H_kv=2, D=3, D_v=5, causal=causal, alibi=alibi)
    given = {"scale": scale, "window": window, "softcap": softcap}
    arrays = data(made, 1, **given)
    arrays |= prepare(made, arrays, given)  # an lse that is not rounded
    step = 1e-6
    for name, gradient in zip("qkv", reference(made, arrays, given), strict=True):
        assert gradient.shape == arrays[name].shape
        for place in list(np.ndindex(arrays[name].shape))[:: max(1, arrays[name].size // 12)]:
            ends = []
            for sign in (1, -1):
                moved = {**arrays, name: arrays[name].copy()}
                moved[name][place] += sign * step
                ends.append((arrays["dout"] * attend(made, moved, given)[0]).sum())
            assert gradient[place] == pytest.approx((ends[0] - ends[1]) / (2 * step), rel=1e-6, abs=1e-8)


@pytest.mark.parametrize("name", ["dout", "q", "k", "v"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_pair_that_is_hidden_takes_no_part(name: str, value: float) -> None:
    """Under a causal mask the last key meets the last query alone, and the first query the first key alone."""
    made = make("float64", S=3, causal=True)
    arrays = data(made)
    want = reference(made, arrays, scalars(made))
    spoilt = {n: a.copy() for n, a in arrays.items()}
    hidden = 2 if name in "kv" else 0
    spoilt[name][0, hidden] = value
    dq, dk, dv = reference(made, spoilt, scalars(made))
    whole = slice(0, 2) if name in "kv" else slice(1, 3)
    assert np.allclose(dq[0, whole], want[0][0, whole], rtol=1e-12)
    for got, old in ((dk, want[1]), (dv, want[2])):
        assert np.allclose(got[0, whole], old[0, whole], rtol=1e-12)
    bounds = tolerance(made, spoilt, scalars(made), (dq, dk, dv))
    assert all(np.isfinite(bound[0, whole]).all() for bound in bounds)


def test_a_query_that_sees_no_key_gives_0_whatever_it_holds() -> None:
    made = make("float64", S=4, S_kv=2, causal=True)
    arrays = data(made)
    want = reference(made, arrays, scalars(made))
    for name in ("dout", "q", "o"):
        arrays[name][0, :2] = np.nan
    got = reference(made, arrays, scalars(made))
    assert (got[0][0, :2] == 0).all()
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-12)


# -- the tolerance ---------------------------------------------------------------------------------


def long(dtype: str, **options: Any) -> tuple[Problem, dict[str, Array], tuple[Array, ...], tuple[Array, ...]]:
    """A problem whose sums are long, its data, reference and bounds."""
    made = make(dtype, **({"S": 300, "S_kv": 500, "D": 64, "H": 2, "H_kv": 1} | options))
    arrays = data(made, seed=5)
    want = reference(made, arrays, scalars(made))
    return made, arrays, want, tolerance(made, arrays, scalars(made), want)


def worst(got: Any, want: tuple[Array, ...], bounds: tuple[Array, ...]) -> list[float]:
    """Return the worst errors of dq, dk and dv in units of their bounds."""
    return [float((np.abs(g - w) / b).max()) for g, w, b in zip(got, want, bounds, strict=True)]


def tensor_cores(arrays: dict[str, Array]) -> list[Array]:
    """The gradients by products of the inputs' dtype, added up in float32."""
    x = {n: a.astype(np.float32) for n, a in arrays.items()}
    kind = arrays["q"].dtype
    total = [np.zeros(x[n].shape, np.float32) for n in "qkv"]
    k, v = x["k"][0, :, 0], x["v"][0, :, 0]
    for h in range(x["q"].shape[2]):
        q, dout, o = (x[n][0, :, h] for n in ("q", "dout", "o"))
        weights = np.exp(q @ k.T / np.float32(8) - x["lse"][0, h, :, None])
        ds = weights * (dout @ v.T - (dout * o).sum(axis=1, keepdims=True))
        weights, ds = (w.astype(kind).astype(np.float32) for w in (weights, ds))
        total[0][0, :, h] = ds @ k / 8
        total[1][0, :, 0] += ds.T @ q / 8
        total[2][0, :, 0] += weights.T @ dout
    return [t.astype(arrays[n].dtype).astype(np.float64) for t, n in zip(total, "qkv", strict=True)]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_products_of_tensor_cores_pass(dtype: str) -> None:
    _, arrays, want, bounds = long(dtype)
    assert max(worst(tensor_cores(arrays), want, bounds)) < 1


def test_a_float16_accumulator_fails() -> None:
    made = make("float16", S=4000, S_kv=1, D=8)
    arrays = data(made)
    arrays["dout"] = np.abs(arrays["dout"])  # each query's weight of the only key is 1: dv is their sum
    want = reference(made, arrays, scalars(made))
    total = np.zeros(8, np.float16)
    for row in arrays["dout"][0, :, 0]:
        total += row
    assert worst([total[None, None, None]], want[2:], tolerance(made, arrays, scalars(made), want)[2:])[0] > 1


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_a_wrong_scale_a_lost_key_and_a_swapped_row_fail(dtype: str) -> None:
    made, arrays, want, bounds = long(dtype, S_kv=100)
    assert min(worst([x * (1.05 if dtype == "bfloat16" else 1.01) for x in want], want, bounds)) > 1
    assert min(worst([x[:, ::-1] for x in want], want, bounds)) > 1
    fewer = {n: a[:, :99] if n in "kv" else a for n, a in arrays.items()}
    lost = make(dtype, **{**made.dim, "S_kv": 99})
    assert worst(reference(lost, fewer, scalars(lost))[:1], want[:1], bounds[:1])[0] > 1


def test_the_lost_mean_and_the_lost_slope_of_the_soft_cap_fail() -> None:
    made, arrays, want, bounds = long("bfloat16", S_kv=100)
    flat = reference(made, {**arrays, "o": np.zeros_like(arrays["o"])}, scalars(made))
    assert min(worst(flat[:2], want[:2], bounds[:2])) > 1
    given = scalars(made, softcap=2.0)
    arrays |= {n: x.astype(arrays[n].dtype) for n, x in prepare(made, arrays, given).items()}
    want = reference(made, arrays, given)
    bounds = tolerance(made, arrays, given, want)
    # with logits so small that the cap does nothing to them, and its slope is 1
    unbent = reference(made, arrays, {**given, "softcap": 0.0})
    assert min(worst(unbent, want, bounds)) > 1
    assert ATTENTION.scalars == ATTENTION_BWD.scalars
