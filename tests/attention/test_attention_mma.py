"""Attention by mma.sync: what is served, what it compiles to, and what a call launches."""

from __future__ import annotations

import functools
import re
import subprocess
from pathlib import Path

import cuda_lab
import pytest
from cuda_array import Array
from cuda_lab import number

import tlhub_registry
from tlhub import catalog, problem, workload
from tlhub.specs import DeviceFacts
from tlhub.workload import Item
from tlhub_attention.contracts.forward import ATTENTION
from tlhub_attention.contracts.varlen import VARLEN
from tlhub_attention.hopper.forward import HOPPER
from tlhub_attention.mma import forward_program
from tlhub_attention.mma.forward import MMA, MMA_VARLEN
from tlhub_attention.mma.forward_plan import Plan, Room, plan
from tlhub_cuda import TARGET, nvcc

ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a", "compute_80")
SCHEDULES = {"attention": (ATTENTION, MMA), "attention_varlen": (VARLEN, MMA_VARLEN)}


def facts(arch):
    return TARGET.facts(f"cuda:{arch}")


def room(arch):
    return Room.of(f"cuda:{arch}", facts(arch).shared_memory)


def make(d=128, d_v=None, dtype="float16", kernel="attention", **options):
    contract, _ = SCHEDULES[kernel]
    dims = {**{x.name: x.name for x in contract.dims}, "D": d, "D_v": d_v or d}
    return problem.make(contract, dims, dtype, options)


# -- what it serves ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", SCHEDULES)
@pytest.mark.parametrize("arch", ARCHS)
def test_16_bit_floats_are_served_with_any_channels_that_divide_by_8(kernel, arch):
    supports = SCHEDULES[kernel][1].supports
    for d, d_v in ((8, 8), (64, 64), (72, 40), (192, 128), (256, 256), (8, 256)):
        for dtype in ("float16", "bfloat16"):
            for options in ({}, {"out_dtype": "float32", "causal": True, "lse": True, "alibi": True}):
                assert supports(make(d, d_v, dtype, kernel, **options), facts(arch)) is None


@pytest.mark.parametrize(
    ("made", "arch", "reason"),
    [
        (make(), "cuda:sm_75", "it is for compute capability 8.0 and newer, and this is cuda:sm_75"),
        (make(dtype="float32"), "cuda:sm_80", "not q float32, k float32, v float32"),
        (make(dtype="float8_e4m3fn"), "cuda:sm_89", "not q float8_e4m3fn"),
        (
            make(dtype={"q": "float16", "k": "float16", "v": "bfloat16"}),
            "cuda:sm_80",
            "q float16, k float16, v bfloat16",
        ),
        (make(out_dtype="float64"), "cuda:sm_80", "out_dtype='float64'"),
        (make(63), "cuda:sm_80", "D=63; it takes multiples of 8 from 8 to 256"),
        (make(264), "cuda:sm_80", "D=264"),
        (make(64, 320), "cuda:sm_80", "D_v=320"),
        (make("D"), "cuda:sm_80", "D is symbolic"),
        (make(264, kernel="attention_varlen"), "cuda:sm_80", "D=264"),
    ],
)
def test_the_rest_is_left_to_others_with_the_reason(made, arch, reason):
    assert reason in MMA.supports(made, DeviceFacts(arch, "a GPU"))


@pytest.mark.parametrize("kernel", SCHEDULES)
def test_what_certifies_it_can_be_served(kernel):
    contract, schedule = SCHEDULES[kernel]
    items = workload.parse(tlhub_registry.workload(f"certify/{kernel}-mma"), f"{kernel}-mma", catalog.load())
    made = [(i.arch, problem.make(contract, i.shape, i.dtype, i.options)) for i in items if isinstance(i, Item)]
    assert len(made) == len(items) > 10
    assert {arch for arch, _ in made} == {"cuda:compute_80", "cuda:sm_90a"}
    assert all(schedule.supports(m, TARGET.facts(arch)) is None for arch, m in made)


def test_hopper_comes_first_where_there_is_one():
    assert MMA.priority < HOPPER.priority


# -- what they compile to ----------------------------------------------------------------------------


@functools.cache
def build(d=128, d_v=None, dtype="float16", *, kernel="attention", arch="sm_90a", **options):
    """Build a binary with all dims but the channels symbolic."""
    contract, schedule = SCHEDULES[kernel]
    made = make(d, d_v, dtype, kernel, **options)
    (config,) = schedule.configs(made, facts(arch))
    return cuda_lab.build(
        schedule.program, contract, made.dim, dtype=dtype, config=config, options=options, arch=f"cuda:{arch}"
    )


def kernels(d, d_v, arch, alibi=False):
    """Return the names of the kernels, with their plans."""
    chosen = plan(d, d_v, room(arch))
    finished = {f"mma_{chosen.finished(d_v)}_finished": chosen.finished(d_v)}
    return finished if alibi else {f"mma_{chosen}": chosen, **finished}


