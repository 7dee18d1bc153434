"""Decoding on Hopper: what is served, by which plan, what it compiles to, and what a call launches."""

from __future__ import annotations

import re
import subprocess

import cuda_lab
import decode_lab
import pytest
import sass
from cuda_array import Array
from cuda_lab import number
from decode_lab import make

import tlhub_registry
from tlhub import catalog, problem, workload
from tlhub.errors import BuildError
from tlhub.specs import DeviceFacts
from tlhub.workload import Item
from tlhub_attention.contracts.decode import DECODE
from tlhub_attention.cuda.decode_plan import Plan
from tlhub_attention.hopper import decode_program
from tlhub_attention.hopper.decode import HOPPER_DECODE
from tlhub_attention.hopper.decode_plan import BARRIERS, exchange, plan_of_clusters, plans
from tlhub_cuda import nvcc

H200 = DeviceFacts("cuda:sm_90a", "an H200", cores=132, shared_memory=227 * 1024)
CHANNELS = [(d, d_v) for d in range(8, 257, 8) for d_v in range(8, 257, 8)]


# -- what it serves ----------------------------------------------------------------------------------


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit_floats_are_served_with_any_channels_that_divide_by_8(dtype, paged):
    for d, d_v in ((8, 8), (128, 128), (72, 40), (192, 128), (256, 256)):
        for out in ("float16", "bfloat16", "float32"):
            made = make(d, d_v, dtype, paged=paged, out_dtype=out, lse=True, alibi=True)
            assert HOPPER_DECODE.supports(made, H200) is None


@pytest.mark.parametrize(
    ("made", "arch", "reason"),
    [
        (make(), "cuda:sm_90", "it is for cuda:sm_90a, and this is cuda:sm_90"),
        (make(dtype="float32"), "cuda:sm_90a", "not q float32, k float32, v float32"),
        (make(out_dtype="float64"), "cuda:sm_90a", "out_dtype='float64'"),
        (make(264), "cuda:sm_90a", "D=264"),
        (make("D"), "cuda:sm_90a", "D is symbolic"),
    ],
)
def test_the_rest_is_left_to_others_with_the_reason(made, arch, reason):
    assert reason in HOPPER_DECODE.supports(made, DeviceFacts(arch, "a GPU"))


def test_what_certifies_it_can_be_served():
    name = "attention_decode-hopper"
    items = workload.parse(tlhub_registry.workload(f"certify/{name}"), name, catalog.load())
    made = [problem.make(DECODE, i.shape, i.dtype, i.options) for i in items if isinstance(i, Item)]
    assert len(made) == len(items) > 15
    assert all(HOPPER_DECODE.supports(m, H200) is None for m in made)
    assert {m.option["paged"] for m in made} == {False, True}


# -- plans -------------------------------------------------------------------------------------------


def test_every_plan_has_room_for_a_ring():
    for channels in CHANNELS:
        for plan in plans(*channels):
            assert (
                plan.chunks <= plan.stages <= 24
                and plan.stages % plan.chunks == 0
                and plan.shared(*channels, BARRIERS) <= 227 * 1024
            )


def test_clusters_have_room_to_add_up_rows():
    for channels in CHANNELS:
        plan = plan_of_clusters(*channels)
        room = 228 * 1024 // plan.blocks - 1024
        assert plan.turns == 1 and plan.shared(*channels, BARRIERS) + exchange(channels[1]) <= room


