"""Attention over sequences end to end on Hopper: what is served, what it compiles to, and what a call launches."""

from __future__ import annotations

import functools

import cuda_lab
import pytest
import sass
from cuda_array import Array
from cuda_lab import number

import tlhub_registry
from tlhub import catalog, problem, workload
from tlhub.specs import DeviceFacts
from tlhub_attention.contracts.varlen import VARLEN
from tlhub_attention.hopper.forward_plan import Plan, plans
from tlhub_attention.hopper.varlen import HOPPER_VARLEN

H200 = DeviceFacts("cuda:sm_90a", "an H200", cores=132, shared_memory=227 * 1024)
BESIDE = 144  # bytes of shared memory that a plan has not: three slots of tiles


def make(d=128, d_v=None, dtype="float16", **options):
    dims = {**{n: n for n in ("T", "H", "N1", "H_kv", "T_kv")}, "D": d, "D_v": d_v or d}
    return problem.make(VARLEN, dims, dtype, options)


@pytest.mark.parametrize("name", ["certify/attention_varlen-hopper", "suites/attention_varlen"])
def test_what_certifies_it_and_what_is_measured_are_served(name):
    items = workload.parse(tlhub_registry.workload(name), name.split("/")[1], catalog.load())
    assert items
    for item in items:
        assert HOPPER_VARLEN.supports(problem.make(VARLEN, item.shape, item.dtype, item.options), H200) is None


@pytest.mark.parametrize(
    ("made", "arch", "reason"),
    [
        (make(), "cuda:sm_90", "it is for cuda:sm_90a"),
        (make(dtype="float32"), "cuda:sm_90a", "not q float32, k float32, v float32"),
        (make(260), "cuda:sm_90a", "D=260; it takes multiples of 8 from 8 to 256"),
        (make("D"), "cuda:sm_90a", "D is symbolic"),
    ],
)
def test_the_rest_is_left_to_others_with_the_reason(made, arch, reason):
    assert reason in HOPPER_VARLEN.supports(made, DeviceFacts(arch, "a GPU"))


def test_every_plan_has_room_for_the_slots_of_tiles():
    channels = [(d, d_v) for d in range(8, 257, 8) for d_v in range(8, 257, 8)]
    chosen = {(c, plan) for c in channels for causal in (False, True) for plan in plans(*c, causal)}
    assert all(
        p.shared(*c, item) + BESIDE <= 227 * 1024 for c, plan in chosen for item in (2, 4) for p in (plan, plan.capped)
    )


@functools.cache
def build(d=128, d_v=None, dtype="float16", **options):
    """Build a binary with all dims but the channels symbolic."""
    made = make(d, d_v, dtype, **options)
    (config,) = HOPPER_VARLEN.configs(made, H200)
    return cuda_lab.build(HOPPER_VARLEN.program, VARLEN, made.dim, dtype=dtype, config=config, options=options)


@pytest.mark.parametrize(
    ("channels", "options"),
    [
        pytest.param((128, 128), {"causal": True, "lse": True}, marks=pytest.mark.slow),
        pytest.param((128, 128), {"alibi": True}, marks=pytest.mark.slow),
        pytest.param((64, 64), {"dtype": "bfloat16", "lse": True}, marks=pytest.mark.slow),
        pytest.param((64, 64), {"causal": True, "alibi": True}, marks=pytest.mark.slow),
        pytest.param((72, 40), {"out_dtype": "float32"}, marks=pytest.mark.slow),
        pytest.param((192, 128), {"causal": True}, marks=pytest.mark.slow),
        pytest.param((256, 256), {"causal": True}, marks=pytest.mark.slow),
    ],
)
def test_kernels_compile_with_next_to_no_spills_and_no_serialised_wgmma(channels, options):
    built = build(*channels, **options).built
    item, chosen = 4 if "out_dtype" in options else 2, plans(*channels, options.get("causal", False))
    assert built.warnings == ()
    capped = chosen[-1].capped
    for name, plan in [*((f"hopper_{plan}", plan) for plan in chosen), (f"hopper_{capped}_capped", capped)]:
        assert built.resources[f"arrange_{name}.spills"] == 0
        # three consumers with slopes keep a few words aside from one tile to the next
        assert built.resources[f"{name}.spills"] <= (32 if plan.groups == 3 and "alibi" in options else 0)
        assert built.resources[f"{name}.shared_memory"] == plan.shared(*channels, item) + BESIDE
    assert built.resources["attend_rows.spills"] == 0


@pytest.mark.slow
def test_nothing_is_loaded_that_the_kernel_before_may_still_write():
    assert sass.early_loads(build(128, 128, causal=True, lse=True).linked) == {}


# -- a call ------------------------------------------------------------------------------------------

SCRATCH = Array((1 << 20,), 1 << 47, "uint8")


