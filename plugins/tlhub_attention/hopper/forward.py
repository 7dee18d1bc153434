"""The schedule of attention on Hopper's tensor cores: what it serves, and by which plan."""

from __future__ import annotations

from collections.abc import Sequence

from tlhub.specs import Config, DeviceFacts, Problem, Schedule
from tlhub_attention.cuda import served
from tlhub_attention.hopper.forward_plan import plans


def supports(problem: Problem, facts: DeviceFacts) -> str | None:
    """Return why the schedule does not serve *problem*, or None."""
    return served.on_hopper(facts) or served.unserved(problem)


def configs(problem: Problem, facts: DeviceFacts) -> Sequence[Config]:
    """Return the one config: ``plans``, as ``Plan`` writes them, of which each call takes the cheapest."""
    d, d_v = (int(problem.dim[name]) for name in ("D", "D_v"))
    return ({"plans": " ".join(map(str, plans(d, d_v, bool(problem.option["causal"]))))},)


HOPPER = Schedule(
    name="hopper",
    kernel="attention",
    kernel_revision=2,
    revision=1,
    targets=("cuda",),
    toolchain="cuda",
    program="tlhub_attention.hopper.forward_program:program",
    supports=supports,
    configs=configs,
    symbolic=("B", "S", "H", "H_kv", "S_kv"),
    sources=(
        *(f"tlhub_attention.hopper.forward{part}" for part in ("", "_plan", "_program")),
        *("tlhub_attention.cuda.code", "tlhub_attention.cuda.served"),
        "tlhub.cuda.tensor_cores",
        "tlhub/cuda/tensor_cores.cuh",
        *(f"tlhub_attention/cuda/{name}.cuh" for name in ("call", "rows", "softmax", "forward_hopper")),
    ),
    priority=20,
    doc="TMA and wgmma, softmax beside the products, longest tiles first; up to 256 channels, any length and stride",
)
