"""Gemm of few rows: what the schedule serves, its tiles, that its kernels compile, and which of them a call takes."""

from __future__ import annotations

import functools
from dataclasses import replace

import cuda_lab
import pytest
import sass
from cuda_array import Array
from cuda_lab import number

from tlhub import problem
from tlhub.errors import BuildError
from tlhub.specs import DeviceFacts
from tlhub_gemm import skinny, skinny_plan
from tlhub_gemm.contract import GEMM
from tlhub_gemm.skinny import SKINNY
from tlhub_gemm.skinny_plan import TOKENS, Tile

H200 = DeviceFacts("cuda:sm_90a", "an H200", cores=132, shared_memory=227 * 1024)
A100 = DeviceFacts("cuda:sm_80", "an A100", cores=108, shared_memory=163 * 1024)
RTX = DeviceFacts("cuda:sm_86", "a smaller GPU", cores=84, shared_memory=99 * 1024)
HOPPER = {"skinny_8": "64x2x64x8", "skinny_64": "128x1x64x4"}
AMPERE = {"skinny_8": "32x1x128x4", "skinny_64": "128x1x64x3"}


def make(m=8, n=4096, k=4096, dtype="float16", **options):
    return problem.make(GEMM, (m, n, k), dtype, options)


# -- what it serves ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "facts", [H200, A100, DeviceFacts("cuda:compute_80", "a GPU"), DeviceFacts("cuda:sm_120a", "")]
)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_up_to_64_rows_are_served_from_ampere_on(dtype, facts):
    for m in (1, 64):
        assert SKINNY.supports(make(m, dtype=dtype, trans_b=True, out_dtype="float32"), facts) is None


@pytest.mark.parametrize(
    ("made", "facts", "reason"),
    [
        (make(65), H200, "M is 65, and it is for at most 64 rows"),
        (make("M"), H200, "M is symbolic"),
        (make(), DeviceFacts("cuda:sm_75", "a T4"), "cuda:sm_75"),
        (make(dtype="float32"), H200, "float32"),
        (make(trans_a=True), H200, "trans_a"),
        (make(tensor_core=False), H200, "tensor_core=False"),
        (make(glu=True), H200, "glu without trans_b; it reads gates and values along K"),
        (make(accum="float64"), H200, "accum='float64'"),
    ],
)
def test_the_rest_is_left_to_others_with_the_reason(made, facts, reason):
    assert reason in SKINNY.supports(made, facts)


# -- its tiles ---------------------------------------------------------------------------------------


def test_few_columns_split_k_until_every_sm_has_a_block():
    tile = skinny.best(make(8, 4096, 4096), 8, H200)
    assert (tile.rows, tile.split) == (64, 2)
    assert skinny.best(make(8, 512, 8192), 8, H200).split == 8
    assert skinny.best(make(8, 512, 1024), 8, H200).split == 2  # no part of K is under 8 tiles deep
    assert skinny.best(make(8, 8192, 8192), 8, H200).split == 1


def test_the_bytes_on_their_way_do_not_grow_with_the_number_of_blocks():
    stages = [skinny.best(make(8, n, 8192), 8, H200).stages for n in (6144, 8192, 10240, 28672)]
    assert stages == sorted(stages, reverse=True) and len(set(stages)) == 4
    for n, s in zip((6144, 8192, 10240), stages, strict=False):
        assert 0.8 < n // 64 * s * 64 * 128 / (132 * 64 * 1024) < 1.2


@pytest.mark.parametrize("facts", [H200, A100, RTX, DeviceFacts("cuda:compute_80", "a GPU")])
@pytest.mark.parametrize("trans_b", [False, True])
def test_every_config_fits_the_device(facts, trans_b):
    for n, k in ((0, 0), (1, 1), (100, 64), (4096, 14336), (57344, 8192)):
        for m in (1, 16, 17, 64):
            made = make(m, n, k, trans_b=trans_b)
            configs = SKINNY.configs(made, facts)
            assert configs and len({str(c) for c in configs}) == len(configs)
            for config in configs:
                ((tokens, tile),) = skinny_plan.tiles(config).items()
                assert tokens >= m and (tokens == 8 or tokens < 2 * m)
                assert tile.shared(tokens, trans_b, facts.arch) <= (facts.shared_memory or 99 * 1024)
                assert tile.threads(tokens, facts.arch) <= 1024 and tile.split <= 8


