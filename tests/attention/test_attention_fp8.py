"""Attention of 8-bit floats on Hopper's tensor cores: what is served, by which plan, and what a call launches."""

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
from tlhub.workload import Item
from tlhub_attention.contracts.forward import ATTENTION
from tlhub_attention.hopper import forward_plan
from tlhub_attention.hopper.fp8 import HOPPER_FP8
from tlhub_attention.hopper.fp8_plan import Plan, part, plans

H200 = DeviceFacts("cuda:sm_90a", "an H200", cores=132, shared_memory=227 * 1024)
SYMBOLS = {"B": "B", "S": "S", "H": "H", "H_kv": "H_kv", "S_kv": "S_kv"}
CHANNELS = [(d, d_v) for d in range(16, 257, 16) for d_v in range(16, 257, 16)]
E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
FACTORS = 9  # parameters of SCALED_PARAMETERS after those of a call: three arrays with two strides each


def make(d=128, d_v=None, dtype=E4M3, **options):
    return problem.make(ATTENTION, {**SYMBOLS, "D": d, "D_v": d_v or d}, dtype, options)


# -- what it serves ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("out", ["float16", "bfloat16", "float32"])
def test_float8_is_served_with_any_channels_that_divide_by_16(dtype, out):
    for d, d_v in ((16, 16), (64, 64), (80, 48), (192, 128), (256, 256), (16, 256)):
        options = {"causal": True, "lse": True, "scaled": True, "alibi": True}
        assert HOPPER_FP8.supports(make(d, d_v, dtype, out_dtype=out, **options), H200) is None
    assert HOPPER_FP8.supports(problem.make(ATTENTION, (2, 1000, 16, 128), dtype, {}), H200) is None


@pytest.mark.parametrize(
    ("made", "arch", "reason"),
    [
        (make(), "cuda:sm_90", "it is for cuda:sm_90a, and this is cuda:sm_90"),
        (make(dtype="bfloat16"), "cuda:sm_90a", "not q bfloat16, k bfloat16, v bfloat16"),
        (
            make(dtype={"q": E4M3, "k": E4M3, "v": E5M2}),
            "cuda:sm_90a",
            "q float8_e4m3fn, k float8_e4m3fn, v float8_e5m2",
        ),
        (make(out_dtype="float64"), "cuda:sm_90a", "out_dtype='float64'"),
        (make(72), "cuda:sm_90a", "D=72; it takes multiples of 16 from 16 to 256"),
        (make(272), "cuda:sm_90a", "D=272"),
        (make(64, 8), "cuda:sm_90a", "D_v=8"),
        (make("D"), "cuda:sm_90a", "D is symbolic"),
    ],
)
def test_the_rest_is_left_to_others_with_the_reason(made, arch, reason):
    assert reason in HOPPER_FP8.supports(made, DeviceFacts(arch, "a GPU"))


def test_what_certifies_it_can_be_served():
    items = workload.parse(tlhub_registry.workload("certify/attention-hopper_fp8"), "fp8", catalog.load())
    made = [problem.make(ATTENTION, i.shape, i.dtype, i.options) for i in items if isinstance(i, Item)]
    assert len(made) == len(items) > 20
    assert all(HOPPER_FP8.supports(m, H200) is None for m in made)
    taken = {HOPPER_FP8.configs(m, H200)[0]["plans"] for m in made}
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
        logits, weights = plan.keys // 2, plan.keys // 8
        sums = (forward_plan.round_up(d_v, 32) + part(d_v)) // 2
        assert logits + weights + sums + 32 <= (160 if plan.groups == 3 else 232)


@pytest.mark.parametrize("d_v", range(16, 257, 16))
def test_products_are_of_whole_parts_of_the_channels_and_8_at_a_time(d_v):
    assert forward_plan.round_up(d_v, 32) % part(d_v) == 0 and part(d_v) % 8 == 0


def test_a_tensor_core_keeps_no_sum_of_more_keys_than_the_tolerance_allows():
    assert all(plan.keys <= 128 for *_, plan in every_plan())


