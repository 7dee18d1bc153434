"""Products of narrow types by mma.sync: what is served, which kernels a call takes, and what they compile to."""

from __future__ import annotations

import functools

import cuda_array
import cuda_lab
import pytest

import tlhub_registry
from tlhub import catalog, problem, workload
from tlhub.specs import DeviceFacts
from tlhub.workload import Item
from tlhub_gemm.contract import GEMM
from tlhub_mixed.contracts.scaled import SCALED
from tlhub_mixed.mma.gemm import MMA_MIXED
from tlhub_mixed.mma.plan import PLANS
from tlhub_mixed.mma.program import program
from tlhub_mixed.mma.scaled import MMA_SCALED

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
KERNELS = {"gemm": (GEMM, MMA_MIXED), "gemm_scaled": (SCALED, MMA_SCALED)}
ALL = {"glu": True, "epilogue": "silu", "bias": True, "residual": True}
LEAST_SHARED = 99 * 1024  # of a block, of compute capability 8.6, 8.9 and 12.0


def facts(arch="sm_89"):
    return DeviceFacts(f"cuda:{arch}", "a GPU")


def make(name="gemm", dtype=E4M3, dims=("M", "N", "K"), **options):
    return problem.make(KERNELS[name][0], dict(zip("MNK", dims, strict=True)), dtype, options)


# -- what they serve ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "dtype", "options", "least"),
    [
        ("gemm", E4M3, {}, 89),
        ("gemm", {"a": E4M3, "b": E5M2}, {"fast_accum": True, "out_dtype": E5M2, **ALL}, 89),
        ("gemm", "int8", {}, 80),
        ("gemm", "int8", {"trans_a": True, "out_dtype": "int8", **ALL}, 80),
        ("gemm", "float32", {"compute": "tf32", "trans_b": True}, 80),
        ("gemm", "float32", {"compute": "3xtf32", "out_dtype": "bfloat16"}, 80),
        ("gemm_scaled", E4M3, {"scaling": "block", "scale_dtype": "float8_e8m0fnu", **ALL}, 89),
        ("gemm_scaled", E5M2, {"scaling": "row", "fast_accum": True}, 89),
        ("gemm_scaled", "int8", {"scaling": "row", "out_dtype": "float32"}, 80),
    ],
)
def test_narrow_types_are_served_from_the_first_tensor_cores_on_that_multiply_them(name, dtype, options, least):
    made, schedule = make(name, dtype, **options), KERNELS[name][1]
    for arch, capability in (("sm_80", 80), ("sm_86", 86), ("sm_89", 89), ("sm_90a", 90), ("sm_120a", 120)):
        assert (schedule.supports(made, facts(arch)) is None) == (capability >= least)


@pytest.mark.parametrize(
    ("name", "dtype", "options", "arch", "reason"),
    [
        ("gemm", E4M3, {}, "sm_86", "float8_e4m3fn is for sm_89 and newer, and this is cuda:sm_86"),
        ("gemm", "int8", {}, "sm_75", "int8 is for sm_80 and newer, and this is cuda:sm_75"),
        ("gemm", "float16", {}, "sm_89", "it multiplies float8, int8, and float32 as tf32, not float16"),
        ("gemm", "float32", {}, "sm_89", "compute='ieee'; it multiplies float32 as 'tf32' or '3xtf32'"),
        ("gemm", E4M3, {"accum": "float16"}, "sm_89", "accum='float16'; float8_e4m3fn is added up in 'float32' here"),
        ("gemm", E4M3, {"out_dtype": "float64"}, "sm_89", "out_dtype='float64'; of float8_e4m3fn it writes bfloat16"),
        ("gemm_scaled", "int8", {"tensor_core": False}, "sm_80", "tensor_core=False, and this schedule uses them"),
        ("gemm_scaled", E5M2, {"scaling": "block"}, "compute_80", "float8_e5m2 is for sm_89 and newer"),
    ],
)
def test_the_rest_is_left_to_others_with_the_reason(name, dtype, options, arch, reason):
    assert reason in KERNELS[name][1].supports(make(name, dtype, **options), facts(arch))


@pytest.mark.parametrize(
    ("name", "types", "option", "ways"),
    [
        ("gemm", {E4M3, E5M2, "int8", "float32"}, "compute", {"ieee", "tf32", "3xtf32"}),
        ("gemm_scaled", {E4M3, E5M2, "int8"}, "scaling", {"tensor", "row", "block"}),
    ],
)
def test_what_certifies_it_has_every_type_and_way_to_compute_and_is_served(name, types, option, ways):
    contract, schedule = KERNELS[name]
    items = workload.parse(tlhub_registry.workload(f"certify/{name}-{schedule.name}"), name, catalog.load())
    made = [(problem.make(contract, i.shape, i.dtype, i.options), i.arch) for i in items if isinstance(i, Item)]
    assert len(made) == len(items)
    assert all(schedule.supports(m, DeviceFacts(arch, "a GPU")) is None for m, arch in made)
    assert {m.dtype for m, _ in made} == types and {m.option[option] for m, _ in made} == ways


# -- plans and instructions --------------------------------------------------------------------------


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.name)
def test_a_plan_has_room_and_whole_products_for_each_warp(plan):
    assert max(map(plan.shared, (False, True))) <= LEAST_SHARED
    rows, columns = plan.rows // plan.down, plan.columns // plan.across
    assert rows % 16 == columns % 16 == 0 and plan.columns // 2 % columns == 0