def test_symbolic_rows_have_a_kernel_for_each_number_of_tokens():
    config = skinny.config(make("M"), H200)
    assert list(skinny_plan.tiles(config)) == list(TOKENS)
    assert config["skinny_8"] == str(skinny.best(make(8), 8, H200))
    assert set(skinny_plan.tiles(skinny.config(make("M", "N", "K"), A100))) == set(TOKENS)


def test_a_tile_is_written_as_it_is_read():
    assert str(Tile.parse("64x2x128x6")) == "64x2x128x6"
    with pytest.raises(BuildError, match="'64x2' is no tile; it is four numbers"):
        Tile.parse("64x2")


# -- its kernels -------------------------------------------------------------------------------------


@functools.cache
def build(arch, dtype="float16", **options):
    config = HOPPER if arch == "cuda:sm_90a" else AMPERE
    return cuda_lab.build(
        SKINNY.program, GEMM, ("B", "M", "N", "K"), dtype=dtype, arch=arch, config=config, options=options
    )


@pytest.mark.parametrize(
    ("arch", "options"),
    [
        ("cuda:sm_90a", {}),
        ("cuda:sm_80", {"trans_b": True, "epilogue": "gelu", "bias": True, "residual": True}),
        pytest.param("cuda:sm_90a", {"dtype": "bfloat16", "trans_b": True}, marks=pytest.mark.slow),
        pytest.param("cuda:sm_80", {"dtype": "bfloat16"}, marks=pytest.mark.slow),
        pytest.param("cuda:sm_86", {}, marks=pytest.mark.slow),
        pytest.param("cuda:sm_89", {"out_dtype": "float8_e4m3fn"}, marks=pytest.mark.slow),
        pytest.param("cuda:sm_100a", {"trans_b": True}, marks=pytest.mark.slow),
        pytest.param("cuda:sm_120a", {}, marks=pytest.mark.slow),
    ],
)
def test_kernels_compile_without_spills(arch, options):
    built = build(arch, **options).built
    spills = {name: n for name, n in built.resources.items() if name.endswith(".spills")}
    assert set(spills) > {"skinny_8.spills", "skinny_64.spills", "simt_any.spills"}
    assert not any(spills.values())


def test_nothing_is_loaded_that_the_kernel_before_may_still_write():
    assert sass.early_loads(build("cuda:sm_90a").linked) == {}


@pytest.mark.slow
def test_ptx_multiplies_16_by_8_tiles_that_were_copied_asynchronously():
    ptx = cuda_lab.device_code(build("cuda:compute_80").linked)
    assert b"mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32" in ptx
    assert b"cp.async.cg.shared.global" in ptx and b"ldmatrix" in ptx


# -- a call ------------------------------------------------------------------------------------------


def call(driver, m, n, k, *, batch=None, a=None, b=None, arch="cuda:sm_90a"):
    """Call C = A B with operands in C order; *a* and *b* replace what their arrays have. Return what was said."""
    lead = () if batch is None else (batch,)
    said = driver.do(
        cuda_lab.call,
        build(arch).linked,
        [
            Array((*lead, m, k), **{"address": 1 << 30, "dtype": "float16", **(a or {})}),
            Array((*lead, k, n), **{"address": 1 << 40, "dtype": "float16", **(b or {})}),
            Array((*lead, m, n), 1 << 45, "float16"),
            None,
            1.0,
            1.0,
        ],
    )
    assert said.error is None
    return said


def test_a_call_takes_the_kernel_for_its_rows(driver):
    launch = call(driver, 8, 4096, 4096).launch
    assert (launch["kernel"], launch["grid"], launch["block"]) == ("skinny_8", [64 * 2, 1, 1], [160, 1, 1])
    assert launch["cluster"] == [2, 1, 1] and launch["programmatic"] == 1
    assert launch["shared"] == Tile.parse(HOPPER["skinny_8"]).shared(8, False, "cuda:sm_90a")
    assert call(driver, 9, 4096, 4096).launch["kernel"] == "skinny_64"
    assert call(driver, 65, 64, 64).launch["kernel"].startswith("simt")