def test_elements_of_a_byte_take_half_the_rings():
    assert Plan(128, 128).shared(128, 128, 2) < forward_plan.Plan(128, 128).shared(128, 128, 2) - 2 * 2 * 128 * 128


# -- what they compile to ----------------------------------------------------------------------------


@functools.cache
def build(d=128, d_v=None, dtype=E4M3, **options):
    """Build a binary with all dims but the channels symbolic."""
    made = make(d, d_v, dtype, **options)
    (config,) = HOPPER_FP8.configs(made, H200)
    return cuda_lab.build(HOPPER_FP8.program, ATTENTION, made.dim, dtype=dtype, config=config, options=options)


@pytest.mark.parametrize(
    ("channels", "options"),
    [
        ((128, 128), {"causal": True, "lse": True, "scaled": True}),
        pytest.param((128, 128), {"lse": True}, marks=pytest.mark.slow),
        pytest.param((128, 128), {"alibi": True, "scaled": True}, marks=pytest.mark.slow),
        pytest.param((64, 64), {"dtype": E5M2}, marks=pytest.mark.slow),
        pytest.param((80, 48), {"out_dtype": "float32"}, marks=pytest.mark.slow),
        pytest.param((192, 128), {"causal": True}, marks=pytest.mark.slow),
        pytest.param((192, 192), {"lse": True, "scaled": True}, marks=pytest.mark.slow),
        pytest.param((256, 256), {"causal": True, "scaled": True}, marks=pytest.mark.slow),
    ],
)
def test_kernels_compile_without_spills_or_serialised_wgmma(channels, options):
    built = build(*channels, **options).built
    item, chosen = 4 if "out_dtype" in options else 2, plans(*channels, options.get("causal", False))
    assert built.warnings == ()
    capped = chosen[-1].capped
    for name, plan in [*((f"fp8_{plan}", plan) for plan in chosen), (f"fp8_{capped}_capped", capped)]:
        assert built.resources[f"{name}.spills"] == 0
        assert built.resources[f"{name}.shared_memory"] == plan.shared(*channels, item)
        assert built.resources[f"{name}.registers"] == 65536 // plan.threads // 8 * 8


def test_nothing_is_loaded_that_the_kernel_before_may_still_write():
    assert sass.early_loads(build(128, 128, causal=True, lse=True, scaled=True).linked) == {}


# -- a call ------------------------------------------------------------------------------------------


def call(driver, s=1000, s_kv=None, *, batch=2, heads=8, kv_heads=2, scalars=(0.1, 0, 0.0), **arrays):
    """Call with arrays in C order, and a factor for all heads of k; *arrays* replace what those have."""
    s_kv = s if s_kv is None else s_kv
    shapes = {"q": (s, heads), "k": (s_kv, kv_heads), "v": (s_kv, kv_heads), "o": (s, heads)}
    q, k, v, o = (
        Array((batch, *shape, 128), **{"address": (i + 1) << 42, "dtype": E4M3, **arrays.get(name, {})})
        for i, (name, shape) in enumerate(shapes.items())
    )
    o = Array(o.shape, **{"address": o.address, "dtype": "bfloat16", **arrays.get("o", {})})
    factors = [
        Array((batch, heads), 1 << 20, "float32"),
        Array((batch, kv_heads), 1 << 21, "float32", (0, 0)),
        Array((batch, kv_heads), 1 << 22, "float32", (8, 4)),
    ]
    workspace = Array((1 << 40,), 1 << 46, "uint8")
    lse = Array((batch, heads, s), 1 << 45, "float32")
    built = build(causal=True, lse=True, scaled=True).linked
    return driver.do(cuda_lab.call, built, [q, k, v, *factors, o, lse, workspace, *scalars])


def served(driver, *shape, **named):
    said = call(driver, *shape, **named)
    assert said.error is None
    return said


