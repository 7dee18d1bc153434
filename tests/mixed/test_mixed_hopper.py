"""Products of narrow types on Hopper's tensor cores: what is served, by which plans, and what they compile to."""

from __future__ import annotations

import functools
import re

import cuda_lab
import pytest
import sass

import tlhub_registry
from tlhub import catalog, problem, workload
from tlhub.build.program import TensorMap
from tlhub.errors import BuildError
from tlhub.specs import DeviceFacts
from tlhub.workload import Item
from tlhub_gemm.contract import GEMM
from tlhub_mixed.contracts.scaled import SCALED as SCALED_PRODUCT
from tlhub_mixed.cuda.operands import NO_SCALES, OF_BLOCKS, OF_ROWS, kind
from tlhub_mixed.cuda.products import products
from tlhub_mixed.hopper import plan as plan_module
from tlhub_mixed.hopper.gemm import HOPPER_MIXED
from tlhub_mixed.hopper.plan import PLAIN, PROMOTED, SCALED, Plan
from tlhub_mixed.hopper.program import program
from tlhub_mixed.hopper.scaled import HOPPER_SCALED

H200 = DeviceFacts("cuda:sm_90a", "an H200", cores=132, shared_memory=227 * 1024)
ALL = {"epilogue": "gelu", "bias": True, "residual": True}
E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"


def make(m=4096, n=4096, k=4096, dtype=E4M3, **options):
    return problem.make(GEMM, (m, n, k), dtype, {"trans_b": True, **options})


def plans(made, at=0):
    return str(HOPPER_MIXED.configs(made, H200)[at]["plans"]).split()


# -- what it serves ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (E4M3, {}),
        (E4M3, {"fast_accum": True, "out_dtype": "float32"}),
        (E5M2, {"out_dtype": E5M2, **ALL}),
        ({"a": E4M3, "b": E5M2}, {}),
        ("int8", {}),
        ("int8", {"out_dtype": "int8"}),
        ("float32", {"compute": "tf32"}),
        ("float32", {"compute": "3xtf32", "out_dtype": "bfloat16"}),
        ("float32", {"compute": "tf32", "out_dtype": "int8", "glu": True, **ALL}),
        (E4M3, {"out_dtype": "int8", "glu": True, **ALL}),
    ],
)
def test_narrow_types_and_tf32_are_served_in_any_layout(dtype, options):
    for trans in range(4):
        made = make(dtype=dtype, trans_a=bool(trans & 1), **{**options, "trans_b": bool(trans & 2)})
        assert HOPPER_MIXED.supports(made, H200) is None


@pytest.mark.parametrize(
    ("made", "arch", "reason"),
    [
        (make(), "cuda:sm_89", "it is for cuda:sm_90a, and this is cuda:sm_89"),
        (make(tensor_core=False), "cuda:sm_90a", "tensor_core=False"),
        (make(dtype="float16"), "cuda:sm_90a", "not float16"),
        (make(dtype="float32"), "cuda:sm_90a", "it multiplies float32 as 'tf32' or '3xtf32'"),
        (make(accum="float16"), "cuda:sm_90a", "accum='float16'; float8_e4m3fn is added up in 'float32' here"),
        (make(dtype="int8", out_dtype=E4M3), "cuda:sm_90a", "of int8 it writes int32, int8"),
    ],
)
def test_the_rest_is_left_to_others_with_the_reason(made, arch, reason):
    assert reason in HOPPER_MIXED.supports(made, DeviceFacts(arch, "a GPU"))


# -- plans -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "options", "plan"),
    [
        # what was the fastest on an H200, or within 3 % of it
        ((2048, 2048, 2048), {}, "128x256"),
        ((4096, 4096, 4096), {}, "128x256"),
        ((64, 4096, 4096), {}, "64x64-k2"),
        ((4096, 4096, 4096), {"fast_accum": True}, "128x256"),
        ((8192, 8192, 8192), {"fast_accum": True}, "128x256"),
        ((4096, 4096, 4096), {"dtype": "int8"}, "128x256"),
        ((64, 4096, 4096), {"dtype": "int8"}, "64x32"),
    ],
)
def test_the_model_chooses_what_was_measured_to_be_fast(shape, options, plan):
    assert plans(make(*shape, **options))[0].removesuffix("-b2") == plan