def test_every_batch_has_its_blocks(driver):
    launch = call(driver, 5, 104, 64, batch=3).launch
    assert launch["grid"] == [3 * 2 * 2, 1, 1]
    assert [number(p, "q") for p in launch["parameters"][2:6]] == [3, 5, 104, 64]


def test_tensor_maps_have_the_arrays_as_they_are_stored(driver):
    said = call(driver, 40, 256, 512, batch=2, a={"strides": (40 * 640, 640, 1)})
    a, b = said.maps()[:2]
    assert (a["address"], a["dims"], a["strides"]) == (1 << 30, [512, 40, 2], [1280, 40 * 1280])
    assert (b["address"], b["dims"], b["strides"]) == (1 << 40, [256, 512, 2], [512, 512 * 512])
    assert a["box"] == [64, 64, 1] and b["box"] == [64, 64, 1]


def test_strides_that_do_not_count_may_be_anything(driver):
    """Of one batch and one row; 66 columns in C order are not aligned, and rows of 72 are."""
    said = call(driver, 1, 64, 64, batch=1, a={"strides": (7, 3, 1)}, b={"strides": (9, 64, 1)})
    assert said.launch["kernel"] == "skinny_8"
    assert said.maps()[0]["strides"] == [16, 16]
    assert call(driver, 5, 64, 66, a={"strides": (72, 1)}).launch["kernel"] == "skinny_8"
    assert call(driver, 5, 64, 66, batch=2, a={"strides": (330, 72, 1)}).launch["kernel"] == "simt_any"


@pytest.mark.parametrize(
    ("shape", "operand"),
    [
        ((8, 64, 65), {}),
        ((8, 65, 64), {}),
        ((8, 64, 64), {"a": {"address": (1 << 30) + 2}}),
        ((8, 64, 64), {"b": {"strides": (1, 64)}}),
    ],
)
def test_what_is_not_aligned_goes_to_the_cuda_cores(driver, shape, operand):
    assert call(driver, *shape, **operand).launch["kernel"] == "simt_any"


def test_ampere_takes_its_own_kernels_without_clusters(driver):
    """Its b is stored (N, K), and the epilogue takes bias and residual."""
    arrays = [Array((8, 64)), Array((96, 64)), Array((96,)), Array((8, 96)), Array((8, 96), 1 << 40)]
    options = {"trans_b": True, "epilogue": "gelu", "bias": True, "residual": True}
    said = driver.do(
        cuda_lab.call,
        build("cuda:sm_80", **options).linked,
        [*(replace(array, dtype="float16") for array in arrays), None, 1.0, 1.0],
    )
    launch = said.launch
    assert (launch["kernel"], launch["grid"], launch.get("cluster")) == ("skinny_8", [3, 1, 1], None)
    assert not launch.get("programmatic") and said.maps() == [None] * len(launch["parameters"])


def test_what_a_tensor_map_cannot_have_goes_to_the_cuda_cores(driver):
    """Rows that are one and the same, rows backwards, and an empty sum."""
    for operand in ({"strides": (0, 1)}, {"strides": (-64, 1), "address": (1 << 30) + 7 * 128}):
        assert call(driver, 8, 64, 64, a=operand).launch["kernel"] == "simt_small"
    assert call(driver, 8, 64, 0).launch["kernel"].startswith("simt")


@pytest.mark.parametrize("wide", [{"n": 1 << 31}, {"k": 1 << 31}, {"batch": 1 << 31}])
def test_coordinates_that_are_no_ints_go_to_the_cuda_cores(driver, wide):
    """Or past what a grid of theirs has, which is an error; a tensor map would read zeros there."""
    size = {"m": 8, "n": 64, "k": 64, "batch": 1, **wide}
    m, n, k, batch = size["m"], size["n"], size["k"], size["batch"]
    said = driver.do(
        cuda_lab.call,
        build("cuda:sm_90a").linked,
        [
            Array((batch, m, k), 1 << 30, "float16"),
            Array((batch, k, n), 1 << 50, "float16"),
            Array((batch, m, n), 1 << 52, "float16"),
            None,
            1.0,
            1.0,
        ],
    )
    taken = said.error or said.launch["kernel"]
    assert "simt_" in taken
