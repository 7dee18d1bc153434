"""The schedule of attention_decode on Hopper: what it serves, and by which plans."""

from __future__ import annotations

from collections.abc import Sequence

from tlhub.specs import Config, DeviceFacts, Problem, Schedule
from tlhub_attention.cuda import decode_code, served
from tlhub_attention.hopper.decode_plan import plan_of_clusters, plans


def supports(problem: Problem, facts: DeviceFacts) -> str | None:
    """Return why the schedule does not serve *problem*, or None."""
    return served.on_hopper(facts) or served.unserved(problem)


def configs(problem: Problem, facts: DeviceFacts) -> Sequence[Config]:
    """Return the one config: ``plans``, as ``Plan`` writes them: a call takes the first with enough rows; and
    ``together``, that of clusters, for few tiles."""
    d, d_v = (int(problem.dim[name]) for name in ("D", "D_v"))
    return ({"plans": " ".join(map(str, plans(d, d_v))), "together": str(plan_of_clusters(d, d_v))},)


HOPPER_DECODE = Schedule(
    name="hopper",
    kernel="attention_decode",
    kernel_revision=2,
    revision=3,
    targets=("cuda",),
    toolchain="cuda",
    program="tlhub_attention.hopper.decode_program:program",
    supports=supports,
    configs=configs,
    symbolic=decode_code.SYMBOLIC,
    sources=(
        *(f"tlhub_attention.hopper.decode{part}" for part in ("", "_plan", "_program")),
        *decode_code.SOURCES,
        *(f"tlhub_attention/cuda/decode_{part}.cuh" for part in ("hopper", "cluster")),
    ),
    priority=20,
    doc="keys and values stream once through bulk tensor copies, in even shares of the SMs; contiguous or in pages",
)
