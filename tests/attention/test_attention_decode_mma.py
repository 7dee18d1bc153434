"""Decoding by mma.sync: what is served, by which plan, what it compiles to, and what a call launches."""

from __future__ import annotations

import cuda_lab
import decode_lab
import pytest
from cuda_array import Array
from decode_lab import make

import tlhub_registry
from tlhub import catalog, problem, workload
from tlhub.specs import DeviceFacts
from tlhub.workload import Item
from tlhub_attention.contracts.decode import DECODE
from tlhub_attention.cuda.decode_plan import Plan
from tlhub_attention.mma import decode_program
from tlhub_attention.mma.decode import MMA_DECODE
from tlhub_attention.mma.decode_plan import plans

LEAST = 99 * 1024  # bytes of shared memory, on sm_86 and sm_120
PTX = DeviceFacts("cuda:compute_80", "any GPU", cores=108, shared_memory=LEAST)
CHANNELS = [(d, d_v) for d in range(8, 257, 8) for d_v in range(8, 257, 8)]

# -- what it serves ----------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_90", "sm_90a", "sm_100a", "sm_120", "compute_80"])
def test_it_is_for_all_from_capability_8_on(arch):
    facts = DeviceFacts(f"cuda:{arch}", "a GPU", shared_memory=LEAST)
    for paged in (False, True):
        assert MMA_DECODE.supports(make(72, 40, "bfloat16", paged=paged, lse=True, alibi=True), facts) is None


@pytest.mark.parametrize(
    ("made", "arch", "reason"),
    [
        (make(), "cuda:sm_75", "it is for compute capability 8.0 and newer, and this is cuda:sm_75"),
        (make(dtype="float32"), "cuda:sm_80", "not q float32, k float32, v float32"),
        (make(out_dtype="float64"), "cuda:sm_80", "out_dtype='float64'"),
        (make(100), "cuda:sm_80", "D=100"),
        (make("D"), "cuda:sm_80", "D is symbolic"),
    ],
)
def test_the_rest_is_left_to_others_with_the_reason(made, arch, reason):
    assert reason in MMA_DECODE.supports(made, DeviceFacts(arch, "a GPU"))


def test_what_certifies_it_can_be_served():
    name = "attention_decode-mma"
    items = workload.parse(tlhub_registry.workload(f"certify/{name}"), name, catalog.load())
    made = [problem.make(DECODE, i.shape, i.dtype, i.options) for i in items if isinstance(i, Item)]
    assert len(made) == len(items) > 10
    assert all(MMA_DECODE.supports(m, PTX) is None for m in made)
    assert {m.option["paged"] for m in made} == {m.option["alibi"] for m in made} == {False, True}


# -- plans -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared_memory", [LEAST, 163 * 1024, 227 * 1024])
def test_every_plan_has_room_for_a_ring(shared_memory):
    for channels in CHANNELS:
        chosen = plans(*channels, shared_memory)
        assert chosen[0].rows == 16
        for plan in chosen:
            assert (
                plan.stages >= 2 * plan.chunks and plan.blocks * (plan.shared(*channels) + 1024) <= shared_memory + 1024
            )


def test_no_plan_keeps_more_in_registers_than_a_thread_has():
    for d, d_v in CHANNELS:
        for _ in plans(d, d_v, LEAST):
            assert -(-d // 16) * 4 + -(-d_v // 16) * 8 + 56 <= 255


def test_a_device_with_more_shared_memory_has_more_on_its_way_or_more_blocks_of_an_sm():
    assert list(map(str, plans(128, 128, LEAST))) == ["16x4x8x1x1x16", "32x4x10x1x1x16", "64x8x8x1x1x16"]
    assert list(map(str, plans(128, 128, 163 * 1024))) == ["16x4x12x1x1x16", "32x8x12x1x1x16", "64x8x10x1x1x16"]
    assert list(map(str, plans(128, 128, 227 * 1024)))[0] == "16x4x8x2x1x16"
    assert list(map(str, plans(256, 256, LEAST))) == ["16x2x4x1x1x16"]


# -- what they compile to ----------------------------------------------------------------------------


def build(*channels, facts=PTX, **options):
    return decode_lab.build(MMA_DECODE, facts, *channels, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "channels", "most", "options"),  # most: bytes, of which sm_90a's are of 32 rows, and Hopper has its own
    [
        ("cuda:compute_80", (128, 128), 0, {"paged": True, "lse": True}),
        ("cuda:compute_80", (128, 128), 0, {"dtype": "bfloat16", "alibi": True}),
        ("cuda:sm_86", (64, 64), 0, {"dtype": "bfloat16", "causal": False}),
        ("cuda:sm_80", (72, 40), 0, {"out_dtype": "float32", "paged": True, "alibi": True}),
        ("cuda:sm_90a", (192, 128), 176, {}),
        ("cuda:sm_120", (256, 256), 8, {"lse": True, "paged": True}),
    ],
)
def test_kernels_compile_with_next_to_no_spills(arch, channels, most, options):
    facts = DeviceFacts(arch, "a GPU", shared_memory=LEAST)
    built = build(*channels, facts=facts, **options).built
    assert built.warnings == ()
    for plan in plans(*channels, LEAST):
        assert built.resources[f"decode_{plan.rows}.spills"] <= most
        assert built.resources[f"decode_{plan.rows}.shared_memory"] == plan.shared(*channels)


