"""The CPU kernels through ``tlhub.get``, against float64 within the contract's tolerance.

One symbolic binary a set of dtypes and options serves every size here, so hypothesis may ask for many.
"""

from __future__ import annotations

import math
import subprocess
import sys
import threading
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from attention_lab import MANY, SPOILT, SYMBOLIC, Array, column, dims, layout, numbers, spoil
from hypothesis import given
from hypothesis import strategies as st

import tlhub
from tlhub import testing
from tlhub.errors import ArgumentError
from tlhub_attention.contracts.forward import ATTENTION

VARIANTS: list[tuple[Any, dict[str, Any]]] = [
    ("float32", {}),
    ("float32", {"causal": True, "lse": True}),
    ("float64", {"lse": True}),
    ("float64", {"causal": True, "out_dtype": "bfloat16"}),
    ("float16", {"lse": True}),
    ("float16", {"causal": True, "out_dtype": "float32"}),
    ("bfloat16", {"causal": True}),
    ("bfloat16", {"lse": True, "out_dtype": "float16"}),
    ({"q": "float32", "k": "bfloat16", "v": "float16"}, {"causal": True, "out_dtype": "float64"}),
    ("float32", {"alibi": True, "lse": True}),
    ("float8_e4m3fn", {"scaled": True, "lse": True}),
    ({"q": "float8_e5m2", "k": "float8_e4m3fn", "v": "float8_e5m2"}, {"scaled": True, "alibi": True, "causal": True}),
    ({"q": "bfloat16", "k": "float8_e4m3fn", "v": "float8_e5m2"}, {"out_dtype": "float32"}),
]


def get(dtype: Any = "float32", **options: Any) -> Any:
    return tlhub.get("attention", SYMBOLIC, dtype, device="cpu", **options)


@pytest.mark.tvm
@pytest.mark.parametrize(("dtype", "options"), VARIANTS, ids=[f"{d}-{o}" for d, o in VARIANTS])
@MANY
@given(data=st.data())
def test_any_size_stride_and_scalar_is_within_the_tolerance(dtype: Any, options: dict[str, Any], data: Any) -> None:
    kernel = get(dtype, **options)
    extents = data.draw(dims())
    problem = testing.numbers.bind(kernel.problem, extents)
    arrays = testing.inputs(ATTENTION, problem, seed=data.draw(st.integers(0, 99)))
    arrays = {n: layout(data.draw, a) if a.ndim == 4 else numbers(data.draw, a) for n, a in arrays.items()}
    scalars = {
        "scale": data.draw(st.sampled_from([1 / math.sqrt(max(extents["D"], 1)), 0.5, -0.25, 0.0])),
        "window": data.draw(st.sampled_from([0, 0, 1, 2, 7, 96, 1000, 2**63 - 1])),
        "softcap": data.draw(st.sampled_from([0.0, 0.0, 0.3, 30.0, -2.0])),
    }
    assert testing.check(kernel, dims=extents, arrays=arrays, scalars=scalars) <= 1


@MANY
@given(extents=dims(), data=st.data())
def test_outputs_of_any_stride_are_written_and_nothing_else_is(extents: dict[str, int], data: Any) -> None:
    kernel = get("float32", causal=True, lse=True)
    b, s, h, d = (extents[n] for n in ("B", "S", "H", "D_v"))
    q = np.zeros((b, s, h, extents["D"]), np.float32)
    k = np.zeros((b, extents["S_kv"], extents["H_kv"], extents["D"]), np.float32)
    v = np.ones((b, extents["S_kv"], extents["H_kv"], d), np.float32)
    room, room_lse = np.full((h, b, 2 * d + 1, s + 2), -7, np.float32), np.full((s, h, b + 1), -7, np.float32)
    out, lse = room[:, :, 1 : 2 * d + 1 : 2, 1 : s + 1].transpose(1, 3, 0, 2), room_lse[:, :, :b].transpose(2, 1, 0)
    if data.draw(st.booleans()):
        out, lse = out[:, ::-1], lse[..., ::-1]
    kernel(q, k, v, out=(out, lse))
    seen = np.clip(np.arange(s) + extents["S_kv"] - s + 1, 0, None)
    np.testing.assert_array_equal(out, np.broadcast_to((seen > 0)[None, :, None, None], out.shape))
    with np.errstate(divide="ignore"):
        np.testing.assert_allclose(lse, np.broadcast_to(np.log(seen), lse.shape), rtol=1e-6)
    out[...], lse[...] = -7, -7
    assert (room == -7).all() and (room_lse == -7).all()


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_every_number_of_threads_gives_the_same_bits(threads: int) -> None:
    kernel = get("float32", causal=True)
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 700, 3, 20)).astype(np.float32) for _ in range(3))
    try:
        tlhub.set_num_threads(1)
        want = kernel(q, k, v)
        tlhub.set_num_threads(threads)
        for _ in range(3):
            np.testing.assert_array_equal(kernel(q, k, v), want)
    finally:
        tlhub.set_num_threads(None)


