"""The schedule of attention's gradients by mma.sync, on sm_80 and newer: what it serves."""

from __future__ import annotations

from collections.abc import Sequence

from tlhub.specs import Config, DeviceFacts, Problem, Schedule
from tlhub_attention.cuda import served
from tlhub_attention.mma.backward_plan import plans

_INPUTS = ("dout", "q", "k", "v", "o")


def supports(problem: Problem, facts: DeviceFacts) -> str | None:
    """Return why the schedule does not serve *problem*, or None."""
    return served.by_mma(facts) or served.unserved(problem, _INPUTS)


def configs(problem: Problem, facts: DeviceFacts) -> Sequence[Config]:
    """Return the plans that fit the device, as ``Plan`` writes them; the first is what is taken untried."""
    alibi = bool(problem.option["alibi"])
    fitting = plans(int(problem.dim["D"]), int(problem.dim["D_v"]), facts.shared_memory, alibi)
    return tuple({"plan": str(plan)} for plan in fitting)


SOURCES = (
    *(f"tlhub_attention.mma.backward{part}" for part in ("", "_plan", "_program")),
    *(f"tlhub_attention.cuda.{name}" for name in ("code", "backward_code", "served")),
    *(f"tlhub.cuda.{name}" for name in ("tensor_cores", "warp_mma")),
    *(f"tlhub/cuda/{name}.cuh" for name in ("tensor_cores", "warp_mma")),
    *(f"tlhub_attention/cuda/{name}.cuh" for name in ("call", "rows")),
    *(f"tlhub_attention/cuda/backward_{name}.cuh" for name in ("call", "rows", "tiles", "begin", "operands", "mma")),
)
"""What the schedules over one sequence and over many are made of."""

MMA_BWD = Schedule(
    name="mma",
    kernel="attention_bwd",
    kernel_revision=2,
    revision=1,
    targets=("cuda",),
    toolchain="cuda",
    program="tlhub_attention.mma.backward_program:program",
    supports=supports,
    configs=configs,
    symbolic=("B", "S", "H", "H_kv", "S_kv"),
    sources=SOURCES,
    priority=15,
    doc="mma.sync of sm_80 and newer; up to 256 channels, any length and stride",
)
