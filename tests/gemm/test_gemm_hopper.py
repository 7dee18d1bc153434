"""Gemm on Hopper's tensor cores: what is served, by which plans, and what they compile to."""

from __future__ import annotations

import math
import re
import subprocess
from pathlib import Path

import cuda_lab
import numpy as np
import pytest
import sass
from hopper_lab import OTHERS, SCHEMES, build

import tlhub_registry
from tlhub import catalog, problem, workload
from tlhub.errors import BuildError
from tlhub.specs import DeviceFacts
from tlhub.workload import Item
from tlhub_cuda import nvcc
from tlhub_gemm import hopper_program
from tlhub_gemm.contract import GEMM
from tlhub_gemm.hopper import HOPPER, PLANS
from tlhub_gemm.hopper_plan import Plan
from tlhub_gemm.skinny_plan import Tile

H200 = DeviceFacts("cuda:sm_90a", "an H200", cores=132, shared_memory=227 * 1024)
ALL = {"epilogue": "gelu", "bias": True, "residual": True}
GATED = "coop-128x256-b2 ping-128x128 coop-256x128 coop-128x128-k2"


def make(m=4096, n=4096, k=4096, dtype="float16", **options):
    return problem.make(GEMM, (m, n, k), dtype, options)


def plans(made, at=0):
    return str(HOPPER.configs(made, H200)[at]["plans"]).split()


# -- what it serves ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("out", ["float16", "bfloat16", "float32", "float8_e4m3fn", "float8_e5m2", "int8"])
def test_16_bit_floats_are_served_in_any_layout(dtype, out):
    for trans in range(4):
        made = make(
            dtype=dtype, out_dtype=out, glu=bool(trans & 1), trans_a=bool(trans & 1), trans_b=bool(trans & 2), **ALL
        )
        assert HOPPER.supports(made, H200) is None and plans(made)
    assert HOPPER.supports(make("M", "N", "K", tensor_core=True), H200) is None


@pytest.mark.parametrize(
    ("made", "arch", "reason"),
    [
        (make(), "cuda:sm_90", "it is for cuda:sm_90a, and this is cuda:sm_90"),
        (make(), "cuda:sm_100a", "cuda:sm_100a"),
        (make(tensor_core=False), "cuda:sm_90a", "tensor_core=False"),
        (make(dtype="float32"), "cuda:sm_90a", "not float32"),
        (make(dtype="float8_e4m3fn"), "cuda:sm_90a", "not float8_e4m3fn"),
        (make(accum="float64"), "cuda:sm_90a", "accum='float64'"),
        (make(accum="float16"), "cuda:sm_90a", "accum='float16'"),
        (make(out_dtype="float64"), "cuda:sm_90a", "out_dtype='float64'"),
    ],
)
def test_the_rest_is_left_to_others_with_the_reason(made, arch, reason):
    assert reason in HOPPER.supports(made, DeviceFacts(arch, "a GPU"))


# -- plans -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "plan"),
    [
        # what was the fastest on an H200, or within 2 % of it
        ((1024, 1024, 1024), "coop-128x64"),  # as many tiles as SMs, almost
        ((2048, 2048, 2048), "ping-128x128"),
        ((4096, 4096, 4096), "coop-128x256"),
        ((8192, 8192, 8192), "ping-128x192"),
        ((128, 4096, 4096), "coop-128x64-k2"),  # too few tiles without a split
        ((128, 6144, 4096), "coop-128x96-k2"),
        ((128, 8192, 28672), "coop-128x128-k2"),
        ((128, 10240, 8192), "coop-128x160-k2"),
        ((512, 10240, 8192), "coop-256x160"),  # 128 tiles are one wave
        ((512, 57344, 8192), "coop-128x256"),  # where b lies along N, boxes for 160 columns are narrow
        ((512, 4096, 14336), "ping-128x128"),
    ],
)
def test_the_model_chooses_what_was_measured_to_be_fast(shape, plan):
    assert plans(make(*shape))[0].removesuffix("-b2") == plan


def test_operands_are_shared_where_their_rows_are_slow_to_load():
    """8208 bytes are no multiple of 32, 8192 are one of 128; what is no multiple of 16 is copied."""
    for n in (4104, 2056):
        assert plans(make(n, n, n))[0] == "coop-256x192-a2"
    for n in (4096, 4160, 4099):
        assert Plan.parse(plans(make(n, n, n))[0]).cluster == 1


