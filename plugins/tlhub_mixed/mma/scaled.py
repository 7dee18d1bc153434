"""The schedule of gemm_scaled by mma.sync, on sm_80 and newer."""

from __future__ import annotations

from tlhub.specs import Schedule
from tlhub_mixed.mma import gemm

MMA_SCALED = Schedule(
    name="mma_scaled",
    kernel="gemm_scaled",
    kernel_revision=1,
    revision=1,
    targets=("cuda",),
    toolchain="cuda",
    program="tlhub_mixed.mma.program:program",
    supports=gemm.unserved,
    symbolic=("M", "N", "K", "N_128", "K_128", "N_2"),
    sources=("tlhub_mixed.mma.scaled", *gemm.SOURCES),
    priority=10,
    doc="asynchronous copies and mma.sync; scales of rows at the end, those of blocks for each 128 of K; any stride",
)
