"""The schedule of attention_decode by mma.sync, on sm_80 and newer: what it serves, and by which plans."""

from __future__ import annotations

from collections.abc import Sequence

from tlhub.specs import Config, DeviceFacts, Problem, Schedule
from tlhub_attention.cuda import decode_code, served
from tlhub_attention.mma.decode_plan import plans


def supports(problem: Problem, facts: DeviceFacts) -> str | None:
    """Return why the schedule does not serve *problem*, or None."""
    return served.by_mma(facts) or served.unserved(problem)


def configs(problem: Problem, facts: DeviceFacts) -> Sequence[Config]:
    """Return the one config: ``plans``, as ``Plan`` writes them: a call takes the first with enough rows."""
    d, d_v = (int(problem.dim[name]) for name in ("D", "D_v"))
    return ({"plans": " ".join(map(str, plans(d, d_v, facts.shared_memory)))},)


MMA_DECODE = Schedule(
    name="mma",
    kernel="attention_decode",
    kernel_revision=2,
    revision=1,
    targets=("cuda",),
    toolchain="cuda",
    program="tlhub_attention.mma.decode_program:program",
    supports=supports,
    configs=configs,
    symbolic=decode_code.SYMBOLIC,
    sources=(
        *(f"tlhub_attention.mma.decode{part}" for part in ("", "_plan", "_program")),
        *decode_code.SOURCES,
        "tlhub_attention/cuda/decode_mma.cuh",
    ),
    priority=15,
    doc="keys and values stream once through asynchronous copies, in even shares of the SMs; contiguous or in pages",
)
