"""The schedule of attention's gradients on Hopper's tensor cores: what it serves."""

from __future__ import annotations

from collections.abc import Sequence

from tlhub.specs import Config, DeviceFacts, Problem, Schedule
from tlhub_attention.cuda import served

_INPUTS = ("dout", "q", "k", "v", "o")


def supports(problem: Problem, facts: DeviceFacts) -> str | None:
    """Return why the schedule does not serve *problem*, or None."""
    return served.on_hopper(facts) or served.unserved(problem, _INPUTS)


def configs(problem: Problem, facts: DeviceFacts) -> Sequence[Config]:
    """Return the one config: tiles follow from the number of channels."""
    return ({},)


HOPPER_BWD = Schedule(
    name="hopper",
    kernel="attention_bwd",
    kernel_revision=2,
    revision=1,
    targets=("cuda",),
    toolchain="cuda",
    program="tlhub_attention.hopper.backward_program:program",
    supports=supports,
    configs=configs,
    symbolic=("B", "S", "H", "H_kv", "S_kv"),
    sources=(
        *(f"tlhub_attention.hopper.backward{part}" for part in ("", "_plan", "_program")),
        "tlhub_attention.hopper.ragged",
        *(f"tlhub_attention.cuda.{name}" for name in ("code", "backward_code", "served")),
        "tlhub.cuda.tensor_cores",
        "tlhub/cuda/tensor_cores.cuh",
        *(f"tlhub_attention/cuda/{name}.cuh" for name in ("call", "rows")),
        *(f"tlhub_attention/cuda/backward_{name}.cuh" for name in ("call", "rows", "tiles", "begin", "ends")),
        *(f"tlhub_attention/cuda/backward_{name}.cuh" for name in ("memory", "steps", "hopper", "wide", "kernel")),
    ),
    priority=20,
    doc="TMA and wgmma, five products under way beside the exponentials; up to 256 channels, any length and stride",
)