def test_no_plan_splits_k_further_than_it_goes():
    assert Plan.parse("coop-128x64-k2").least_k == 64
    tried = {plan for k in (1, 64) for at in range(6) for plan in plans(make(128, 4096, k), at)}
    assert tried and not any("-k" in plan for plan in tried)
    assert any("-k" in plan for at in range(6) for plan in plans(make(128, 4096, 65), at))


def test_an_epilogue_leaves_no_registers_for_large_tiles_of_one_consumer():
    assert Plan.parse("ping-128x192").sums == 192 and Plan.parse("coop-128x256").sums == 128
    for options in ({"epilogue": "silu"}, {"bias": True}, {"residual": True}):
        made = make(8192, 8192, 8192, **options)
        assert all(Plan.parse(plan).sums <= 128 for at in range(6) for plan in plans(made, at))


@pytest.mark.parametrize("size", [4096, 8192])
@pytest.mark.parametrize("options", [{"epilogue": "gelu"}, {"residual": True}, {"bias": True}, {"glu": True}, ALL])
def test_consumers_take_turns_where_an_epilogue_is_worth_hiding(size, options):
    assert plans(make(size, size, size, trans_b=True, **options)) == ["ping-128x128"]


def test_symbolic_rows_have_a_few_plans_and_kernels_for_few_rows():
    (config,) = HOPPER.configs(make("M"), H200)
    assert {"coop-128x64-k2", "ping-128x128"} <= set(plans(make("M"))) and len(plans(make("M"))) <= 4
    assert {"skinny_8", "skinny_16", "skinny_32", "skinny_64"} <= set(config)
    (config,) = HOPPER.configs(make("M", trans_a=True), H200)
    assert set(config) == {"plans"}  # those for few rows read a along K
    (config,) = HOPPER.configs(make(4096, "N"), H200)
    assert set(config) == {"plans"}
    (config,) = HOPPER.configs(make("M", "N", "K", glu=True, trans_b=True), H200)
    assert "skinny_64" in config and 1 < len(str(config["plans"]).split()) <= 4


@pytest.mark.parametrize(("out", "item"), [("int8", 1), ("float16", 2), ("float32", 4)])
@pytest.mark.parametrize("glu", [False, True])
def test_every_plan_has_room_for_a_ring(out, item, glu):
    sizes = [(m, n) for n in (1000, 4096, 10240) for m in (128, 4096)]
    tried = {plan for m, n in sizes for at in range(6) for plan in plans(make(m, n, out_dtype=out, glu=glu), at)}
    assert len(tried) > (3 if glu else 8)
    for plan in map(Plan.parse, sorted(tried)):
        assert plan.stages(item, glu) >= 3 and plan.shared(item, glu) <= 227 * 1024
        staged = plan.columns // plan.split // (2 if glu else 1)
        assert staged % plan.chunk(item, glu) == 0 and 32 <= plan.chunk(item, glu) * item <= 128


