"""The CPU kernels through ``tlhub.get``, against float64 within the contract's tolerance.

One symbolic binary a set of dtypes and options serves every size here, so hypothesis may ask for many.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tlhub
from tlhub import testing
from tlhub.errors import ArgumentError, NoSchedule
from tlhub.testing.data import numpy_dtype
from tlhub_gemm.contract import DTYPES, GEMM

Array = np.ndarray[Any, Any]
ANY = ("B", "M", "N", "K")
MANY = settings(
    max_examples=20,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
EXTENTS = st.one_of(
    st.integers(0, 9),
    st.sampled_from([13, 16, 17, 31, 33, 47, 48, 63, 65, 96, 97, 100, 127, 131]),
)
DEPTHS = st.one_of(EXTENTS, st.sampled_from([255, 400, 511, 512, 513, 1029]))


def get(dtype: str = "float32", **options: object) -> Any:
    return tlhub.get("gemm", {d: d for d in ANY}, dtype, device="cpu", **options)


@st.composite
def dims(draw: st.DrawFn) -> dict[str, int]:
    return {"B": draw(st.integers(0, 3)), "M": draw(EXTENTS), "N": draw(EXTENTS), "K": draw(DEPTHS)}


def layout(draw: Any, array: Array) -> Array:
    """Return the values of *array* in an array of other strides, offset and surroundings (NaN or 0x55)."""
    kind = draw(st.sampled_from(["plain", "fortran", "gap", "step", "reversed", "offset"]))
    fill = np.nan if array.dtype.kind in "fV" else 0x55
    if kind == "plain" or not array.ndim:
        return array
    if kind == "fortran":
        return np.asfortranarray(array)
    if kind == "reversed":
        return np.ascontiguousarray(array[..., ::-1])[..., ::-1]
    if kind == "offset":
        room = np.full(array.size + 3, fill, array.dtype)
        room[3:] = array.ravel()
        return room[3:].reshape(array.shape)
    shape = list(array.shape)
    shape[-1] = 2 * shape[-1] if kind == "step" else shape[-1] + 5
    room = np.full(shape, fill, array.dtype)
    view = room[..., ::2] if kind == "step" else room[..., : array.shape[-1]]
    view[...] = array
    return view


GATED: dict[str, object] = {"glu": True, "epilogue": "silu", "bias": True, "residual": True}
OPTIONS: list[tuple[str, dict[str, object]]] = [
    *[(dtype, {}) for dtype in DTYPES],
    ("float32", {"trans_a": True, "trans_b": True}),
    ("float32", {"trans_b": True, "bias": True, "residual": True, "epilogue": "gelu"}),
    ("float32", {"accum": "float64", "out_dtype": "float64"}),
    ("float64", {"out_dtype": "bfloat16", "epilogue": "gelu", "bias": True}),
    ("float16", {"out_dtype": "float32", "epilogue": "silu", "residual": True}),
    ("bfloat16", {"trans_a": True, "epilogue": "gelu_tanh", "bias": True}),
    ("float8_e4m3fn", {"out_dtype": "float8_e5m2", "epilogue": "relu", "residual": True}),
    ("float8_e5m2", {"out_dtype": "float16", "trans_b": True}),
    ("int8", {"out_dtype": "int8", "epilogue": "relu", "bias": True, "residual": True}),
    ("int8", {"out_dtype": "float32", "epilogue": "silu"}),
    ("float32", GATED),
    ("float16", {"glu": True, "trans_b": True, "bias": True, "out_dtype": "int8"}),
]


@pytest.mark.parametrize(
    ("dtype", "options"), OPTIONS, ids=[f"{d}-{'-'.join(map(str, o.values()))}" for d, o in OPTIONS]
)
@MANY
@given(data=st.data())
def test_any_size_and_stride_is_within_the_tolerance(dtype: str, options: dict[str, object], data: Any) -> None:
    kernel = get(dtype, **options)
    extents = data.draw(dims())
    if options.get("glu"):
        extents |= {"N": 2 * extents["N"], "N_2": extents["N"]}
    problem = testing.numbers.bind(kernel.problem, extents)
    arrays = testing.inputs(GEMM, problem, seed=data.draw(st.integers(0, 99)))
    arrays = {name: layout(data.draw, array) for name, array in arrays.items()}
    factors = {"alpha": [1.0, 1.0, -0.37, 0.0], "out_scale": [1.0, 1.0, 8.0, -0.3]}
    scalars = {name: data.draw(st.sampled_from(values)) for name, values in factors.items()}
    assert testing.check(kernel, dims=extents, arrays=arrays, scalars=scalars) <= 1


@MANY
@given(extents=dims(), data=st.data())
def test_outputs_of_any_stride_are_written_and_nothing_else_is(extents: dict[str, int], data: Any) -> None:
    kernel = get("float32")
    shape = tuple(extents[d] for d in "BMN")
    room = np.full((shape[0], shape[1] + 2, 2 * shape[2] + 3), -7, np.float32)
    step = data.draw(st.sampled_from([1, 2]))
    out = room[:, 1 : 1 + shape[1], 1 : 1 + step * shape[2] : step]
    if data.draw(st.booleans()):
        out = out[..., ::-1]
    a = np.ones((shape[0], shape[1], extents["K"]), np.float32)
    b = np.ones((shape[0], extents["K"], shape[2]), np.float32)
    before = room.copy()
    assert kernel(a, b, out=out) is out
    np.testing.assert_array_equal(out, np.full(shape, extents["K"], np.float32))
    out[...] = -7
    np.testing.assert_array_equal(room, before)


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_every_number_of_threads_gives_the_same_bits(threads: int) -> None:
    kernel = get("float32")
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((3, 131, 300), np.float32), rng.standard_normal((3, 300, 257), np.float32)
    thin = rng.standard_normal((2, 2000), np.float32), rng.standard_normal((2000, 1100), np.float32)
    tlhub.set_num_threads(1)
    try:
        alone = kernel(a, b), kernel(*thin)
        tlhub.set_num_threads(threads)
        for want, got in zip(alone, (kernel(a, b), kernel(*thin)), strict=True):
            np.testing.assert_array_equal(want, got)
    finally:
        tlhub.set_num_threads(None)


def test_two_threads_of_python_may_call_at_once() -> None:
    kernel = get("float32")
    rng = np.random.default_rng(1)
    pairs = [(rng.standard_normal((200, 150), np.float32), rng.standard_normal((150, 190), np.float32)) for _ in "ab"]
    wrong: list[int] = []

    def run(i: int) -> None:
        want = kernel(*pairs[i])
        wrong.extend(1 for _ in range(50) if (kernel(*pairs[i]) != want).any())

    workers = [threading.Thread(target=run, args=(i,)) for i in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


# -- conversions -----------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", [None, "x86-64-v2"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_every_code_of_a_narrow_float_is_read_exactly(dtype: str, arch: str | None, portable: Any) -> None:
    portable(arch)
    bits = 16 if "16" in dtype else 8
    codes = np.arange(2**bits, dtype=f"uint{bits}").view(numpy_dtype(dtype))
    kernel = tlhub.get("gemm", {d: d for d in ANY}, dtype, device="cpu", arch=arch, out_dtype="float32")
    with np.errstate(invalid="ignore"):
        want = codes.astype(np.float32)
    for a, b in ((codes[:, None], np.ones((1, 1), codes.dtype)), (np.ones((1, 1), codes.dtype), codes[None])):
        np.testing.assert_array_equal(kernel(a, b).ravel(), want)


@pytest.mark.parametrize("arch", [None, "x86-64-v2"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_results_are_rounded_to_nearest_even(dtype: str, arch: str | None, portable: Any) -> None:
    portable(arch)
    kind = numpy_dtype(dtype)
    bits = 8 * kind.itemsize
    codes = np.arange(2**bits, dtype=f"uint{bits}").view(kind).astype(np.float32)
    codes = np.sort(codes[np.isfinite(codes)])
    # each value, the half way between each pair, and what lies next to that on both sides
    middle = codes[1:] / 2 + codes[:-1] / 2
    values = np.concatenate([codes, middle, np.nextafter(middle, np.inf), np.nextafter(middle, -np.inf), [np.nan]])
    values = values.astype(np.float32)
    kernel = tlhub.get("gemm", {d: d for d in ANY}, "float32", device="cpu", arch=arch, out_dtype=dtype)
    got = kernel(values[:, None], np.ones((1, 1), np.float32)).ravel().astype(np.float32)
    np.testing.assert_array_equal(got, values.astype(kind).astype(np.float32))


@pytest.mark.parametrize(("dtype", "largest"), [("float8_e4m3fn", 448.0), ("float8_e5m2", 57344.0)])
def test_float8_results_saturate(dtype: str, largest: float) -> None:
    kernel = get("float32", out_dtype=dtype)
    values = np.array([[1000.0, 448.0, 464.0, 465.0, -1000.0, np.nan, np.inf, 1e30, -1e30]], np.float32)
    got = kernel(np.ones((1, 1), np.float32), values).astype(np.float32)
    within = np.clip(values, -largest, largest).astype(numpy_dtype(dtype)).astype(np.float32)
    np.testing.assert_array_equal(got, within)


def test_float64_results_are_rounded_once() -> None:
    # to float32 first, this is a tie that falls to even; it lies above the half way
    value = 1 + 2.0**-8 + 2.0**-40
    kernel = get("float64", out_dtype="bfloat16")
    got = kernel(np.array([[value, -value, 1 + 2.0**-8]]).T, np.ones((1, 1)))
    assert got.astype(np.float64).ravel().tolist() == [1 + 2.0**-7, -1 - 2.0**-7, 1.0]


@pytest.mark.parametrize("epilogue", ["relu", "gelu", "gelu_tanh", "silu"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_activations_over_their_whole_range(epilogue: str, dtype: str) -> None:
    kernel = get(dtype, epilogue=epilogue)
    x = np.concatenate([np.linspace(-120, 120, 4801), [0.0, -0.0, 1e-30, -1e-30, 3e38, -3e38, np.nan, np.inf, -np.inf]])
    extents = {"B": 1, "M": 1, "N": len(x), "K": 1}
    arrays = {"a": np.ones((1, 1, 1), dtype), "b": x.astype(dtype)[None, None]}
    assert testing.check(kernel, dims=extents, arrays=arrays) <= 1


def test_a_result_is_quantised_with_a_given_scale() -> None:
    """Rounded to nearest even and saturated; a NaN is 0."""
    x = np.array([[0.25, 0.75, 1.25, -0.75, 100.0, -100.0, np.nan]], np.float32)
    got = get("float32", out_dtype="int8")(np.ones((1, 1), np.float32), x, out_scale=2.0)
    assert got.tolist() == [[0, 2, 2, -2, 127, -128, 0]]


@pytest.mark.parametrize("shape", [(3, 5), (40, 7)])
def test_gates_without_their_values_are_refused(shape: tuple[int, int]) -> None:
    shapes = ((shape[0], 4), (4, shape[1]), (shape[1],), (shape[0], shape[1] // 2 + 1))
    with pytest.raises(ArgumentError, match="argument 'b': expected an even number of columns"):
        get("float32", **GATED)(*(np.ones(x, np.float32) for x in shapes))


def test_what_the_cpu_does_not_serve_says_why() -> None:
    with pytest.raises(NoSchedule) as caught:
        get("float32", compute="tf32")
    assert "tf32" in str(caught.value)


@pytest.fixture
def portable() -> Iterator[Any]:
    """Skip where this machine does not run code for the arch that a test asks for."""
    from tlhub_cpu import TARGET

    def check(arch: str | None) -> None:
        reason = arch and TARGET.runs(f"cpu:{arch}", TARGET.devices()[0])
        if reason:
            pytest.skip(str(reason))

    yield check
