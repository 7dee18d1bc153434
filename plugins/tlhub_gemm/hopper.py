"""The schedule of gemm on Hopper's tensor cores: what it serves, and by which plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product

from tlhub.specs import DTYPES, Config, DeviceFacts, Problem, Schedule
from tlhub_gemm import skinny
from tlhub_gemm.hopper_plan import Plan, finish, plain

PLANS = tuple(
    Plan.parse(text)
    for text in (
        "coop-128x256 coop-128x256-b2 coop-256x128 coop-128x192 coop-128x64 coop-128x64-k2 "
        "coop-128x96-k2 coop-128x128-k2 coop-128x160-k2 coop-256x160 coop-256x192 coop-256x192-a2 "
        "ping-128x128 ping-128x128-b2 ping-128x160 ping-128x192 ping-128x192-b2 ping-64x128"
    ).split()
)
"""The plans worth considering; the first of equals is chosen."""

_MOST_SUMS = 128  # of a thread, beside an epilogue

_EXTENTS = (128, 512, 1000, 2048, 8192)
"""Extents that stand for those of a symbolic dim; one makes rows that are slow to load."""

_MOST_PLANS = 4
_LEAST_GAIN = 0.005  # of the time, by which a further plan for symbolic dims has to pay

_ARCH = "cuda:sm_90a"
_OUT = ("float16", "bfloat16", "float32", "float8_e4m3fn", "float8_e5m2", "int8")


def supports(problem: Problem, facts: DeviceFacts) -> str | None:
    """Return why the schedule does not serve *problem*, or None."""
    option = problem.option
    if facts.arch != _ARCH:
        return f"it is for {_ARCH}, and this is {facts.arch}"
    if option["tensor_core"] is False:
        return "tensor_core=False, and this schedule uses them"
    if problem.dtype not in ("float16", "bfloat16"):
        return f"it multiplies float16 and bfloat16, not {problem.dtype}"
    if option["accum"] != "float32":
        return f"accum={option['accum']!r}; tensor cores add up in 'float32' here"
    if option["out_dtype"] not in _OUT:
        return f"out_dtype={option['out_dtype']!r}; it writes {', '.join(_OUT)}"
    return None


def configs(problem: Problem, facts: DeviceFacts) -> Sequence[Config]:
    """Return the configs worth trying, the best guess first.

    ``plans``: what a binary can do, as ``Plan`` writes it, of which each call takes the cheapest. A problem whose dims
    are all known has one plan; symbolic dims have the few that serve all extents well, and kernels for few rows.
    """
    symbolic = any(isinstance(extent, str) for extent in problem.dim.values())
    if not symbolic:
        costs = {plan: _cost(plan, problem, {}, facts) for plan in _plans(problem)}
        return [{"plans": str(plan)} for plan in sorted(costs, key=costs.__getitem__)[:6]]
    few = skinny.config(problem, facts) if _few_rows(problem, facts) else {}
    return [{"plans": " ".join(map(str, _cover(problem, facts))), **few}]


def _plans(problem: Problem) -> tuple[Plan, ...]:
    """Return the plans worth considering: with many sums there are registers for a plain epilogue only, gates and
    values are whole boxes, and what is staged of a narrow c is more than 16 bytes of a row."""
    option, item = problem.option, DTYPES[dict(problem.dtypes)["c"]][1] // 8
    found = PLANS if plain(option) else (plan for plan in PLANS if plan.sums <= _MOST_SUMS)
    if option["glu"]:
        found = (plan for plan in found if plan.columns % 128 == 0)
    return tuple(plan for plan in found if plan.chunk(item, bool(option["glu"])) * item > 16)


def _few_rows(problem: Problem, facts: DeviceFacts) -> bool:
    """Tell whether calls of *problem* may have so few rows that others kernels than these are for them."""
    return isinstance(problem.dim["M"], str) and skinny.serves(problem, facts) is None


def _cover(problem: Problem, facts: DeviceFacts) -> list[Plan]:
    """Return the plans that together serve all extents of symbolic dims well, chosen one by one."""
    symbols = sorted({extent for name, extent in problem.dims if name in "BMNK" and isinstance(extent, str)})
    cases = [dict(zip(symbols, extents, strict=True)) for extents in product(_EXTENTS, repeat=len(symbols))]
    costs = {plan: [_cost(plan, problem, case, facts) for case in cases] for plan in _plans(problem)}
    least = [min(column) for column in zip(*costs.values(), strict=True)]

    def loss(plans: Sequence[Plan]) -> float:
        taken = (min(column) for column in zip(*(costs[plan] for plan in plans), strict=True))
        return sum(cost / best for cost, best in zip(taken, least, strict=True)) / len(cases)

    chosen: list[Plan] = []
    while len(chosen) < _MOST_PLANS:
        plan = min(costs, key=lambda p: loss([*chosen, p]))
        if chosen and loss(chosen) - loss([*chosen, plan]) < _LEAST_GAIN:
            break
        chosen.append(plan)
    return chosen


def _cost(plan: Plan, problem: Problem, case: Mapping[str, int], facts: DeviceFacts) -> int:
    """Return the cost of *problem* with *case* for its symbols."""
    b, m, n, k = (case.get(e, 1) if isinstance(e, str) else e for e in (problem.dim[name] for name in "BMNK"))
    across = {name: bool(problem.option[name]) for name in ("trans_a", "trans_b")}
    return plan.cost(b, m, n, k, **across, processors=facts.cores, finish=finish(problem.option))


HOPPER = Schedule(
    name="hopper",
    kernel="gemm",
    kernel_revision=2,
    revision=2,
    targets=("cuda",),
    toolchain="cuda",
    program="tlhub_gemm.hopper_program:program",
    supports=supports,
    configs=configs,
    sources=(
        *(f"tlhub_gemm.{name}" for name in ("hopper", "hopper_plan", "hopper_program")),
        "tlhub/cuda/staging.cuh",
        *(f"tlhub_gemm/cuda/{name}.cuh" for name in ("hopper_tiles", "hopper_finish", "hopper", "align")),
        *skinny.SKINNY.sources,  # few rows, and what is left
    ),
    priority=20,
    doc="TMA and wgmma, persistent, cooperative or ping-pong consumers; any size, strides that TMA takes",
)
