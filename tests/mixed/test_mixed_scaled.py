"""gemm_scaled on the CPU against float64, within a tolerance that fails what is wrong; and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tlhub
from tlhub import testing
from tlhub.errors import ArgumentError, NoSchedule
from tlhub.problem import make
from tlhub.testing.data import numpy_dtype
from tlhub_mixed.contracts.scaled import SCALED
from tlhub_mixed.references import scaled

Array = np.ndarray[Any, Any]
MANY = settings(
    max_examples=20,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
EXTENTS = st.one_of(st.integers(0, 9), st.sampled_from([16, 31, 63, 65, 97, 100, 128, 131, 200, 257]))
E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"


def get(dtype: Any = E4M3, **options: object) -> Any:
    return tlhub.get("gemm_scaled", {d: d for d in "MNK"}, dtype, device="cpu", **options)


def sizes(m: int, n: int, k: int, glu: object = False) -> dict[str, int]:
    made = {"M": m, "N": n, "K": k, "N_128": -(-n // 128), "K_128": -(-k // 128)}
    return {**made, "N_2": n // 2} if glu else made


def ones(*shape: int, dtype: str = E4M3) -> Array:
    return np.ones(shape, numpy_dtype(dtype))


def layout(draw: Any, array: Array) -> Array:
    """Return the values of *array* in an array of other strides and surroundings."""
    kind = draw(st.sampled_from(["plain", "plain", "fortran", "gap", "step", "reversed"]))
    if kind == "plain" or not array.ndim:
        return array
    if kind == "fortran":
        return np.asfortranarray(array)
    if kind == "reversed":
        return np.ascontiguousarray(array[..., ::-1])[..., ::-1]
    count = array.shape[-1]
    room = np.full((*array.shape[:-1], 2 * count + 3), 0x7F, np.uint8 if array.itemsize == 1 else array.dtype)
    room = room.view(array.dtype)
    view = room[..., : 2 * count : 2] if kind == "step" else room[..., 1 : count + 1]
    view[...] = array
    return view


OPTIONS: list[tuple[Any, dict[str, object]]] = [
    (E4M3, {"scaling": "block", "trans_b": True}),
    (E4M3, {"scaling": "block", "scale_dtype": "float8_e8m0fnu", "out_dtype": "float32", "tensor_core": False}),
    ({"a": E5M2, "b": E4M3}, {"out_dtype": "float16", "bias": True, "epilogue": "gelu_tanh", "tensor_core": False}),
    (E4M3, {"scaling": "row", "glu": True, "epilogue": "silu", "bias": True, "residual": True, "out_dtype": E4M3}),
    ("int8", {"scaling": "row", "trans_b": True, "residual": True}),
    ("int8", {"scaling": "row", "out_dtype": "int8", "epilogue": "relu"}),
]
NAMES = [f"{d}-{'-'.join(map(str, o.values()))}" for d, o in OPTIONS]


@pytest.mark.parametrize(("dtype", "options"), OPTIONS, ids=NAMES)
@MANY
@given(data=st.data())
def test_any_size_and_stride_is_within_the_tolerance(dtype: Any, options: Any, data: Any) -> None:
    kernel, glu = get(dtype, **options), options.get("glu")
    n = data.draw(EXTENTS)
    dims = sizes(data.draw(EXTENTS), 2 * n if glu else n, data.draw(st.one_of(EXTENTS, st.just(600))), glu)
    problem = testing.numbers.bind(kernel.problem, dims)
    arrays = testing.inputs(SCALED, problem, seed=data.draw(st.integers(0, 99)))
    arrays = {name: layout(data.draw, array) for name, array in arrays.items()}
    factor, gap = data.draw(st.sampled_from([1.0, 1.0, 0.25, -3.0])), data.draw(st.sampled_from([0, 3]))
    testing.check(kernel, dims=dims, arrays=arrays, scalars={"out_scale": factor}, gap=lambda count: gap)


# -- the tolerance fails what is wrong -------------------------------------------------------------


def product(a: Array, b: Array, sa: Array, sb: Array, accum: type = np.float32) -> Array:
    """A product with scales by block, in NumPy."""
    total = np.zeros((a.shape[0], b.shape[1]), accum)
    for k in range(a.shape[1]):
        step = a[:, k, None].astype(accum) * b[k].astype(accum)
        total = (total + step * sa[:, k // 128, None] * np.repeat(sb[k // 128], 128)[: b.shape[1]]).astype(accum)
    return total if accum is np.float64 else total.astype(ml_dtypes.bfloat16)


def nearby(x: Array) -> Array:
    return np.roll(x, 1, axis=0)


FAULTS: dict[str, Callable[..., Array]] = {
    "a lost tail": lambda a, b, sa, sb: product(a[:, :-1], b[:-1], sa, sb),
    "float16 sums": lambda a, b, sa, sb: product(a, b, sa, sb, np.float16),
    "swapped rows": lambda a, b, sa, sb: nearby(product(a, b, sa, sb)),
    "scales of another row": lambda a, b, sa, sb: product(a, b, nearby(sa), sb),
    "scales of another block of K": lambda a, b, sa, sb: product(a, b, sa[:, ::-1], sb),
    "b's scales transposed": lambda a, b, sa, sb: product(a, b, sa, sb.T),
    "no scales": lambda a, b, sa, sb: product(a, b, 0 * sa + 1, 0 * sb + 1),
    "truncation to bfloat16": lambda a, b, sa, sb: (
        product(a, b, sa, sb, np.float64).astype(np.float32).view(np.uint32) & 0xFFFF0000
    ).view(np.float32),
}


def problem_of(shape: tuple[int, int, int] = (5, 256, 256), **options: object) -> Any:
    return make(SCALED, shape, E4M3, options)


def compare(problem: Any, arrays: dict[str, Array], output: Array) -> float:
    reference = scaled.reference(problem, arrays, {"out_scale": 1.0})
    bounds = scaled.tolerance(problem, arrays, {"out_scale": 1.0}, reference)
    return testing.numbers.compare(output, *reference, *bounds)


IN_FLOAT32 = problem_of(scaling="block", tensor_core=False)


def test_a_product_in_float32_is_within_the_tolerance() -> None:
    arrays = testing.inputs(SCALED, IN_FLOAT32, seed=3)
    compare(IN_FLOAT32, arrays, product(*arrays.values()))


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_wrong_is_out_of_the_tolerance(fault: str) -> None:
    arrays = testing.inputs(SCALED, IN_FLOAT32, seed=3)
    with pytest.raises(AssertionError, match="times the bound"):
        compare(IN_FLOAT32, arrays, FAULTS[fault](*arrays.values()))


def on_tensor_cores(a: Array, b: Array, fast: bool, bits: int = 13) -> Array:
    """A product as a tensor core has it: 32 products and the sum so far, all cut *bits* below the largest of them."""
    a, b = a.astype(float), b.astype(float)
    total = sums = np.zeros((len(a), b.shape[1]))
    for first in range(0, a.shape[1], 32):
        if first % 128 == 0 and not fast:
            total, sums = total + sums.astype(np.float32), 0 * sums
        step = a[:, first : first + 32, None] * b[first : first + 32]
        added = np.concatenate([step, sums[:, None]], axis=1)
        _, exponent = np.frexp(abs(added).max(axis=1, keepdims=True))
        unit = np.ldexp(1.0, exponent - 1 - bits)
        sums = (np.trunc(added / unit) * unit).sum(axis=1)
    return (total + sums).astype(np.float32)


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("kind", ["normal", "positive", "of all sizes"])
def test_what_tensor_cores_lose_is_within_the_tolerance(kind: str, fast: bool) -> None:
    options = {"out_dtype": "float32", "fast_accum": fast}
    problem = problem_of((16, 16, 1024), **options)
    rng = np.random.default_rng(0)
    drawn = {name: rng.standard_normal(shape) for name, shape in (("a", (16, 1024)), ("b", (1024, 16)))}
    change = {"normal": lambda x: x, "positive": abs, "of all sizes": lambda x: np.exp(1.5 * x)}[kind]
    one = np.array(1, np.float32)
    arrays = {name: change(x).clip(-448, 448).astype(numpy_dtype(E4M3)) for name, x in drawn.items()}
    given = {**arrays, "a_scale": one, "b_scale": one}
    assert compare(problem, given, on_tensor_cores(**arrays, fast=fast)) < 1
    with pytest.raises(AssertionError, match="times the bound"):
        compare(problem, given, on_tensor_cores(**arrays, fast=fast, bits=5))
    if kind != "normal":
        with pytest.raises(AssertionError, match="times the bound"):
            strict = problem_of((16, 16, 1024), out_dtype="float32", tensor_core=False)
            compare(strict, given, on_tensor_cores(**arrays, fast=fast))


# -- exact values ----------------------------------------------------------------------------------


def test_the_option_tells_the_layout_of_scales_and_no_extent_does() -> None:  # A20
    a, b, one = ones(16, 32), ones(32, 32), np.ones(32, np.float32)
    half, four = np.array(0.5, np.float32), np.array(4, np.float32)
    np.testing.assert_array_equal(get()(a, b, half, four).astype(float), np.full((16, 32), 64.0))
    rows = np.arange(1, 17, dtype=np.float32)
    c = get(scaling="row", out_dtype="float32")(a, b, rows, one)
    np.testing.assert_array_equal(c, 32 * rows[:, None] * one)
    single = get(scaling="row", out_dtype="float32")(a[:1], b[:, :1], half[None], four[None])
    np.testing.assert_array_equal(single, [[64.0]])
    with pytest.raises(ArgumentError, match=r"'a_scale': expected shape \(\), got \(1,\)"):
        get()(a[:1], b, half[None], four)
    with pytest.raises(ArgumentError, match=r"'b_scale': expected shape \(N=32,\), got \(32, 1\)"):
        get(scaling="row")(a, b, rows, one[:, None])


def test_the_output_scale_is_applied_and_float8_results_saturate() -> None:  # A25
    a, b, one = ones(4, 32), ones(32, 4), np.array(1, np.float32)
    kernel = get(out_dtype=E4M3)
    assert (kernel(a, b, one, one, out_scale=0.25).astype(float) == 8).all()
    assert (kernel(a, b, one, one, out_scale=100).astype(float) == 448).all()
    assert (kernel(a, b, one, one, out_scale=-100).astype(float) == -448).all()


def test_int8_results_saturate() -> None:  # A16
    a, b = np.array([[100]], np.int8), np.array([[2, -2]], np.int8)
    one, pair = np.ones(1, np.float32), np.ones(2, np.float32)
    c = get("int8", scaling="row", out_dtype="int8", epilogue="none")(a, b, one, pair)
    assert c.tolist() == [[127, -128]]


def test_int8_sums_are_exact() -> None:
    a, b = np.full((2, 40000), -128, np.int8), np.full((40000, 3), 127, np.int8)
    a[:, 0] = 1
    one = np.array(1, np.float32)
    c = get("int8", out_dtype="float32", scaling="row")(a, b, np.ones(2, np.float32), np.ones(3, np.float32))
    np.testing.assert_array_equal(c, np.full((2, 3), -128 * 127 * 39999 + 127, np.float32) * one)


def test_quantised_blocks_of_zeros_give_zeros() -> None:  # A19
    x = np.zeros((3, 200), np.float32)
    q, scale = tlhub.get_for("quantize", x, device="cpu")(x)
    c = get(scaling="block", trans_b=True)(q, ones(5, 200), scale, np.ones((1, 2), np.float32))
    assert (c.astype(float) == 0).all()


def test_a_scale_that_is_nan_reaches_what_it_scales_and_nothing_else() -> None:
    sa, sb = np.ones((3, 2), np.float32), np.ones((2, 2), np.float32)
    sa[1, 1] = sb[0, 1] = np.nan
    c = get(scaling="block", trans_b=True)(ones(3, 200), ones(150, 200), sa, sb).astype(float)
    want = np.zeros((3, 150), bool)
    want[1] = want[:, :128] = True
    np.testing.assert_array_equal(np.isnan(c), want)


def test_nan_in_an_operand_stays_in_its_row() -> None:  # A03
    a = ones(32, 33)
    a[1:] = np.nan
    one = np.array(1, np.float32)
    c = get()(a, ones(33, 64), one, one).astype(float)
    assert (c[0] == 33).all() and np.isnan(c[1:]).all()


def test_gates_are_the_first_half_of_the_columns_and_values_the_second() -> None:
    a, b = ones(2, 8), ones(8, 6)
    b[:, 3:] = [2, 3, 4]
    one, columns = np.ones(2, np.float32), np.ones(6, np.float32)
    c = get(scaling="row", glu=True, epilogue="relu", out_dtype="float32")(a, b, one, columns)
    np.testing.assert_array_equal(c, [[8 * 16.0, 8 * 24.0, 8 * 32.0]] * 2)
    assert (get(scaling="row", glu=True, epilogue="relu", out_dtype="float32")(a, -b, one, columns) == 0).all()


@pytest.mark.tvm
@pytest.mark.parametrize("threads", [1, 3])
def test_every_number_of_threads_gives_the_same_bits(threads: int) -> None:
    kernel = get(scaling="block", trans_b=True)
    dims = sizes(200, 700, 300)
    arrays = testing.inputs(SCALED, testing.numbers.bind(kernel.problem, dims))
    tlhub.set_num_threads(1)
    try:
        alone = kernel(*arrays.values())
        tlhub.set_num_threads(threads)
        assert kernel(*arrays.values()).tobytes() == alone.tobytes()
    finally:
        tlhub.set_num_threads(None)


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "options", "reason"),
    [
        ({"a": E4M3, "b": "int8"}, {}, "a is float8_e4m3fn and b is int8; only the two float8 types mix"),
        ("int8", {"scaling": "block"}, "scaling='block' with int8 operands; allowed: 'tensor' or 'row'"),
        (E4M3, {"scale_dtype": "float8_e8m0fnu"}, "scale_dtype='float8_e8m0fnu' with scaling='tensor'"),
        ("int8", {"fast_accum": True}, "fast_accum with int8 operands"),
        (E4M3, {"fast_accum": True, "scaling": "block"}, "fast_accum with float8_e4m3fn operands, scaling='block'"),
        (E4M3, {"glu": True}, "N=33 with glu=True; N counts gates and values, so it is even"),
        ("float16", {}, "it does not take dtype 'float16'; allowed: float8_e4m3fn, float8_e5m2, int8"),
    ],
)
def test_what_cannot_be_is_refused(dtype: Any, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ArgumentError) as refused:
        tlhub.get("gemm_scaled", (16, 33, 64), dtype, device="cpu", **options)
    assert reason in str(refused.value)


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"fast_accum": True}, "a CPU adds up in full float32"), ({"tensor_core": True}, "a CPU has no tensor cores")],
)
def test_what_a_cpu_does_not_do_is_said(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(NoSchedule, match=reason):
        get(**options)


def test_scales_of_another_shape_are_refused_and_say_how_they_were_read() -> None:
    kernel, a, b = get(scaling="block", trans_b=True), ones(3, 200), ones(150, 200)
    sa, sb = np.ones((3, 2), np.float32), np.ones((2, 2), np.float32)
    with pytest.raises(ArgumentError, match=r"'a_scale': expected shape \(M=3, K_128=2\), got \(2, 3\)"):
        kernel(a, b, sa.T, sb)
    with pytest.raises(ArgumentError, match=r"'b_scale': expected shape \(N_128=2, K_128=2\), got \(2, 1\)"):
        kernel(a, b, sa, sb[:, :1])
    with pytest.raises(
        ArgumentError, match=r"'a_scale' with scaling='block': expected dims \(M, K_128\), got shape \(\)"
    ):
        tlhub.get_for("gemm_scaled", a, b, np.array(1, np.float32), sb, scaling="block", trans_b=True)
    with pytest.raises(ArgumentError, match="'a_scale': expected dtype float32, got float64"):
        kernel(a, b, sa.astype(float), sb)


def test_an_odd_number_of_columns_has_no_halves() -> None:
    kernel = get(scaling="row", glu=True, epilogue="relu", out_dtype="float32")
    with pytest.raises(ArgumentError, match="'b': expected an even number of columns"):
        kernel(ones(2, 8), ones(8, 5), np.ones(2, np.float32), np.ones(5, np.float32))


def test_tensors_of_pytorch_with_scales_of_powers_of_two() -> None:
    torch = pytest.importorskip("torch")
    x = torch.arange(800, dtype=torch.float32).reshape(4, 200)
    options: dict[str, Any] = {"device": "cpu", "scale_dtype": "float8_e8m0fnu"}
    q, scale = tlhub.get_for("quantize", x, **options)(x)
    assert (q.dtype, scale.dtype, scale.shape) == (torch.float8_e4m3fn, torch.float8_e8m0fnu, (4, 2))
    options |= {"scaling": "block", "trans_b": True, "out_dtype": "float32", "tensor_core": False}
    b, b_scale = torch.ones(6, 200).to(torch.float8_e4m3fn), torch.ones(1, 2).to(torch.float8_e8m0fnu)
    c = tlhub.get_for("gemm_scaled", q, b, scale, b_scale, **options)(q, b, scale, b_scale)
    spread = scale.float().repeat_interleave(128, 1)[:, :200]
    torch.testing.assert_close(c, (q.float() * spread).sum(1, keepdim=True).expand(4, 6))