@pytest.mark.parametrize(
    ("shape", "scaling", "plan"),
    [
        ((2048, 2048, 2048), "row", "128x256"),
        ((8192, 8192, 8192), "row", "128x192"),
        ((4096, 6144, 4096), "row", "128x192"),
        ((2048, 4096, 14336), "row", "128x128"),
        ((16384, 16384, 16384), "row", "128x192"),
        ((4096, 7168, 16384), "block", "128x256"),
        ((64, 24576, 1536), "block", "64x192"),
        ((64, 4096, 7168), "block", "64x64-k2"),
        ((64, 7168, 2048), "block", "64x64"),
        ((128, 4096, 7168), "block", "64x64"),
        ((128, 7168, 16384), "block", "128x128-k2"),
        ((128, 32768, 512), "block", "128x128"),
    ],
)
def test_products_with_scales_have_the_plan_that_was_measured_to_be_fast(shape, scaling, plan):
    made = problem.make(SCALED_PRODUCT, shape, E4M3, {"trans_b": True, "scaling": scaling})
    assert HOPPER_SCALED.configs(made, H200)[0]["plans"] == plan


def test_sums_are_promoted_where_the_tensor_core_would_lose_bits():
    assert kind(make()).promoted and not kind(make(fast_accum=True)).promoted and not kind(make(dtype="int8")).promoted
    assert kind(make(dtype="float32", compute="3xtf32")) == (0, True, 3)
    assert kind(make(dtype="float32", compute="tf32")) == (0, False, 1)


def test_symbolic_dims_have_a_few_plans_for_large_and_for_small_calls():
    chosen = [Plan.parse(text) for text in plans(make("M"))]
    tiles = [p.rows * p.columns for p in chosen]
    assert len(tiles) == 4 and min(tiles) <= 8192 and max(tiles) >= 16384


