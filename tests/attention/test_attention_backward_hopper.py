"""Attention's gradients on Hopper's tensor cores: what is served, what it compiles to, and what a call launches."""

from __future__ import annotations

import functools
import subprocess

import cuda_lab
import pytest
import sass
from cuda_array import Array
from cuda_lab import number

import tlhub_registry
from tlhub import catalog, problem, workload
from tlhub.specs import DeviceFacts
from tlhub.workload import Item
from tlhub_attention.contracts.backward import ATTENTION_BWD
from tlhub_attention.hopper import backward_program
from tlhub_attention.hopper.backward import HOPPER_BWD
from tlhub_attention.hopper.backward_plan import Plan, plans
from tlhub_cuda import nvcc

H200 = DeviceFacts("cuda:sm_90a", "an H200", cores=132, shared_memory=227 * 1024)
SYMBOLS = {"B": "B", "S": "S", "H": "H", "H_kv": "H_kv", "S_kv": "S_kv"}


def make(d=128, d_v=None, dtype="float16", **options):
    return problem.make(ATTENTION_BWD, {**SYMBOLS, "D": d, "D_v": d_v or d}, dtype, options)


# -- what it serves ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit_floats_are_served_with_any_channels_that_divide_by_8(dtype):
    for d, d_v in ((8, 8), (64, 64), (72, 40), (128, 64), (128, 128), (192, 128), (64, 256), (256, 256)):
        for options in ({}, {"causal": True, "deterministic": True}, {"alibi": True}):
            assert HOPPER_BWD.supports(make(d, d_v, dtype, **options), H200) is None


@pytest.mark.parametrize(
    ("made", "arch", "reason"),
    [
        (make(), "cuda:sm_90", "it is for cuda:sm_90a, and this is cuda:sm_90"),
        (make(dtype="float32"), "cuda:sm_90a", "dout, q, k, v and o of one type, float16 or bfloat16, not"),
        (make(dtype={**dict.fromkeys(["dout", *"qkv"], "float16"), "o": "bfloat16"}), "cuda:sm_90a", "o bfloat16"),
        (make(60), "cuda:sm_90a", "D=60; it takes multiples of 8 from 8 to 256"),
        (make(264, 128), "cuda:sm_90a", "D=264"),
        (make(64, 260), "cuda:sm_90a", "D_v=260"),
        (make("D"), "cuda:sm_90a", "D is symbolic"),
    ],
)
def test_the_rest_is_left_to_others_with_the_reason(made, arch, reason):
    assert reason in HOPPER_BWD.supports(made, DeviceFacts(arch, "a GPU"))


def test_what_certifies_it_can_be_served():
    name = "attention_bwd-hopper"
    items = workload.parse(tlhub_registry.workload(f"certify/{name}"), name, catalog.load())
    made = [problem.make(ATTENTION_BWD, i.shape, i.dtype, i.options) for i in items if isinstance(i, Item)]
    assert len(made) == len(items) > 20
    assert all(HOPPER_BWD.supports(m, H200) is None for m in made)
    assert {plans(int(m.dim["D"]), int(m.dim["D_v"]))[0] for m in made} >= {
        *(Plan(128, 64), Plan(64, 128), Plan(64, 192, wide=True, paired=True), Plan(64, 256, wide=True))
    }
    assert {m.option["deterministic"] for m in made} == {m.option["alibi"] for m in made} == {False, True}


def test_what_the_suite_measures_can_be_served():
    items = workload.parse(tlhub_registry.workload("suites/attention_bwd"), "attention_bwd", catalog.load())
    made = [problem.make(ATTENTION_BWD, i.shape, i.dtype, i.options) for i in items if isinstance(i, Item)]
    assert made and all(HOPPER_BWD.supports(m, H200) is None for m in made)


# -- plans -------------------------------------------------------------------------------------------


def test_every_plan_has_room_in_a_block():
    for d in range(8, 257, 8):
        for d_v in range(8, 257, 8):
            for plan in plans(d, d_v):
                assert d <= plan.channels and plan.shared(d_v) <= 227 * 1024


def test_few_channels_take_larger_tiles_but_not_beside_a_cap():
    assert plans(64, 64) == (Plan(128, 64), Plan(64, 128))
    assert plans(64, 72) == plans(128, 128) == (Plan(64, 128), Plan(64, 128))


def test_more_channels_than_a_consumer_has_registers_for_are_shared_out():
    assert plans(136, 128) == plans(192, 128) == (Plan(64, 192, wide=True, paired=True),) * 2
    assert plans(128, 136)[0] == Plan(64, 128, wide=True, paired=True) and plans(256, 256)[0].parts == 4
    assert (plans(256, 256)[0].keys, plans(128, 128)[0].keys) == (64, 128)


def test_blocks_are_paired_where_there_is_room_for_the_others_keys():
    assert plans(256, 128)[0].paired and not plans(256, 136)[0].paired and not plans(256, 256)[0].paired


# -- what they compile to ----------------------------------------------------------------------------