@pytest.mark.slow
def test_v_is_laid_across_before_the_launch_that_reads_it(driver):
    said = served(driver, 1000, 1100)
    across, attend = said.launches()
    assert (across["kernel"], across["grid"], across["programmatic"]) == ("fp8_across", [2 * 2 * 9, 1, 1], 1)
    assert (attend["kernel"], attend["grid"], attend["block"]) == ("fp8_128x128", [128, 1, 1], [384, 1, 1])
    assert attend["programmatic"] == 1 and attend["shared"] == Plan(128, 128).shared(128, 128, 2)
    assert number(across["parameters"][0]) == number(attend["parameters"][4]) == 1 << 46
    assert (
        number(across["parameters"][1], "I") == number(attend["parameters"][5], "I") == 1152
    )  # places for keys, in whole blocks


def test_tensor_maps_have_the_arrays_as_they_are_stored(driver):
    """Here q in a packed array, and k stored (batch, heads, sequence, channels)."""
    packed = {"strides": (1000 * 3072, 3072, 128, 1)}
    said = served(driver, q=packed, k={"strides": (2 * 1000 * 128, 128, 1000 * 128, 1)})
    q, k, o = said.maps(said.launches()[1])[:3]
    assert (q["dims"], q["strides"], q["box"]) == ([128, 1000, 8, 2], [3072, 128, 3072000], [128, 128, 1, 1])
    assert (k["dims"], k["strides"], k["box"]) == ([128, 1000, 2, 2], [128, 128000, 256000], [128, 128, 1, 1])
    assert (o["dims"], o["strides"], o["box"]) == ([128, 1000, 8, 2], [2048, 256, 2048000], [64, 16, 1, 1])


def test_factors_keep_their_strides(driver):
    given = served(driver).launches()[1]["parameters"][-FACTORS:]
    assert [number(x) for x in given] == [1 << 20, 8, 1, 1 << 21, 0, 0, 1 << 22, 8, 4]


def test_an_o_that_has_no_tensor_map_is_written_element_by_element(driver):
    said = served(driver, o={"address": (1 << 44) + 2})
    launch = said.launches()[1]
    assert launch["kernel"] == "fp8_128x128" and number(launch["parameters"][3], "i") == 1
    assert said.maps(launch)[2]["address"] == 1 << 42


@pytest.mark.parametrize(
    ("scalars", "kernel"),
    [
        ((0.1, 100, 0.0), "fp8_128x128"),
        ((0.1, 0, 30.0), "fp8_128x128_capped"),
        ((-0.1, 0, 0.0), "fp8_128x128_capped"),
        ((float("nan"), 0, 0.0), "fp8_128x128_capped"),
    ],
)
def test_a_cap_or_an_unusual_scale_takes_the_kernel_that_finishes_logits(driver, scalars, kernel):
    assert served(driver, scalars=scalars).launches()[1]["kernel"] == kernel


@pytest.mark.parametrize(
    "arrays",
    [
        {"q": {"address": (1 << 30) + 8}},
        {"k": {"strides": (256008, 264, 128, 1)}},
        {"v": {"strides": (256000, 256, 1, 2)}},
        {"v": {"strides": (256000, -256, 128, 1)}},
    ],
)
def test_what_no_tensor_map_describes_is_computed_row_by_row(driver, arrays):
    launch = served(driver, **arrays).launch
    assert (launch["kernel"], launch["grid"]) == ("fp8_rows", [132 * 16, 1, 1])
    assert number(launch["parameters"][-FACTORS]) == 1 << 20


def test_no_keys_are_left_to_the_rows(driver):
    assert served(driver, 100, 0).launch["kernel"] == "fp8_rows"


@pytest.mark.parametrize("empty", [{"batch": 0}, {"s": 0, "s_kv": 5}, {"heads": 0, "kv_heads": 0}])
def test_a_call_without_a_query_launches_nothing(driver, empty):
    assert served(driver, **empty).launches() == []


def test_heads_that_are_not_shared_evenly_are_refused(driver):
    refused = call(driver, 5, heads=33)
    assert "ValueError" in refused.error and "H=33" in refused.error and refused.launches() == []