def test_two_threads_at_once_are_right() -> None:
    kernel = get("float32")
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 130, 4, 32)).astype(np.float32) for _ in range(3))
    want, wrong = kernel(q, k, v), []

    def run() -> None:
        for _ in range(20):
            if not np.array_equal(kernel(q, k, v), want):
                wrong.append(1)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


# -- exact cases -----------------------------------------------------------------------------------


def attend(q: Array, k: Array, v: Array, dtype: str = "float32", **given: Any) -> Any:
    options = {n: given.pop(n) for n in ("causal", "lse") if n in given}
    return get(dtype, **options)(q, k, v, **given)


def test_logits_beyond_the_range_of_float16_are_right() -> None:  # A15
    q = np.full((1, 4, 1, 64), 300, np.float16)
    o = attend(q, q, column([0, 1, 2, 3], np.float16), "float16")
    np.testing.assert_array_equal(o.ravel(), [1.5] * 4)


def test_one_query_under_causal_sees_every_key() -> None:  # A26
    o = attend(column([1]), column([0] * 8), column(range(8)), causal=True)
    assert o.item() == 3.5


def test_rows_that_see_no_key_are_0_and_their_lse_is_minus_infinity() -> None:  # A27
    o, lse = attend(column([1] * 4), column([0] * 2), column([3, 5]), causal=True, lse=True)
    np.testing.assert_array_equal(o.ravel(), [0, 0, 3, 4])
    np.testing.assert_array_equal(lse.ravel()[:3], [-np.inf, -np.inf, 0])
    assert lse.ravel()[3] == pytest.approx(math.log(2), rel=1e-6)
    o, lse = attend(column([1] * 4), column([]), column([]), lse=True)
    assert (o == 0).all() and (lse == -np.inf).all()


def test_lse_is_natural_so_that_parts_merge() -> None:  # A29
    logits, values = np.float32([2, 0]), [1, 0]
    parts = [
        attend(column([1]), column([x]), column([y]), lse=True, scale=1.0) for x, y in zip(logits, values, strict=True)
    ]
    weights = np.exp([lse.item() for _, lse in parts])
    merged = (weights * [o.item() for o, _ in parts]).sum() / weights.sum()
    assert merged == pytest.approx(0.880797, abs=1e-6)


def test_a_masked_key_never_wins() -> None:  # A31
    q, k, v = column([-20000, 0], np.float16), column([1, 0], np.float16), column([1, 100], np.float16)
    o, lse = attend(q[:, :1], k[:, :1], v[:, :1], "float16", lse=True, scale=1.0)
    assert (o.item(), lse.item()) == (1, pytest.approx(-20000, rel=1e-6))
    o, lse = attend(q, k, v, "float16", lse=True, causal=True, scale=1.0)
    assert (o[0, 0, 0, 0], lse[0, 0, 0]) == (1, pytest.approx(-20000, rel=1e-6))


def test_the_soft_cap_comes_before_the_mask() -> None:  # A32
    o = attend(column([0, 0]), column([0, 0]), column([1, 100]), causal=True, softcap=1.0)
    assert o.ravel().tolist() == [1.0, 50.5]


def test_a_window_counts_the_query_itself() -> None:  # A33
    q, v = column([0] * 5), column(range(5))
    for causal in (True, False):  # a window hides later keys as well
        assert attend(q, q, v, causal=causal, window=2).ravel().tolist() == [0, 0.5, 1.5, 2.5, 3.5]
    assert attend(q[:, :1], q, v, window=2).item() == 3.5  # aligned at the end
    assert (attend(q, q, v, window=-1) == attend(q, q, v)).all()  # none


def test_the_largest_window_hides_nothing_before_the_query() -> None:
    q, k = np.ones((1, 8, 1, 1), "float32"), np.ones((1, 5, 1, 1), "float32")
    assert np.array_equal(get(causal=True)(q, k, k, window=2**63 - 1).ravel(), [0] * 3 + [1] * 5)