@functools.cache
def build(d=128, d_v=None, dtype="float16", **options):
    """Build a binary with all dims but the channels symbolic."""
    made = make(d, d_v, dtype, **options)
    (config,) = HOPPER_BWD.configs(made, H200)
    return cuda_lab.build(HOPPER_BWD.program, ATTENTION_BWD, made.dim, dtype=dtype, config=config, options=options)


@pytest.mark.parametrize(
    ("channels", "options"),
    [
        ((128, 128), {"causal": True}),
        pytest.param((64, 64), {"dtype": "bfloat16"}, marks=pytest.mark.slow),
        pytest.param((64, 64), {"causal": True, "deterministic": True}, marks=pytest.mark.slow),
        pytest.param((128, 128), {"dtype": "bfloat16", "deterministic": True}, marks=pytest.mark.slow),
        pytest.param((72, 40), {"causal": True}, marks=pytest.mark.slow),
        pytest.param((40, 96), {}, marks=pytest.mark.slow),
        pytest.param((128, 128), {"causal": True, "alibi": True}, marks=pytest.mark.slow),
        pytest.param((192, 128), {"causal": True, "deterministic": True}, marks=pytest.mark.slow),
        pytest.param((256, 256), {"alibi": True}, marks=pytest.mark.slow),
        pytest.param((256, 256), {"dtype": "bfloat16", "causal": True}, marks=pytest.mark.slow),
        pytest.param((64, 256), {}, marks=pytest.mark.slow),
    ],
)
def test_kernels_compile_without_spills_or_serialised_wgmma(channels, options):
    built = build(*channels, **options).built
    assert built.warnings == ()
    plain, capped = plans(*channels)
    assert {name.removesuffix(".spills") for name in built.resources if name.endswith(".spills")} == {
        *(f"backward_{plain.queries}", f"backward_{capped.queries}_capped", "gradient_rows"),
        *(f"{end}_{plan.queries}" for end in ("begin", "end") for plan in (plain, capped)),
    }
    assert not any(count for name, count in built.resources.items() if name.endswith(".spills"))
    for name, plan in ((f"backward_{plain.queries}", plain), (f"backward_{capped.queries}_capped", capped)):
        assert built.resources[f"{name}.shared_memory"] == plan.shared(channels[1])
        assert built.resources[f"{name}.registers"] == 168  # all that there are at the launch, for 384 threads


def test_nothing_is_loaded_that_the_kernel_before_may_still_write():
    assert sass.early_loads(build(128, 128, causal=True).linked) == {}


