"""Gemm on the CUDA cores: what the schedule serves, that it compiles without spills, and which kernel a call takes."""

from __future__ import annotations

import functools

import cuda_lab
import pytest
from cuda_array import Array
from cuda_lab import number

from tlhub import problem
from tlhub.specs import DeviceFacts
from tlhub_gemm import cuda_code, simt_program
from tlhub_gemm.contract import DTYPES, GEMM
from tlhub_gemm.simt import SIMT

SYMBOLIC = ("B", "M", "N", "K")
FACTS = DeviceFacts("cuda:sm_75", "a GPU")
ALL = {"epilogue": "gelu", "bias": True, "residual": True}


@functools.cache
def build(dtype, arch, **options):
    return cuda_lab.build(SIMT.program, GEMM, SYMBOLIC, dtype=dtype, arch=arch, options=options)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_is_served_on_any_arch(dtype):
    assert SIMT.supports(problem.make(GEMM, (4, 5, 6), dtype, {}), FACTS) is None


@pytest.mark.parametrize(
    ("dtype", "option", "value"),
    [
        ("float16", "tensor_core", True),
        ("float32", "compute", "tf32"),
        ("float8_e4m3fn", "fast_accum", True),
        ("float16", "accum", "float16"),
    ],
)
def test_what_only_tensor_cores_do_is_left_to_them(dtype, option, value):
    reason = SIMT.supports(problem.make(GEMM, (4, 5, 6), dtype, {option: value}), FACTS)
    assert reason is not None and option in reason and "tensor core" in reason.replace("_", " ")


@pytest.mark.parametrize(
    ("dtype", "arch", "options"),
    [
        ("float32", "cuda:sm_75", {"trans_b": True}),
        ("float16", "cuda:sm_90a", ALL),
        pytest.param("float32", "cuda:sm_80", {"accum": "float64"}, marks=pytest.mark.slow),
        pytest.param("float64", "cuda:sm_75", ALL, marks=pytest.mark.slow),
        pytest.param("bfloat16", "cuda:sm_86", {"trans_a": True, "epilogue": "silu"}, marks=pytest.mark.slow),
        pytest.param("float8_e4m3fn", "cuda:sm_89", {"out_dtype": "float8_e5m2"}, marks=pytest.mark.slow),
        pytest.param("float8_e5m2", "cuda:sm_75", {"accum": "float64"}, marks=pytest.mark.slow),
        pytest.param("float32", "cuda:sm_90a", {"epilogue": "gelu_tanh"}, marks=pytest.mark.slow),
        pytest.param("float64", "cuda:sm_100a", {}, marks=pytest.mark.slow),
        pytest.param("int8", "cuda:sm_120a", {"out_dtype": "int8", "bias": True}, marks=pytest.mark.slow),
    ],
)
def test_kernels_compile_without_spills(dtype, arch, options):
    resources = build(dtype, arch, **options).built.resources
    for kernel in ("simt_large", "simt_small", "simt_any"):
        assert resources[f"{kernel}.spills"] == 0
        assert 0 < resources[f"{kernel}.shared_memory"] <= 48 * 1024


@pytest.mark.slow
def test_ptx_is_made_for_whatever_device_comes():
    assert b".target sm_80" in cuda_lab.device_code(build("float32", "cuda:compute_80").linked)


def call(driver, a, b, c, *more, alpha=1.0, **options):
    """Call the float32 product and return its only launch."""
    said = driver.do(
        cuda_lab.call, build("float32", "cuda:sm_75", **options).linked, [a, b, *more, c, None, alpha, 1.0]
    )
    assert said.error is None
    return said.launch


def product(driver, m, n, k, batch=None, a=None, b=None):
    """Call C = A B^T with operands in C order; *a* and *b* replace what their arrays have."""
    lead = () if batch is None else (batch,)
    return call(
        driver,
        Array((*lead, m, k), **{"address": 1 << 30, **(a or {})}),
        Array((*lead, n, k), **{"address": 1 << 40, **(b or {})}),
        Array((*lead, m, n), 1 << 45),
        trans_b=True,
    )


def test_tiles_are_as_large_as_keep_most_sms_busy(driver):
    """The fake GPU has 132 SMs, two thirds of them are 88."""
    full, few = product(driver, 256 * 8, 128 * 11, 64), product(driver, 256 * 8, 128 * 10, 64)
    assert (full["kernel"], full["grid"]) == ("simt_large", [88, 1, 1])
    assert (few["kernel"], few["grid"]) == ("simt_small", [32 * 20, 1, 1])
    assert product(driver, 256, 128, 64, batch=88)["kernel"] == "simt_large"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("address", (1 << 30) + 4),
        ("strides", (65, 1)),
        ("strides", (1, 64)),
        ("strides", (128, 2)),
    ],
)
def test_what_cannot_be_read_16_bytes_at_once_is_read_element_by_element(driver, field, value):
    assert product(driver, 64, 64, 64)["kernel"] == "simt_small"
    assert product(driver, 64, 64, 64, a={field: value})["kernel"] == "simt_any"
    assert product(driver, 64, 64, 64, b={field: value})["kernel"] == "simt_any"


