"""quantize on the CPU, bit for bit: against the reference for any size and stride, and against values known by hand."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tlhub
from tlhub import testing
from tlhub.errors import ArgumentError
from tlhub.testing.data import numpy_dtype
from tlhub_mixed.contracts.quantize import QUANTIZE, SCALES

Array = np.ndarray[Any, Any]
MANY = settings(
    max_examples=20,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
EXTENTS = st.one_of(st.integers(0, 9), st.sampled_from([16, 31, 127, 128, 129, 200, 256, 300]))
SPECIAL = [0.0, -0.0, np.nan, np.inf, -np.inf, 1e-45, -1e-40, 3e-38, 3.4e38, 65504.0, 448.0, 464.0, 1e-3]


def get(dtype: str = "float32", **options: object) -> Any:
    return tlhub.get("quantize", {"M": "M", "K": "K"}, dtype, device="cpu", **options)


def sizes(m: int, k: int) -> dict[str, int]:
    return {"M": m, "K": k, "M_128": -(-m // 128), "K_128": -(-k // 128)}


OPTIONS: list[tuple[str, dict[str, object]]] = [
    ("float32", {"scaling": "tensor"}),
    ("float32", {"scaling": "row", "out_dtype": "int8"}),
    ("bfloat16", {"scaling": "1x128"}),
    ("float16", {"scaling": "128x128", "out_dtype": "float8_e5m2"}),
    ("float32", {"scaling": "1x128", "scale_dtype": "float8_e8m0fnu"}),
    ("bfloat16", {"scaling": "128x128", "scale_dtype": "float8_e8m0fnu", "out_dtype": "int8"}),
    ("float32", {"scaling": "tensor", "given": True}),
    ("bfloat16", {"scaling": "row", "given": True, "scale_dtype": "float8_e8m0fnu"}),
    ("float16", {"scaling": "1x128", "given": True, "out_dtype": "int8"}),
    ("float32", {"scaling": "128x128", "given": True}),
]
NAMES = [f"{d}-{'-'.join(map(str, o.values()))}" for d, o in OPTIONS]


@pytest.mark.parametrize(("dtype", "options"), OPTIONS, ids=NAMES)
@MANY
@given(data=st.data())
def test_any_size_stride_and_value_gives_the_reference_s_bits(dtype: str, options: Any, data: Any) -> None:
    kernel = get(dtype, **options)
    dims = sizes(data.draw(EXTENTS), data.draw(EXTENTS))
    problem = testing.numbers.bind(kernel.problem, dims)
    arrays = testing.inputs(QUANTIZE, problem, data.draw(st.integers(0, 99)), data.draw(st.sampled_from([1.0, 1e-3])))
    x = arrays["x"]
    for value in data.draw(st.lists(st.sampled_from(SPECIAL), max_size=3)):
        if x.size:
            with np.errstate(over="ignore"):
                x.ravel()[data.draw(st.integers(0, x.size - 1))] = value
    kind = data.draw(st.sampled_from(["plain", "fortran", "gap", "step", "reversed"]))
    if kind == "fortran":
        x = np.asfortranarray(x)
    elif kind == "reversed":
        x = np.ascontiguousarray(x[::-1, ::-1])[::-1, ::-1]
    elif kind != "plain":
        room = np.full((dims["M"], 2 * dims["K"] + 3), np.nan, x.dtype)
        view = room[:, : 2 * dims["K"] : 2] if kind == "step" else room[:, 1 : dims["K"] + 1]
        view[...] = x
        x = view
    gap = data.draw(st.sampled_from([0, 3]))
    assert testing.check(kernel, dims=dims, arrays={**arrays, "x": x}, gap=lambda count: gap) == 0


@pytest.mark.parametrize(
    ("out", "values"),
    [
        ("float8_e4m3fn", [448, 448, 448, 448, -448, np.nan, 448, -448, -0.0, 2.0**-9, 0.0]),  # A17 is the first six
        ("float8_e5m2", [1024, 448, 448, 448, -1024, np.nan, 57344, -57344, -0.0, 2.0**-9, 2.0**-11]),
        ("int8", [127, 127, 127, 127, -128, 0, 127, -128, 0, 0, 0]),
    ],
)
def test_conversions_saturate_and_keep_nan(out: str, values: list[float]) -> None:
    x = np.array([[1000, 448, 464, 465, -1000, np.nan, np.inf, -1e30, -0.0, 2.0**-9, 2.0**-11]], np.float32)
    q = get(scaling="tensor", given=True, out_dtype=out)(x, np.array(1, np.float32))
    np.testing.assert_array_equal(q.astype(np.float64), [values])
    assert np.signbit(q.astype(np.float64)[0, 8]) == (out != "int8")


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_ties_go_to_even_below_the_least_normal_number_too(dtype: str) -> None:
    codes = np.arange(128, dtype=np.uint8).view(numpy_dtype(dtype)).astype(np.float32)
    codes = codes[np.isfinite(codes)]
    middle = codes[1:] / 2 + codes[:-1] / 2
    x = np.concatenate([codes, middle, np.nextafter(middle, np.float32(1e9)), np.nextafter(middle, np.float32(-1))])[
        None
    ]
    q = get(scaling="tensor", given=True, out_dtype=dtype)(x, np.array(1, np.float32))
    np.testing.assert_array_equal(q.view(np.uint8), x.astype(numpy_dtype(dtype)).view(np.uint8))
    assert q.view(np.uint8)[0, len(codes) :][: len(middle)].tolist() == [c + c % 2 for c in range(len(middle))]


@pytest.mark.parametrize(
    ("amax", "scale", "code"),
    [
        (0.0, 1.0, 127),  # A19: all zeros
        (2.0**-120, 1.0, 127),  # the scale would be below the least normal number
        (448.0, 1.0, 127),
        (449.0, np.float32(449) / np.float32(448), 128),
        (1344.0, 3.0, 129),
        (3.5, 2.0**-7, 120),
        (np.inf, np.inf, 255),
        (np.nan, np.nan, 255),
    ],
)
def test_scales_are_amax_over_the_largest_value(amax: float, scale: float, code: int) -> None:
    x = np.zeros((1, 256), np.float32)
    x[0, 130] = -amax
    q, made = get()(x)
    np.testing.assert_array_equal(made, np.array([[1, scale]], np.float32))
    _, power = get(scale_dtype="float8_e8m0fnu")(x)
    assert power.dtype == ml_dtypes.float8_e8m0fnu
    assert power.view(np.uint8).tolist() == [[127, code]]
    assert (q[0, :128].view(np.uint8) == 0).all()


@pytest.mark.parametrize("out", ["float8_e4m3fn", "int8"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_hidden_in_no_dtype(value: float, out: str) -> None:
    x = np.ones((2, 256), np.float32)
    x[1, 3] = value
    q, scale = get(out_dtype=out)(x)
    with np.errstate(invalid="ignore"):
        back = q.astype(np.float32) * np.repeat(scale, 128, axis=1)
    assert np.isnan(back[1, :128]).all()
    assert np.isfinite(back[0]).all() and np.isfinite(back[1, 128:]).all()


def test_a_slice_has_the_codes_and_scales_of_its_copy() -> None:  # A07
    x = np.arange(72, dtype=np.float32).reshape(3, 4, 6)[:, ::2, :].reshape(6, 6)
    view = np.arange(72, dtype=np.float32).reshape(12, 6)[::2]
    np.testing.assert_array_equal(view, x)
    kernel = get(scaling="row", out_dtype="int8")
    (q, scale), (again, same) = kernel(view), kernel(x.copy())
    np.testing.assert_array_equal(q, again)
    np.testing.assert_array_equal(scale, same)
    np.testing.assert_array_equal(scale, np.array([5, 17, 29, 41, 53, 65], np.float32) / np.float32(127))


@pytest.mark.parametrize("scaling", list(SCALES))
def test_values_come_back_within_half_a_unit(scaling: str) -> None:
    x = np.random.default_rng(0).standard_normal((200, 300)).astype(np.float32)
    q, scale = get(scaling=scaling, out_dtype="int8")(x)
    rows, columns = {"tensor": (200, 300), "row": (1, 300), "1x128": (1, 128), "128x128": (128, 128)}[scaling]
    grid = scale.reshape(-(-200 // rows), -(-300 // columns))
    spread = np.repeat(np.repeat(grid, rows, 0), columns, 1)[:200, :300]
    assert (abs(q * spread - x) <= spread * 0.5001).all()
    assert abs(q).max() == 127


def test_scales_of_another_shape_or_dtype_are_refused() -> None:
    x = np.ones((3, 200), np.float32)
    kernel = get(given=True)
    with pytest.raises(ArgumentError, match=r"'scale': expected shape \(M=3, K_128=2\), got \(3, 3\)"):
        kernel(x, np.ones((3, 3), np.float32))
    with pytest.raises(ArgumentError, match=r"'scale': expected shape \(M=3, K_128=2\), got \(2, 3\)"):
        kernel(x, np.ones((2, 3), np.float32))
    with pytest.raises(ArgumentError, match="'scale': expected dtype float32, got"):
        kernel(x, np.ones((3, 2), ml_dtypes.float8_e8m0fnu))
    with pytest.raises(
        ArgumentError, match=r"'scale' with given=True, scaling='1x128': expected dims \(M, K_128\), got shape \(3,\)"
    ):
        tlhub.get_for("quantize", x, np.ones(3, np.float32), given=True)
    with pytest.raises(ArgumentError, match="K_128 is 3; it is K/128 rounded up: 2 for K=200"):
        tlhub.get_for("quantize", x, np.ones((3, 3), np.float32), given=True)
    out = np.ones((3, 200), ml_dtypes.float8_e4m3fn), np.ones((3, 1), np.float32)
    with pytest.raises(ArgumentError, match=r"'scale' \(out\): expected shape \(M=3, K_128=2\), got \(3, 1\)"):
        get()(x, out=out)


@pytest.mark.tvm
@pytest.mark.parametrize("threads", [1, 3])
def test_every_number_of_threads_gives_the_same_bits(threads: int) -> None:
    x = np.random.default_rng(0).standard_normal((700, 300)).astype(np.float32)
    tlhub.set_num_threads(threads)
    try:
        for scaling in SCALES:
            problem = testing.numbers.bind(get(scaling=scaling).problem, sizes(700, 300))
            testing.check(get(scaling=scaling), dims=problem.dim, arrays={"x": x})
    finally:
        tlhub.set_num_threads(None)
