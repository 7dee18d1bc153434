"""Attention on Hopper's tensor cores: what is served, by which plan, what it compiles to, and what a call launches."""

from __future__ import annotations

import functools
import subprocess
from pathlib import Path

import cuda_lab
import pytest
import sass
from cuda_array import Array
from cuda_lab import number

import tlhub_registry
from tlhub import catalog, problem, workload
from tlhub.errors import BuildError
from tlhub.specs import DeviceFacts
from tlhub.workload import Item
from tlhub_attention.contracts.forward import ATTENTION
from tlhub_attention.hopper import forward_plan, forward_program
from tlhub_attention.hopper.forward import HOPPER
from tlhub_attention.hopper.forward_plan import Plan, plans
from tlhub_cuda import nvcc

H200 = DeviceFacts("cuda:sm_90a", "an H200", cores=132, shared_memory=227 * 1024)
SYMBOLS = {"B": "B", "S": "S", "H": "H", "H_kv": "H_kv", "S_kv": "S_kv"}
CHANNELS = [(d, d_v) for d in range(8, 257, 8) for d_v in range(8, 257, 8)]


def make(d=128, d_v=None, dtype="float16", **options):
    dims = {**SYMBOLS, "D": d, "D_v": d_v or d}
    return problem.make(ATTENTION, dims, dtype, options)


# -- what it serves ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("out", ["float16", "bfloat16", "float32"])
def test_16_bit_floats_are_served_with_any_channels_that_divide_by_8(dtype, out):
    for d, d_v in ((8, 8), (64, 64), (72, 40), (192, 128), (256, 256), (8, 256)):
        assert HOPPER.supports(make(d, d_v, dtype, out_dtype=out, causal=True, lse=True), H200) is None
    assert HOPPER.supports(problem.make(ATTENTION, (2, 1000, 16, 128), dtype, {}), H200) is None


@pytest.mark.parametrize(
    ("made", "arch", "reason"),
    [
        (make(), "cuda:sm_90", "it is for cuda:sm_90a, and this is cuda:sm_90"),
        (make(), "cuda:sm_100a", "cuda:sm_100a"),
        (make(dtype="float32"), "cuda:sm_90a", "not q float32, k float32, v float32"),
        (make(dtype="float8_e4m3fn"), "cuda:sm_90a", "not q float8_e4m3fn"),
        (
            make(dtype={"q": "float16", "k": "float16", "v": "bfloat16"}),
            "cuda:sm_90a",
            "q float16, k float16, v bfloat16",
        ),
        (make(out_dtype="float64"), "cuda:sm_90a", "out_dtype='float64'"),
        (make(63), "cuda:sm_90a", "D=63; it takes multiples of 8 from 8 to 256"),
        (make(264), "cuda:sm_90a", "D=264"),
        (make(64, 320), "cuda:sm_90a", "D_v=320"),
        (make("D"), "cuda:sm_90a", "D is symbolic"),
    ],
)
def test_the_rest_is_left_to_others_with_the_reason(made, arch, reason):
    assert reason in HOPPER.supports(made, DeviceFacts(arch, "a GPU"))


def test_what_certifies_it_can_be_served():
    items = workload.parse(tlhub_registry.workload("certify/attention-hopper"), "attention-hopper", catalog.load())
    made = [problem.make(ATTENTION, i.shape, i.dtype, i.options) for i in items if isinstance(i, Item)]
    assert len(made) == len(items) > 20
    assert all(HOPPER.supports(m, H200) is None for m in made)
    taken = {HOPPER.configs(m, H200)[0]["plans"] for m in made}
    assert taken == {" ".join(map(str, plans(*c, causal))) for c in CHANNELS for causal in (False, True)}


# -- plans -------------------------------------------------------------------------------------------


def every_plan():
    return {(d, d_v, plan) for d, d_v in CHANNELS for causal in (False, True) for plan in plans(d, d_v, causal)}


