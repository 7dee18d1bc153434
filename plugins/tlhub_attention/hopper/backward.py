"""The schedule of attention's gradients on Hopper's tensor cores: what it serves."""

from __future__ import annotations

from collections.abc import Sequence

from tlhub.specs import Config, DeviceFacts, Problem, Schedule

_ARCH = "cuda:sm_90a"
_DTYPES = ("float16", "bfloat16")
_INPUTS = ("dout", "q", "k", "v", "o")
_MOST = 256  # channels


def supports(problem: Problem, facts: DeviceFacts) -> str | None:
    """Return why the schedule does not serve *problem*, or None."""
    dtypes = dict(problem.dtypes)
    if facts.arch != _ARCH:
        return f"it is for {_ARCH}, and this is {facts.arch}"
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
        *(f"tlhub_attention.cuda.{name}" for name in ("code", "backward_code")),
        "tlhub.cuda.tensor_cores",
        "tlhub/cuda/tensor_cores.cuh",
        *(f"tlhub_attention/cuda/{name}.cuh" for name in ("call", "rows")),
        *(f"tlhub_attention/cuda/backward_{name}.cuh" for name in ("call", "rows", "tiles", "begin", "ends")),
        *(f"tlhub_attention/cuda/backward_{name}.cuh" for name in ("memory", "steps", "hopper", "wide", "kernel")),
    ),
    priority=20,
    experimental=True,
    doc="TMA and wgmma, five products under way beside the exponentials; up to 256 channels, any length and stride",
)
