"""Calls of gemm on Hopper's tensor cores, with a driver that remembers: the plan, tensor maps, and copies."""

from __future__ import annotations

import ctypes
import re
import subprocess
from itertools import product
from pathlib import Path

import cuda_lab
import numpy as np
import pytest
from cuda_array import Array
from cuda_lab import number
from hopper_lab import SCHEMES, build

import tlhub_gemm
from tlhub_gemm.hopper_plan import Plan


def arguments(m, n, k, *, batch=None, a=None, b=None, c=None, workspace=None):
    """Return C = A B with arrays in C order; *a*, *b* and *c* replace what their arrays have."""
    lead = () if batch is None else (batch,)
    return [
        Array((*lead, m, k), **{"address": 1 << 30, "dtype": "float16", **(a or {})}),
        Array((*lead, k, n), **{"address": 1 << 40, "dtype": "float16", **(b or {})}),
        Array((*lead, m, n), **{"address": 1 << 45, "dtype": "float16", **(c or {})}),
        workspace,
        1.0,
        1.0,
    ]


def call(driver, *shape, name="main", **arrays):
    said = driver.do(cuda_lab.call, build(SCHEMES).linked, arguments(*shape, **arrays), name=name)
    assert said.error is None
    return said


def cheapest(plans, m, n, k):
    how = {"trans_a": False, "trans_b": False, "processors": 132}
    return min(plans.split(), key=lambda p: Plan.parse(p).cost(1, m, n, k, **how))


def test_a_call_takes_the_cheapest_plan(driver):
    taken = set()
    for m, n, k in ((128, 4096, 4096), (4096, 4096, 4096), (8192, 8192, 8192), (16384, 16384, 16384), (100, 1000, 64)):
        plan = cheapest(SCHEMES, m, n, k)
        assert call(driver, m, n, k).launch["kernel"] == "hopper_" + plan.replace("-", "_")
        taken.add(plan)
    assert len(taken) >= 2


def test_rows_that_are_slow_to_load_are_shared(driver):
    """The stride decides, not the extents: 4104 elements are 16 bytes beyond a multiple of 32."""
    for k, gap, shared in ((4096, 0, False), (4104, 0, True), (4096, 8, True), (4096, 64, False)):
        rows = {"strides": (k + gap, 1)}
        taken = call(driver, 4096, 8192, k, a=rows).launch
        assert (taken.get("cluster") == [2, 1, 1]) == shared, taken["kernel"]


def test_a_launch_has_as_many_clusters_as_fit(driver):
    launch = call(driver, 128, 4096, 4096).launch
    assert (launch["kernel"], launch["grid"], launch["cluster"]) == ("hopper_coop_128x64_k2", [128, 1, 1], [2, 1, 1])
    assert launch["block"] == [384, 1, 1] and launch["programmatic"] == 1
    assert launch["shared"] == Plan.parse("coop-128x64-k2").shared(2)
    launch = call(driver, 8192, 8192, 8192).launch
    assert (launch["kernel"], launch["grid"]) == ("hopper_ping_128x192", [132, 1, 1])
    assert call(driver, 200, 304, 64).launch["grid"] == [4, 1, 1]  # by ping-128x192
    assert call(driver, 200, 304, 64, batch=3).launch["grid"] == [12, 1, 1]


def test_tensor_maps_have_the_arrays_as_they_are_stored(driver):
    view = {"strides": (200 * 640, 640, 1)}
    said = call(driver, 200, 304, 64, batch=2, a=view, c={"strides": (200 * 320, 320, 1)})
    a, b, c = said.maps()[:3]
    assert (a["address"], a["dims"], a["strides"]) == (1 << 30, [64, 200, 2], [1280, 200 * 1280])
    assert (b["address"], b["dims"], b["strides"]) == (1 << 40, [304, 64, 2], [608, 64 * 608])
    assert (c["address"], c["dims"], c["strides"]) == (1 << 45, [304, 200, 2], [640, 200 * 640])
    assert (a["box"], b["box"], c["box"]) == ([64, 128, 1], [64, 64, 1], [64, 16, 1])
    assert number(said.launch["parameters"][4], "i") == 0


def test_blocks_that_share_b_load_a_half_each(driver):
    said = call(driver, 4096, 8192, 4104)
    assert said.launch["kernel"] == "hopper_coop_128x256_b2" and said.launch["cluster"] == [2, 1, 1]
    assert [m["box"] for m in said.maps()[:3]] == [[64, 128, 1], [64, 32, 1], [64, 16, 1]]


@pytest.mark.parametrize(
    ("n", "c"),
    [
        (304, {"address": (1 << 45) + 2}),
        (304, {"strides": (1, 200)}),
        (304, {"strides": (305, 1)}),
        (300, {"strides": (304, 1)}),  # a tensor copy would write all of the last 16 bytes of a row
    ],
)
def test_a_c_that_no_tensor_copy_may_write_is_written_element_by_element(driver, n, c):
    said = call(driver, 200, n, 64, b={"strides": (304, 1)}, c=c)
    assert said.launch["kernel"].startswith("hopper_") and number(said.launch["parameters"][4], "i") == 1
    assert said.maps()[2]["address"] == 1 << 30


