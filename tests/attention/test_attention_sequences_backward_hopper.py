"""The gradients of sequences end to end on Hopper's tensor cores: what is served, and what a call launches."""

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
from tlhub_attention.contracts.varlen_backward import VARLEN_BWD
from tlhub_attention.hopper.backward_plan import Plan, plans
from tlhub_attention.hopper.varlen_backward import HOPPER_VARLEN_BWD

H200 = DeviceFacts("cuda:sm_90a", "an H200", cores=132, shared_memory=227 * 1024)
SYMBOLS = {"T": "T", "H": "H", "N1": "N1", "H_kv": "H_kv", "T_kv": "T_kv"}


def make(d=128, d_v=None, dtype="float16", **options):
    return problem.make(VARLEN_BWD, {**SYMBOLS, "D": d, "D_v": d_v or d}, dtype, options)


# -- what it serves ----------------------------------------------------------------------------------


def test_it_serves_what_the_schedule_of_equally_long_ones_does():
    assert HOPPER_VARLEN_BWD.supports(make(192, 128, alibi=True, causal=True, deterministic=True), H200) is None
    assert "D=264" in HOPPER_VARLEN_BWD.supports(make(264), H200)
    assert "float16 or bfloat16" in HOPPER_VARLEN_BWD.supports(make(dtype="float32"), H200)
    assert "cuda:sm_80" in HOPPER_VARLEN_BWD.supports(make(), DeviceFacts("cuda:sm_80", "an A100"))


def test_what_certifies_it_can_be_served():
    name = "attention_varlen_bwd-hopper"
    items = workload.parse(tlhub_registry.workload(f"certify/{name}"), name, catalog.load())
    made = [problem.make(VARLEN_BWD, i.shape, i.dtype, i.options) for i in items if isinstance(i, Item)]
    assert len(made) == len(items) > 10
    assert all(HOPPER_VARLEN_BWD.supports(m, H200) is None for m in made)
    assert {plan.wide for m in made for plan in plans(int(m.dim["D"]), int(m.dim["D_v"]))} == {False, True}


# -- what they compile to ----------------------------------------------------------------------------


@functools.cache
def build(d=128, d_v=None, dtype="float16", **options):
    """Build a binary with all dims but the channels symbolic."""
    made = make(d, d_v, dtype, **options)
    return cuda_lab.build(HOPPER_VARLEN_BWD.program, VARLEN_BWD, made.dim, dtype=dtype, config={}, options=options)


@pytest.mark.parametrize(
    ("channels", "options"),
    [
        pytest.param((192, 128), {"causal": True, "alibi": True}, marks=pytest.mark.slow),
        pytest.param((128, 128), {"causal": True}, marks=pytest.mark.slow),
        pytest.param((64, 64), {"deterministic": True}, marks=pytest.mark.slow),
        pytest.param((256, 256), {"dtype": "bfloat16", "deterministic": True, "alibi": True}, marks=pytest.mark.slow),
    ],
)
def test_kernels_compile_without_spills_or_serialised_wgmma(channels, options):
    built = build(*channels, **options).built
    assert built.warnings == ()
    assert not any(count for name, count in built.resources.items() if name.endswith(".spills"))


@pytest.mark.slow
def test_nothing_is_loaded_that_the_kernel_before_may_still_write():
    assert sass.early_loads(build(128, 128, causal=True).linked) == {}


# -- a call ------------------------------------------------------------------------------------------

T, T_KV, N1, H, H_KV = 1000, 700, 9, 8, 2
SCRATCH = 1 << 47


def call(driver, t=T, t_kv=T_KV, *, n1=N1, scalars=(0.1, 0, 0.0), **arrays):
    """Call with arrays in C order; *arrays* replace what those have."""
    wide, narrow = 192, 128
    shapes = {"dout": (t, H, narrow), "q": (t, H, wide), "k": (t_kv, H_KV, wide), "v": (t_kv, H_KV, narrow)}
    shapes |= {"o": (t, H, narrow), "lse": (H, t), "starts": (n1,), "starts_kv": (n1,), "slopes": (H,)}
    shapes |= {"dq": (t, H, wide), "dk": (t_kv, H_KV, wide), "dv": (t_kv, H_KV, narrow)}
    dtypes = {"lse": "float32", "starts": "int32", "starts_kv": "int32", "slopes": "float32"}
    given = [
        Array(shape, **{"address": (i + 1) << 42, "dtype": dtypes.get(name, "float16"), **arrays.get(name, {})})
        for i, (name, shape) in enumerate(shapes.items())
    ]
    scratch = Array((1 << 40,), SCRATCH, "uint8")
    library = build(192, 128, causal=True, alibi=True).linked
    return driver.do(cuda_lab.call, library, [*given, scratch, *scalars])


def served(driver, *shape, **named):
    said = call(driver, *shape, **named)
    assert said.error is None
    return said.launches()


def test_a_call_has_a_number_for_every_tile_that_there_may_be(driver):
    begin, products, end, rows = served(driver)
    tiles = H * (T // 64 + N1 + 1)
    assert [x["kernel"] for x in (begin, products, end, rows)] == ["begin_64", "backward_64", "end_64", "gradient_rows"]
    assert begin["grid"] == end["grid"] == [tiles, 1, 1]
    assert products["grid"] == [H_KV * (T_KV // 128 + N1 + 1) * 2, 1, 1] and products["cluster"] == [2, 1, 1]
    assert products["shared"] == Plan(64, 192, wide=True, paired=True).shared(128)
    sums, stats, counts = (number(p) for p in begin["parameters"][1:4])
    assert (sums, stats - sums, counts - stats) == (SCRATCH, tiles * 3 * 64 * 64 * 4, tiles * 64 * 2 * 4)


def test_boxes_end_where_a_sequence_does(driver):
    """Rows of a box are out of bounds after those that a place, a row of the array, is the end of."""
    said = call(driver)
    q, k, v, dout, dk, dv = said.maps(said.launches()[1])[:6]
    row = H * 192 * 2
    assert (q["dims"], q["strides"], q["box"]) == ([192, 64, H, T + 1], [row, 384, row], [64, 64, 1, 1])
    assert q["address"] == (2 << 42) - 64 * row
    assert (k["dims"], v["dims"]) == ([192, 64, H_KV, T_KV + 1], [128, 64, H_KV, T_KV + 1])
    assert (dk["box"], dv["box"], dout["box"]) == ([64, 16, 1, 1], [64, 16, 1, 1], [64, 64, 1, 1])
    assert dk["address"] == (11 << 42) - 16 * H_KV * 192 * 2


def test_a_cap_takes_a_kernel_of_its_own(driver):
    assert served(driver, scalars=(0.1, 0, 30.0))[1]["kernel"] == "backward_64_capped"


@pytest.mark.parametrize(
    ("shape", "arrays"), [((0, 100), {}), ((100, 0), {}), ((T, T_KV), {"q": {"address": (1 << 46) + 2}})]
)
def test_what_has_no_pairs_or_no_tensor_map_is_left_to_the_rows(driver, shape, arrays):
    (launch,) = served(driver, *shape, **arrays)
    assert launch["kernel"] == "gradient_rows" and number(launch["parameters"][0]) == 0


def test_gradients_that_have_no_tensor_map_are_written_element_by_element(driver):
    products = served(driver, dk={"address": (1 << 46) + 2})[1]
    assert products["kernel"] == "backward_64" and number(products["parameters"][6], "i") == 1