def test_a_price_is_the_cost_that_was_computed_here():
    def ceil_div(x, y):
        return -(-x // y)

    ways = ((False, NO_SCALES, 32, 1), (True, NO_SCALES, 32, 3), (True, OF_ROWS, 128, 1), (True, OF_BLOCKS, 128, 1))
    for p in (*PLAIN, *PROMOTED, *SCALED):
        for promoted, scales, depth, parts in ways:
            clusters = f"B * CEIL_DIV(M, {p.rows * p.share}) * CEIL_DIV(N, {p.columns})"
            price = p.price(clusters, promoted, scales, depth, parts).replace("/", "//")
            values = {"CEIL_DIV": ceil_div, "SMS": 132, "B": 2, "M": 1000, "N": 4100, "K": 777}
            how = {"promoted": promoted, "scales": scales, "depth": depth, "parts": parts}
            cost = p.cost(2, 1000, 4100, 777, **how, processors=132)
            assert eval(price, values) == cost


@pytest.mark.parametrize("item", [1, 2, 4])
@pytest.mark.parametrize("glu", [False, True])
@pytest.mark.parametrize("scales", [NO_SCALES, OF_ROWS, OF_BLOCKS])
def test_every_plan_has_room_for_a_ring_and_two_small_blocks_for_each_other(item, glu, scales):
    for p in {*PLAIN, *PROMOTED, *SCALED}:
        if p.serves(item, glu):
            assert p.stages(item, glu, scales) >= 3 and p.shared(item, glu, scales) + 1024 <= 228 * 1024 // p.resident
            assert p.finished(glu) % p.chunk(item, glu) == 0 and 32 <= p.chunk(item, glu) * item <= 128
            sums = 4 * p.rows * p.columns
            assert p.split == 1 or sums <= p.stages(item, glu, scales) * (p.rows + p.columns) * plan_module.BYTES


def test_a_plan_is_written_as_it_is_read():
    for text in ("128x256-b2", "64x32", "64x256-k4"):
        assert str(Plan.parse(text)) == text
    assert Plan.parse("256x128-b2") == Plan(256, 128, share=2) and Plan.parse("64x64-k2").split == 2
    with pytest.raises(BuildError, match="'128' is no plan; it is a tile"):
        Plan.parse("128")


def test_what_certifies_it_runs_every_plan():
    items = workload.parse(tlhub_registry.workload("certify/gemm-hopper_mixed"), "mixed", catalog.load())
    made = [problem.make(GEMM, i.shape, i.dtype, i.options) for i in items if isinstance(i, Item)]
    assert len(made) == len(items)
    types = {(dict(m.dtypes)["a"], m.option["compute"], m.option["fast_accum"]) for m in made}
    assert {(E4M3, "ieee", False), (E4M3, "ieee", True), (E5M2, "ieee", False), ("int8", "ieee", False)} <= types
    assert {("float32", "tf32", False), ("float32", "3xtf32", False)} <= types
    assert any("M" in m.dim and isinstance(m.dim["M"], str) for m in made)


# -- what they compile to ----------------------------------------------------------------------------


@functools.cache
def build(texts, dtype=E4M3, **options):
    """Build a binary with all dims symbolic."""
    dims = ("B", "M", "N", "K")
    how = {"dtype": dtype, "config": {"plans": texts}, "options": {"trans_b": True, **options}}
    return cuda_lab.build(HOPPER_MIXED.program, GEMM, dims, **how)


@pytest.mark.parametrize(
    ("texts", "dtype", "options"),
    [
        ("256x128-b2 64x32", E4M3, {}),
        pytest.param("128x192-b2 64x64", E5M2, {"out_dtype": "float32", **ALL}, marks=pytest.mark.slow),
        pytest.param("128x256 256x128-b2 64x256", E4M3, {"fast_accum": True}, marks=pytest.mark.slow),
        pytest.param("128x256 128x32", "int8", {"out_dtype": "int8"}, marks=pytest.mark.slow),
        pytest.param("128x256-b2 64x128", "float32", {"compute": "tf32"}, marks=pytest.mark.slow),
        pytest.param("256x128", "float32", {"compute": "3xtf32"}, marks=pytest.mark.slow),
        pytest.param("128x128", E4M3, {"out_dtype": E4M3, **ALL}, marks=pytest.mark.slow),
    ],
)
def test_kernels_compile_without_spills_or_serialised_wgmma(texts, dtype, options):
    built = build(texts, dtype, **options).built
    assert built.warnings == ()
    item = {"float32": 4, E4M3: 1, "int8": 1}.get(options.get("out_dtype", ""), 4 if dtype == "float32" else 2)
    for p in map(Plan.parse, texts.split()):
        name = "product_" + str(p).replace("-", "_")
        assert built.resources[f"{name}.spills"] == 0
        assert built.resources[f"{name}.shared_memory"] == p.shared(item, False, NO_SCALES)


def test_nothing_is_loaded_that_the_kernel_before_may_still_write():
    assert sass.early_loads(build("256x128-b2 64x32").linked) == {}


@pytest.mark.parametrize(
    ("a", "b", "instruction", "numbers"),
    [
        (E4M3, E5M2, "m64n128k32.f32.e4m3.e5m2", '"+f"'),
        ("int8", "int8", "m64n128k32.s32.s8.s8", '"+r"'),
        ("float32", "float32", "m64n128k8.f32.tf32.tf32", '"+f"'),
    ],
)
def test_a_product_is_the_instruction_of_its_types(a, b, instruction, numbers):
    text = products(a, b, [128, 64, 128])
    assert text.count("struct product::Product<") == 2 and instruction in text
    assert text.count(numbers) == 128 // 2 + 64 // 2
    assert (", add, 1, 1;" in text) == (a != "int8"), "signs of operands are of floats"


def test_operands_that_are_no_rows_along_k_are_copied_into_scratch_memory():
    made = make("M", "N", "K")
    branches = program(made, {"plans": "128x128"}, "cuda:sm_90a").branches
    assert [len(b.launches) for b in branches] == [1, 1, 2, 2]
    assert [bool(b.workspace) for b in branches] == [False, False, True, True]
    assert all(b.launches[0].kernel == "pack_operands" for b in branches[2:])
    assert all(re.search(r"\bfits_a && fits_b\b", b.when) for b in branches[:2])


def test_float32_is_rounded_as_it_is_loaded_and_copied_to_be_split_in_parts():
    """Tensor cores cut tf32 off, which errs twice as far."""
    for compute, fits in (("tf32", True), ("3xtf32", False)):
        made = program(make("M", "N", "K", "float32", compute=compute), {"plans": "128x128"}, "cuda:sm_90a")
        assert (made.values["fits_a"] != "0") == (made.values["fits_b"] != "0") == fits
        product = made.branches[0].launches[-1].parameters
        assert [p.dtype for p in product if isinstance(p, TensorMap)] == ["tfloat32", "tfloat32", "float32"]


def test_blocks_that_split_k_are_a_cluster_and_each_finishes_a_slice_of_the_columns():
    launch = program(make("M", "N", "K"), {"plans": "64x256-k4"}, "cuda:sm_90a").branches[0].launches[0]
    assert launch.cluster == (4, 1, 1) and "SMS" not in str(launch.grid[0])
    maps = [p.box for p in launch.parameters if isinstance(p, TensorMap)]
    assert maps == [(128, 64, 1), (128, 256, 1), (32, 16, 1)], "of C a warp of two consumers has 256 / 2 / 4 columns"
