"""The schedule of gemm_scaled on Hopper's tensor cores: what it serves."""

from __future__ import annotations

from tlhub.specs import DeviceFacts, Problem, Schedule
from tlhub_mixed.cuda.operands import OF_BLOCKS, kind
from tlhub_mixed.hopper import gemm
from tlhub_mixed.hopper.program import SPAN


def supports(problem: Problem, facts: DeviceFacts) -> str | None:
    """Return why the schedule does not serve *problem*, or None."""
    half = problem.dim.get("N_2")
    if facts.arch != gemm.ARCH:
        return f"it is for {gemm.ARCH}, and this is {facts.arch}"
    if problem.option["tensor_core"] is False:
        return "tensor_core=False, and this schedule uses them"
    if kind(problem).scales == OF_BLOCKS and isinstance(half, int) and half % SPAN:
        return f"N={problem.dim['N']} with glu and scales of blocks; the half of it is a multiple of {SPAN}"
    return None


HOPPER_SCALED = Schedule(
    name="hopper_scaled",
    kernel="gemm_scaled",
    kernel_revision=1,
    revision=1,
    targets=("cuda",),
    toolchain="cuda",
    program="tlhub_mixed.hopper.program:program",
    supports=supports,
    configs=gemm.configs,
    sources=("tlhub_mixed.hopper.scaled", *gemm.HOPPER_MIXED.sources),
    priority=20,
    doc="TMA and wgmma; scales of rows in the epilogue, those of blocks as each 128 of K are added up; any stride",
)