@pytest.mark.parametrize("item", [2, 4])
def test_every_plan_has_room_for_its_rings_and_a_chunk_of_o(item):
    for d, d_v, plan in every_plan():
        assert plan.buffers(d, d_v, item) >= 1 and plan.shared(d, d_v, item) <= 227 * 1024


def test_no_plan_keeps_more_in_registers_than_a_consumer_has():
    for _, d_v, plan in every_plan():
        logits, weights, sums = plan.keys // 2, plan.keys // 4, forward_plan.round_up(d_v, 32) // 2
        assert logits + weights + sums + 32 <= (160 if plan.groups == 3 else 232)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("s_kv", "plan"), [(1024, "128x128"), (8192, "128x128"), (16384, "128x160"), (65536, "128x160")]
)
def test_long_sequences_take_larger_blocks_of_keys(driver, s_kv, plan):
    said = call(driver, 128, s_kv, causal=False)
    assert said.error is None and said.launch["kernel"] == f"hopper_{plan}"


def test_a_plan_is_written_as_it_is_read():
    assert Plan.parse("192x128") == Plan(192, 128) and str(Plan(192, 128)) == "192x128"
    with pytest.raises(BuildError, match="'128' is no plan; it is the queries of a tile and the keys of a block"):
        Plan.parse("128")


# -- what they compile to ----------------------------------------------------------------------------


@functools.cache
def build(d=128, d_v=None, dtype="float16", **options):
    """Build a binary with all dims but the channels symbolic."""
    made = make(d, d_v, dtype, **options)
    (config,) = HOPPER.configs(made, H200)
    return cuda_lab.build(HOPPER.program, ATTENTION, made.dim, dtype=dtype, config=config, options=options)


@pytest.mark.parametrize(
    ("channels", "options"),
    [
        ((128, 128), {"causal": True, "lse": True}),
        pytest.param((128, 128), {"lse": True}, marks=pytest.mark.slow),
        pytest.param((64, 64), {"dtype": "bfloat16"}, marks=pytest.mark.slow),
        pytest.param((72, 40), {"out_dtype": "float32"}, marks=pytest.mark.slow),
        pytest.param((96, 96), {"dtype": "bfloat16", "causal": True}, marks=pytest.mark.slow),
        pytest.param((192, 128), {"causal": True}, marks=pytest.mark.slow),
        pytest.param((192, 192), {"lse": True}, marks=pytest.mark.slow),
        pytest.param((256, 256), {"causal": True}, marks=pytest.mark.slow),
    ],
)
def test_kernels_compile_with_next_to_no_spills_and_no_serialised_wgmma(channels, options):
    """Three consumers have 160 registers, of which a tile's end takes some bytes more."""
    built = build(*channels, **options).built
    item, chosen = 4 if "out_dtype" in options else 2, plans(*channels, options.get("causal", False))
    assert built.warnings == ()
    capped = chosen[-1].capped
    for name, plan in [*((f"hopper_{plan}", plan) for plan in chosen), (f"hopper_{capped}_capped", capped)]:
        assert built.resources[f"{name}.spills"] <= (16 if plan.groups == 3 else 0)
        assert built.resources[f"{name}.shared_memory"] == plan.shared(*channels, item)
        assert (
            built.resources[f"{name}.registers"] == 65536 // plan.threads // 8 * 8
        )  # all that there are at the launch


def test_nothing_is_loaded_that_the_kernel_before_may_still_write():
    assert sass.early_loads(build(128, 128, causal=True, lse=True).linked) == {}