def call(driver, tokens=1000, keys=None, *, count=5, heads=8, kv_heads=2, scalars=(0.1, 0, 0.0), **arrays):
    """Call with arrays in C order; *arrays* replace what those have. *count*: of sequences."""
    keys = tokens if keys is None else keys
    shapes = {
        "q": ((tokens, heads, 128), "float16"),
        "k": ((keys, kv_heads, 128), "float16"),
        "v": ((keys, kv_heads, 128), "float16"),
        "starts": ((count + 1,), "int32"),
        "starts_kv": ((count + 1,), "int32"),
        "o": ((tokens, heads, 128), "float16"),
        "lse": ((heads, tokens), "float32"),
    }
    given = [
        Array(shape, **{"address": (i + 1) << 40, "dtype": dtype, **arrays.get(name, {})})
        for i, (name, (shape, dtype)) in enumerate(shapes.items())
    ]
    return driver.do(cuda_lab.call, build(causal=True, lse=True).linked, [*given, SCRATCH, *scalars])


def served(driver, *shape, **named):
    said = call(driver, *shape, **named)
    assert said.error is None
    return said


def test_sequences_are_put_in_order_before_blocks_draw_their_tiles(driver):
    said = served(driver)
    order, products = said.launches()
    assert (order["kernel"], order["grid"]) == ("arrange_hopper_128x128", [1, 1, 1])
    assert (products["kernel"], products["grid"]) == ("hopper_128x128", [8 * (7 + 7), 1, 1])
    assert order["programmatic"] == products["programmatic"] == 1
    assert products["shared"] == Plan(128, 128).shared(128, 128, 2) + BESIDE
    assert order["parameters"][:2] == products["parameters"][5:7]  # scratch memory, and tiles that there is room for
    assert number(order["parameters"][0]) == 1 << 47 and number(order["parameters"][1], "i") == 8 * (7 + 7)
    sizes = [number(p, "i") for p in order["parameters"][2:7]]
    assert sizes == [5, 1000, 8, 1000, 2]  # sequences, queries, heads, keys, kv heads
    assert [number(p) for p in order["parameters"][-7:-3]] == [4 << 40, 1, 5 << 40, 1]  # starts


def test_as_many_blocks_as_fit_draw_tiles(driver):
    assert served(driver, 9000).launches()[1]["grid"] == [132, 1, 1]


def test_tensor_maps_are_of_a_batch_of_one(driver):
    """Here q in a packed array, and k stored (heads, positions, channels)."""
    said = served(driver, q={"strides": (3072, 128, 1)}, k={"strides": (128, 128000, 1)})
    q, k, v, o = said.maps(said.launches()[1])[:4]
    assert (q["dims"], q["strides"], q["box"]) == ([128, 1000, 8, 1], [6144, 256, 16], [64, 128, 1, 1])
    assert (k["dims"], k["strides"], k["box"]) == ([128, 1000, 2, 1], [256, 256000, 16], [64, 128, 1, 1])
    assert (v["dims"], v["strides"], v["box"]) == ([128, 1000, 2, 1], [512, 256, 16], [64, 128, 1, 1])
    assert (o["dims"], o["strides"], o["box"]) == ([128, 1000, 8, 1], [2048, 256, 16], [64, 16, 1, 1])


def test_an_o_that_has_no_tensor_map_is_written_element_by_element(driver):
    _, products = served(driver, o={"strides": (1032, 129, 1)}).launches()
    assert products["kernel"] == "hopper_128x128" and number(products["parameters"][4], "i") == 1


def test_a_cap_takes_the_kernel_that_finishes_logits(driver):
    names = [launch["kernel"] for launch in served(driver, scalars=(0.1, 0, 30.0)).launches()]
    assert names == ["arrange_hopper_128x128_capped", "hopper_128x128_capped"]


@pytest.mark.parametrize("arrays", [{"q": {"address": (1 << 30) + 2}}, {"k": {"strides": (257, 128, 1)}}])
def test_what_no_tensor_map_describes_is_computed_row_by_row(driver, arrays):
    launch = served(driver, **arrays).launch
    assert (launch["kernel"], launch["grid"]) == ("attend_rows", [2000, 1, 1])


def test_no_keys_are_left_to_the_rows(driver):
    assert served(driver, 100, 0).launch["kernel"] == "attend_rows"


def test_a_call_without_a_query_launches_nothing(driver):
    assert served(driver, 0, 5).launches() == []


def test_scratch_memory_has_the_order_and_a_link_of_each_tile(driver):
    small = Array((4 * (4 + 5 * 7 + 8 * 14) - 1,), 1 << 47, "uint8")
    refused = driver.do(
        cuda_lab.call,
        build(causal=True, lse=True).linked,
        [
            *(Array((1000, h, 128), (i + 1) << 40, "float16") for i, h in enumerate((8, 2, 2))),
            *(Array((6,), (i + 4) << 40, "int32") for i in range(2)),
            Array((1000, 8, 128), 6 << 40, "float16"),
            Array((8, 1000), 7 << 40, "float32"),
            small,
            *(0.1, 0, 0.0),
        ],
    )
    assert "at least 604 bytes" in refused.error and refused.launches() == []


def test_a_number_of_heads_that_kv_heads_do_not_divide_is_refused(driver):
    refused = call(driver, heads=33)
    assert "ValueError" in refused.error and "H=33" in refused.error and refused.launches() == []
