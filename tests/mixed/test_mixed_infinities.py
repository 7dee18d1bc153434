"""What gemm_scaled's tolerance says of infinities: where they are exact, and where anything is right."""

from __future__ import annotations

import numpy as np
import pytest

from tlhub import testing
from tlhub.problem import make
from tlhub.testing.data import numpy_dtype
from tlhub_mixed.contracts.scaled import SCALED
from tlhub_mixed.references import scaled

E4M3 = "float8_e4m3fn"


@pytest.mark.parametrize("scaling", ["block", "row"])
def test_an_infinite_scale_takes_any_sign_of_a_sum_that_may_be_of_either_and_no_other(scaling: str) -> None:
    problem = make(SCALED, (2, 2, 4), E4M3, {"scaling": scaling})
    a, b = np.ones((2, 4), numpy_dtype(E4M3)), np.ones((4, 2), numpy_dtype(E4M3))
    a[0] = [1, -1, 1, -1]  # sums of 0
    scales = (np.float32([[np.inf], [np.inf]]), np.ones((1, 1), np.float32))
    if scaling == "row":
        scales = (scales[0][:, 0], np.ones(2, np.float32))
    inputs = dict(zip(("a", "b", "a_scale", "b_scale"), (a, b, *scales), strict=True))
    expected = scaled.reference(problem, inputs, {"out_scale": 1.0})
    (bounds,) = scaled.tolerance(problem, inputs, {"out_scale": 1.0}, expected)
    assert testing.compare(np.float32([[-np.inf, np.nan], [np.inf, np.inf]]), expected[0], bounds) == 0
    with pytest.raises(AssertionError, match=r"output\[1, 0\] is -inf, expected inf"):
        testing.compare(np.float32([[np.nan, np.nan], [-np.inf, np.inf]]), expected[0], bounds)


@pytest.mark.parametrize("out", ["float32", E4M3, "int8"])
def test_what_comes_of_an_infinity_is_held_to_as_much_as_the_rest(out: str) -> None:
    problem = make(
        SCALED, (2, 1, 4), "int8", {"scaling": "row", "epilogue": "relu", "residual": True, "out_dtype": out}
    )
    inputs = {
        "a": np.int8([[-1] * 4, [1] * 4]),
        "b": np.ones((4, 1), np.int8),
        "a_scale": np.float32([np.inf, np.inf]),
        "b_scale": np.float32([1]),
        "residual": np.float32([[3], [3]]),
    }
    expected = scaled.reference(problem, inputs, {"out_scale": 1.0})
    largest = {"float32": np.inf, E4M3: 448, "int8": 127}[out]
    assert expected[0].tolist() == [[3], [largest]]
    (bounds,) = scaled.tolerance(problem, inputs, {"out_scale": 1.0}, expected)
    assert testing.compare(expected[0].astype(numpy_dtype(out)), expected[0], bounds) <= 1
    for wrong in ([[4], [largest]], [[3], [3]]):
        with pytest.raises(AssertionError):
            testing.compare(np.array(wrong, numpy_dtype(out)), expected[0], bounds)


def test_a_gate_that_may_be_0_times_an_infinity_takes_anything_and_one_that_is_not_does_not() -> None:
    problem = make(SCALED, (3, 2, 1), "int8", {"scaling": "row", "epilogue": "silu", "glu": True})
    inputs = {
        "a": np.int8([[-100], [1], [0]]),
        "b": np.int8([[1, 1]]),
        "a_scale": np.float32([1, 1, 1]),
        "b_scale": np.float32([1, np.inf]),
    }
    expected = scaled.reference(problem, inputs, {"out_scale": 1.0})
    assert expected[0][0, 0] == np.inf and expected[0][1, 0] == np.inf and np.isnan(expected[0][2, 0])
    bounds = scaled.tolerance(problem, inputs, {"out_scale": 1.0}, expected)[0]
    testing.compare(np.float32([[np.nan], [np.inf], [np.nan]]), expected[0], bounds)
    for wrong in ([[np.inf], [np.nan], [np.nan]], [[np.inf], [np.inf], [0]]):
        with pytest.raises(AssertionError):
            testing.compare(np.float32(wrong), expected[0], bounds)