@pytest.mark.parametrize("trans_b", [False, True])
@pytest.mark.parametrize("text", ["coop-128x256-b2", "ping-128x128", "coop-128x128-k2"])
def test_gates_and_values_are_boxes_of_their_own(text, trans_b):
    """A tile of B is as many columns of both, and one of C half as wide."""
    made, plan = make("M", "N", "K", glu=True, trans_b=trans_b), Plan.parse(text)
    found = hopper_program.program(made, {"plans": text}, "cuda:sm_90a")
    _, b, c = found.branches[0].launches[0].parameters[:3]
    depth = hopper_program.DEPTH
    assert b.box[:2] == ((depth, plan.columns // 2 // plan.share_b) if trans_b else (64, depth // plan.share_b))
    assert c.box[:2] == (plan.chunk(2, True), 16) and plan.columns // 2 // plan.split % c.box[0] == 0
    assert all("N % 2 == 0" in branch.when for branch in found.branches)
    tiles = [branch for branch in found.branches if branch.launches[-1].kernel.startswith("hopper")]
    assert all(("ALIGNED(N_2 * 2, 16)" in branch.when) == (not trans_b) for branch in tiles)


@pytest.mark.parametrize("glu", [False, True])
@pytest.mark.parametrize(
    ("text", "box"), [("coop-128x256", (64, 128)), ("coop-256x128", (64, 256)), ("ping-64x128", (64, 64))]
)
def test_a_residual_is_loaded_in_boxes_of_all_rows_of_a_tile(text, box, glu):
    """Where it has a tensor map as c has; one of float32 is loaded element by element."""
    for out in ("bfloat16", "float32", "int8"):
        made = make("M", "N", "K", residual=True, glu=glu, trans_b=True, out_dtype=out)
        found = hopper_program.program(made, {"plans": text}, "cuda:sm_90a")
        a, _, _, residual, direct = found.branches[0].launches[0].parameters[:5]
        assert direct.value == 0 and ("ALIGNED(DATA(residual), 16)" in found.values["fits_c"]) == (out == "bfloat16")
        assert (residual.address, residual.box[:2]) == ("DATA(residual)", box) if out == "bfloat16" else residual == a
        *_, (a, _, c, residual, direct) = (
            branch.launches[-1].parameters[:5] for branch in found.branches if "hopper" in branch.launches[-1].kernel
        )
        assert direct.value == 1 and residual == c


def test_what_certifies_it_runs_every_plan():
    """And a binary with several plans beside the kernels for few rows."""
    items = workload.parse(tlhub_registry.workload("certify/gemm-hopper"), "gemm-hopper", catalog.load())
    made = [problem.make(GEMM, i.shape, i.dtype, i.options) for i in items if isinstance(i, Item)]
    numbers = [m for m in made if not any(isinstance(extent, str) for extent in m.dim.values())]
    assert {plan for m in numbers for plan in plans(m)[:1]} == set(map(str, PLANS))
    assert any(len(plans(m)) > 1 and "skinny_8" in HOPPER.configs(m, H200)[0] for m in made)


def test_a_plan_is_written_as_it_is_read():
    for text in ("coop-128x256-b2", "ping-64x128", "coop-128x96-a2-k2"):
        assert str(Plan.parse(text)) == text
    assert Plan.parse("coop-128x96-a2-k2") == Plan(False, 128, 96, share_a=2, split=2)
    with pytest.raises(BuildError, match="'coop-128' is no plan; it is coop or ping, a tile"):
        Plan.parse("coop-128")


# -- what they compile to ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("texts", "options"),
    [
        (SCHEMES, {}),
        pytest.param(
            OTHERS,
            {"dtype": "bfloat16", "trans_a": True, "trans_b": True, "out_dtype": "float32", **ALL},
            marks=pytest.mark.slow,
        ),
        pytest.param(SCHEMES, {"dtype": "bfloat16", "trans_b": True, "out_dtype": "float32"}, marks=pytest.mark.slow),
        pytest.param(SCHEMES, {"trans_a": True}, marks=pytest.mark.slow),
        pytest.param(OTHERS, {"trans_b": True, **ALL, "epilogue": "silu"}, marks=pytest.mark.slow),
        pytest.param(OTHERS, {"dtype": "bfloat16", "bias": True, "epilogue": "gelu_tanh"}, marks=pytest.mark.slow),
        pytest.param(GATED, {"glu": True, "trans_b": True, **ALL, "epilogue": "silu"}, marks=pytest.mark.slow),
        pytest.param(GATED, {"glu": True, "out_dtype": "float8_e4m3fn", "bias": True}, marks=pytest.mark.slow),
        pytest.param("coop-128x256 ping-128x128", {"out_dtype": "int8", **ALL}, marks=pytest.mark.slow),
        pytest.param("coop-128x256", {"out_dtype": "int8", "bias": True}, marks=pytest.mark.slow),
    ],
)
def test_kernels_compile_without_spills_or_serialised_wgmma(texts, options):
    built = build(texts, **options).built
    assert built.warnings == ()
    for plan in map(Plan.parse, texts.split()):
        name = "hopper_" + str(plan).replace("-", "_")
        assert built.resources[f"{name}.spills"] == 0
        assert built.resources[f"{name}.registers"] == 168  # all that 384 threads have at the launch
        item = {"float32": 4, "float8_e4m3fn": 1, "int8": 1}.get(options.get("out_dtype", ""), 2)
        assert built.resources[f"{name}.shared_memory"] == plan.shared(item, bool(options.get("glu")))


def test_nothing_is_loaded_that_the_kernel_before_may_still_write():
    assert sass.early_loads(build(SCHEMES).linked) == {}


def test_gelu_errs_by_less_than_is_allowed():
    """By the coefficients that the text has, of powers of two, a rounding at each step."""
    text = (Path(hopper_program.__file__).parent / "cuda/hopper_finish.cuh").read_text("utf-8")
    body = text.partition("activate<GELU, float>")[2].partition("float odds")[0]
    last, *others = (np.float32(number) for number in re.findall(r"[ (-](-?\d\.\d+(?:e-\d+)?)f", body))
    x = np.concatenate([np.linspace(-12, 12, 240001), [-1e30, -60, 60, 1e30, np.inf]]).astype(np.float32)
    with np.errstate(all="ignore"):
        square, power = x * x, last
        for coefficient in others:
            power = power * square + coefficient
        found = x * (1 / (1 + np.exp2(power * x)))
        exact = x * (np.vectorize(math.erfc)(x * -(0.5**0.5)) / 2)
        assert len(others) == 6 and np.all((abs(found - exact) <= 6 * 2.0**-24 * abs(x)) | (found == exact))


def ptx(texts, **options):
    """Return the PTX of each kernel by its name."""
    folder = Path(build(texts, **options).folder)
    found = nvcc.find()
    command = [found.command, "-ptx", "-gencode", "arch=compute_90a,code=compute_90a", "-std=c++17", "program.cu"]
    subprocess.run([*command, "-o", "program.ptx"], cwd=folder, check=True, capture_output=True, timeout=100)
    entries = (folder / "program.ptx").read_text().split(".entry ")
    return {entry.partition("(")[0]: entry for entry in entries}


@pytest.mark.slow
def test_a_stage_of_a_residual_is_read_before_it_is_released():
    """What the other consumer reads makes loads slow."""
    assert sass.early_arrivals(build("ping-128x128", residual=True).linked) == {}


def test_wgmma_multiplies_whole_tiles_that_bulk_copies_brought():
    code = ptx(SCHEMES)
    for name, columns, products in (
        ("hopper_coop_128x256_b2", 256, 2 * 4),  # four steps of 16 along K, for the first stage and for the others
        ("hopper_ping_128x192", 192, 2 * 2 * 4),
        ("hopper_coop_128x64_k2", 64, 2 * 4),
    ):
        text = code[name]
        assert text.count(f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.f16.f16") == products
        assert text.count("setmaxnreg") == 2 and text.count("wgmma.wait_group") == 2
        assert "cp.async.bulk.tensor.3d.global.shared::cta" in text and "stmatrix" in text
        assert ("multicast::cluster" in text) == ("b2" in name)
        assert ("st.async.weak.shared::cluster" in text) == ("k2" in name)
        # one barrier for all threads, at the start, and turns where consumers have them
        assert text.count("bar.sync") == text.count("bar.arrive") // 2 + 1 == (2 if "ping" in name else 1)


def test_plans_of_a_config_have_a_kernel_each():
    made = problem.make(GEMM, ("M", "N", "K"), "float16", {})
    source = hopper_program.program(made, {"plans": SCHEMES}, "cuda:sm_90a").source
    assert source.count("\nHOPPER(") == 3 and source.count("struct tensor_cores::FromShared<") == 3


def test_kernels_of_plans_and_for_few_rows_share_products():
    made = problem.make(GEMM, ("M", "N", "K"), "float16", {})
    few = {"skinny_8": "64x2x64x8", "skinny_64": "64x2x64x7"}
    source = hopper_program.program(made, {"plans": SCHEMES, **few}, "cuda:sm_90a").source
    widths = re.findall(r"struct tensor_cores::FromShared<(\d+),", source)
    assert widths == ["8", "64", "192", "256"] and source.count("\nSKINNY_HOPPER(") == 2


@pytest.mark.parametrize("launched", [0, 16])
def test_a_layout_that_differs_from_the_launch_does_not_compile(tmp_path, launched):
    """The bytes of shared memory of a launch are those that the kernel lays out."""
    cuda_lab.needs_nvcc()
    made = problem.make(GEMM, ("M", "N", "K"), "float16", {})
    source = hopper_program.program(made, {"plans": "ping-64x128", "skinny_8": "64x2x64x8"}, "cuda:sm_90a").source
    for macro, name, shared in (
        ("HOPPER", "hopper_ping_64x128, ", Plan.parse("ping-64x128").shared(2)),
        ("SKINNY_HOPPER", "", Tile.parse("64x2x64x8").shared(8, False, "cuda:sm_90a")),
    ):
        assert f"\n{macro}({name}{shared}, " in source
        source = source.replace(f"\n{macro}({name}{shared}, ", f"\n{macro}({name}{shared - launched}, ")
    (tmp_path / "program.cu").write_text(source)
    command = [nvcc.find().command, "-ptx", "-arch=sm_90a", "-std=c++17", "program.cu", "-o", "program.ptx"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    said = done.stdout + done.stderr
    assert (done.returncode == 0) == (launched == 0)
    for mistake in ("Plan.shared has another layout", "Tile.shared has another layout"):
        assert (mistake in said) == bool(launched)
