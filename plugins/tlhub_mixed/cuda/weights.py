"""The schedules of products with narrow weights on any GPU with mma.sync."""

from __future__ import annotations

from tlhub.specs import DeviceFacts, Problem, Schedule
from tlhub_mixed.cuda.code import number

_LEAST_ARCH = 80

SOURCES = (
    *(f"tlhub_mixed.cuda.{name}" for name in ("weights", "weights_program", "code")),
    *("tlhub.cuda.tensor_cores", "tlhub.cuda.warp_mma"),
    *(f"tlhub/cuda/{name}.cuh" for name in ("tensor_cores", "warp_mma", "elements")),
    *(f"tlhub_mixed/cuda/{name}.cuh" for name in ("call", "weights", "weights_few")),
)


def supports(problem: Problem, facts: DeviceFacts) -> str | None:
    """Return why the schedules do not serve *problem*, or None."""
    if number(facts.arch) < _LEAST_ARCH:
        return f"it is for sm_{_LEAST_ARCH} and newer, and this is {facts.arch}"
    return None


def _schedule(kernel: str) -> Schedule:
    return Schedule(
        name="mma",
        kernel=kernel,
        kernel_revision=1,
        revision=1,
        targets=("cuda",),
        toolchain="cuda",
        program="tlhub_mixed.cuda.weights_program:program",
        supports=supports,
        symbolic=("M",),
        sources=SOURCES,
        priority=10,
        doc="codes become numbers in registers on their way to mma.sync; warps share K; for few rows of a at a time",
    )


W4_MMA, W8_MMA = (_schedule(f"gemm_w{bits}a16") for bits in (4, 8))
