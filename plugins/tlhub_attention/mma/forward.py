"""The schedules of attention by mma.sync, on sm_80 and newer, of one sequence and of many: what they serve."""

from __future__ import annotations

from collections.abc import Sequence

from tlhub.specs import Config, DeviceFacts, Problem, Schedule
from tlhub_attention.cuda import served
from tlhub_attention.mma.forward_plan import Room, plan


def supports(problem: Problem, facts: DeviceFacts) -> str | None:
    """Return why the schedule does not serve *problem*, or None."""
    return served.by_mma(facts) or served.unserved(problem)


def configs(problem: Problem, facts: DeviceFacts) -> Sequence[Config]:
    """Return the one config: ``plan``, as ``Plan`` writes it, by the channels and the device's shared memory."""
    d, d_v = (int(problem.dim[name]) for name in ("D", "D_v"))
    return ({"plan": str(plan(d, d_v, Room.of(facts.arch, facts.shared_memory)))},)


def _schedule(kernel: str, symbolic: tuple[str, ...], doc: str) -> Schedule:
    return Schedule(
        name="mma",
        kernel=kernel,
        kernel_revision=2,
        revision=1,
        targets=("cuda",),
        toolchain="cuda",
        program="tlhub_attention.mma.forward_program:program",
        supports=supports,
        configs=configs,
        symbolic=symbolic,
        sources=(
            *(f"tlhub_attention.mma.forward{part}" for part in ("", "_plan", "_program")),
            *("tlhub_attention.cuda.code", "tlhub_attention.cuda.served"),
            *(f"tlhub.cuda.{name}" for name in ("tensor_cores", "warp_mma")),
            *(f"tlhub/cuda/{name}.cuh" for name in ("tensor_cores", "warp_mma")),
            *(f"tlhub_attention/cuda/{name}.cuh" for name in ("call", "rows", "softmax", "forward_mma")),
        ),
        priority=15,
        doc=doc,
    )


MMA = _schedule(
    "attention",
    ("B", "S", "H", "H_kv", "S_kv"),
    "mma.sync, softmax in registers, longest tiles first; up to 256 channels, any length and stride",
)
MMA_VARLEN = _schedule(
    "attention_varlen",
    ("T", "H", "N1", "H_kv", "T_kv"),
    "mma.sync, tiles of sequences found on the device; up to 256 channels, any length and stride",
)
