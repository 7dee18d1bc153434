"""The schedule of gemm on Hopper's tensor cores for narrow types and tf32: what it serves, and by which plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product

from tlhub.specs import DTYPES, Config, DeviceFacts, Problem, Schedule
from tlhub_mixed.cuda.operands import OF_BLOCKS, kind
from tlhub_mixed.hopper import plan

ARCH = "cuda:sm_90a"
_FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
_ACCUM = {**dict.fromkeys(_FLOAT8, "float32"), "int8": "int32", "float32": "float32"}
_OUT = {
    "int8": ("int32", "int8", "float32", "float16", "bfloat16"),
    **dict.fromkeys(("float32", *_FLOAT8), ("bfloat16", "float16", "float32", *_FLOAT8, "int8")),
}

_EXTENTS = (64, 128, 512, 2048, 8192)
"""Extents that stand for those of a symbolic dim."""

_MOST_PLANS = 4


def supports(problem: Problem, facts: DeviceFacts) -> str | None:
    """Return why the schedule does not serve *problem*, or None."""
    option, dtypes = problem.option, dict(problem.dtypes)
    a, accum, out = dtypes["a"], option["accum"], dtypes["c"]
    if facts.arch != ARCH:
        return f"it is for {ARCH}, and this is {facts.arch}"
    if option["tensor_core"] is False:
        return "tensor_core=False, and this schedule uses them"
    if a not in _ACCUM:
        return f"it multiplies float8, int8, and float32 as tf32, not {a}"
    if accum != _ACCUM[a]:
        return f"accum={accum!r}; {a} is added up in {_ACCUM[a]!r} here"
    if a == "float32" and option["compute"] == "ieee":
        return "compute='ieee'; it multiplies float32 as 'tf32' or '3xtf32'"
    if out not in _OUT[a]:
        return f"out_dtype={out!r}; of {a} it writes {', '.join(_OUT[a])}"
    return None


def configs(problem: Problem, facts: DeviceFacts) -> Sequence[Config]:
    """Return the configs worth trying, the best guess first.

    ``plans``: what a binary can do, as ``Plan`` writes it, of which each call takes the cheapest: one where all dims
    are known, the few that serve all extents well where some are symbolic.
    """
    symbols = sorted({extent for name, extent in problem.dim.items() if isinstance(extent, str) and name in "BMNK"})
    costs = {p: [_cost(p, problem, case, facts) for case in _cases(symbols)] for p in _plans(problem)}
    if not symbols:
        return [{"plans": str(p)} for p in sorted(costs, key=lambda p: costs[p][0])[:4]]
    least = [min(column) for column in zip(*costs.values(), strict=True)]
    chosen: list[plan.Plan] = []
    while len(chosen) < _MOST_PLANS:
        rest = [p for p in costs if p not in chosen]
        chosen.append(min(rest, key=lambda p: _loss([costs[q] for q in (*chosen, p)], least)))
    return [{"plans": " ".join(map(str, chosen))}]


def _plans(problem: Problem) -> tuple[plan.Plan, ...]:
    """Return the plans worth considering."""
    item, glu = DTYPES[dict(problem.dtypes)["c"]][1] // 8, bool(problem.option.get("glu"))
    made = kind(problem)
    found = plan.SCALED if made.scales == OF_BLOCKS else plan.PROMOTED if made.promoted else plan.PLAIN
    return tuple(p for p in found if p.serves(item, glu))


def _cases(symbols: Sequence[str]) -> list[Mapping[str, int]]:
    return [dict(zip(symbols, extents, strict=True)) for extents in product(_EXTENTS, repeat=len(symbols))]


def _loss(costs: Sequence[Sequence[int]], least: Sequence[int]) -> float:
    """Return how far the cheapest of *costs* are from the *least*, summed over cases."""
    return sum(min(column) / best for column, best in zip(zip(*costs, strict=True), least, strict=True))


def _cost(p: plan.Plan, problem: Problem, case: Mapping[str, int], facts: DeviceFacts) -> int:
    """Return the cost of *problem* with *case* for its symbols."""
    dim = {"B": 1, **problem.dim}
    b, m, n, k = (case.get(e, 1) if isinstance(e, str) else e for e in (dim[name] for name in "BMNK"))
    made, depth = kind(problem), plan.BYTES * 8 // DTYPES[dict(problem.dtypes)["a"]][1]
    return p.cost(
        *(b, m, n, k),
        promoted=made.promoted,
        scales=made.scales,
        depth=depth,
        parts=made.parts,
        processors=facts.cores,
    )


HOPPER_MIXED = Schedule(
    name="hopper_mixed",
    kernel="gemm",
    kernel_revision=2,
    revision=2,
    targets=("cuda",),
    toolchain="cuda",
    program="tlhub_mixed.hopper.program:program",
    supports=supports,
    configs=configs,
    sources=(
        *(
            f"tlhub_mixed.{name}"
            for name in ("hopper.gemm", "hopper.plan", "hopper.program", "cuda.code", "cuda.operands", "cuda.products")
        ),
        "tlhub.cuda.tensor_cores",
        *(f"tlhub/cuda/{name}.cuh" for name in ("tensor_cores", "elements")),
        *(f"tlhub_mixed/cuda/{name}.cuh" for name in ("call", "pack", "product_hopper")),
    ),
    priority=20,
    doc="TMA and wgmma for float8, int8 and tf32; float8 sums promoted every 128 of K unless fast_accum; any stride",
)
