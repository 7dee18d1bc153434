"""The schedule of gemm by mma.sync for narrow types and tf32, on sm_80 and newer: what it serves."""

from __future__ import annotations

from tlhub.specs import DeviceFacts, Problem, Schedule
from tlhub_mixed.contracts.epilogue import FLOAT8
from tlhub_mixed.cuda.code import number

_LEAST_ARCH = {**dict.fromkeys(FLOAT8, 89), "int8": 80, "float32": 80}
_ACCUM = {**dict.fromkeys(FLOAT8, "float32"), "int8": "int32", "float32": "float32"}
_OUT = ("bfloat16", "float16", "float32", *FLOAT8, "int8")


def unserved(problem: Problem, facts: DeviceFacts) -> str | None:
    """Return why tensor cores do not multiply the operands of *problem*, or None."""
    dtypes = dict(problem.dtypes)
    a = dtypes["a"]
    if problem.option["tensor_core"] is False:
        return "tensor_core=False, and this schedule uses them"
    if a not in _LEAST_ARCH:
        return f"it multiplies float8, int8, and float32 as tf32, not {a}"
    if number(facts.arch) < _LEAST_ARCH[a]:
        return f"{a} is for sm_{_LEAST_ARCH[a]} and newer, and this is {facts.arch}"
    return None


def supports(problem: Problem, facts: DeviceFacts) -> str | None:
    """Return why the schedule does not serve *problem*, or None."""
    option, dtypes = problem.option, dict(problem.dtypes)
    a, accum, out = dtypes["a"], option["accum"], dtypes["c"]
    if reason := unserved(problem, facts):
        return reason
    if accum != _ACCUM[a]:
        return f"accum={accum!r}; {a} is added up in {_ACCUM[a]!r} here"
    if a == "float32" and option["compute"] == "ieee":
        return "compute='ieee'; it multiplies float32 as 'tf32' or '3xtf32'"
    written = ("int32", *_OUT) if a == "int8" else _OUT
    if out not in written:
        return f"out_dtype={out!r}; of {a} it writes {', '.join(written)}"
    return None


SOURCES = (
    *(f"tlhub_mixed.mma.{name}" for name in ("gemm", "plan", "program")),
    *(f"tlhub_mixed.cuda.{name}" for name in ("code", "operands")),
    *(f"tlhub.cuda.{name}" for name in ("tensor_cores", "warp_mma")),
    *(f"tlhub/cuda/{name}.cuh" for name in ("tensor_cores", "warp_mma", "elements")),
    *(f"tlhub_mixed/cuda/{name}.cuh" for name in ("call", "pack", "product_mma")),
)

MMA_MIXED = Schedule(
    name="mma_mixed",
    kernel="gemm",
    kernel_revision=2,
    revision=1,
    targets=("cuda",),
    toolchain="cuda",
    program="tlhub_mixed.mma.program:program",
    supports=supports,
    symbolic=("B", "M", "N", "K", "N_2"),
    sources=SOURCES,
    priority=10,
    doc="asynchronous copies and mma.sync for float8 (sm_89 and newer), int8 and tf32; any size and stride",
)
