"""The schedule of quantize on GPUs."""

from __future__ import annotations

from tlhub.specs import Schedule
from tlhub_mixed.contracts.quantize import QUANTIZE

QUANTIZE_BLOCKS = Schedule(
    name="cuda_quantize",
    kernel="quantize",
    kernel_revision=1,
    revision=1,
    targets=("cuda",),
    toolchain="cuda",
    program="tlhub_mixed.cuda.quantize_program:program",
    symbolic=tuple(d.name for d in QUANTIZE.dims),
    sources=(
        *(f"tlhub_mixed.cuda.{name}" for name in ("quantize", "quantize_program", "code")),
        *("tlhub_mixed.contracts.quantize", "tlhub.formats"),
        *("tlhub/cuda/elements.cuh", "tlhub_mixed/cuda/quantize.cuh"),
    ),
    doc="a team of threads for each block, which it reads twice; any stride, four neighbours at once where they lie so",
)