@pytest.mark.parametrize(
    ("dtype", "options", "instruction", "lines"),
    [
        ({"a": E4M3, "b": E5M2}, {}, "m16n8k32.row.col.f32.e4m3.e5m2.f32", ["PROMOTED = 1", "TF32 = 0"]),
        (E5M2, {"fast_accum": True}, "m16n8k32.row.col.f32.e5m2.e5m2.f32", ["PROMOTED = 0", "TF32 = 0"]),
        ("int8", {}, "m16n8k32.row.col.s32.s8.s8.s32", ["PROMOTED = 0", "TF32 = 0"]),
        ("float32", {"compute": "tf32"}, "m16n8k8.row.col.f32.tf32.tf32.f32", ["PROMOTED = 0", "TF32 = 1"]),
        ("float32", {"compute": "3xtf32"}, "m16n8k8.row.col.f32.tf32.tf32.f32", ["PROMOTED = 1", "TF32 = 3"]),
    ],
)
def test_a_product_is_the_instruction_of_its_types(dtype, options, instruction, lines):
    source = program(make(dtype=dtype, **options), {}, "cuda:sm_89").source
    assert f'#define WARP_PRODUCT "{instruction}"' in source
    assert all(f"constexpr int {line};" in source for line in [*lines, "PARTS = 1"])
    assert ("using A = uint32_t;" in source) == (dtype == "float32"), "floats are read as they are, and rounded later"


# -- which kernels a call takes ----------------------------------------------------------------------


@functools.cache
def hollow_build(arch="cuda:sm_90a"):
    return cuda_lab.build(
        "hollow:products", GEMM, ("B", "M", "N", "K"), dtype="int8", options={"trans_b": True}, arch=arch
    )


SCRATCH = cuda_array.Array((1 << 33,), 1 << 47, "uint8")


def launches(driver, m, n=4096, k=4096, **arrays):
    """Call gemm of int8 and return its launches; *arrays* replace what arrays in C order have."""
    shapes = {"a": ((1, m, k), "int8"), "b": ((1, n, k), "int8"), "c": ((1, m, n), "int32")}
    given = [
        cuda_array.Array(shape, **{"address": (i + 1) << 40, "dtype": dtype, **arrays.get(name, {})})
        for i, (name, (shape, dtype)) in enumerate(shapes.items())
    ]
    said = driver.do(cuda_lab.call, hollow_build().linked, [*given, SCRATCH, 1.0, 1.0])
    assert said.error is None
    return said.launches()


@pytest.mark.parametrize(
    ("m", "n", "k", "kernel", "blocks"),
    [
        (1, 4096, 4096, "product_16x32", 128),
        (16, 1024, 8192, "product_16x32", 32),
        (64, 4096, 4096, "product_64x32", 128),
        (128, 8192, 4096, "product_64x64", 2 * 128),
        (4096, 4096, 4096, "product_128x128", 32 * 32),
        (1000, 8192, 100, "product_128x128", 8 * 64),
    ],
)
def test_few_rows_are_multiplied_in_small_tiles_that_keep_more_processors_busy(driver, m, n, k, kernel, blocks):
    launch = launches(driver, m, n, k)[-1]
    assert (launch["kernel"], launch["grid"]) == (kernel, [blocks, 1, 1])


@pytest.mark.parametrize(
    "arrays",
    [
        {"a": {"address": (1 << 40) + 8}},
        {"b": {"strides": (1 << 30, 1, 4096)}},
        {"a": {"strides": (1 << 30, 4100, 1)}},
        {"a": {"strides": (1 << 30, 0, 1)}},
        {"b": {"strides": (1 << 30, 8192, 2)}},
    ],
)
def test_operands_that_are_not_16_bytes_side_by_side_are_copied_first(driver, arrays):
    first, second = launches(driver, 256, **arrays)
    assert (first["kernel"], second["kernel"]) == ("pack_operands", "product_64x64")


@pytest.mark.parametrize(
    "arrays",
    [
        {},
        {"a": {"strides": (1 << 30, 4112, 1)}},
        {"c": {"address": (3 << 40) + 4, "strides": (1 << 30, 1, 4096)}},
    ],
)
def test_arrays_with_gaps_and_results_of_any_stride_are_taken_as_they_are(driver, arrays):
    (launch,) = launches(driver, 256, **arrays)
    assert launch["kernel"] == "product_64x64"


# -- what they compile to ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "arch", "dtype", "options"),
    [
        ("gemm_scaled", "cuda:sm_89", E4M3, {"scaling": "block", "trans_b": True, **ALL}),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("gemm", "cuda:sm_89", {"a": E4M3, "b": E5M2}, {"out_dtype": E4M3, **ALL}),
                ("gemm", "cuda:sm_120a", E4M3, {"fast_accum": True, "trans_b": True}),
                ("gemm", "cuda:sm_90a", E4M3, {}),
                ("gemm", "cuda:sm_80", "int8", {"out_dtype": "int8", **ALL}),
                ("gemm", "cuda:compute_80", "float32", {"compute": "tf32"}),
                ("gemm", "cuda:sm_86", "float32", {"compute": "3xtf32"}),
                ("gemm_scaled", "cuda:sm_100a", E5M2, {"scaling": "row"}),
                ("gemm_scaled", "cuda:sm_80", "int8", {"scaling": "row", "out_dtype": E5M2}),
            )
        ),
    ],
)
def test_kernels_compile_with_next_to_no_spills(name, arch, dtype, options):
    contract, schedule = KERNELS[name]
    how = {"dtype": dtype, "options": options, "arch": arch}
    built = cuda_lab.build(schedule.program, contract, ("M", "N", "K"), **how).built
    assert built.warnings == () and built.resources["spills"] <= 64
