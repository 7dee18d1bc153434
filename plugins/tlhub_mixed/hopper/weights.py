"""The schedules of products with narrow weights on Hopper."""

from __future__ import annotations

from tlhub.specs import DeviceFacts, Problem, Schedule
from tlhub_mixed.cuda import weights

_ARCH = "cuda:sm_90a"


def supports(problem: Problem, facts: DeviceFacts) -> str | None:
    """Return why the schedules do not serve *problem*, or None."""
    return None if facts.arch == _ARCH else f"it is for {_ARCH}, and this is {facts.arch}"


def _schedule(kernel: str) -> Schedule:
    return Schedule(
        name="hopper",
        kernel=kernel,
        kernel_revision=1,
        revision=1,
        targets=("cuda",),
        toolchain="cuda",
        program="tlhub_mixed.hopper.weights_program:program",
        supports=supports,
        symbolic=("M",),
        sources=(
            *("tlhub_mixed.hopper.weights", "tlhub_mixed.hopper.weights_program", *weights.SOURCES),
            *("tlhub_mixed/cuda/pack.cuh", "tlhub_mixed/cuda/weights_hopper.cuh"),
        ),
        priority=20,
        doc="codes become numbers in registers on their way to mma.sync for few rows of a, and to wgmma for more",
    )


W4_HOPPER, W8_HOPPER = (_schedule(f"gemm_w{bits}a16") for bits in (4, 8))