def test_a_layout_that_differs_from_the_launch_does_not_compile(tmp_path):
    """The bytes of shared memory of a launch are those that the kernel lays out."""
    cuda_lab.needs_nvcc()
    source, shared = backward_program.program(make(8), {}, "cuda:sm_90a").source, Plan(128, 64).shared(8)
    line = f"\nBACKWARD(backward_128, {shared}, "
    assert line in source
    (tmp_path / "program.cu").write_text(source.replace(line, f"\nBACKWARD(backward_128, {shared - 16}, "))
    command = [nvcc.find().command, "-ptx", "-arch=sm_90a", "-std=c++17", "program.cu", "-o", "program.ptx"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode != 0 and "Plan.shared has another layout" in done.stdout + done.stderr


# -- a call ------------------------------------------------------------------------------------------


SCRATCH = 1 << 47


def call(driver, s=1000, s_kv=None, *, batch=2, heads=8, kv_heads=2, scalars=(0.1, 0, 0.0), d=128, **arrays):
    """Call with arrays in C order; *arrays* replace what those have."""
    s_kv = s if s_kv is None else s_kv
    shapes = {"dout": (s, heads), "q": (s, heads), "k": (s_kv, kv_heads), "v": (s_kv, kv_heads), "o": (s, heads)}
    shapes |= {"lse": (), "dq": (s, heads), "dk": (s_kv, kv_heads), "dv": (s_kv, kv_heads)}
    given = [
        Array((batch, *shape, d), **{"address": (i + 1) << 42, "dtype": "float16", **arrays.get(name, {})})
        if name != "lse"
        else Array((batch, heads, s), (i + 1) << 42, "float32")
        for i, (name, shape) in enumerate(shapes.items())
    ]
    scratch = Array((1 << 40,), SCRATCH, "uint8")
    return driver.do(cuda_lab.call, build(causal=True).linked, [*given, scratch, *scalars])


def served(driver, *shape, **named):
    said = call(driver, *shape, **named)
    assert said.error is None
    return said.launches()


def maps(driver, **named):
    """Return the tensor maps of the products."""
    said = call(driver, **named)
    return said.maps(said.launches()[1])[:6]


def test_a_call_is_what_is_before_the_products_and_what_is_after(driver):
    launches = begin, products, end, rows = served(driver)
    assert [x["kernel"] for x in launches] == ["begin_64", "backward_64", "end_64", "gradient_rows"]
    tiles = 2 * 8 * 16  # of 64 queries of each head
    assert begin["grid"] == end["grid"] == [tiles, 1, 1] and products["grid"] == [2 * 2 * 8, 1, 1]
    assert products["block"] == [384, 1, 1] and products["shared"] == Plan(64, 128).shared(128)
    assert all(x["programmatic"] for x in launches)
    sums, stats, counts = (number(p) for p in begin["parameters"][1:4])
    assert (sums, stats - sums, counts - stats) == (SCRATCH, tiles * 64 * 128 * 4, tiles * 64 * 2 * 4)
    assert begin["parameters"][1:4] == products["parameters"][7:10] == end["parameters"][1:4]
    assert rows["parameters"][0] == begin["parameters"][3]  # whether there are any to be mended


def test_tensor_maps_have_the_arrays_as_they_are_stored(driver):
    """Here q in a packed array, and dk stored (batch, heads, sequence, channels)."""
    packed, turned = {"strides": (1000 * 3072, 3072, 128, 1)}, {"strides": (2 * 1000 * 128, 128, 1000 * 128, 1)}
    q, k, v, dout, dk, dv = maps(driver, q=packed, dk=turned)
    assert (q["dims"], q["strides"], q["box"]) == ([128, 1000, 8, 2], [6144, 256, 6144000], [64, 64, 1, 1])
    assert (k["dims"], k["strides"], k["box"]) == ([128, 1000, 2, 2], [512, 256, 512000], [64, 128, 1, 1])
    assert (v["box"], dout["box"]) == ([64, 128, 1, 1], [64, 64, 1, 1])
    assert (dk["dims"], dk["strides"], dk["box"]) == ([128, 1000, 2, 2], [256, 256000, 512000], [64, 16, 1, 1])
    assert dv["address"] == 9 << 42


@pytest.mark.parametrize("name", ["dk", "dv"])
def test_keys_gradients_that_have_no_tensor_map_are_written_element_by_element(driver, name):
    products = served(driver, **{name: {"address": (1 << 46) + 2}})[1]
    assert products["kernel"] == "backward_64" and number(products["parameters"][6], "i") == 1
    assert number(served(driver)[1]["parameters"][6], "i") == 0


def test_rows_that_are_not_aligned_are_read_and_written_element_by_element(driver):
    odd = {"address": (1 << 46) + 2}
    whole = [number(x["parameters"][0], "i") for x in served(driver, o=odd)[::2]]
    assert whole == [0, 1]
    assert [number(x["parameters"][0], "i") for x in served(driver, dq=odd)[::2]] == [1, 0]


@pytest.mark.parametrize(
    ("scalars", "kernel"),
    [
        ((0.1, 0, 0.0), "backward_64"),
        ((-0.1, 100, 0.0), "backward_64"),
        ((float("nan"), 0, 0.0), "backward_64"),
        ((0.1, 0, 30.0), "backward_64_capped"),
        ((0.1, 0, float("nan")), "backward_64_capped"),
    ],
)
def test_a_cap_takes_a_kernel_of_its_own(driver, scalars, kernel):
    assert served(driver, scalars=scalars)[1]["kernel"] == kernel


@pytest.mark.parametrize(
    "arrays",
    [
        {"q": {"address": (1 << 30) + 2}},
        {"dout": {"strides": (1032000, 1032, 129, 1)}},
        {"v": {"strides": (256000, 256, 1, 2)}},
        {"k": {"strides": (0, 256, 128, 1)}},
    ],
)
def test_what_no_tensor_map_describes_is_computed_row_by_row(driver, arrays):
    (launch,) = served(driver, **arrays)
    assert (launch["kernel"], launch["grid"]) == ("gradient_rows", [132 * 16, 1, 1])
    assert number(launch["parameters"][0]) == 0  # all of them


@pytest.mark.parametrize("shape", [(100, 0), (0, 100)])
def test_what_has_no_pairs_is_left_to_the_rows(driver, shape):
    assert [x["kernel"] for x in served(driver, *shape)] == ["gradient_rows"]


def test_a_call_without_a_gradient_launches_nothing(driver):
    assert served(driver, batch=0) == []


@pytest.mark.parametrize(
    ("wrong", "said"),
    [({"heads": 33}, "H=33"), ({"kv_heads": 0}, "H_kv=0"), ({"s": 0x3FFF0000, "batch": 1}, "S=1073676288")],
)
def test_what_no_launch_serves_is_refused_with_its_sizes(driver, wrong, said):
    refused = call(driver, **{"s": 5, **wrong})
    assert "ValueError" in refused.error and said in refused.error and refused.launches() == []


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({"dout": {"dtype": "bfloat16"}}, "'dout'"),
        ({"v": {"device": 1}}, "'v'"),
        ({"dq": {"address": 2 << 42}}, "'dq'"),  # where q is
    ],
)
def test_arguments_are_checked_before_a_launch(driver, arrays, said):
    refused = call(driver, **arrays)
    assert said in refused.error and refused.launches() == []
