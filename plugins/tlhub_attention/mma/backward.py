"""The schedule of attention's gradients by mma.sync, on sm_80 and newer: what it serves."""

from __future__ import annotations

from collections.abc import Sequence

from tlhub.specs import Config, DeviceFacts, Problem, Schedule
from tlhub_attention.mma.backward_plan import plans

_DTYPES = ("float16", "bfloat16")
_INPUTS = ("dout", "q", "k", "v", "o")
_MOST = 256  # channels


def supports(problem: Problem, facts: DeviceFacts) -> str | None:
    """Return why the schedule does not serve *problem*, or None."""
    dtypes = dict(problem.dtypes)
    if int(facts.arch.rpartition("_")[2].rstrip("af")) < 80:
        return f"it is for compute capability 8.0 and newer, and this is {facts.arch}"
    if len({dtypes[name] for name in _INPUTS}) > 1 or dtypes["q"] not in _DTYPES:
        given = ", ".join(f"{name} {dtypes[name]}" for name in _INPUTS)
        return f"it takes {', '.join(_INPUTS)} of one type, {' or '.join(_DTYPES)}, not {given}"
    for name in ("D", "D_v"):
        extent = problem.dim[name]
        if isinstance(extent, str):
            return f"{name} is symbolic; it is compiled for one number of channels"
        if extent % 8 or not 8 <= extent <= _MOST:
            return f"{name}={extent}; it takes multiples of 8 from 8 to {_MOST}"
    return None


def configs(problem: Problem, facts: DeviceFacts) -> Sequence[Config]:
    """Return the plans that fit the device, as ``Plan`` writes them; the first is what is taken untried."""
    alibi = bool(problem.option["alibi"])
    fitting = plans(int(problem.dim["D"]), int(problem.dim["D_v"]), facts.shared_memory, alibi)
    return tuple({"plan": str(plan)} for plan in fitting)


SOURCES = (
    *(f"tlhub_attention.mma.backward{part}" for part in ("", "_plan", "_program")),
    *(f"tlhub_attention.cuda.{name}" for name in ("code", "backward_code")),
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
    experimental=True,
    doc="mma.sync of sm_80 and newer; up to 256 channels, any length and stride",
)