@pytest.mark.parametrize(("heads", "kv_heads"), [(33, 2), (3, 2)])
def test_heads_that_do_not_divide_are_refused_before_anything_is_written(heads: int, kv_heads: int) -> None:  # A34
    with pytest.raises(ValueError, match=f"H={heads} .*H_kv={kv_heads}"):
        tlhub.get("attention", {"B": 1, "S": 3, "H": heads, "D": 8, "H_kv": kv_heads}, "float32", device="cpu")
    q, k, out = (np.full((1, 3, h, 8), 7, np.float32) for h in (heads, kv_heads, heads))
    with pytest.raises(ArgumentError, match="argument 'k': expected heads"):
        get("float32")(q, k, k, out=out)
    assert (out == 7).all()


def test_channels_off_the_grid_of_tiles_all_count() -> None:  # A35
    q, k = np.zeros((1, 4, 1, 63), np.float32), np.zeros((1, 4, 1, 63), np.float32)
    q[..., 62], k[0, :, 0, 62] = 8, range(4)
    o = attend(q, k, column(range(4)))
    np.testing.assert_allclose(o.ravel(), 2.497504, atol=1e-6)


def test_each_array_has_its_own_strides() -> None:  # A37
    room = np.zeros((1, 8, 1, 16), np.float32)
    room[0, :, 0, 0] = [0, 9, 1, 9, 2, 9, 3, 9]
    k, v, q = room[:, ::2], column(range(4)), column([math.log(2)], width=16)
    o = attend(q, k, v, scale=1.0)
    assert o.item() == pytest.approx(34 / 15, rel=1e-6)
    np.testing.assert_array_equal(o, attend(q, k.copy(), v, scale=1.0))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64])
def test_lanes_and_tiles_past_the_last_key_are_not_counted(dtype: Any) -> None:  # A39
    o = attend(column([0], dtype), column([0] * 250, dtype), column(range(250), dtype), np.dtype(dtype).name)
    assert o.item() == 124.5


@pytest.mark.parametrize("causal", [True, False])
def test_alibi_weighs_keys_by_their_distance(causal: bool) -> None:
    """With a slope of ln 2 a key weighs half as much with each place, on both sides."""
    kernel, slopes = get("float32", alibi=True, causal=causal), np.float32([math.log(2), 0])
    q, v = np.zeros((1, 2, 2, 1), np.float32), column([8, 4, 16])
    o = kernel(q, column([0] * 3), v, slopes)  # query 0 stands at key 1
    first = [(4 + 4) / 1.5, 12 / 2] if causal else [(4 + 4 + 8) / 2, 28 / 3]
    np.testing.assert_allclose(o[0, :, :, 0], [first, [(2 + 2 + 16) / 1.75, 28 / 3]], rtol=1e-6)


def test_a_factor_of_a_tensor_is_a_view_that_repeats_it() -> None:
    q, v = np.ones((2, 1, 4, 2), ml_dtypes.float8_e4m3fn), np.ones((2, 3, 2, 2), ml_dtypes.float8_e4m3fn)
    v[0, 1] = 3
    k, factors = np.zeros_like(v), [np.float32(x) for x in (2, 4, 0.5)]
    k[0, 1, :, 0] = 1
    views = [np.broadcast_to(x, (2, h)) for x, h in zip(factors, (4, 2, 2), strict=True)]
    o = get("float8_e4m3fn", scaled=True, lse=True)(q, k, v, *views, scale=0.125)[0]
    first = 0.5 * (2 + 3 * math.e) / (2 + math.e)
    np.testing.assert_allclose(o.astype(float)[:, 0, 0, 0], [first, 0.5], rtol=2**-8)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("keys", [0, 1])
def test_a_factor_of_v_never_reaches_a_query_that_sees_no_key(value: float, keys: int) -> None:
    kernel = get("float8_e4m3fn", scaled=True, causal=True, out_dtype="float32")
    q, k = (np.ones((1, n, 1, 1), ml_dtypes.float8_e4m3fn) for n in (3, keys))
    one = np.ones((1, 1), "float32")
    o = kernel(q, k, k, one, one, one * value).ravel()
    assert np.array_equal(o, [0, 0, value if keys else 0], equal_nan=True)


def test_heads_share_keys_in_order() -> None:
    v = np.arange(3, dtype=np.float32).reshape(1, 1, 3, 1)
    o = attend(np.zeros((1, 2, 12, 4), np.float32), np.zeros((1, 1, 3, 4), np.float32), v)
    np.testing.assert_array_equal(o[0, :, :, 0], [np.repeat([0, 1, 2], 4)] * 2)


