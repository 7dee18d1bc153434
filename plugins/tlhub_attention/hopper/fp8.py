"""The schedule of attention of 8-bit floats on Hopper's tensor cores: what it serves, and by which plan."""

from __future__ import annotations

from collections.abc import Sequence

from tlhub.specs import Config, DeviceFacts, Problem, Schedule
from tlhub_attention.cuda import served
from tlhub_attention.hopper.fp8_plan import plans

_IN = ("float8_e4m3fn", "float8_e5m2")


def supports(problem: Problem, facts: DeviceFacts) -> str | None:
    """Return why the schedule does not serve *problem*, or None."""
    return served.on_hopper(facts) or served.unserved(problem, types=_IN, step=16)


def configs(problem: Problem, facts: DeviceFacts) -> Sequence[Config]:
    """Return the one config: ``plans``, as ``Plan`` writes them, of which each call takes the cheapest."""
    d, d_v = (int(problem.dim[name]) for name in ("D", "D_v"))
    return ({"plans": " ".join(map(str, plans(d, d_v, bool(problem.option["causal"]))))},)


HOPPER_FP8 = Schedule(
    name="hopper_fp8",
    kernel="attention",
    kernel_revision=2,
    revision=1,
    targets=("cuda",),
    toolchain="cuda",
    program="tlhub_attention.hopper.fp8_program:program",
    supports=supports,
    configs=configs,
    symbolic=("B", "S", "H", "H_kv", "S_kv"),
    sources=(
        *(f"tlhub_attention.hopper.{name}" for name in ("fp8", "fp8_plan", "fp8_program", "forward_plan")),
        *("tlhub_attention.cuda.code", "tlhub_attention.cuda.served"),
        "tlhub.cuda.tensor_cores",
        "tlhub/cuda/tensor_cores.cuh",
        *(
            f"tlhub_attention/cuda/{name}.cuh"
            for name in ("call", "fp8_call", "fp8_rows", "softmax", "forward_hopper", "fp8_across", "fp8_hopper")
        ),
    ),
    priority=20,
    doc="8-bit tensor cores: TMA and wgmma, weights in e4m3, v laid across first; up to 256 channels, any length",
)