def test_wgmma_multiplies_whole_tiles_that_bulk_copies_brought():
    folder = Path(build(causal=True, lse=True).folder)
    command = [nvcc.find().command, "-ptx", "-gencode", "arch=compute_90a,code=compute_90a", "-std=c++17", "program.cu"]
    subprocess.run([*command, "-o", "program.ptx"], cwd=folder, check=True, capture_output=True, timeout=100)
    entries = (folder / "program.ptx").read_text().split(".entry ")
    text = {entry.partition("(")[0]: entry for entry in entries}["hopper_128x128"]
    products = text.split("wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16")[1:]
    # 8 steps of 16 channels and 8 of 16 keys: of the first logits, of two products at once in a tile and where the next
    # begins, of the last sum, and of the first logits of a tile that does not overlap, which there is none of
    assert len(products) in (8 + 2 * (8 + 8) + 8, 8 + 2 * (8 + 8) + 8 + 8)
    assert text.count("setmaxnreg") == 2
    assert "cp.async.bulk.tensor.4d.global.shared::cta" in text and "stmatrix" in text
    # one barrier for all threads, at the start; consumers' turns are named ones
    assert text.count("barrier.sync") + text.count("bar.sync \t0") + text.count("bar.sync 0") == 1


@pytest.mark.parametrize("launched", [0, 16])
def test_a_layout_that_differs_from_the_launch_does_not_compile(tmp_path, launched):
    """The bytes of shared memory of a launch are those that the kernel lays out."""
    cuda_lab.needs_nvcc()
    source = forward_program.program(make(8), {"plans": "128x64"}, "cuda:sm_90a").source
    shared = Plan(128, 64).shared(8, 8, 2)
    assert f"\nHOPPER(hopper_128x64, {shared}, " in source
    source = source.replace(f"\nHOPPER(hopper_128x64, {shared}, ", f"\nHOPPER(hopper_128x64, {shared - launched}, ")
    (tmp_path / "program.cu").write_text(source)
    command = [nvcc.find().command, "-ptx", "-arch=sm_90a", "-std=c++17", "program.cu", "-o", "program.ptx"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode == 0) == (launched == 0)
    assert ("Plan.shared has another layout" in done.stdout + done.stderr) == bool(launched)


# -- a call ------------------------------------------------------------------------------------------


def call(driver, s=1000, s_kv=None, *, batch=2, heads=8, kv_heads=2, scalars=(0.1, 0, 0.0), causal=True, **arrays):
    """Call with arrays in C order; *arrays* replace what those have."""
    s_kv = s if s_kv is None else s_kv
    shapes = {"q": (s, heads), "k": (s_kv, kv_heads), "v": (s_kv, kv_heads), "o": (s, heads)}
    given = [
        Array((batch, *shape, 128), **{"address": (i + 1) << 42, "dtype": "float16", **arrays.get(name, {})})
        for i, (name, shape) in enumerate(shapes.items())
    ]
    given.append(Array((batch, heads, s), 1 << 46, "float32"))
    return driver.do(cuda_lab.call, build(causal=causal, lse=True).linked, [*given, None, *scalars])


def served(driver, *shape, **named):
    said = call(driver, *shape, **named)
    assert said.error is None
    return said


def test_a_launch_has_as_many_blocks_as_fit(driver):
    launch = served(driver).launch
    assert (launch["kernel"], launch["grid"], launch["block"]) == ("hopper_128x128", [128, 1, 1], [384, 1, 1])
    assert launch["programmatic"] == 1 and launch["shared"] == Plan(128, 128).shared(128, 128, 2)
    assert served(driver, 1100).launch["grid"] == [132, 1, 1]
    assert served(driver, 1, batch=1).launch["grid"] == [8, 1, 1]


def test_tensor_maps_have_the_arrays_as_they_are_stored(driver):
    """Here q in a packed array, and k stored (batch, heads, sequence, channels)."""
    packed = {"strides": (1000 * 3072, 3072, 128, 1)}
    said = served(driver, q=packed, k={"strides": (2 * 1000 * 128, 128, 1000 * 128, 1)})
    q, k, v, o = said.maps()[:4]
    assert (q["dims"], q["strides"], q["box"]) == ([128, 1000, 8, 2], [6144, 256, 6144000], [64, 128, 1, 1])
    assert (k["dims"], k["strides"], k["box"]) == ([128, 1000, 2, 2], [256, 256000, 512000], [64, 128, 1, 1])
    assert (v["dims"], v["strides"], v["box"]) == ([128, 1000, 2, 2], [512, 256, 512000], [64, 128, 1, 1])
    assert (o["dims"], o["strides"], o["box"]) == ([128, 1000, 8, 2], [2048, 256, 2048000], [64, 16, 1, 1])
    assert number(said.launch["parameters"][4], "i") == 0


