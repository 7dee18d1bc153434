"""The schedules of products with narrow weights on Hopper."""

from __future__ import annotations

from tlhub.specs import DeviceFacts, Problem, Schedule
from tlhub_mixed.cuda import weights
from tlhub_mixed.hopper import gemm


def supports(problem: Problem, facts: DeviceFacts) -> str | None:
    """Return why the schedules do not serve *problem*, or None."""
    return None if facts.arch == gemm.ARCH else f"it is for {gemm.ARCH}, and this is {facts.arch}"


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
        configs=gemm.configs,
        symbolic=("M",),
        sources=tuple(
            dict.fromkeys(
                (
                    *("tlhub_mixed.hopper.weights", "tlhub_mixed.hopper.weights_program"),
                    *weights.SOURCES,
                    *gemm.HOPPER_MIXED.sources,
                )
            )
        ),
        priority=20,
        experimental=True,
        doc="few rows of a by mma.sync, more by wgmma on weights that are unpacked to scratch memory first",
    )


W4_HOPPER, W8_HOPPER = (_schedule(f"gemm_w{bits}a16") for bits in (4, 8))