_FORMS = [
    ((128, 128), {"causal": True, "lse": True}),
    ((128, 128), {"kernel": "attention_varlen", "causal": True, "lse": True}),
    ((128, 128), {"kernel": "attention_varlen", "alibi": True}),
    ((128, 128), {"dtype": "bfloat16", "alibi": True}),
    ((64, 64), {"lse": True}),
    ((72, 40), {"out_dtype": "float32"}),
    ((96, 96), {"dtype": "bfloat16", "causal": True}),
    ((192, 128), {"causal": True}),
    ((256, 256), {"causal": True}),
    ((8, 256), {"kernel": "attention_varlen"}),
]


@pytest.mark.parametrize(
    ("arch", "channels", "options"),
    [
        ("sm_90a", *_FORMS[0]),
        *(
            pytest.param(arch, *form, marks=pytest.mark.slow)
            for arch in ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_120a")
            for form in _FORMS
            if (arch, form) != ("sm_90a", _FORMS[0])
        ),
    ],
)
def test_kernels_compile_with_next_to_no_spills(arch, channels, options):
    built = build(*channels, arch=arch, **options).built
    assert built.warnings == ()
    most = 8 if arch == "sm_90a" and options.get("kernel") == "attention_varlen" else 0  # bytes; hopper serves there
    for name, chosen in kernels(*channels, arch, options.get("alibi", False)).items():
        assert built.resources[f"{name}.spills"] <= most
        assert 0 < built.resources[f"{name}.shared_memory"] - chosen.shared(*channels) <= 256  # and what it declares