def test_logits_of_ten_thousand_are_right() -> None:
    o, lse = attend(column([1e4]), column([1, 0.9999]), column([1, 2]), lse=True, scale=1.0)
    exact = np.float64(np.float32(0.9999)) * 1e4 - 1e4
    assert o.item() == pytest.approx(1 + 1 / (1 + math.exp(-exact)), abs=2e-3)
    assert lse.item() == pytest.approx(1e4 + math.log1p(math.exp(exact)), rel=1e-6)


# -- what is not a number --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("name", ["k", "v"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("window", [0, 5])
def test_keys_that_a_query_does_not_see_may_hold_anything(dtype: str, name: str, value: float, window: int) -> None:
    kernel = get(dtype, causal=True, lse=True)
    extents = {"B": 1, "S": 120, "H": 2, "D": 8, "H_kv": 1, "S_kv": 130, "D_v": 7}
    arrays = testing.inputs(ATTENTION, testing.numbers.bind(kernel.problem, extents))
    for j in (20, 95, 96, 129):
        arrays[name][0, j] = value
    if name == "k" and value == np.inf:
        arrays["q"] = np.abs(arrays["q"])  # else the logits are inf - inf, in whatever order
    assert testing.check(kernel, dims=extents, arrays=arrays, scalars={"window": window}) <= 1


@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.parametrize(("name", "value"), SPOILT)
def test_what_is_no_number_spoils_what_it_does_in_the_reference(name: str, value: float, softcap: float) -> None:
    kernel, extents = get(causal=True, lse=True), {"B": 1, "S": 120, "H": 2, "D": 8, "H_kv": 1, "S_kv": 130, "D_v": 7}
    arrays = testing.inputs(ATTENTION, testing.numbers.bind(kernel.problem, extents))
    spoil(arrays, name, value)
    assert testing.check(kernel, dims=extents, arrays=arrays, scalars={"softcap": softcap}) <= 1


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_query_that_is_no_number_spoils_its_row_alone(value: float) -> None:
    kernel = get("float32")
    extents = {"B": 1, "S": 30, "H": 1, "D": 1, "H_kv": 1, "S_kv": 40, "D_v": 3}
    arrays = testing.inputs(ATTENTION, testing.numbers.bind(kernel.problem, extents))
    arrays["q"][0, 11], arrays["k"] = value, np.abs(arrays["k"])
    o = kernel(*arrays.values())
    want = np.isnan(o[0, :, 0, 0]) == (np.arange(30) == 11)
    assert want.all() if value != -np.inf else o[0, 11].tolist() == [[0, 0, 0]]  # no weight at all


def test_old_contents_of_an_output_never_matter() -> None:
    q, out = column([1, 2, 3]), np.full((1, 3, 1, 1), np.nan, np.float32)
    lse = np.full((1, 1, 3), np.nan, np.float32)
    get("float32", lse=True)(q, q, q, out=(out, lse))
    assert np.isfinite(out).all() and np.isfinite(lse).all()


# -- arrays ----------------------------------------------------------------------------------------


def test_an_output_that_overlaps_an_input_is_refused() -> None:
    q = np.ones((1, 4, 1, 8), np.float32)
    with pytest.raises(ArgumentError, match="argument 'o'"):
        get("float32")(q, q, q, out=q)
    assert (q == 1).all()


def test_bfloat16_arrays_are_served_and_returned() -> None:
    q = np.ones((1, 4, 1, 8), ml_dtypes.bfloat16)
    o = get("bfloat16")(q, q, q)
    assert o.dtype == ml_dtypes.bfloat16 and (o == 1).all()


# -- memory ----------------------------------------------------------------------------------------

_MEMORY = """
import resource, sys
sys.modules["torch"] = None  # tvm-ffi would import it, which takes seconds
import numpy as np, tlhub
kernel = tlhub.get("attention", {d: d for d in ("B", "S", "H", "D", "H_kv", "S_kv", "D_v")}, "float32", device="cpu")
small = np.ones((1, 16, 1, 8), np.float32)
kernel(small, small, small)
q = np.ones((1, int(sys.argv[1]), 1, 8), np.float32)
out = np.ones_like(q)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
kernel(q, q, q, out=out)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_memory_grows_with_the_length_and_not_with_its_square() -> None:
    get("float32")
    length = 8192  # its square would be 256 MiB of logits
    done = subprocess.run([sys.executable, "-c", _MEMORY, str(length)], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 8 * 1024  # KiB


@pytest.mark.parametrize("thorough", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_plugin_conforms(thorough: bool) -> None:
    testing.conformance("tlhub_attention", thorough=thorough)
