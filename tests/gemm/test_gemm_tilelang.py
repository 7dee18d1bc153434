"""The schedules of gemm in TileLang and by dlight, without a GPU: what they serve, compile to, and launch."""

from __future__ import annotations

import functools
import os
import re
import tempfile
from pathlib import Path
from types import SimpleNamespace

import cuda_lab
import pytest
from cuda_array import Array
from cuda_lab import number

import tlhub_cuda
from tlhub.build import pool
from tlhub.problem import make
from tlhub_gemm import dlight, tilelang_mma
from tlhub_gemm.contract import GEMM

ANY = ("B", "M", "N", "K")
ALL = {"trans_a": True, "trans_b": True, "bias": True, "residual": True, "epilogue": "gelu", "out_dtype": "float32"}


def problem(dtype="float16", **options):
    return make(GEMM, ANY, dtype, options)


def facts(arch="sm_80"):
    return tlhub_cuda.TARGET.facts(f"cuda:{arch}")


@functools.cache
def build(module, arch, dtype="float16", options=()):
    """Build the first config of a schedule in a worker."""
    cuda_lab.needs_nvcc()
    schedule = {"mma": tilelang_mma.MMA, "dlight": dlight.DLIGHT}[module]
    asked = problem(dtype, **dict(options))
    config = schedule.configs(asked, facts(arch))[0]
    folder = tempfile.mkdtemp(dir=cuda_lab._folders())
    built = pool.default().build(GEMM, asked, schedule, config, f"cuda:{arch}", tlhub_cuda.TARGET, folder)
    source = Path(folder, "program.cu").read_text()
    return SimpleNamespace(built=built, linked=os.path.join(folder, "kernel.so"), source=source, config=config)


# -- what they serve -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arch", "dtype", "options", "reason"),
    [
        ("sm_75", "float16", {}, None),
        ("sm_75", "bfloat16", {}, "from compute capability 8.0 on"),
        ("compute_80", "bfloat16", {"out_dtype": "float32", "epilogue": "silu"}, None),
        ("sm_90a", "float16", {"tensor_core": True}, None),
        ("sm_80", "float16", {"tensor_core": False}, "tensor_core=False"),
        ("sm_80", "float16", {"glu": True}, "glu"),
        ("sm_80", "float32", {}, "float32 inputs; it multiplies float16 and bfloat16"),
        ("sm_75", "float16", {"accum": "float16", **ALL}, None),
        ("sm_90a", "float16", {"accum": "float16"}, None),
        ("sm_80", "float16", {"accum": "float64"}, "it adds up in 'float32', and float16 in 'float16' too"),
        ("sm_80", "float16", {"out_dtype": "float8_e5m2"}, "out_dtype='float8_e5m2'"),
    ],
)
def test_what_tensor_cores_serve(arch, dtype, options, reason):
    said = tilelang_mma.supports(problem(dtype, **options), facts(arch))
    assert (said is None) if reason is None else reason in said


@pytest.mark.parametrize(
    ("arch", "dtype", "options", "reason"),
    [
        ("sm_75", "float32", {"trans_a": True}, None),
        ("sm_75", "bfloat16", {}, "before compute capability 8.0"),
        ("sm_90a", "float16", {"tensor_core": True}, "tensor cores, and this schedule uses none"),
        ("sm_90a", "float32", {"compute": "tf32"}, "tensor cores"),
        ("sm_90a", "float64", {}, "float64 inputs; it has float32, float16, bfloat16"),
        ("sm_90a", "float16", {"out_dtype": "float64"}, "float64 output"),
        ("sm_90a", "float32", {"accum": "float64"}, "accum='float64'"),
        ("sm_90a", "float32", {"glu": True}, "glu"),
    ],
)
def test_what_dlight_serves(arch, dtype, options, reason):
    said = dlight.supports(problem(dtype, **options), facts(arch))
    assert (said is None) if reason is None else reason in said


@pytest.mark.parametrize("arch", tlhub_cuda.TARGET.archs)
def test_configs_fit_the_device(arch):
    for options in ({}, ALL):
        found = tilelang_mma.configs(problem(**options), facts(arch))
        assert len(found) > 1 and len({tuple(c.items()) for c in found}) == len(found)
        for c in found:
            tiles = (c["large_m"] + c["large_n"]) * c["k"] * 2
            assert c["stages"] * tiles <= facts(arch).shared_memory
            assert (c["stages"] == 1) == (arch == "sm_75")


# -- what they compile to --------------------------------------------------------------------------

LATER = ["sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a", "compute_80"]