def test_strides_of_dims_of_extent_one_do_not_count(driver):
    """Nor does what C order would make of them: 66 columns are not aligned, and rows of 68 are."""
    assert product(driver, 3, 64, 66, a={"strides": (68, 1)}, b={"strides": (68, 1)})["kernel"] == "simt_small"
    assert product(driver, 1, 64, 64, batch=1, a={"strides": (5, 3, 1)})["kernel"] == "simt_small"
    assert product(driver, 3, 64, 66, batch=2, a={"strides": (3 * 66, 68, 1)})["kernel"] == "simt_any"


def test_a_kernel_gets_the_strides_of_the_operands_as_they_are_multiplied(driver):
    launch = product(driver, 64, 96, 128, batch=3, a={"strides": (0, 256, -1)}, b={"strides": (12288, 1, 96)})
    values = [number(p, "q") for p in launch["parameters"][:-2]]
    assert values[:4] == [3, 64, 96, 128]
    assert values[4:8] == [1 << 30, 0, 256, -1]
    assert values[8:12] == [1 << 40, 12288, 1, 96]
    assert values[12:18] == [0] * 6  # no bias, no residual
    assert values[18:] == [1 << 45, 64 * 96, 96, 1]
    assert [number(p, "d") for p in launch["parameters"][-2:]] == [1.0, 1.0]


def test_operands_of_the_epilogue_and_alpha_are_passed_on(driver):
    shape = (5, 6)
    said = driver.do(
        cuda_lab.call,
        build("float16", "cuda:sm_90a", **ALL).linked,
        [
            Array((5, 7), 1 << 20, "float16"),
            Array((7, 6), 2 << 20, "float16"),
            Array((6,), 3 << 20, "float16", (2,)),
            Array(shape, 4 << 20, "float16", (0, 1)),
            Array(shape, 5 << 20, "float16"),
            None,
            -0.5,
            4.0,
        ],
    )
    assert said.error is None
    parameters = said.launch["parameters"]
    assert [number(p, "q") for p in parameters[8:18]] == [2 << 20, 42, 1, 6, 3 << 20, 2, 4 << 20, 30, 0, 1]
    assert [number(p, "d") for p in parameters[-2:]] == [-0.5, 4.0]


def test_a_product_over_nothing_is_launched_and_an_empty_one_is_not(driver):
    assert product(driver, 4, 4, 0)["grid"] == [1, 1, 1]
    said = driver.do(
        cuda_lab.call,
        build("float32", "cuda:sm_75", trans_b=True).linked,
        [Array((0, 8)), Array((4, 8)), Array((0, 4)), None, 1.0, 1.0],
    )
    assert said.error is None and not said.launches()


def test_values_lie_where_vectors_can_be_read_or_single_elements_are(driver):
    """Half of 72 columns are 144 bytes; half of 68 are 136, no multiple of 16."""
    for n, kernel in ((72, "simt_small"), (68, "simt_any")):
        b, c = Array((64, n), 1 << 40), Array((64, n // 2), 1 << 45)
        launch = call(driver, Array((64, 64)), b, c, glu=True)
        assert launch["kernel"] == kernel
        assert [number(p, "q") for p in launch["parameters"][:4]] == [1, 64, n // 2, 64]


def test_gates_without_their_values_are_refused(driver):
    arrays = [Array((4, 8)), Array((8, 7), 2 << 40), Array((4, 4), 3 << 40), None, 1.0, 1.0]
    said = driver.do(cuda_lab.call, build("float32", "cuda:sm_75", glu=True).linked, arrays)
    assert "no launch for the call: B=1, M=4, N=7" in said.error and not said.launches()


def test_types_and_options_are_written_into_the_source():
    made = problem.make(GEMM, (4, 5, 6), {"a": "float8_e4m3fn", "b": "float8_e5m2"}, {"out_dtype": "float32", **ALL})
    source = cuda_code.source(made, *simt_program.FILES)
    for line in (
        "#include <cuda_fp8.h>",
        "using A = __nv_fp8_e4m3;",
        "using B = __nv_fp8_e5m2;",
        "using C = float;",
        "using Beside = float;",
        "using Sum = float;",
        "#define ACTIVATION GELU",
        "TRANS_A = false, TRANS_B = false, GLU = false, BIAS = true, RESIDUAL = true;",
    ):
        assert line in source
