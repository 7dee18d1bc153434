"""Attention's gradients by mma.sync: what is served, the plans, what they compile to, and what a call launches."""

from __future__ import annotations

import functools
import subprocess

import cuda_lab
import pytest
from cuda_array import Array
from cuda_lab import number

import tlhub_registry
from tlhub import catalog, problem, workload
from tlhub.specs import DeviceFacts
from tlhub.workload import Item
from tlhub_attention.contracts.backward import ATTENTION_BWD
from tlhub_attention.contracts.varlen_backward import VARLEN_BWD
from tlhub_attention.mma import backward_program
from tlhub_attention.mma.backward import MMA_BWD
from tlhub_attention.mma.backward_plan import Plan, plans, widths
from tlhub_attention.mma.varlen_backward import MMA_VARLEN_BWD
from tlhub_cuda import TARGET, nvcc

H200, A100, RTX = (TARGET.facts(f"cuda:{arch}") for arch in ("sm_90a", "sm_80", "sm_89"))
PTX = TARGET.facts("cuda:compute_80")
DENSE = {"B": "B", "S": "S", "H": "H", "H_kv": "H_kv", "S_kv": "S_kv"}
ENDS = {"T": "T", "H": "H", "N1": "N1", "H_kv": "H_kv", "T_kv": "T_kv"}
KERNELS = {"attention_bwd": (ATTENTION_BWD, MMA_BWD, DENSE), "attention_varlen_bwd": (VARLEN_BWD, MMA_VARLEN_BWD, ENDS)}
ALL = {"causal": True, "deterministic": True, "alibi": True}


def make(d=128, d_v=None, dtype="float16", kernel="attention_bwd", **options):
    contract, _, symbols = KERNELS[kernel]
    return problem.make(contract, {**symbols, "D": d, "D_v": d_v or d}, dtype, options)


# -- what it serves ----------------------------------------------------------------------------------


@pytest.mark.parametrize("facts", [H200, A100, RTX, PTX, TARGET.facts("cuda:sm_120a")], ids=lambda facts: facts.arch)
@pytest.mark.parametrize("kernel", KERNELS)
def test_16_bit_floats_are_served_from_sm_80_on(kernel, facts):
    schedule = KERNELS[kernel][1]
    for d, d_v in ((8, 8), (64, 64), (72, 40), (128, 64), (192, 128), (256, 256)):
        for dtype in ("float16", "bfloat16"):
            for options in ({}, ALL):
                assert schedule.supports(make(d, d_v, dtype, kernel, **options), facts) is None


@pytest.mark.parametrize(
    ("made", "arch", "reason"),
    [
        (make(), "cuda:sm_75", "it is for compute capability 8.0 and newer, and this is cuda:sm_75"),
        (make(dtype="float32"), "cuda:sm_80", "dout, q, k, v and o of one type, float16 or bfloat16, not"),
        (make(dtype={**dict.fromkeys(["dout", *"qkv"], "float16"), "o": "bfloat16"}), "cuda:sm_80", "o bfloat16"),
        (make(60), "cuda:sm_80", "D=60; it takes multiples of 8 from 8 to 256"),
        (make(64, 264), "cuda:sm_80", "D_v=264"),
        (make("D"), "cuda:sm_80", "D is symbolic"),
    ],
)
def test_the_rest_is_left_to_others_with_the_reason(made, arch, reason):
    assert reason in MMA_BWD.supports(made, DeviceFacts(arch, "a GPU"))


@pytest.mark.parametrize("kernel", KERNELS)
def test_what_certifies_it_can_be_served(kernel):
    contract, schedule, _ = KERNELS[kernel]
    items = workload.parse(tlhub_registry.workload(f"certify/{kernel}-mma"), kernel, catalog.load())
    made = [(problem.make(contract, i.shape, i.dtype, i.options), i.arch) for i in items if isinstance(i, Item)]
    assert 10 < len(made) == len(items) <= 25
    assert all(schedule.supports(m, TARGET.facts(arch)) is None for m, arch in made)
    for option in ALL:
        assert {m.option[option] for m, _ in made} == {False, True}