@pytest.mark.parametrize(("arch", "early"), [("cuda:sm_80", False), ("cuda:compute_80", False), ("cuda:sm_90a", True)])
def test_launches_begin_early_where_kernels_can_wait(arch, early):
    made = make(8)
    launches = [b.launches[0] for b in decode_program.program(made, {"plans": "16x4x8x1x1x16"}, arch).branches]
    assert [launch.programmatic for launch in launches] == [early, False]


# -- a call ------------------------------------------------------------------------------------------


def call(driver, *shape, **named):
    return decode_lab.call(driver, build(paged=True, lse=True), *shape, **named)


def served(driver, *shape, **named):
    said = call(driver, *shape, **named)
    assert said.error is None
    return said.launch


@pytest.mark.parametrize(("s", "plan"), [(1, Plan(16, 4, 8)), (5, Plan(32, 4, 10)), (16, Plan(64, 8, 8))])
def test_rows_that_share_a_kv_head_choose_the_kernel(driver, s, plan):
    launch = served(driver, s)
    assert (launch["kernel"], launch["grid"]) == (f"decode_{plan.rows}", [132, 1, 1])
    assert (launch["block"], launch["shared"]) == ([32 * plan.warps, 1, 1], plan.shared(128, 128))
    assert "programmatic" not in launch


def test_scratch_memory_has_a_part_of_a_tile_for_each_block(driver):
    need = 132 * 2 * 32 * (128 // 2 + 4) * 4  # a tag is as long as what it tells of
    assert served(driver, scratch=Array((need,), 1 << 47, "uint8"))["kernel"] == "decode_16"
    refused = call(driver, scratch=Array((need - 1,), 1 << 47, "uint8"))
    assert f"at least {need} bytes" in refused.error and refused.launches() == []


@pytest.mark.parametrize(
    "arrays",
    [
        {"page": 20},
        {"page": 1},
        {"k": {"strides": (0, 256, 128, 1)}},
        {"k": {"strides": (2 * 32 * 128, 128, 32 * 128, 1)}},
        {"q": {"address": (1 << 45) + 2}},
        {"pool": 0, "room": 0},
    ],
)
def test_rows_of_16_bytes_may_lie_anyhow(driver, arrays):
    assert served(driver, **arrays)["kernel"] == "decode_16"


@pytest.mark.parametrize(
    "arrays",
    [
        {"k": {"address": (1 << 42) + 2}},
        {"v": {"strides": (32 * 256, 256, 1, 2)}},
        {"v": {"strides": (32 * 260, 260, 130, 1)}},
    ],
)
def test_others_are_computed_row_by_row(driver, arrays):
    launch = served(driver, **arrays)
    assert (launch["kernel"], launch["grid"]) == ("decode_rows", [6, 1, 1])


@pytest.mark.parametrize(("wrong", "said"), [({"heads": 33}, "H=33"), ({"kv_heads": 0}, "H_kv=0"), ({"s": 17}, "S=17")])
def test_what_no_launch_serves_is_refused_with_its_sizes(driver, wrong, said):
    refused = call(driver, **wrong)
    assert "ValueError" in refused.error and said in refused.error and refused.launches() == []


@pytest.mark.parametrize("empty", [{"batch": 0}, {"s": 0}, {"heads": 0, "kv_heads": 0}])
def test_a_call_without_a_query_launches_nothing(driver, empty):
    assert call(driver, **empty).launches() == []


def test_a_layout_that_differs_from_the_launch_does_not_compile():
    """The bytes of shared memory of a launch are those that the kernel lays out."""
    cuda_lab.needs_nvcc()
    plan = Plan(16, 4, 8)
    source = decode_program.program(make(8), {"plans": str(plan)}, "cuda:sm_80").source
    assert f"\nMMA_DECODE({plan.shared(8, 8)}, 16, 4, 8, 1, 1, 16)" in source
    assert "BYTES == SHARED" in source