def test_no_plan_keeps_more_in_registers_than_a_thread_has():
    for d, d_v in CHANNELS:
        for plan in plans(d, d_v):
            queries, sums = -(-d // 16) * 4, -(-d_v // 16) * 8
            assert queries + sums + 56 <= (255 if plan.turns * plan.warps == 4 else 232)


def test_few_rows_have_64_kib_on_their_way_to_an_sm_and_more_all_that_there_is_room_for():
    assert list(map(str, plans(128, 128))) == ["16x4x8x1x2x16", "64x4x7x1x2x64"]
    assert [plan.stages for plan in plans(64, 64)] == [16, 14]
    assert list(map(str, plans(128, 120))) == ["16x4x8x1x2x16", "32x8x20x1x1x16", "64x8x24x1x1x16"]
    assert list(map(str, plans(256, 256))) == ["16x4x8x1x1x16"]


def test_a_plan_is_written_as_it_is_read():
    assert Plan.parse("32x8x6x1x1x16") == Plan(32, 8, 6) and str(Plan(32, 8, 6)) == "32x8x6x1x1x16"
    with pytest.raises(BuildError, match="'16x4' is no plan; it is rows of a tile, warps, stages, blocks of an SM"):
        Plan.parse("16x4")


@pytest.mark.parametrize(("page", "part"), [(16, 16), (24, 8), (64, 16), (100, 8), ("page", 16)])
def test_bulk_copies_bring_as_many_keys_as_surely_are_of_one_page(page, part):
    made = make(page=page, paged=True)
    made = decode_program.program(made, HOPPER_DECODE.configs(made, H200)[0], "cuda:sm_90a")
    assert f"\nconstexpr int PART = {part};\n" in made.source
    assert made.branches[0].launches[0].parameters[0].box == (64, 2, part, 1, 1)


# -- what they compile to ----------------------------------------------------------------------------


def build(*channels, **options):
    return decode_lab.build(HOPPER_DECODE, H200, *channels, **options)


@pytest.mark.parametrize(
    ("channels", "options"),
    [
        ((128, 128), {"paged": True, "lse": True}),
        pytest.param((128, 128), {"alibi": True}, marks=pytest.mark.slow),
        pytest.param((128, 128), {"dtype": "bfloat16"}, marks=pytest.mark.slow),
        pytest.param((64, 64), {"dtype": "bfloat16", "causal": False}, marks=pytest.mark.slow),
        pytest.param((72, 40), {"out_dtype": "float32", "paged": True}, marks=pytest.mark.slow),
        pytest.param((192, 128), {}, marks=pytest.mark.slow),
        pytest.param((192, 192), {"paged": True}, marks=pytest.mark.slow),
        pytest.param((256, 192), {"lse": True, "paged": True}, marks=pytest.mark.slow),
        pytest.param((256, 256), {"lse": True, "paged": True}, marks=pytest.mark.slow),
    ],
)
def test_kernels_compile_without_spills_but_for_a_tiles_end_of_256_channels(channels, options):
    built = build(*channels, **options).built
    assert built.warnings == ()
    assert built.resources["decode_together.spills"] == 0
    for plan in plans(*channels):
        most = 32 if max(channels) == 256 else 0
        assert built.resources[f"decode_{plan.rows}.spills"] <= most
        assert built.resources[f"decode_{plan.rows}.shared_memory"] == plan.shared(*channels, BARRIERS)
    assert built.resources["decode_rows.spills"] == 0


@pytest.mark.slow
def test_only_lengths_are_loaded_that_the_kernel_before_may_still_write():
    """Past the L1 cache, to foresee what comes first: they are read again."""
    early = sass.early_loads(build(128, 128, alibi=True).linked)
    assert set(early) == {"decode_16", "decode_64"}
    assert all("LDG.E.STRONG.GPU" in load for loads in early.values() for load in loads)


@pytest.mark.xfail(strict=True, reason="arrivals do not wait for loads yet; no result was seen to change")
def test_keys_and_values_are_read_before_their_room_is_told_to_be_free():
    assert sass.early_arrivals(build(128, 128, paged=True, lse=True).linked) == {}


@pytest.mark.parametrize("launched", [0, 16])
def test_a_layout_that_differs_from_the_launch_does_not_compile(tmp_path, launched):
    """The bytes of shared memory of a launch are those that the kernel lays out."""
    plan = Plan(16, 4, 8)
    shared = plan.shared(8, 8, BARRIERS)
    source = small(plan)
    assert f"\nHOPPER_DECODE({shared}, 16, 4, 8, 1, 1, 16)" in source
    source = source.replace(f"\nHOPPER_DECODE({shared}, ", f"\nHOPPER_DECODE({shared - launched}, ")
    done = compiled(tmp_path, source)
    assert (done.returncode == 0) == (launched == 0)
    assert ("Plan.shared has another layout" in done.stdout + done.stderr) == bool(launched)


def test_what_is_fetched_ahead_of_the_kernel_before_leaves_nothing_in_the_l1_cache(tmp_path):
    """The kernel before may yet write lengths, keys and values: they are loaded when it has ended."""
    assert compiled(tmp_path, small(Plan(16, 4, 8, turns=2))).returncode == 0
    functions = (tmp_path / "program.ptx").read_text().split("\n.visible .entry ")
    (kernel,) = (text for text in functions if text.startswith("decode_16("))
    before, after = kernel.split("griddepcontrol.wait;", maxsplit=1)
    assert before.count("prefetch.tensor.5d.L2") == 2 and "prefetch.tensor.5d" not in after
    assert set(re.findall(r"ld\.global\.\w+", before)) == {"ld.global.cg"} and "ld.global.u32" in after
    assert "cp.async.bulk.tensor" not in before


def small(plan, **options):
    """Return the source of kernels for heads of 8 channels."""
    config = {"plans": str(plan), "together": str(plan)}
    return decode_program.program(make(8, **options), config, "cuda:sm_90a").source


def compiled(folder, source):
    """Compile *source* to program.ptx in *folder*, if that can be."""
    cuda_lab.needs_nvcc()
    (folder / "program.cu").write_text(source)
    command = [nvcc.find().command, "-ptx", "-arch=sm_90a", "-std=c++17", "program.cu", "-o", "program.ptx"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100, check=False)


# -- a call ------------------------------------------------------------------------------------------


def call(driver, *shape, **named):
    return decode_lab.call(driver, build(paged=True, lse=True), *shape, **named)


def served(driver, *shape, **named):
    said = call(driver, *shape, **named)
    assert said.error is None
    return said


@pytest.mark.parametrize("s", [2, 8])
def test_so_many_sms_as_read_heads_side_by_side_have_a_block(driver, s):
    launch = served(driver, s).launch
    assert (launch["grid"], launch["block"], launch["programmatic"]) == ([128, 1, 1], [384, 1, 1], 1)
    assert launch["shared"] == plans(128, 128)[s > 4].shared(128, 128, BARRIERS)


@pytest.mark.parametrize(
    ("shape", "blocks"),
    [
        ({"batch": 1, "room": 2048}, 8),
        ({"batch": 1, "room": 8 * 8 * 64}, 8),
        ({"batch": 1, "room": 8 * 8 * 64 + 16}, 1),  # more than 8 units of a block
        ({"batch": 5, "room": 8 * 4 * 64}, 8),  # 80 blocks, in clusters of 8: 4 units
        ({"batch": 5, "room": 8 * 4 * 64 + 16}, 1),
        ({"batch": 16, "room": 4 * 4 * 64}, 4),  # 128 blocks
        ({"batch": 30, "room": 2 * 8 * 64}, 2),
        ({"batch": 30, "room": 2 * 8 * 64 + 16}, 1),
        ({"batch": 70, "room": 64}, 1),  # more blocks than SMs
        ({"batch": 1, "room": 64, "heads": 64}, 1),  # two tiles of rows each
    ],
)
def test_the_blocks_of_a_cluster_share_a_tile_where_there_are_few(driver, shape, blocks):
    launch = served(driver, 1, **shape).launch
    if blocks == 1:
        assert (launch["kernel"], launch["grid"]) == (f"decode_{16 if shape.get('heads', 8) == 8 else 64}", [128, 1, 1])
    else:
        assert (launch["kernel"], launch["cluster"]) == ("decode_together", [blocks, 1, 1])
        assert (launch["grid"], launch["block"]) == ([blocks, 2 * shape["batch"], 1], [160, 1, 1])
        assert launch["shared"] == Plan(16, 4, 8).shared(128, 128, BARRIERS) + exchange(128)


@pytest.mark.parametrize(("s", "heads", "rows"), [(2, 8, 16), (4, 8, 16), (5, 8, 64), (2, 32, 64), (16, 32, 64)])
def test_rows_that_share_a_kv_head_choose_the_kernel(driver, s, heads, rows):
    assert served(driver, s, heads=heads).launch["kernel"] == f"decode_{rows}"


def test_tensor_maps_have_parts_of_pages(driver):
    """Here k stored (pages, heads, positions, channels)."""
    said = served(driver, k={"strides": (2 * 32 * 128, 128, 32 * 128, 1)})
    k, v = said.maps()[:2]
    assert (k["dims"], k["strides"]) == ([64, 2, 32, 2, 50], [128, 256, 8192, 16384])
    assert (v["dims"], v["strides"]) == ([64, 2, 32, 2, 50], [128, 512, 256, 16384])
    assert k["box"] == v["box"] == [64, 2, 16, 1, 1]


def test_the_kernel_gets_the_room_and_the_table(driver):
    launch = served(driver, room=100, page=48, table={"strides": (7, 1)}).launch
    sizes = [number(p, "i") for p in launch["parameters"] if len(p) == 8][:5]
    assert sizes == [3, 1, 8, 144, 2]  # batch, queries, heads, room for keys, kv heads
    lengths, step, table, row, column, page = launch["parameters"][-6:]
    assert number(lengths) == 4 << 40 and number(step) == 1 and number(table) == 5 << 40
    assert (number(row), number(column), number(page, "i")) == (7, 1, 48)


def test_scratch_memory_has_a_part_of_a_tile_for_each_block(driver):
    need = 132 * 2 * 32 * (128 // 2 + 4) * 4  # a tag is as long as what it tells of
    assert served(driver, 2, scratch=Array((need,), 1 << 47, "uint8")).launch["kernel"] == "decode_16"
    refused = call(driver, 2, scratch=Array((need - 1,), 1 << 47, "uint8"))
    assert f"at least {need} bytes" in refused.error and refused.launches() == []


@pytest.mark.parametrize(
    "arrays",
    [
        {"k": {"address": (1 << 42) + 2}},
        {"v": {"strides": (32 * 256, 256, 1, 2)}},
        {"k": {"strides": (0, 256, 128, 1)}},
        {"page": 20},  # of which bulk copies of 16 keys would cross the end
    ],
)
def test_what_no_bulk_copy_brings_is_computed_row_by_row(driver, arrays):
    launch = served(driver, **arrays).launch
    assert (launch["kernel"], launch["grid"]) == ("decode_rows", [6, 1, 1])


@pytest.mark.parametrize("arrays", [{"q": {"address": (1 << 45) + 2}}, {"o": {"strides": (1032, 1032, 129, 1)}}])
def test_q_and_o_may_lie_anyhow(driver, arrays):
    assert served(driver, **arrays).launch["kernel"] == "decode_together"
    assert served(driver, batch=70, **arrays).launch["kernel"] == "decode_16"


def test_an_empty_pool_is_left_to_the_rows(driver):
    assert served(driver, pool=0).launch["kernel"] == "decode_rows"
    assert served(driver, room=0).launch["kernel"] == "decode_together"  # every length is 0


@pytest.mark.parametrize("empty", [{"batch": 0}, {"s": 0}, {"heads": 0, "kv_heads": 0}])
def test_a_call_without_a_query_launches_nothing(driver, empty):
    assert served(driver, **empty).launches() == []


@pytest.mark.parametrize(("wrong", "said"), [({"heads": 33}, "H=33"), ({"kv_heads": 0}, "H_kv=0"), ({"s": 17}, "S=17")])
def test_what_no_launch_serves_is_refused_with_its_sizes(driver, wrong, said):
    refused = call(driver, **wrong)
    assert "ValueError" in refused.error and said in refused.error and refused.launches() == []


@pytest.mark.parametrize(
    ("arrays", "said"),
    [({"lengths": {"dtype": "float32"}}, "'lengths'"), ({"table": {"device": 1}}, "'table'")],
)
def test_arguments_are_checked_before_a_launch(driver, arrays, said):
    refused = call(driver, **arrays)
    assert said in refused.error and refused.launches() == []