@pytest.mark.parametrize("arch", ["sm_80", *(pytest.param(a, marks=pytest.mark.slow) for a in ("sm_75", *LATER))])
def test_tensor_cores_and_asynchronous_copies(arch):
    made = build("mma", arch)
    step = 8 if arch == "sm_75" else 16
    assert set(re.findall(r"mma_sync<[\w:, ]*, (16, 8, \d+),", made.source)) == {f"16, 8, {step}"}
    # the two functions for aligned operands copy 16 bytes at a time: asynchronously, or through registers
    copies = re.findall(r"cp_async_gs_conditional<(\d+)>", made.source)
    assert set(copies) == (set() if arch == "sm_75" else {"16"})
    assert arch != "sm_75" or "uint4" in made.source
    assert "wgmma" not in made.source and "tma_load" not in made.source
    if arch != "compute_80":
        assert made.built.resources["spills"] == 0
    assert made.built.warnings == ()


@pytest.mark.parametrize("arch", ["sm_80", *(pytest.param(a, marks=pytest.mark.slow) for a in ("sm_75", "sm_90a"))])
def test_sums_in_float16_are_finished_in_float32(arch):
    made = build("mma", arch, options=(("accum", "float16"), ("out_dtype", "float32")))
    assert set(re.findall(r"mma_sync<tl::DataType::(\w+), \S+, tl::DataType::(\w+),", made.source)) == {
        ("kFloat16", "kFloat16")
    }
    assert "float total" not in made.source and "float x[" in made.source
    assert made.built.resources["spills"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90a"])
@pytest.mark.parametrize(
    "options",
    [
        ALL,
        {"trans_b": True, "epilogue": "silu"},
        {"trans_a": True, "bias": True},
        {"accum": "float16", **ALL},
    ],
)
def test_no_option_spills(arch, options):
    assert build("mma", arch, options=tuple(options.items())).built.resources["spills"] == 0


@pytest.mark.parametrize(
    ("arch", "dtype"),
    [
        ("sm_75", "float32"),
        ("sm_90a", "bfloat16"),
        *(pytest.param(a, "float16", marks=pytest.mark.slow) for a in LATER),
    ],
)
def test_dlight_compiles(arch, dtype):
    made = build("dlight", arch, dtype)
    assert "__shared__" in made.source and made.built.resources.get("spills", 0) == 0


# -- their launches --------------------------------------------------------------------------------


def call(driver, made, m, n, k, batch=1, alpha=1.0, a=None, c=None, **fields):
    """Call an NN product of float16; *a* and *c*: strides."""
    shapes, strides = [(batch, m, k), (batch, k, n), (batch, m, n)], [a, None, c]
    arrays = [
        Array(shape, (i + 1) << 40, "float16", step, **fields)
        for i, (shape, step) in enumerate(zip(shapes, strides, strict=True))
    ]
    return driver.do(cuda_lab.call, made.linked, [*arrays, None, alpha, 1.0])


def test_the_tile_follows_the_call(driver):
    made = build("mma", "sm_80")
    large = call(driver, made, 4096, 4096, 4096).launch
    assert large["kernel"] == "gemm_0_kernel" and large["grid"] == [32 * 32, 1, 1]
    assert large["shared"] == made.config["stages"] * 2 * 128 * 32 * 2 and large["block"][0] == made.config["threads"]
    small = call(driver, made, 200, 256, 512, batch=3).launch
    assert small["kernel"] == "gemm_1_kernel" and small["grid"] == [4 * 4 * 3, 1, 1]


@pytest.mark.parametrize(
    ("sizes", "fields"),
    [
        ((257, 256, 256), {}),  # M is free
        ((256, 256, 8), {"a": (1 << 40, 16, 1)}),
        ((256, 130, 256), {"refused": True}),
        ((256, 256, 100), {"refused": True}),
        ((256, 256, 256), {"a": (0, 260, 1), "refused": True}),
        ((256, 256, 256), {"a": (0, 1, 256), "refused": True}),
        ((256, 256, 256), {"c": (0, 257, 1), "refused": True}),
    ],
)
def test_vectors_only_where_operands_are_aligned(driver, sizes, fields):
    fields = dict(fields)
    expected = "gemm_2_kernel" if fields.pop("refused", False) else "gemm_1_kernel"
    assert call(driver, build("mma", "sm_80"), *sizes, **fields).launch["kernel"] == expected


def test_wide_strides_and_many_batches(driver):
    assert call(driver, build("mma", "sm_80"), 64, 64, 64, batch=70000).launch["grid"] == [70000, 1, 1]
    launch = call(driver, build("mma", "sm_80"), 64, 64, 64, batch=3, a=(1 << 35, 64, 1)).launch
    assert (1 << 32) in [number(p) for p in launch["parameters"] if len(p) == 16]  # in vectors of 8
    assert call(driver, build("mma", "sm_80"), 8, 64, 0).launch["grid"] == [1, 1, 1]  # the epilogue of zeros


def test_a_dim_that_is_too_long_is_refused(driver):
    said = call(driver, build("mma", "sm_80"), (1 << 31) - 1, 8, 8)
    assert "has no launch for the call" in said.error and not said.calls
