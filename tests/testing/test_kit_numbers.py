"""The kit's own judgement: what is right passes, and each kind of wrong is named."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tlhub import problem
from tlhub.errors import ArgumentError
from tlhub.specs import Arg, Dim, Kernel, Option, Scalar
from tlhub.testing import check, compare, default_scalars, inputs, poisoned
from tlhub.testing.data import spilled
from tlhub.testing.numbers import bind

pytestmark = pytest.mark.light

SCALE = Kernel(
    name="scale",
    revision=1,
    dims=(Dim("B", default=1, elide=True), Dim("M"), Dim("D")),
    inputs=(Arg("x", ("B", "M", "D")),),
    outputs=(
        Arg("y", ("B", "M", "D"), dtype="option:out"),
        Arg("total", ("B", "M"), dtype="float32", when={"sum": True}),
    ),
    dtypes=("float32", "float16", "bfloat16", "float8_e4m3fn", "int8"),
    options=(
        Option("out", ("float32", "int8", "float16"), default="float32"),
        Option("sum", (False, True), default=False),
    ),
    scalars=(Scalar("scale", default="1/sqrt(D)"), Scalar("shift", "int", 0)),
    reference=f"{__name__}:reference",
    tolerance=f"{__name__}:tolerance",
    flops=lambda dims: 1.0 * dims["M"] * dims["D"],
)


def reference(problem, inputs, scalars):
    y = inputs["x"].astype(np.float64) * scalars["scale"] + scalars["shift"]
    return (y, y.sum(-1)) if problem.option["sum"] else (y,)


def tolerance(problem, inputs, scalars, outputs):
    return tuple(1e-6 * abs(o) + 1e-6 for o in outputs)


class Compiled:
    """Stands for a CompiledKernel: it computes the reference, then *spoil* has its way with the outputs."""

    def __init__(self, problem, spoil=lambda outputs: None):
        self.problem, self.spoil = problem, spoil

    def __call__(self, *arrays, out, **scalars):
        outputs = out if isinstance(out, tuple) else (out,)
        for output, value in zip(outputs, reference(self.problem, {"x": arrays[0]}, scalars), strict=True):
            output[...] = value.astype(output.dtype)
        self.spoil(outputs)


def made(shape=(5, 7), dtype="float32", **options):
    return problem.make(SCALE, shape, dtype, options)


def test_right_numbers_pass_and_the_ratio_is_returned():
    assert 0 < check(Compiled(made()), kernel=SCALE) <= 1
    assert check(Compiled(made(sum=True)), kernel=SCALE, seed=3) <= 1
    assert check(Compiled(made((0, 7))), kernel=SCALE) == 0


def wrong_element(outputs):
    outputs[0][0, 3, 2] += 1


def unwritten(outputs):
    outputs[0][0, 1, 1] = np.nan


def swapped(outputs):
    outputs[0][0, [0, 1]] = outputs[0][0, [1, 0]]


def second_output(outputs):
    outputs[1][0, 4] = 0


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (wrong_element, r"y\[0, 3, 2\] is .*, expected .* within .* times the bound; 1 of 35 elements"),
        (unwritten, r"y\[0, 1, 1\] is nan, expected -?[0-9.]+ within"),
        (swapped, r"14 of 35 elements"),
        (second_output, r"total\[0, 4\] is 0.0, expected -?[0-9.]+ within"),
    ],
)
def test_wrong_numbers_are_named(spoil, said):
    with pytest.raises(AssertionError, match=said):
        check(Compiled(made(sum=True), spoil), kernel=SCALE, scale=3.0)


@pytest.mark.parametrize("place", [-1, 0])
def test_writing_beside_an_output_is_seen(place):
    def spill(outputs):
        whole = outputs[0].base
        start = 64 - 1 if place == -1 else 64 + outputs[0].size
        whole[start] = 1.0

    with pytest.raises(AssertionError, match="outside output 'y'"):
        check(Compiled(made(), spill), kernel=SCALE)


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
def test_an_output_that_nobody_writes_fails(dtype):
    class Idle(Compiled):
        def __call__(self, *arrays, out, **scalars):
            pass

    with pytest.raises(AssertionError):
        check(Idle(made((64, 64), out=dtype)), kernel=SCALE)


def test_symbolic_kernels_are_checked_at_the_dims_given():
    symbolic = problem.make(SCALE, ("M", "M"), "float32", {})
    assert check(Compiled(symbolic), dims={"M": 9, "D": 9}, kernel=SCALE) <= 1
    assert bind(symbolic, {"M": 9}).dim == {"B": 1, "M": 9, "D": 9}
    with pytest.raises(AssertionError, match="dim B"):
        bind(symbolic, {"B": 2})
    with pytest.raises(ArgumentError, match="symbolic"):
        check(Compiled(symbolic), kernel=SCALE)


def test_given_arrays_and_scalars_are_used():
    seen = {}

    class Spy(Compiled):
        def __call__(self, *arrays, out, **scalars):
            seen.update(scalars, x=arrays[0])
            super().__call__(*arrays, out=out, **scalars)

    x = np.ones((1, 2, 4), np.float32)
    check(Spy(made((2, 4))), kernel=SCALE, arrays={"x": x}, scalars={"shift": 3})
    assert seen["x"] is x and seen["shift"] == 3 and seen["scale"] == 0.5
    with pytest.raises(ArgumentError, match="no scalar 'sacle'"):
        check(Spy(made()), kernel=SCALE, scalars={"sacle": 1.0})


def test_compare_holds_nan_and_infinity_to_be_themselves():
    want = np.array([1.0, np.nan, np.inf, -np.inf])
    assert compare(want.astype(np.float32), want, 1e-6) == 0
    for place, value in ((0, np.inf), (0, np.nan), (1, 0.0), (2, -np.inf), (2, 1e30), (3, np.nan)):
        got = want.copy()
        got[place] = value
        with pytest.raises(AssertionError, match=rf"\[{place}\]"):
            compare(got, want, 1e-6)


def test_compare_takes_overflow_for_what_the_format_says():
    assert compare(np.array([np.inf], np.float16), [70000.0], 35.0) == 0
    assert compare(np.array([np.inf], np.float16), [65500.0], 32.0) == 0
    with pytest.raises(AssertionError):
        compare(np.array([np.inf], np.float16), [60000.0], 30.0)
    with pytest.raises(AssertionError):
        compare(np.array([np.inf], np.float32), [70000.0], 35.0)


def test_compare_needs_equal_shapes_and_an_honest_bound():
    with pytest.raises(AssertionError, match="shape"):
        compare(np.zeros((2, 1)), np.zeros((1, 2)), 1.0)
    with pytest.raises(AssertionError):
        compare(np.ones(1), np.zeros(1), np.nan)
    assert compare(np.ones(1), np.ones(1), 0.0) == 0


def test_inputs_are_of_the_contract_and_repeat():
    for dtype in SCALE.dtypes:
        one = inputs(SCALE, made((33, 65), dtype), seed=1)["x"]
        assert one.shape == (1, 33, 65) and one.dtype.name == dtype
        assert (one == inputs(SCALE, made((33, 65), dtype), seed=1)["x"]).all()
        assert (one != inputs(SCALE, made((33, 65), dtype), seed=2)["x"]).any()
    whole = inputs(SCALE, made((64, 64), "int8"))["x"]
    assert whole.min() == -128 and whole.max() == 127
    large = inputs(SCALE, made((64, 64), "float8_e4m3fn"), scale=1e4)["x"].astype(np.float32)
    assert np.isfinite(large).all() and abs(large).max() == 448


def prepare(problem, inputs, scalars, rng):
    most = problem.dim["D"]
    lengths = np.full(inputs["n"].shape, most) if rng is None else rng.integers(0, most + 1, inputs["n"].shape)
    return {"n": lengths, "half": scalars["scale"] * inputs["x"]}


def test_inputs_that_the_kernel_prepares():
    more = (Arg("n", ("M",), dtype="int32"), Arg("half", ("B", "M", "D"), dtype="float16"))
    kernel = replace(SCALE, inputs=(*SCALE.inputs, *more), prepare=f"{__name__}:prepare")
    asked = problem.make(kernel, (65, 4), "float32", {})
    made = inputs(kernel, asked, seed=1)
    assert list(made) == ["x", "n", "half"]
    assert made["n"].dtype == np.int32 and made["n"].min() == 0 and made["n"].max() == 4
    assert (made["half"] == (made["x"] / 2).astype(np.float16)).all()
    assert (inputs(kernel, asked, seed=1, scalars={"scale": 2.0})["half"] == (made["x"] * 2).astype(np.float16)).all()
    assert (inputs(kernel, asked, whole=True)["n"] == 4).all()


def test_poison_shows_in_every_dtype():
    y, total = poisoned(SCALE, made(sum=True))
    assert np.isnan(y).all() and np.isnan(total).all() and not spilled(y)
    (z,) = poisoned(SCALE, made(out="int8"))
    assert (z == 0x55).all() and not spilled(z)


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8", "bfloat16", "float8_e5m2", "float8_e4m3fn"])
def test_poison_between_rows(dtype):
    contract = replace(SCALE, outputs=(replace(SCALE.outputs[0], dtype=dtype),))
    (y,) = poisoned(contract, made((4, 3)), gap=lambda count: count - 1)
    assert y.shape == (1, 4, 3) and y.strides[1:] == (5 * y.itemsize, y.itemsize)
    y[...] = 1
    assert not spilled(y)
    start = (y.ctypes.data - y.base.ctypes.data) // y.itemsize
    for at in (3, 14, 19):  # of rows of five, beside the columns of y
        whole = y.base.copy()
        y.base[start + at] = 1
        assert spilled(y)
        y.base[...] = whole
    assert not spilled(y)


def test_default_scalars():
    assert default_scalars(SCALE, made((2, 16))) == {"scale": 0.25, "shift": 0}
    assert default_scalars(SCALE, made((2, 0)))["scale"] == 0.0
