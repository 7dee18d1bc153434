"""The CPU kernels of the backward of sequences end to end, against float64 within the contract's tolerance.

Whatever is of no sequence holds NaN throughout.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from attention_lab import MANY, SCALARS, SPOILT, Array, heads, layout, numbers, spoil
from hypothesis import given, settings
from hypothesis import strategies as st

import tlhub
from tlhub import testing
from tlhub.errors import ArgumentError
from tlhub_attention.contracts.varlen_backward import VARLEN_BWD
from tlhub_attention.references.varlen_backward import prepare

SMALL = {"T": 60, "H": 4, "D": 9, "N1": 4, "H_kv": 2, "T_kv": 70, "D_v": 17}


def get(dtype: Any = "float32", **options: Any) -> Any:
    options = options or {"causal": True}
    symbolic = {d.name: d.name for d in VARLEN_BWD.dims}
    return tlhub.get("attention_varlen_bwd", symbolic, dtype, device="cpu", **options)


def data(kernel: Any, extents: dict[str, int], seed: int = 0, **scalars: float) -> dict[str, Array]:
    """Return inputs with NaN in all that is of no sequence."""
    problem = testing.numbers.bind(kernel.problem, extents)
    arrays = testing.inputs(VARLEN_BWD, problem, seed, scalars=scalars)
    for name, ends in (("q", "starts"), ("k", "starts_kv")):
        outside = np.ones(arrays[name].shape[0], bool)
        outside[arrays[ends][0] : arrays[ends][-1]] = False
        for x in ("k", "v") if name == "k" else ("q", "dout", "o"):
            arrays[x][outside] = np.nan
        if name == "q":
            arrays["lse"][:, outside] = np.nan
    return arrays


@pytest.mark.tvm
@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        ("float32", {"causal": True}),
        (
            {"dout": "float16", "q": "bfloat16", "k": "bfloat16", "v": "float16", "o": "float32"},
            {"deterministic": True, "alibi": True},
        ),
    ],
    ids=str,
)
@settings(MANY, max_examples=10)
@given(data_=st.data())
def test_gradients_of_any_sequences(dtype: Any, options: dict[str, Any], data_: Any) -> None:
    kernel = get(dtype, **options)
    tokens = st.sampled_from([0, 7, 47, 48, 191, 250])
    sizes = {"T": tokens, "T_kv": tokens, "N1": st.sampled_from([1, 2, 3, 4, 9, 40])}
    extents = data_.draw(heads()) | {name: data_.draw(kind) for name, kind in sizes.items()}
    scalars = data_.draw(SCALARS)
    arrays = data(kernel, extents, data_.draw(st.integers(0, 99)), **scalars)
    for name, array in arrays.items():
        strided = array.ndim == 3
        arrays[name] = layout(data_.draw, array[None])[0] if strided else numbers(data_.draw, array)
    assert testing.check(kernel, dims=extents, arrays=arrays, scalars=scalars) <= 1


def test_what_is_of_no_sequence_or_of_an_empty_one_gives_0() -> None:
    arrays = data(get(), SMALL)
    arrays["starts"], arrays["starts_kv"] = np.int32([3, 20, 20, 50]), np.int32([8, 8, 30, 64])
    for name in ("dout", "q", "o"):
        arrays[name][3:20] = np.nan  # they have no keys
    for name in ("dout", "q", "o", "lse"):
        rows = arrays[name].T if name == "lse" else arrays[name]
        rows[20:50] = 1
        rows[:3] = rows[50:] = np.nan
    for name in ("k", "v"):
        arrays[name][:30] = np.nan  # the first have no queries
        arrays[name][30:64] = np.arange(34)[:, None, None] / 34
        arrays[name][64:] = np.nan
    out = tuple(np.full_like(arrays[n], np.nan) for n in "qkv")
    dq, dk, dv = get()(*arrays.values(), out=out)
    for got, seen in ((dq, slice(20, 50)), (dk, slice(30, 64)), (dv, slice(30, 64))):
        assert np.isfinite(got).all() and got[seen].any(axis=(1, 2)).all()
        got[seen] = 0
        assert (got == 0).all()


def test_each_sequence_is_attention_bwd_of_its_own() -> None:
    arrays, lone = data(get(), SMALL), ("attention_bwd", {d: d for d in ("B", "S", "H", "D", "H_kv", "S_kv", "D_v")})
    arrays["starts"], arrays["starts_kv"] = np.int32([0, 20, 31, 60]), np.int32([0, 11, 40, 70])
    for name in ("dout", "q", "k", "v", "o", "lse"):
        arrays[name][...] = np.random.default_rng(1).uniform(0, 1, arrays[name].shape)
    found = get()(*arrays.values(), window=9)
    for n in range(3):
        rows, keys = (slice(*arrays[name][n : n + 2]) for name in ("starts", "starts_kv"))
        one = [arrays[x][None, keys if x in "kv" else rows] for x in ("dout", "q", "k", "v", "o")]
        want = tlhub.get(*lone, "float32", device="cpu", causal=True)(*one, arrays["lse"][None, :, rows], window=9)
        for got, same, at in zip(found, want, (rows, keys, keys), strict=True):
            np.testing.assert_array_equal(got[at], same[0])


def test_outputs_of_any_stride_are_written_and_nothing_else_is() -> None:
    arrays = data(get(), SMALL)
    want = get()(*arrays.values())
    rooms = [np.full((w.shape[1], 2 * w.shape[2] + 1, w.shape[0] + 2), -7, np.float32) for w in want]
    out = tuple(room[:, 1::2, 1:-1].transpose(2, 0, 1)[::-1] for room in rooms)
    get()(*arrays.values(), out=out)
    for got, old, room in zip(out, want, rooms, strict=True):
        np.testing.assert_array_equal(got, old)
        got[...] = -7
        assert (room == -7).all()


@pytest.mark.parametrize(("name", "value"), [*SPOILT, ("dout", np.nan)])
def test_what_is_no_number_spoils_what_it_does_in_the_reference(name: str, value: float) -> None:
    kernel, extents = get(), {**SMALL, "T": 120, "T_kv": 130}
    scalars, problem = {"scale": 0.5, "window": 0, "softcap": 0.0}, testing.numbers.bind(kernel.problem, extents)
    arrays = testing.inputs(VARLEN_BWD, problem)
    spoil(arrays, name, value)
    forward = prepare(problem, arrays, scalars, np.random.default_rng(0))
    arrays |= {n: x.astype(arrays[n].dtype) for n, x in forward.items()}
    assert testing.check(kernel, dims=extents, arrays=arrays, scalars=scalars) <= 1


@pytest.mark.parametrize("threads", [2, 5])
def test_every_number_of_threads_gives_the_same_bits(threads: int) -> None:
    arrays = data(get(), {"T": 900, "H": 4, "D": 8, "N1": 30, "H_kv": 2, "T_kv": 700, "D_v": 8})
    try:
        tlhub.set_num_threads(1)
        want = get()(*arrays.values())
        tlhub.set_num_threads(threads)
        for got, old in zip(get()(*arrays.values()), want, strict=True):
            np.testing.assert_array_equal(got, old)
    finally:
        tlhub.set_num_threads(None)


@pytest.mark.parametrize("name", ["dout", "q", "k", "v"])
@pytest.mark.parametrize("window", [0, 5])
def test_what_a_mask_hides_may_hold_anything(name: str, window: int) -> None:
    extents = {"T": 240, "H": 2, "D": 8, "N1": 3, "H_kv": 1, "T_kv": 260, "D_v": 7}
    arrays = data(get(), extents, window=window)
    arrays["starts"], arrays["starts_kv"] = np.int32([0, 120, 240]), np.int32([0, 130, 260])
    for array in ("dout", "q", "k", "v", "o", "lse"):
        arrays[array][...] = np.random.default_rng(2).uniform(0, 1, arrays[array].shape)
    arrays[name][[10, 95, 140, 215]] = np.nan
    with np.errstate(invalid="ignore"):
        assert testing.check(get(), dims=extents, arrays=arrays, scalars={"window": window}) <= 1


# -- what is not served ----------------------------------------------------------------------------


def call(q_heads: int, starts: Any, starts_kv: Any) -> tuple[Array, ...]:
    """Return the outputs, full of 7 before, of 6 queries and 8 keys of one head."""
    q, kv = np.full((6, q_heads, 4), 7, np.float32), np.full((8, 2, 4), 7, np.float32)
    out = tuple(np.full_like(x, 7) for x in (q, kv, kv))
    ends = [np.array(x, np.int32) for x in (starts, starts_kv)]
    lse = np.full((q_heads, 6), 7, np.float32)
    try:
        get()(q, q, kv, kv, q, lse, *ends, out=out)
    except ArgumentError:
        assert all((x == 7).all() for x in out)
        raise
    return out


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"starts": [0, 4, 3]}, "'starts'"),
        ({"starts": [-1, 4, 6]}, "'starts'"),
        ({"starts": [0, 4, 7]}, "'starts'"),
        ({"starts_kv": [0, 9, 9]}, "'starts_kv'"),
        ({"starts_kv": [0, 5, 4]}, "'starts_kv'"),
        ({"starts": [], "starts_kv": []}, "'starts'"),
    ],
)
def test_starts_that_lead_out_of_an_array_are_refused_before_anything_is_written(
    given: dict[str, Any], said: str
) -> None:
    right = {"starts": [0, 2, 6], "starts_kv": [0, 4, 8]}
    with pytest.raises(ArgumentError, match=f"argument {said}: expected numbers that never decrease") as caught:
        call(2, **(right | given))
    assert "hint: tlhub kernels attention_varlen_bwd" in str(caught.value)
    call(2, **right)


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ArgumentError, match="attention_varlen_bwd: argument 'k': expected heads"):
        call(3, [0, 6], [0, 8])
