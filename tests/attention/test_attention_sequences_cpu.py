"""Decoding and sequences end to end on the CPU, against float64 within the contract's tolerance.

Whatever no query may see holds NaN throughout.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from attention_lab import MANY, SCALARS, SPOILT, Array, heads, layout, numbers, spoil
from hypothesis import given
from hypothesis import strategies as st

import tlhub
from tlhub import testing
from tlhub.errors import ArgumentError
from tlhub.specs import Kernel
from tlhub_attention.contracts.decode import DECODE
from tlhub_attention.contracts.varlen import VARLEN

ROOM = st.one_of(st.integers(0, 9), st.sampled_from([23, 24, 95, 96, 97, 250, 300]))
TOKENS = st.one_of(st.integers(0, 9), st.sampled_from([47, 48, 191, 192, 193, 400]))


def get(kernel: Kernel, dtype: Any = "float32", **options: Any) -> Any:
    paged = options.get("paged", False)
    symbolic = {d.name: d.name for d in kernel.dims if d.when in ({}, {"paged": paged})}
    return tlhub.get(kernel.name, symbolic, dtype, device="cpu", **options)


def drawn(kernel: Kernel, compiled: Any, extents: dict[str, int], data: Any) -> dict[str, Array]:
    """Return inputs of *extents* in which no key that is not valid is a number."""
    problem = testing.numbers.bind(compiled.problem, extents)
    arrays = testing.inputs(kernel, problem, seed=data.draw(st.integers(0, 99)))
    hide(arrays)
    for name, array in arrays.items():
        if name not in ("q", "k", "v"):
            arrays[name] = numbers(data.draw, array)
        elif array.ndim == 3:
            arrays[name] = layout(data.draw, array[None])[0]
        else:
            arrays[name] = layout(data.draw, array)
    return arrays


def hide(arrays: dict[str, Array]) -> None:
    """Put NaN where a key is of no sequence."""
    valid = np.zeros(arrays["k"].shape[: arrays["k"].ndim - 2], bool)
    if "starts_kv" in arrays:
        ends = arrays["starts_kv"]
        valid[ends[0] : ends[-1]] = True
    elif "table" in arrays:
        for row, length in zip(arrays["table"], arrays["lengths"], strict=True):
            for i in range(-(-int(length) // valid.shape[1])):
                valid[row[i], : length - i * valid.shape[1]] = True
            row[-(-int(length) // valid.shape[1]) :] = 2**31 - 1  # an entry that is not read
    else:
        for b, length in enumerate(arrays["lengths"]):
            valid[b, :length] = True
    for name in "kv":
        arrays[name][~valid] = np.nan


@pytest.mark.tvm
@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        ("float32", {"lse": True}),
        ("bfloat16", {"causal": False}),
        ({"q": "float16", "k": "float8_e4m3fn", "v": "float8_e5m2"}, {"lse": True, "out_dtype": "float32"}),
    ],
    ids=str,
)
@MANY
@given(data=st.data())
def test_decoding_by_lengths(dtype: Any, options: dict[str, Any], data: Any) -> None:
    kernel = get(DECODE, dtype, **options)
    sizes = {"B": st.integers(0, 4), "S": st.integers(1, 16), "S_kv": ROOM}
    extents = data.draw(heads()) | {name: data.draw(kind) for name, kind in sizes.items()}
    arrays, scalars = drawn(DECODE, kernel, extents, data), data.draw(SCALARS)
    assert testing.check(kernel, dims=extents, arrays=arrays, scalars=scalars) <= 1


@pytest.mark.tvm
@pytest.mark.parametrize(
    ("dtype", "options"),
    [("float32", {"causal": False}), ("bfloat16", {"lse": True, "alibi": True})],
    ids=str,
)
@MANY
@given(data=st.data())
def test_decoding_on_pages(dtype: Any, options: dict[str, Any], data: Any) -> None:
    kernel = get(DECODE, dtype, paged=True, **options)
    page = st.sampled_from([1, 3, 16, 17, 64, 96, 256])
    sizes = {"B": st.integers(0, 4), "S": st.integers(1, 16), "P": st.integers(0, 20), "page": page}
    extents = data.draw(heads()) | {name: data.draw(kind) for name, kind in sizes.items()}
    extents["L"] = data.draw(st.integers(0, 300 // extents["page"] + 1))
    arrays, scalars = drawn(DECODE, kernel, extents, data), data.draw(SCALARS)
    assert testing.check(kernel, dims=extents, arrays=arrays, scalars=scalars) <= 1


@pytest.mark.tvm
@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        ("float32", {"causal": True, "lse": True}),
        ("float64", {}),
        ("bfloat16", {"lse": True, "causal": True, "out_dtype": "float16", "alibi": True}),
    ],
    ids=str,
)
@MANY
@given(data=st.data())
def test_sequences_end_to_end(dtype: Any, options: dict[str, Any], data: Any) -> None:
    kernel = get(VARLEN, dtype, **options)
    sizes = {"T": TOKENS, "T_kv": TOKENS, "N1": st.sampled_from([1, 2, 3, 4, 9, 40])}
    extents = data.draw(heads()) | {name: data.draw(kind) for name, kind in sizes.items()}
    arrays, scalars = drawn(VARLEN, kernel, extents, data), data.draw(SCALARS)
    assert testing.check(kernel, dims=extents, arrays=arrays, scalars=scalars) <= 1


# -- exact cases -----------------------------------------------------------------------------------


def cache(values: list[float]) -> tuple[Array, Array]:
    """Return keys of 0 and *values* in their order, of one sequence and one head."""
    v = np.reshape(np.float32(values), (1, -1, 1, 1))
    return np.zeros_like(v), v


def lengths(*values: int) -> Array:
    return np.array(values, np.int32)


def test_a_query_sees_the_keys_before_the_length() -> None:
    k, v = cache([1, 3, 5, 100, math.nan])
    q = np.ones((1, 1, 1, 1), np.float32)
    for length, want in ((0, 0), (1, 1), (2, 2), (3, 3)):
        assert get(DECODE)(q, k, v, lengths(length)).item() == want


def test_the_last_queries_stand_at_the_last_keys() -> None:
    k, v = cache([0, 2, 4, 6, math.nan])
    q = np.ones((1, 3, 1, 1), np.float32)
    assert get(DECODE)(q, k, v, lengths(4)).ravel().tolist() == [1, 2, 3]
    assert get(DECODE, causal=False)(q, k, v, lengths(4)).ravel().tolist() == [3, 3, 3]
    assert get(DECODE)(q, k, v, lengths(4), window=2).ravel().tolist() == [1, 3, 5]
    o, lse = get(DECODE, lse=True)(q, k, v, lengths(2))  # the first query stands before every key
    assert o.ravel().tolist() == [0, 0, 1]
    np.testing.assert_allclose(lse.ravel(), [-math.inf, 0, math.log(2)], rtol=1e-6)


def test_pages_are_taken_in_the_order_of_the_table() -> None:
    pool = np.arange(12, dtype=np.float32).reshape(4, 3, 1, 1)
    q = np.ones((1, 1, 1, 1), np.float32)
    table = np.array([[2, 0, 99]], np.int32)
    call = get(DECODE, paged=True)
    assert call(q, np.zeros_like(pool), pool, lengths(3), table).item() == 7
    assert call(q, np.zeros_like(pool), pool, lengths(4), table).item() == (6 + 7 + 8 + 0) / 4
    assert call(q, np.zeros_like(pool), pool, lengths(5), table, window=2).item() == 0.5
    assert call(q, np.zeros_like(pool), pool, lengths(0), table).item() == 0


def test_padding_of_the_last_tile_is_not_counted() -> None:  # A39
    k, v = cache(list(range(250)))
    assert get(DECODE)(np.zeros((1, 1, 1, 1), np.float32), k, v, lengths(250)).item() == 124.5


def test_tokens_of_no_sequence_give_0() -> None:
    q, (k, v) = np.ones((6, 1, 1), np.float32), (x[0] for x in cache([1, 3, 5, math.nan]))
    o, lse = get(VARLEN, lse=True, causal=True)(q, k, v, lengths(1, 3, 3, 5), lengths(0, 2, 3, 3))
    assert o.ravel().tolist() == [0, 1, 2, 0, 0, 0]
    np.testing.assert_allclose(lse.ravel(), [-math.inf, 0, math.log(2), *[-math.inf] * 3], rtol=1e-6)


@pytest.mark.parametrize("kernel", [DECODE, VARLEN])
def test_a_key_that_the_mask_hides_may_hold_anything(kernel: Kernel) -> None:
    compiled = get(kernel, lse=True, causal=True)
    extents = {"H": 4, "D": 8, "H_kv": 2, "D_v": 7}
    extents |= {"B": 1, "S": 16, "S_kv": 120} if kernel is DECODE else {"T": 120, "T_kv": 130, "N1": 2}
    arrays = testing.inputs(kernel, testing.numbers.bind(compiled.problem, extents), whole=True)
    k, v = (arrays[name][0] if kernel is DECODE else arrays[name] for name in "kv")
    k[115], v[115], v[5] = math.nan, math.nan, math.inf  # the first is seen by some
    assert testing.check(compiled, dims=extents, arrays=arrays, scalars={"window": 9}) <= 1


@pytest.mark.parametrize("kernel", [DECODE, VARLEN], ids=lambda k: k.name)
@pytest.mark.parametrize(("name", "value"), SPOILT)
def test_what_is_no_number_spoils_what_it_does_in_the_reference(kernel: Kernel, name: str, value: float) -> None:
    compiled = get(kernel, **({"lse": True} if kernel is DECODE else {"causal": True, "lse": True}))
    sizes = {"B": 3, "S": 5, "H": 2, "D": 8, "H_kv": 1, "S_kv": 130, "T": 120, "N1": 4, "T_kv": 130, "D_v": 7}
    extents = {n: x for n, x in sizes.items() if n in compiled.problem.dim}
    arrays = testing.inputs(kernel, testing.numbers.bind(compiled.problem, extents))
    spoil(arrays, name, value)
    assert testing.check(compiled, dims=extents, arrays=arrays) <= 1


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_every_number_of_threads_gives_the_same_bits(threads: int) -> None:
    kernel = get(VARLEN, causal=True, lse=True)
    extents = {"T": 900, "H": 4, "D": 8, "N1": 30, "H_kv": 2, "T_kv": 700, "D_v": 8}
    arrays = testing.inputs(VARLEN, testing.numbers.bind(kernel.problem, extents))
    try:
        tlhub.set_num_threads(1)
        want = kernel(*arrays.values())
        tlhub.set_num_threads(threads)
        for one, other in zip(kernel(*arrays.values()), want, strict=True):
            np.testing.assert_array_equal(one, other)
    finally:
        tlhub.set_num_threads(None)


# -- what is not served ----------------------------------------------------------------------------

WRONG = [
    (DECODE, {}, {"lengths": [3, -1]}, "'lengths': expected numbers from 0 to S_kv"),
    (DECODE, {}, {"lengths": [3, 11]}, "'lengths': expected numbers from 0 to S_kv"),
    (DECODE, {"paged": True}, {"lengths": [9, 1]}, "'lengths': expected numbers from 0 to L page"),
    (DECODE, {"paged": True}, {"lengths": [-2, 1]}, "'lengths': expected numbers from 0 to L page"),
    (DECODE, {"paged": True}, {"lengths": [8, 8], "table": [[0, 1], [2, 3]]}, "'table': expected numbers of pages"),
    (DECODE, {"paged": True}, {"lengths": [8, 5], "table": [[0, 1], [2, -1]]}, "'table': expected numbers of pages"),
    (VARLEN, {}, {"starts": [0, 4, 3]}, "'starts': expected numbers that never decrease"),
    (VARLEN, {}, {"starts": [-1, 4, 6]}, "'starts': expected numbers that never decrease"),
    (VARLEN, {}, {"starts": [0, 4, 7]}, "'starts': expected numbers that never decrease"),
    (VARLEN, {}, {"starts_kv": [0, 9, 9]}, "'starts_kv': expected numbers that never decrease"),
    (VARLEN, {}, {"starts": [], "starts_kv": []}, "'starts': expected numbers that never decrease"),
]


@pytest.mark.parametrize(("kernel", "options", "given", "said"), WRONG)
def test_numbers_that_lead_out_of_an_array_are_refused_before_anything_is_written(
    kernel: Kernel, options: dict[str, Any], given: dict[str, list[Any]], said: str
) -> None:
    rows, keys = ((2, 1), (3, 4) if options else (2, 10)) if kernel is DECODE else ((6,), (8,))
    q, kv, out = (np.full((*shape, 1, 4), 7, np.float32) for shape in (rows, keys, rows))
    right = {"lengths": [2, 2], "table": [[0, 1], [2, 0]]} if kernel is DECODE else {"starts": [0, 2, 6]}
    right |= {} if kernel is DECODE else {"starts_kv": [0, 4, 8]}
    if kernel is DECODE and not options:
        del right["table"]
    arrays = [np.array(x, np.int32) for x in (right | given).values()]
    with pytest.raises(ArgumentError, match=f"argument {said}") as caught:
        get(kernel, **options)(q, kv, kv, *arrays, out=out)
    assert (out == 7).all() and f"hint: tlhub kernels {kernel.name}" in str(caught.value)
    get(kernel, **options)(q, kv, kv, *[np.array(x, np.int32) for x in right.values()], out=out)


@pytest.mark.parametrize("kernel", [DECODE, VARLEN])
def test_heads_that_do_not_divide_are_refused(kernel: Kernel) -> None:
    shape, keys = ((2, 1), (2, 10)) if kernel is DECODE else ((6,), (8,))
    q, kv = np.ones((*shape, 3, 4), np.float32), np.ones((*keys, 2, 4), np.float32)
    numbers = [lengths(1, 1)] if kernel is DECODE else [lengths(0, 6), lengths(0, 8)]
    with pytest.raises(ArgumentError, match=f"{kernel.name}: argument 'k': expected heads"):
        get(kernel)(q, kv, kv, *numbers)


def test_more_queries_than_decoding_takes_are_refused() -> None:
    q, kv = np.zeros((1, 17, 2, 4), np.float32), np.zeros((1, 20, 1, 4), np.float32)
    kernel, out = get(DECODE, lse=True), np.full_like(q, 7)
    with pytest.raises(ArgumentError, match="argument 'q': expected at most 16 queries"):
        kernel(q, kv, kv, lengths(20), out=(out, np.zeros((1, 2, 17), np.float32)))
    assert (out == 7).all()


def test_the_problem_is_read_off_the_arrays() -> None:
    q, kv = np.ones((2, 1, 4, 8), np.float32), np.ones((5, 16, 2, 8), np.float32)
    arrays = (q, kv, kv, lengths(20, 3), np.int32([[4, 0], [1, 0]]))
    kernel = tlhub.get_for("attention_decode", *arrays, paged=True)
    assert (kernel(*arrays) == 1).all()
    with pytest.raises(ArgumentError, match="argument 'table': expected B=2"):
        tlhub.get_for("attention_decode", *arrays[:4], np.int32([[4, 0]]), paged=True)
    with pytest.raises(ArgumentError, match="S=17 queries"):
        tlhub.get_for("attention_decode", np.ones((2, 17, 4, 8), np.float32), *arrays[1:], paged=True)