@pytest.mark.parametrize("o", [{"address": (1 << 45) + 2}, {"strides": (1032000, 1032, 129, 1)}])
def test_an_o_that_has_no_tensor_map_is_written_element_by_element(driver, o):
    said = served(driver, o=o)
    assert said.launch["kernel"] == "hopper_128x128" and number(said.launch["parameters"][4], "i") == 1
    assert said.maps()[3]["address"] == 1 << 42


@pytest.mark.parametrize(
    ("scalars", "kernel"),
    [
        ((0.1, 0, 0.0), "hopper_128x128"),
        ((0.1, 100, 0.0), "hopper_128x128"),
        ((0.1, 0, 30.0), "hopper_128x128_capped"),
        ((-0.1, 0, 0.0), "hopper_128x128_capped"),
        ((0.0, 0, 0.0), "hopper_128x128_capped"),
        ((1e-300, 0, 0.0), "hopper_128x128_capped"),
        ((float("nan"), 0, 0.0), "hopper_128x128_capped"),
    ],
)
def test_a_cap_or_an_unusual_scale_takes_the_kernel_that_finishes_logits(driver, scalars, kernel):
    assert served(driver, scalars=scalars).launch["kernel"] == kernel


@pytest.mark.parametrize("window", [-5, 0, 1, 1 << 29, 1 << 40])
def test_windows_that_hide_nothing_more_fit_an_int(driver, window):
    given = number(served(driver, scalars=(0.1, window, 0.0)).launch["parameters"][-2], "i")
    assert given == max(0, min(window, 0x3FFF0000))


@pytest.mark.parametrize(
    "arrays",
    [
        {"q": {"address": (1 << 30) + 2}},
        {"k": {"strides": (256008, 257, 128, 1)}},
        {"v": {"strides": (256000, 256, 1, 2)}},
        {"k": {"strides": (0, 256, 128, 1)}},
        {"v": {"strides": (256000, -256, 128, 1)}},
    ],
)
def test_what_no_tensor_map_describes_is_computed_row_by_row(driver, arrays):
    launch = served(driver, **arrays).launch
    assert (launch["kernel"], launch["grid"]) == ("attend_rows", [132 * 16, 1, 1])


def test_no_keys_are_left_to_the_rows(driver):
    assert served(driver, 100, 0).launch["kernel"] == "attend_rows"


@pytest.mark.parametrize("empty", [{"batch": 0}, {"s": 0, "s_kv": 5}, {"heads": 0, "kv_heads": 0}])
def test_a_call_without_a_query_launches_nothing(driver, empty):
    assert served(driver, **empty).launches() == []


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"heads": 33}, "H=33"),  # not shared evenly by 2
        ({"kv_heads": 0}, "H_kv=0"),
        ({"s": 0x3FFF0000, "batch": 1}, "S=1073676288"),
    ],
)
def test_what_no_launch_serves_is_refused_with_its_sizes(driver, wrong, said):
    refused = call(driver, **{"s": 5, **wrong})
    assert "ValueError" in refused.error and said in refused.error and refused.launches() == []


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({"k": {"dtype": "bfloat16"}}, "'k'"),
        ({"v": {"device": 1}}, "'v'"),
        ({"o": {"address": 1 << 42}}, "'o'"),  # where q is
    ],
)
def test_arguments_are_checked_before_a_launch(driver, arrays, said):
    refused = call(driver, **arrays)
    assert said in refused.error and refused.launches() == []
