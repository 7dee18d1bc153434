"""The schedule of attention of 8-bit floats on Hopper's tensor cores: what it serves, and by which plan."""

from __future__ import annotations

from collections.abc import Sequence

from tlhub.specs import Config, DeviceFacts, Problem, Schedule
from tlhub_attention.hopper.fp8_plan import plans

_ARCH = "cuda:sm_90a"
_IN = ("float8_e4m3fn", "float8_e5m2")
_OUT = ("float16", "bfloat16", "float32")
_MOST = 256  # channels


def supports(problem: Problem, facts: DeviceFacts) -> str | None:
    """Return why the schedule does not serve *problem*, or None."""
    dtypes = dict(problem.dtypes)
    inputs = {dtypes[name] for name in "qkv"}
    if facts.arch != _ARCH:
        return f"it is for {_ARCH}, and this is {facts.arch}"
    if len(inputs) > 1 or dtypes["q"] not in _IN:
        return f"it takes q, k and v of one type, {' or '.join(_IN)}, not {', '.join(dtypes[name] for name in 'qkv')}"
    if dtypes["o"] not in _OUT:
        return f"out_dtype={dtypes['o']!r}; it writes {', '.join(_OUT)}"
    for name in ("D", "D_v"):
        extent = problem.dim[name]
        if isinstance(extent, str):
            return f"{name} is symbolic; it is compiled for one number of channels"
        if extent % 16 or not 16 <= extent <= _MOST:
            return f"{name}={extent}; it takes multiples of 16 from 16 to {_MOST}"
    return None


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
        "tlhub_attention.cuda.code",
        "tlhub.cuda.tensor_cores",
        "tlhub/cuda/tensor_cores.cuh",
        *(
            f"tlhub_attention/cuda/{name}.cuh"
            for name in ("call", "fp8_call", "rows", "softmax", "forward_hopper", "fp8_hopper")
        ),
    ),
    priority=20,
    experimental=True,
    doc="8-bit tensor cores: TMA and wgmma, weights in e4m3, v laid across first; up to 256 channels, any length",
)