# -- plans -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("facts", [H200, A100, RTX, PTX], ids=lambda facts: facts.arch)
def test_every_device_has_room_for_a_plan(facts):
    for d in range(8, 257, 8):
        for d_v in range(8, 257, 8):
            fitting = plans(d, d_v, facts.shared_memory)
            assert fitting
            for plan in fitting:
                assert plan.shared(d, d_v) <= facts.shared_memory
                across = plan.threads // 32 // (plan.queries // 32)  # of dq a warp has 32 queries, and some channels
                assert plan.queries % 32 == 0 and widths(d, d_v)[0] % (16 * across) == 0


def test_tiles_are_as_large_as_channels_and_shared_memory_let_them():
    first = {facts.arch: [plans(d, d, facts.shared_memory)[0] for d in (64, 128, 256)] for facts in (H200, A100, RTX)}
    assert first == {
        "cuda:sm_90a": [Plan(128, 128, 32, 2), Plan(64, 128, 32, 2), Plan(64, 64, 16, 2)],
        "cuda:sm_80": [Plan(64, 64, 32, 2), Plan(64, 128, 32, 2), Plan(32, 64, 16, 2)],
        "cuda:sm_89": [Plan(64, 64, 32, 2), Plan(32, 64, 16, 2), Plan(32, 32, 16, 1)],
    }
    assert plans(64, 64, H200.shared_memory, alibi=True)[0] == Plan(64, 64, 32, 2), "slopes take registers"


# -- what they compile to ----------------------------------------------------------------------------


@functools.cache
def build(d=128, d_v=None, dtype="float16", arch="sm_90a", kernel="attention_bwd", **options):
    """Build a binary with all dims but the channels symbolic, of the first plan."""
    contract, schedule, _ = KERNELS[kernel]
    made = make(d, d_v, dtype, kernel, **options)
    config = schedule.configs(made, TARGET.facts(f"cuda:{arch}"))[0]
    return cuda_lab.build(
        schedule.program, contract, made.dim, dtype=dtype, config=config, arch=f"cuda:{arch}", options=options
    )


@pytest.mark.parametrize(
    ("channels", "arch", "options", "most"),
    [
        ((128, 128), "sm_90a", {"causal": True}, 0),
        *(
            pytest.param(channels, arch, options, *(most or [0]), marks=pytest.mark.slow)
            for channels, arch, options, *most in [
                ((128, 128), "sm_90a", {"alibi": True}),
                ((128, 128), "sm_80", ALL),
                ((128, 128), "sm_89", {"dtype": "bfloat16"}),
                ((64, 64), "sm_90a", ALL),
                ((64, 64), "sm_80", {}),
                ((64, 64), "sm_89", {"causal": True}),
                ((256, 256), "sm_90a", ALL, 112),
                ((256, 256), "sm_80", {}),
                ((256, 256), "sm_89", {"causal": True}, 16),
                ((192, 128), "sm_90a", {"dtype": "bfloat16"}),
                ((72, 40), "sm_120a", {"causal": True}),
                ((128, 128), "sm_90a", {"kernel": "attention_varlen_bwd", **ALL}),
                ((64, 64), "sm_90a", {"kernel": "attention_varlen_bwd"}),
                ((256, 256), "sm_80", {"kernel": "attention_varlen_bwd", "causal": True}),
            ]
        ),
    ],
)
def test_kernels_compile_without_spills_but_for_a_few_bytes_of_256_channels(channels, arch, options, most):
    built = build(*channels, arch=arch, **options).built
    assert built.warnings == ()
    spills = {name: count for name, count in built.resources.items() if name.endswith(".spills")}
    assert spills.pop("backward_mma.spills") <= most
    assert spills == {f"{name}.spills": 0 for name in ("begin_mma", "end_mma", "gradient_rows")}
    plan = plans(*channels, TARGET.facts(f"cuda:{arch}").shared_memory, bool(options.get("alibi")))[0]
    assert built.resources["backward_mma.shared_memory"] == plan.shared(*channels)


def test_ptx_for_sm_80_adds_up_one_by_one_and_waits_for_no_launch_before():
    ptx = cuda_lab.device_code(build(arch="compute_80", kernel="attention_varlen_bwd").linked)
    assert b".target sm_80" in ptx and b"red.relaxed.gpu.global.add.f32" in ptx
    assert b"griddepcontrol" not in ptx and b"add.v4.f32" not in ptx


