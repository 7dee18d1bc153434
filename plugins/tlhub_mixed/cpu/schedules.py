"""The CPU schedules of mixed precision: what they serve, and their tiles by arch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tlhub.specs import Config, DeviceFacts, Problem, Schedule
from tlhub_mixed.contracts.quantize import QUANTIZE
from tlhub_mixed.contracts.scaled import SCALED
from tlhub_mixed.contracts.weights import W4A16, W8A16

_TILES = {
    # lanes: float32 numbers of a vector; a register tile is mr x nr sums, of 8, 12 and 24 registers, 24 of Arm's; a
    # task takes at most mc x nc of c
    "sse": {"lanes": 4, "mr": 4, "nr": 8, "mc": 192, "nc": 256},
    "avx2": {"lanes": 8, "mr": 6, "nr": 16, "mc": 192, "nc": 256},
    "avx512": {"lanes": 16, "mr": 12, "nr": 32, "mc": 192, "nc": 256},
    "neon": {"lanes": 4, "mr": 6, "nr": 16, "mc": 192, "nc": 256},
}


def vectors(problem: Problem, facts: DeviceFacts) -> Sequence[Config]:
    """Return the vectors of the arch of *facts*: ``lanes`` of float32, and ``half``: it converts float16."""
    return ({"lanes": _TILES[facts.vectors]["lanes"], "half": facts.vectors != "sse"},)


def tiles(problem: Problem, facts: DeviceFacts) -> Sequence[Config]:
    """Return the tiles for the arch of *facts*, and ``half``: it converts float16."""
    return ({**_TILES[facts.vectors], "half": facts.vectors != "sse"},)


def supports(problem: Problem, facts: DeviceFacts) -> str | None:
    """Return why a product of *problem* is not served, or None."""
    option = problem.option
    if option["tensor_core"]:
        return "tensor_core=True, and a CPU has no tensor cores"
    if option["fast_accum"]:
        return "fast_accum is what tensor cores do; a CPU adds up in full float32"
    return None


_SHARED = ("tlhub.cpu.elements", "tlhub.cpu.ir", "tlhub.formats", "tlhub_mixed.cpu.entry")

QUANTIZE_ROWS = Schedule(
    name="cpu_quantize",
    kernel="quantize",
    kernel_revision=1,
    revision=1,
    targets=("cpu",),
    toolchain="tvm",
    program="tlhub_mixed.cpu.quantize:program",
    configs=vectors,
    symbolic=tuple(d.name for d in QUANTIZE.dims),
    sources=("tlhub_mixed.cpu.quantize", "tlhub_mixed.contracts.quantize", *_SHARED),
    doc="two passes over each block, by vectors where rows have unit stride",
)

_PRODUCT = tuple(f"tlhub_mixed.cpu.{m}" for m in ("finish", "plan", "product", "tiles"))

SCALED_BLOCKED = Schedule(
    name="cpu_scaled",
    kernel="gemm_scaled",
    kernel_revision=1,
    revision=1,
    targets=("cpu",),
    toolchain="tvm",
    program="tlhub_mixed.cpu.scaled:program",
    supports=supports,
    configs=tiles,
    symbolic=tuple(d.name for d in SCALED.dims),
    sources=("tlhub_mixed.cpu.scaled", "tlhub_mixed.contracts.quantize", *_PRODUCT, *_SHARED),
    doc="panels converted to float32 (int8: int32) for many rows at once; scales where blocks end, epilogue fused",
)

W4_BLOCKED = Schedule(
    name="cpu_w4",
    kernel="gemm_w4a16",
    kernel_revision=1,
    revision=1,
    targets=("cpu",),
    toolchain="tvm",
    program="tlhub_mixed.cpu.weights:program",
    configs=tiles,
    symbolic=tuple(d.name for d in W4A16.dims),
    sources=(
        *("tlhub_mixed.cpu.weights", "tlhub_mixed.contracts.weights", "tlhub_mixed.contracts.epilogue"),
        *_PRODUCT,
        *_SHARED,
    ),
    doc="weights become float32 a panel at a time, for many rows at once; epilogue fused",
)

W8_BLOCKED = replace(W4_BLOCKED, name="cpu_w8", kernel="gemm_w8a16", symbolic=tuple(d.name for d in W8A16.dims))
