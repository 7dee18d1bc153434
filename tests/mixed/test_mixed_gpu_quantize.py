"""quantize on GPUs: what is served, which kernels a call takes, and what they compile to."""

from __future__ import annotations

import functools

import cuda_array
import cuda_lab
import pytest

import tlhub_registry
from tlhub import catalog, problem, workload
from tlhub.workload import Item
from tlhub_mixed.contracts.quantize import QUANTIZE
from tlhub_mixed.cuda.quantize import QUANTIZE_BLOCKS

E8M0 = "float8_e8m0fnu"
SCRATCH = cuda_array.Array((1 << 20,), 1 << 47, "uint8")


@functools.cache
def build(dtype="float32", arch=cuda_lab.ARCH, **options):
    return cuda_lab.build(QUANTIZE_BLOCKS.program, QUANTIZE, ("M", "K"), dtype=dtype, options=options, arch=arch)


def launches(driver, scale, m=300, k=1000, scratch=None, **options):
    """Call quantize of float32 to int8 with scales of a shape, and return its launches."""
    x, q = cuda_array.Array((m, k), 1 << 40), cuda_array.Array((m, k), 1 << 41, "int8")
    built = build(out_dtype="int8", **options)
    said = driver.do(cuda_lab.call, built.linked, [x, q, cuda_array.Array(scale, 1 << 42), scratch])
    assert said.error is None
    return said.launches()


def test_a_block_has_a_team_of_threads(driver):
    (launch,) = launches(driver, (300, 8))
    assert launch["kernel"] == "quantize_whole" and launch["grid"] == [300, 1, 1]
    (launch,) = launches(driver, (300, 8), k=999)
    assert launch["kernel"] == "quantize_any", "rows are not aligned"


def test_one_scale_for_all_takes_two_launches(driver):
    first, second = launches(driver, (), scratch=SCRATCH, scaling="tensor")
    assert (first["kernel"], second["kernel"]) == ("find_largest_whole", "quantize_all_whole")
    assert first["grid"] == second["grid"]


def test_what_certifies_it_has_every_layout():
    items = workload.parse(tlhub_registry.workload("certify/quantize-cuda_quantize"), "quantize", catalog.load())
    made = [problem.make(QUANTIZE, i.shape, i.dtype, i.options) for i in items if isinstance(i, Item)]
    assert len(made) == len(items)
    assert {m.option["scaling"] for m in made} == {"tensor", "row", "1x128", "128x128"}
    assert {m.option["scale_dtype"] for m in made} == {"float32", E8M0} and {m.option["given"] for m in made} == {
        True,
        False,
    }
    assert {m.option["out_dtype"] for m in made} == {"float8_e4m3fn", "float8_e5m2", "int8"}
    assert {m.dtype for m in made} == set(QUANTIZE.dtypes)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["cuda:sm_75", "cuda:sm_80", "cuda:compute_80"])
@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "float32", "scaling": "128x128", "scale_dtype": E8M0, "out_dtype": "float8_e5m2"},
        {"dtype": "float16", "scaling": "row", "out_dtype": "int8"},
        {"dtype": "bfloat16", "scaling": "tensor", "given": True},
    ],
)
def test_it_compiles_for(arch, options):
    built = build(arch=arch, **options).built
    assert built.warnings == () and built.resources["spills"] == 0