@pytest.mark.parametrize(
    ("shape", "arrays", "copied"),
    [
        ((200, 304, 65), {}, "a"),
        ((200, 305, 64), {}, "b"),
        ((200, 305, 65), {}, "ab"),
        ((200, 304, 64), {"a": {"address": (1 << 30) + 2}}, "a"),
        ((200, 304, 64), {"a": {"strides": (1, 200)}, "b": {"strides": (0, 1)}}, "ab"),
        ((200, 304, 64), {"b": {"strides": (-304, 1)}}, "b"),
    ],
)
def test_an_operand_that_has_no_tensor_map_is_copied_to_scratch_memory(driver, shape, arrays, copied):
    m, n, k = shape
    sizes = {"a": -(-k // 64) * 128 * m, "b": -(-n // 64) * 128 * k}
    needed = sum(-(-sizes[name] // 256) * 256 for name in copied)
    assert call(driver, *shape, name="tlhub_workspace", **arrays).result == needed
    said = driver.do(cuda_lab.call, build(SCHEMES).linked, arguments(*shape, **arrays))
    assert "argument 'workspace'" in said.error
    room = Array((needed,), 1 << 46, "uint8")
    said = call(driver, *shape, workspace=room, **arrays)
    align, gemm = said.launches()
    maps, rows = said.maps(gemm), {"a": m, "b": k}
    assert (align["kernel"], gemm["kernel"][:7]) == ("align_operands", "hopper_")
    to = {"a": number(align["parameters"][5]), "b": number(align["parameters"][13])}
    assert {name for name, address in to.items() if address} == set(copied)
    # the copies' rows are where the tensor maps look for them
    for name, pitch, seen in (("a", 6, 0), ("b", 14, 1)):
        if name in copied:
            assert 2 * number(align["parameters"][pitch]) == maps[seen]["strides"][0] == sizes[name] // rows[name]
    for name, at in zip(copied, (1 << 46, (1 << 46) + needed - -(-sizes[copied[-1]] // 256) * 256), strict=False):
        assert to[name] == at


@pytest.mark.parametrize("batch", [1 << 31, 0x7FFFF000, 0x7FFF0000])
def test_more_tiles_than_an_int_counts_are_left_to_the_cuda_cores(driver, batch):
    """Which refuse what is more than a grid has."""
    said = driver.do(cuda_lab.call, build(SCHEMES).linked, arguments(1, 8, 8, batch=batch))
    assert "simt_" in (said.error or said.launch["kernel"])


def test_an_empty_sum_is_left_to_the_cuda_cores(driver):
    assert call(driver, 200, 304, 0).launch["kernel"].startswith("simt")


# -- copies, as the CPU makes them -------------------------------------------------------------------

HOST = """
#include <cstddef>
#include <cstdint>
#define __device__
#define __forceinline__ inline
#define __global__ static
#define __launch_bounds__(n)
typedef uint16_t A, B;
static struct { unsigned x; } threadIdx, blockIdx, blockDim = {256}, gridDim = {3};
%s
extern "C" void copy(index_t batches, const A *a, index_t a_batch, index_t a_row, index_t a_column, A *to_a,
                     index_t a_pitch, index_t a_rows, index_t a_columns) {
  for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x)
    for (threadIdx.x = 0; threadIdx.x < blockDim.x; ++threadIdx.x)
      align_operands(batches, a, a_batch, a_row, a_column, to_a, a_pitch, a_rows, a_columns,
                     a, 0, 0, 0, nullptr, 0, 0, 0);
}
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """The kernel that copies operands, compiled for the CPU: it copies a."""
    folder = tmp_path_factory.mktemp("copies")
    cuda = Path(tlhub_gemm.__file__).parent / "cuda"
    strides = re.search(r"typedef long long index_t;.*?\n};\n", (cuda / "call.cuh").read_text(), re.DOTALL)
    kernel = (cuda / "align.cuh").read_text().replace('extern "C" __global__', "static")
    (folder / "copies.cc").write_text(HOST % (strides[0] + kernel))
    command = ["g++", "-std=c++17", "-O1", "-shared", "-fPIC", "copies.cc"]
    subprocess.run([*command, "-o", "copies.so"], cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "copies.so")).copy


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 3, 7), (1, 9, 65), (3, 5, 128), (1, 2, 257), (2, 40, 8)])
@pytest.mark.parametrize("kind", ["plain", "gaps", "across", "backwards"])
def test_a_copy_is_where_its_tensor_map_looks(driver, copy, shape, kind):
    """Bytes of the copy, read by the strides of the map that the call encodes, are those of the operand."""
    batch, m, k = shape
    rng = np.random.default_rng(0)
    a = rng.integers(0, 1 << 16, (batch, m, k + 3), np.uint16)[..., :k]
    a = {"gaps": a, "across": np.ascontiguousarray(a.swapaxes(1, 2)).swapaxes(1, 2), "backwards": a[:, ::-1]}.get(
        kind, np.ascontiguousarray(a)
    )
    strides = tuple(s // 2 for s in a.strides)
    given = {"address": (1 << 30) + 2, "strides": strides}
    room = 1 << 46
    said = call(driver, m, 16, k, batch=batch, a=given, workspace=Array((1 << 24,), room, "uint8"))
    align, gemm = said.launches()
    seen = said.maps(gemm)[0]
    values = [number(p) for p in align["parameters"][:9]]
    assert values[5] == seen["address"] == room and seen["dims"] == [k, m, batch]
    there = np.full(batch * m * (k + 64) + 64, 0xABAB, np.uint16)
    arguments = [ctypes.c_int64(v) for v in values]
    arguments[1], arguments[5] = ctypes.c_void_p(a.ctypes.data), ctypes.c_void_p(there.ctypes.data)
    copy(*arguments)
    row, lot = (s // 2 for s in seen["strides"])
    assert row % 64 == 0
    for i, j in product(range(batch), range(m)):
        at = i * lot + j * row
        np.testing.assert_array_equal(there[at : at + k], a[i, j])