def test_portable_code_is_of_warps_products_and_asynchronous_copies(tmp_path):
    cuda_lab.needs_nvcc()
    program = forward_program.program(make(64, causal=True), {"plan": "128x64x4x2"}, "cuda:compute_80")
    (tmp_path / "program.cu").write_text(program.source)
    command = [nvcc.find().command, "-ptx", "-arch=compute_80", "-std=c++17", "program.cu", "-o", "program.ptx"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=100)
    entries = (tmp_path / "program.ptx").read_text().split(".entry ")
    text = {entry.partition("(")[0]: entry for entry in entries}["mma_128x64x4x2"]
    # 4 steps of 16 channels, and of 16 keys, each for 2 slabs of rows and 8 eights of keys, and of channels
    assert len(re.findall(r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.f16\.f16\.f32", text)) == 2 * 4 * 2 * 8
    assert "ldmatrix.sync.aligned.m8n8.x4.trans" in text and "cp.async.cg.shared.global" in text
    assert "setmaxnreg" not in text and "wgmma" not in text


@pytest.mark.parametrize("launched", [0, 16])
def test_a_layout_that_differs_from_the_launch_does_not_compile(tmp_path, launched):
    """The bytes of shared memory of a launch are those that the kernel lays out."""
    cuda_lab.needs_nvcc()
    source = forward_program.program(make(8, alibi=True), {"plan": "64x32x4x1"}, "cuda:sm_80").source
    name, shared = "mma_64x32x4x1_finished", Plan(64, 32, 4, 1).shared(8, 8)
    assert f"\nFORWARD_MMA({name}, {shared}, " in source
    source = source.replace(f"\nFORWARD_MMA({name}, {shared}, ", f"\nFORWARD_MMA({name}, {shared - launched}, ")
    (tmp_path / "program.cu").write_text(source)
    command = [nvcc.find().command, "-ptx", "-arch=sm_80", "-std=c++17", "program.cu", "-o", "program.ptx"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode == 0) == (launched == 0)
    assert ("Plan.shared has another layout" in done.stdout + done.stderr) == bool(launched)


# -- a call ------------------------------------------------------------------------------------------


def call(driver, s=1000, s_kv=None, *, batch=2, heads=8, kv_heads=2, scalars=(0.1, 0, 0.0), **arrays):
    """Call with arrays in C order; *arrays* replace what those have."""
    s_kv = s if s_kv is None else s_kv
    shapes = {"q": (s, heads), "k": (s_kv, kv_heads), "v": (s_kv, kv_heads), "o": (s, heads)}
    given = [
        Array((batch, *shape, 128), **{"address": (i + 1) << 42, "dtype": "float16", **arrays.get(name, {})})
        for i, (name, shape) in enumerate(shapes.items())
    ]
    given.append(Array((batch, heads, s), 1 << 46, "float32"))
    return driver.do(cuda_lab.call, build(causal=True, lse=True).linked, [*given, None, *scalars])


def served(driver, *shape, **named):
    said = call(driver, *shape, **named)
    assert said.error is None
    return said.launch


def whole(launch):
    """Tell whether o is stored 16 bytes at a time."""
    return bool(number(launch["parameters"][0], "i"))


def test_a_tile_is_a_block(driver):
    launch = served(driver)
    assert (launch["kernel"], launch["grid"], launch["block"]) == ("mma_128x64x4x2", [2 * 8 * 8, 1, 1], [128, 1, 1])
    assert launch["shared"] == Plan(128, 64, 4, 2).shared(128, 128) and whole(launch)
    assert served(driver, 1, batch=1)["grid"] == [8, 1, 1]


@pytest.mark.parametrize(
    ("scalars", "kernel"),
    [
        ((0.1, 0, 0.0), "mma_128x64x4x2"),
        ((0.1, 100, 0.0), "mma_128x64x4x2"),
        ((0.1, 0, 30.0), "mma_128x48x4x2_finished"),
        ((-0.1, 0, 0.0), "mma_128x48x4x2_finished"),
        ((0.0, 0, 0.0), "mma_128x48x4x2_finished"),
        ((1e-300, 0, 0.0), "mma_128x48x4x2_finished"),
        ((float("nan"), 0, 0.0), "mma_128x48x4x2_finished"),
    ],
)
def test_a_cap_or_an_unusual_scale_takes_the_kernel_that_finishes_logits(driver, scalars, kernel):
    assert served(driver, scalars=scalars)["kernel"] == kernel


@pytest.mark.parametrize(
    "arrays",
    [
        {"k": {"strides": (2 * 1000 * 128, 128, 1000 * 128, 1)}},  # (batch, heads, sequence, channels)
        {"q": {"strides": (1000 * 3072, 3072, 128, 1)}},  # packed
        {"k": {"strides": (0, 256, 128, 1)}},
        {"v": {"strides": (256000, -256, 128, 1)}},
    ],
)
def test_any_strides_that_keep_16_bytes_together_are_served(driver, arrays):
    assert served(driver, **arrays)["kernel"] == "mma_128x64x4x2"


@pytest.mark.parametrize(
    "arrays",
    [
        {"q": {"address": (1 << 30) + 2}},
        {"k": {"strides": (256008, 257, 128, 1)}},
        {"v": {"strides": (256000, 256, 1, 2)}},
    ],
)
def test_what_is_not_aligned_is_computed_row_by_row(driver, arrays):
    launch = served(driver, **arrays)
    assert (launch["kernel"], launch["grid"]) == ("attend_rows", [132 * 16, 1, 1])


@pytest.mark.parametrize("o", [{"address": (1 << 45) + 2}, {"strides": (1032000, 1032, 129, 1)}])
def test_an_o_that_is_not_aligned_is_written_element_by_element(driver, o):
    launch = served(driver, o=o)
    assert launch["kernel"] == "mma_128x64x4x2" and not whole(launch)


def test_no_keys_are_a_call_like_others(driver):
    assert served(driver, 100, 0)["kernel"] == "mma_128x64x4x2"


@pytest.mark.parametrize("empty", [{"batch": 0}, {"s": 0, "s_kv": 5}, {"heads": 0, "kv_heads": 0}])
def test_a_call_without_a_query_launches_nothing(driver, empty):
    said = call(driver, **empty)
    assert said.error is None and said.launches() == []


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


# -- sequences end to end ----------------------------------------------------------------------------


def call_varlen(driver, tokens, sequences, heads=8, kv_heads=2, **arrays):
    """Call with arrays in C order; *arrays* replace what those have."""
    shapes = {"q": heads, "k": kv_heads, "v": kv_heads, "o": heads}
    q, k, v, o = (
        Array((tokens, count, 128), **{"address": (i + 1) << 42, "dtype": "float16", **arrays.get(name, {})})
        for i, (name, count) in enumerate(shapes.items())
    )
    starts, starts_kv = (Array((sequences + 1,), address << 42, "int32") for address in (6, 7))
    lse = Array((heads, tokens), 5 << 42, "float32")
    library = build(kernel="attention_varlen", causal=True, lse=True).linked
    return driver.do(cuda_lab.call, library, [q, k, v, starts, starts_kv, o, lse, None, 0.1, 0, 0.0])


@pytest.mark.slow
def test_blocks_are_enough_for_any_lengths(driver):
    """Each sequence, and the queries before and after all, may have a tile that is not full."""
    said = call_varlen(driver, 1000, 5)
    assert said.error is None
    assert (said.launch["kernel"], said.launch["grid"]) == ("mma_128x64x4x2", [8 * (1000 // 128 + 6 + 1), 1, 1])
    assert call_varlen(driver, 0, 5).launches() == []


@pytest.mark.slow
def test_sequences_that_are_not_aligned_are_computed_row_by_row(driver):
    said = call_varlen(driver, 1000, 5, v={"strides": (257, 128, 1)})
    assert said.error is None and said.launch["kernel"] == "attend_rows"


def test_a_folder_has_what_the_schedules_are_made_of():
    root = Path(forward_program.__file__).parents[1]
    files = [name for name in MMA.sources if name.startswith("tlhub_attention/")]
    assert files and all((root.parent / name).is_file() for name in files)
