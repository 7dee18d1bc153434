"""The schedules of attention by mma.sync, on sm_80 and newer, of one sequence and of many: what they serve."""

from __future__ import annotations

from collections.abc import Sequence

from tlhub.specs import Config, DeviceFacts, Problem, Schedule
from tlhub_attention.mma.forward_plan import Room, plan

_LEAST = 80  # compute capability
_IN = ("float16", "bfloat16")
_OUT = (*_IN, "float32")
_MOST = 256  # channels


def supports(problem: Problem, facts: DeviceFacts) -> str | None:
    """Return why the schedule does not serve *problem*, or None."""
    dtypes = dict(problem.dtypes)
    if int(facts.arch.rpartition("_")[2].rstrip("af")) < _LEAST:
        return f"it is for compute capability 8.0 and newer, and this is {facts.arch}"
    if len({dtypes[name] for name in "qkv"}) > 1 or dtypes["q"] not in _IN:
        return f"it takes q, k and v of one type, {' or '.join(_IN)}, not {', '.join(dtypes[name] for name in 'qkv')}"
    if dtypes["o"] not in _OUT:
        return f"out_dtype={dtypes['o']!r}; it writes {', '.join(_OUT)}"
    for name in ("D", "D_v"):
        extent = problem.dim[name]
        if isinstance(extent, str):
            return f"{name} is symbolic; it is compiled for one number of channels"
        if extent % 8 or not 8 <= extent <= _MOST:
            return f"{name}={extent}; it takes multiples of 8 from 8 to {_MOST}"
    return None


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
            "tlhub_attention.cuda.code",
            *(f"tlhub.cuda.{name}" for name in ("tensor_cores", "warp_mma")),
            *(f"tlhub/cuda/{name}.cuh" for name in ("tensor_cores", "warp_mma")),
            *(f"tlhub_attention/cuda/{name}.cuh" for name in ("call", "rows", "softmax", "forward_mma")),
        ),
        priority=15,
        experimental=True,
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
