"""gemm_w4a16 and gemm_w8a16 on the CPU against float64, within a tolerance that fails what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tlhub
from tlhub import testing
from tlhub.errors import ArgumentError
from tlhub.problem import make
from tlhub_mixed import packing
from tlhub_mixed.contracts.weights import W4A16
from tlhub_mixed.references import weights as reference

Array = np.ndarray[Any, Any]
MANY = settings(
    max_examples=15,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
EXTENTS = st.one_of(st.integers(0, 9), st.sampled_from([16, 31, 63, 65, 97, 128, 200, 257]))


def get(bits: int = 4, dtype: str = "float16", **options: object) -> Any:
    return tlhub.get(f"gemm_w{bits}a16", {d: d for d in "MNK"}, dtype, device="cpu", **options)


def sizes(bits: int, m: int, n: int, k: int, group: int, glu: object = False) -> dict[str, int]:
    made = {"M": m, "N": n, "K": k, "G": -(-k // group) if group else 1}
    return {**made, **({"K_2": -(-k // 2)} if bits == 4 else {}), **({"N_2": n // 2} if glu else {})}


OPTIONS: list[tuple[int, str, dict[str, object]]] = [
    (4, "float16", {}),
    (4, "bfloat16", {"group": 32, "zero_point": True, "glu": True, "epilogue": "silu", "bias": True}),
    (4, "float16", {"group": 0, "out_dtype": "float8_e4m3fn", "residual": True}),
    (8, "bfloat16", {"group": 64, "zero_point": True, "residual": True}),
    (8, "float16", {"group": 0, "out_dtype": "float32"}),
]
NAMES = [f"w{b}-{d}-{'-'.join(map(str, o.values()))}" for b, d, o in OPTIONS]


@pytest.mark.parametrize(("bits", "dtype", "options"), OPTIONS, ids=NAMES)
@MANY
@given(data=st.data())
def test_any_size_and_stride_is_within_the_tolerance(bits: int, dtype: str, options: Any, data: Any) -> None:
    kernel, glu, group = get(bits, dtype, **options), options.get("glu"), options.get("group", 128)
    n = data.draw(EXTENTS) * (2 if glu else 1)
    k = group * data.draw(st.integers(0, 5)) if group else data.draw(st.one_of(EXTENTS, st.just(400)))
    dims = sizes(bits, data.draw(EXTENTS), n, k, group, glu)
    contract, problem = kernel.kernel, testing.numbers.bind(kernel.problem, dims)
    arrays = testing.inputs(contract, problem, seed=data.draw(st.integers(0, 99)))
    if data.draw(st.booleans()):  # as checkpoints that lie the other way round are passed
        arrays |= {name: np.asfortranarray(arrays[name]) for name in ("a", "scale", "w")}
    testing.check(kernel, dims=dims, arrays=arrays, scalars={"out_scale": data.draw(st.sampled_from([1.0, 0.25]))})


@pytest.mark.tvm
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("zero", [False, True])
def test_every_code_is_read_exactly(bits: int, zero: bool) -> None:
    codes = np.arange(2**bits)[:, None] * np.ones((1, 64), int)
    if bits == 8 and not zero:
        codes -= 128
    point = np.full((len(codes), 2), 2**bits - 1) if zero else None
    made = packing.assemble(codes, np.full((len(codes), 2), 0.5, np.float16), point, bits=bits)
    pick = np.zeros((3, 64), np.float16)
    pick[0, 4] = pick[1, 37] = pick[2, 63] = 1
    c = get(bits, out_dtype="float32", **made.options)(pick, *made.arrays)
    np.testing.assert_array_equal(c, packing.dequantize(made)[:, [4, 37, 63]].T)


def test_no_hint_turns_codes_into_others() -> None:
    a, scale, zero = np.ones((2, 128), np.float16), np.ones((3, 1), np.float16), np.full((3, 1), 3, np.uint8)
    with pytest.raises(ArgumentError, match="'w': expected .*uint8.*\nhint: tlhub kernels$"):
        get(8, group=0, zero_point=True)(a, np.full((3, 128), -5, np.int8), scale, zero)
    with pytest.raises(ArgumentError, match="'w': expected .*int8.*\nhint: tlhub kernels$"):
        get(8, group=0)(a, np.full((3, 128), 200, np.uint8), scale)


def test_the_last_half_byte_of_an_odd_row_means_nothing() -> None:
    w = packing.pack(np.full((2, 3), 9))
    w[:, 1] |= 0xF0
    c = get(group=0, out_dtype="float32")(np.ones((1, 3), np.float16), w, np.ones((2, 1), np.float16))
    assert c.tolist() == [[3.0, 3.0]]


def product(a: Array, codes: Array, scale: Array, zero: Array, accum: type = np.float32) -> Array:
    """A product in NumPy, with groups of 128."""
    spread = [np.repeat(x.astype(accum), 128, axis=1)[:, : codes.shape[1]] for x in (zero, scale)]
    w = (codes.astype(accum) - spread[0]) * spread[1]
    total = np.zeros((len(a), len(codes)), accum)
    for k in range(a.shape[1]):
        total += a[:, k, None].astype(accum) * w[:, k]
    return total.astype(np.float16)


def nearby(x: Array) -> Array:
    return np.roll(x, 1, axis=0)


FAULTS: dict[str, Callable[..., Array]] = {
    "a lost tail": lambda a, q, s, z: product(a[:, :-1], q[:, :-1], s, z),
    "float16 sums": lambda a, q, s, z: product(a, q, s, z, np.float16),
    "swapped rows": lambda a, q, s, z: nearby(product(a, q, s, z)),
    "scales of another row": lambda a, q, s, z: product(a, q, nearby(s), z),
    "scales of another group": lambda a, q, s, z: product(a, q, s[:, ::-1], z),
    "zero points off by one": lambda a, q, s, z: product(a, q, s, z + 1),
    "halves of bytes swapped": lambda a, q, s, z: product(a, q.reshape(-1, 128, 2)[..., ::-1].reshape(q.shape), s, z),
}


def drawn() -> tuple[Any, dict[str, Array], tuple[Array, ...], tuple[Array, ...]]:
    options = {"group": 128, "zero_point": True, "out_dtype": "float16"}
    problem = make(W4A16, (5, 8, 256), "float16", options)
    arrays = testing.inputs(W4A16, problem, seed=1)
    want = reference.reference(problem, arrays, {"out_scale": 1.0})
    return problem, arrays, want, reference.tolerance(problem, arrays, {"out_scale": 1.0}, want)


def test_a_product_in_float32_is_within_the_tolerance() -> None:
    _, arrays, want, bounds = drawn()
    codes = packing.unpack(arrays["w"])
    testing.numbers.compare(product(arrays["a"], codes, arrays["scale"], arrays["zero"]), *want, *bounds)


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_wrong_is_out_of_the_tolerance(fault: str) -> None:
    _, arrays, want, bounds = drawn()
    codes = packing.unpack(arrays["w"])
    with pytest.raises(AssertionError, match="times the bound"):
        testing.numbers.compare(FAULTS[fault](arrays["a"], codes, arrays["scale"], arrays["zero"]), *want, *bounds)


def test_groups_that_do_not_divide_k_are_refused() -> None:
    with pytest.raises(ArgumentError, match="K=200 is no multiple of group=128; allowed: a group that divides K, or 0"):
        tlhub.get("gemm_w4a16", (4, 8, 200), "float16", device="cpu")
    a, w, scale = np.ones((4, 200), np.float16), np.zeros((8, 100), np.uint8), np.ones((8, 2), np.float16)
    with pytest.raises(ArgumentError, match="'a': expected a K that is a multiple of group=128"):
        get()(a, w, scale)


def test_scales_and_zero_points_of_another_shape_or_dtype_are_refused() -> None:
    a, w, scale = np.ones((4, 256), np.float16), np.zeros((8, 128), np.uint8), np.ones((8, 2), np.float16)
    with pytest.raises(ArgumentError, match=r"'scale': expected shape \(N=8, G=2\), got \(2, 8\)"):
        get()(a, w, scale.T)
    with pytest.raises(ArgumentError, match=r"'w': expected shape \(N=?8?, K_2=128\), got \(8, 256\)"):
        get()(a, np.zeros((8, 256), np.uint8), scale)
    with pytest.raises(ArgumentError, match="'scale': expected dtype float16, got float32"):
        get()(a, w, scale.astype(np.float32))
    kernel = get(4, "bfloat16", **OPTIONS[1][2])
    arrays = testing.inputs(kernel.kernel, testing.numbers.bind(kernel.problem, sizes(4, 2, 4, 64, 32, True)))
    negative = [x.astype(np.int8) if name == "zero" else x for name, x in arrays.items()]
    with pytest.raises(ArgumentError, match="'zero': expected dtype uint8, got int8"):
        kernel(*negative)


@pytest.mark.parametrize("m", [1, 4096])
def test_one_row_and_many_give_the_same(m: int) -> None:
    rng = np.random.default_rng(0)
    made = packing.assemble(rng.integers(0, 16, (96, 256)), np.full((96, 2), 0.25, np.float16))
    a = rng.integers(-3, 4, (1, 256)).astype(np.float16)
    c = get()(np.repeat(a, m, axis=0), *made.arrays)
    want = (a.astype(np.float32) @ packing.dequantize(made).T).astype(np.float16)
    np.testing.assert_array_equal(c, np.repeat(want, m, axis=0))