def test_a_layout_that_differs_from_the_launch_does_not_compile(tmp_path):
    """The bytes of shared memory of a launch are those that the kernel lays out."""
    cuda_lab.needs_nvcc()
    plan = Plan(64, 128, 32, 2)
    source = backward_program.program(make(8), {"plan": str(plan)}, "cuda:sm_80").source
    line = f"\nBACKWARD({plan.shared(8, 8)}, 64, 128, 32, 2)"
    assert line in source
    (tmp_path / "program.cu").write_text(source.replace(line, f"\nBACKWARD({plan.shared(8, 8) - 16}, 64, 128, 32, 2)"))
    command = [nvcc.find().command, "-ptx", "-arch=sm_80", "-std=c++17", "program.cu", "-o", "program.ptx"]
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
    return driver.do(cuda_lab.call, build(causal=True).linked, [*given, Array((1 << 40,), SCRATCH, "uint8"), *scalars])


def served(driver, *shape, **named):
    said = call(driver, *shape, **named)
    assert said.error is None
    return said.launches()


def test_a_call_is_what_is_before_the_products_and_what_is_after(driver):
    launches = begin, products, end, rows = served(driver)
    assert [x["kernel"] for x in launches] == ["begin_mma", "backward_mma", "end_mma", "gradient_rows"]
    tiles = 2 * 8 * 16  # of 64 queries of each head
    assert begin["grid"] == end["grid"] == [tiles, 1, 1] and products["grid"] == [2 * 2 * 8, 1, 1]
    assert products["block"] == [256, 1, 1] and products["shared"] == Plan(64, 128, 32, 2).shared(128, 128)
    assert all(x["programmatic"] for x in launches)
    sums, stats, counts = (number(p) for p in begin["parameters"][1:4])
    assert (sums, stats - sums, counts - stats) == (SCRATCH, tiles * 64 * 128 * 4, tiles * 64 * 2 * 4)
    assert begin["parameters"][1:4] == products["parameters"][1:4] == end["parameters"][1:4]
    assert rows["parameters"][0] == begin["parameters"][3]  # whether there are any to be mended


def test_rows_that_are_not_aligned_are_read_and_written_element_by_element(driver):
    odd = {"address": (1 << 46) + 2}
    whole = [
        [number(x["parameters"][0], "i") for x in served(driver, **arrays)[:3]]
        for arrays in ({}, {"o": odd}, {"dk": odd}, {"dv": odd}, {"dq": odd})
    ]
    assert whole == [[1, 3, 1], [0, 3, 1], [1, 2, 1], [1, 1, 1], [1, 3, 0]]


@pytest.mark.parametrize(
    "arrays",
    [
        {"q": {"address": (1 << 30) + 2}},
        {"dout": {"strides": (1032000, 1032, 129, 1)}},
        {"v": {"strides": (256000, 256, 1, 2)}},
    ],
)
def test_what_is_copied_in_no_chunks_is_computed_row_by_row(driver, arrays):
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


@pytest.mark.slow
def test_sequences_have_tiles_of_their_own_and_what_is_outside_of_them_too(driver):
    """Each may have a tile more than its part of all positions, and so may what is before and after them."""
    t, heads, sequences, d = 1000, 4, 7, 128
    shapes = [(t, heads, d)] * 2 + [(t, 2, d)] * 2 + [(t, heads, d)]
    arrays = [Array(shape, (i + 1) << 42, "float16") for i, shape in enumerate(shapes)]
    arrays += [Array((heads, t), 10 << 42, "float32"), *(Array((sequences + 1,), n << 42, "int32") for n in (11, 12))]
    arrays += [Array(shape, (13 + i) << 42, "float16") for i, shape in enumerate([(t, heads, d), *[(t, 2, d)] * 2])]
    built = build(kernel="attention_varlen_bwd", **ALL)
    slopes = Array((heads,), 20 << 42, "float32")
    given = [*arrays[:8], slopes, *arrays[8:], Array((1 << 40,), SCRATCH, "uint8"), 0.1, 0, 0.0]
    said = driver.do(cuda_lab.call, built.linked, given)
    assert said.error is None
    begin, products, end, _ = said.launches()
    assert begin["grid"] == end["grid"] == [heads * (1000 // 64 + sequences + 2), 1, 1]
    assert products["grid"] == [2 * (1000 // 128 + sequences + 2), 1, 1]
