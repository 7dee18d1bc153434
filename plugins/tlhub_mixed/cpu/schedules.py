"""The CPU schedules of mixed precision: what they serve, and their tiles by arch."""

from __future__ import annotations

from collections.abc import Sequence

from tlhub.specs import Config, DeviceFacts, Problem, Schedule
from tlhub_mixed.contracts.quantize import QUANTIZE

_LANES = {"sse": 4, "avx2": 8, "avx512": 16, "neon": 4}
"""Of float32 in a vector, by the vector unit."""


def vectors(problem: Problem, facts: DeviceFacts) -> Sequence[Config]:
    """Return the vectors of the arch of *facts*: ``lanes`` of float32, and ``half``: it converts float16."""
    return ({"lanes": _LANES[facts.vectors], "half": facts.vectors != "sse"},)


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
