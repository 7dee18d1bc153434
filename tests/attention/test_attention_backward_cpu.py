"""The CPU kernels of the backward through ``tlhub.get``, against float64 within the contract's tolerance."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from attention_lab import MANY, SPOILT, SYMBOLIC, Array, column, dims, layout, spoil
from hypothesis import given, settings
from hypothesis import strategies as st

import tlhub
from tlhub import testing
from tlhub.errors import ArgumentError
from tlhub_attention.contracts.backward import ATTENTION_BWD
from tlhub_attention.references.backward import prepare

VARIANTS: list[tuple[Any, dict[str, Any]]] = [
    ("float32", {}),
    ("float32", {"causal": True}),
    ("float64", {"deterministic": True}),
    ("bfloat16", {"alibi": True}),
    ({"dout": "float16", "q": "float32", "k": "bfloat16", "v": "float16", "o": "float32"}, {"causal": True}),
]


def get(dtype: Any = "float32", **options: Any) -> Any:
    return tlhub.get("attention_bwd", SYMBOLIC, dtype, device="cpu", **options)


def data(kernel: Any, extents: dict[str, int], seed: int = 0, **scalars: float) -> dict[str, Array]:
    problem = testing.numbers.bind(kernel.problem, extents)
    return testing.inputs(ATTENTION_BWD, problem, seed, scalars=scalars)


@pytest.mark.tvm
@pytest.mark.parametrize(("dtype", "options"), VARIANTS, ids=[f"{d}-{o}" for d, o in VARIANTS])
@settings(MANY, max_examples=12)
@given(data_=st.data())
def test_any_size_stride_and_scalar_is_within_the_tolerance(dtype: Any, options: dict[str, Any], data_: Any) -> None:
    kernel, extents = get(dtype, **options), data_.draw(dims())
    scalars = {
        "scale": data_.draw(st.sampled_from([1 / math.sqrt(max(extents["D"], 1)), 0.5, -0.25, 0.0])),
        "window": data_.draw(st.sampled_from([0, 0, 1, 2, 7, 96, 1000, 2**63 - 1])),
        "softcap": data_.draw(st.sampled_from([0.0, 0.0, 0.3, 30.0, -2.0])),
    }
    arrays = data(kernel, extents, data_.draw(st.integers(0, 99)), **scalars)
    arrays = {n: layout(data_.draw, a) if a.ndim == 4 else np.asfortranarray(a) for n, a in arrays.items()}
    assert testing.check(kernel, dims=extents, arrays=arrays, scalars=scalars) <= 1


def test_outputs_of_any_stride_are_written_and_nothing_else_is() -> None:
    kernel, extents = get(causal=True), {"B": 2, "S": 30, "H": 4, "D": 9, "H_kv": 2, "S_kv": 41, "D_v": 17}
    arrays = data(kernel, extents)
    want = kernel(*arrays.values())
    rooms = [np.full((w.shape[2], w.shape[0], 2 * w.shape[3] + 1, w.shape[1] + 2), -7, np.float32) for w in want]
    out = tuple(room[:, :, 1::2, 1:-1].transpose(1, 3, 0, 2)[:, ::-1] for room in rooms)
    kernel(*arrays.values(), out=out)
    for got, old, room in zip(out, want, rooms, strict=True):
        np.testing.assert_array_equal(got, old)
        got[...] = -7
        assert (room == -7).all()


@pytest.mark.parametrize("threads", [2, 3, 7])
def test_every_number_of_threads_gives_the_same_bits(threads: int) -> None:
    kernel = get("float32")
    arrays = data(kernel, {"B": 1, "S": 450, "H": 6, "D": 20, "H_kv": 3, "S_kv": 500, "D_v": 20})
    try:
        tlhub.set_num_threads(1)
        want = kernel(*arrays.values())
        tlhub.set_num_threads(threads)
        for _ in range(3):
            for got, old in zip(kernel(*arrays.values()), want, strict=True):
                np.testing.assert_array_equal(got, old)
    finally:
        tlhub.set_num_threads(None)


# -- exact cases -----------------------------------------------------------------------------------


def backward(kernel: Any, dout: Array, q: Array, k: Array, v: Array, **scalars: float) -> tuple[Array, ...]:
    """Return dq, dk and dv with the o and lse of the float64 forward."""
    b, s, h, d = q.shape
    extents = {"B": b, "S": s, "H": h, "D": d, "H_kv": k.shape[2], "S_kv": k.shape[1], "D_v": v.shape[3]}
    problem = testing.numbers.bind(kernel.problem, extents)
    values = testing.default_scalars(ATTENTION_BWD, problem, scalars)
    found = prepare(problem, {"q": q, "k": k, "v": v}, values)
    result: tuple[Array, ...] = kernel(
        dout, q, k, v, found["o"].astype(q.dtype), found["lse"].astype(np.float32), **scalars
    )
    return result


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_lengths_off_the_grid_of_tiles(dtype: Any) -> None:  # A38
    q, ones = np.zeros((1, 296, 2, 96), dtype), np.ones((1, 296, 2, 96), dtype)
    options = {"deterministic": True} if dtype == np.float64 else {}
    kernel = get(np.dtype(dtype).name, **options)
    dq, dk, dv = backward(kernel, ones, q, q, ones)
    np.testing.assert_allclose(dv.astype(np.float64), 1, rtol=1e-3 if dtype == np.float16 else 1e-5)
    assert (dq == 0).all() and (dk == 0).all()
    extents = {"B": 1, "S": 296, "H": 2, "D": 96, "H_kv": 2, "S_kv": 296, "D_v": 96}
    assert testing.check(kernel, dims=extents) <= 1


def test_each_array_has_its_own_strides() -> None:  # A37
    room = np.zeros((1, 8, 1, 16), np.float32)
    room[0, :, 0, 0] = [0, 9, 1, 9, 2, 9, 3, 9]
    k, v, q = room[:, ::2], column(range(4)), column([math.log(2)], width=16)
    dq, dk, dv = backward(get(), column([1.0]), q, k, v, scale=1.0)
    weights = np.array([1, 2, 4, 8]) / 15
    pull = weights * (np.arange(4) - 34 / 15)
    np.testing.assert_allclose(dv.ravel(), weights, rtol=1e-5)
    np.testing.assert_allclose(dk[0, :, 0, 0], pull * math.log(2), rtol=1e-5)
    assert dq[0, 0, 0, 0] == pytest.approx((pull * np.arange(4)).sum(), rel=1e-5)
    for got, same in zip((dq, dk, dv), backward(get(), column([1.0]), q, k.copy(), v, scale=1.0), strict=True):
        np.testing.assert_array_equal(got, same)


def test_queries_that_see_no_key_give_0_and_take_no_part() -> None:
    kernel = get(causal=True)
    extents = {"B": 1, "S": 40, "H": 2, "D": 5, "H_kv": 1, "S_kv": 23, "D_v": 6}
    arrays = data(kernel, extents)
    want = kernel(*arrays.values())
    assert (want[0][:, :17] == 0).all() and (want[0][:, 18:] != 0).all()  # the gradient of a softmax of one is 0
    for name in ("dout", "q", "o"):
        arrays[name][:, :17] = np.nan
    for got, old in zip(kernel(*arrays.values()), want, strict=True):
        np.testing.assert_array_equal(got, old)


def test_a_query_whose_lse_is_minus_infinity_takes_no_part() -> None:
    kernel = get()
    arrays = data(kernel, {"B": 1, "S": 9, "H": 1, "D": 5, "H_kv": 1, "S_kv": 23, "D_v": 6})
    rest = kernel(*(a[:, 1:] if a.ndim == 4 and a.shape[1] == 9 else a for n, a in arrays.items() if n != "lse"),
                  arrays["lse"][..., 1:])  # fmt: skip
    arrays["q"][:, 0], arrays["dout"][:, 0], arrays["lse"][..., 0] = np.nan, np.inf, -np.inf
    dq, dk, dv = kernel(*arrays.values())
    assert (dq[:, 0] == 0).all()
    for got, want in zip((dq[:, 1:], dk, dv), rest, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)


def test_logits_of_ten_thousand_are_right() -> None:
    q, k, v, dout = column([1e4]), column([1, 0.9999]), column([1, 2]), column([1.0])
    dq, dk, dv = backward(get(), dout, q, k, v, scale=1.0)
    x = (np.float64(np.float32(0.9999)) - 1) * 1e4
    p = 1 / (1 + math.exp(-x))
    assert dv.ravel().tolist() == pytest.approx([1 - p, p], rel=5e-3)
    assert dk.ravel().tolist() == pytest.approx([-1e4 * p * (1 - p), 1e4 * p * (1 - p)], rel=5e-3)


@pytest.mark.parametrize("name", ["dout", "q", "k", "v"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("window", [0, 5])
def test_what_a_mask_hides_may_hold_anything(name: str, value: float, window: int) -> None:
    kernel = get(causal=True)
    extents = {"B": 1, "S": 120, "H": 2, "D": 8, "H_kv": 1, "S_kv": 130, "D_v": 7}
    arrays = data(kernel, extents, window=window)
    for j in (10, 20, 95, 96):
        arrays[name][0, j] = value
    with np.errstate(invalid="ignore"):
        assert testing.check(kernel, dims=extents, arrays=arrays, scalars={"window": window}) <= 1


@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.parametrize(("name", "value"), [*SPOILT, ("dout", np.nan), ("dout", np.inf)])
def test_what_is_no_number_spoils_what_it_does_in_the_reference(name: str, value: float, softcap: float) -> None:
    kernel, extents = get(causal=True), {"B": 1, "S": 120, "H": 2, "D": 8, "H_kv": 1, "S_kv": 130, "D_v": 7}
    arrays = data(kernel, extents)
    spoil(arrays, name, value)
    scalars = {"scale": 0.5, "window": 0, "softcap": softcap}
    problem = testing.numbers.bind(kernel.problem, extents)
    arrays |= {n: x.astype(np.float32) for n, x in prepare(problem, arrays, scalars).items()}
    assert testing.check(kernel, dims=extents, arrays=arrays, scalars=scalars) <= 1


def test_old_contents_of_an_output_never_matter() -> None:
    kernel = get()
    arrays = data(kernel, {"B": 1, "S": 3, "H": 1, "D": 1, "H_kv": 1, "S_kv": 3, "D_v": 1})
    out = tuple(np.full_like(arrays[n], np.nan) for n in "qkv")
    kernel(*arrays.values(), out=out)
    assert all(np.isfinite(x).all() for x in out)


# -- what is not served ----------------------------------------------------------------------------


def test_heads_that_do_not_divide_are_refused_before_anything_is_written() -> None:
    q, k, lse = np.ones((1, 3, 3, 8), np.float32), np.ones((1, 3, 2, 8), np.float32), np.ones((1, 3, 3), np.float32)
    out = tuple(np.full_like(x, 7) for x in (q, k, k))
    with pytest.raises(ArgumentError, match="attention_bwd: argument 'k': expected heads"):
        get()(q, q, k, k, q, lse, out=out)
    assert all((x == 7).all() for x in out)


def test_an_output_that_overlaps_an_input_is_refused() -> None:
    q, lse = np.ones((1, 4, 1, 8), np.float32), np.ones((1, 1, 4), np.float32)
    with pytest.raises(ArgumentError, match="argument 'dk'"):
        get()(q, q, q, q, q, lse, out=(np.empty_like(q), q, np.empty_like(q)))


@pytest.mark.parametrize(("name", "shape"), [("lse", (1, 4, 1)), ("o", (1, 4, 1, 7)), ("dout", (1, 5, 1, 8))])
def test_an_argument_of_another_shape_is_refused(name: str, shape: tuple[int, ...]) -> None:
    x = np.ones((1, 4, 1, 8), np.float32)
    arrays = dict.fromkeys(("dout", "q", "k", "v", "o"), x) | {"lse": np.ones((1, 1, 4), np.float32)}
    with pytest.raises(ArgumentError, match="expected shape"):
        get()(*{**arrays, name: np.ones(shape, np.float32)}.values())


# -- memory ----------------------------------------------------------------------------------------

_MEMORY = """
import resource, sys
sys.modules["torch"] = None  # tvm-ffi would import it, which takes seconds
import numpy as np, tlhub
symbolic = {d: d for d in ("B", "S", "H", "D", "H_kv", "S_kv", "D_v")}
kernel = tlhub.get("attention_bwd", symbolic, "float32", device="cpu")

def call(length):
    q, lse = np.ones((1, length, 1, 8), np.float32), np.ones((1, 1, length), np.float32)
    out = tuple(np.ones_like(q) for _ in range(3))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    kernel(q, q, q, q, q, lse, out=out)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before

call(16)
print(call(4096))
"""


def test_memory_grows_with_the_length_and_not_with_its_square() -> None:
    get()
    done = subprocess.run([sys.executable, "-c", _MEMORY], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 8 * 1024  # KiB; a matrix of logits would be 64 MiB
