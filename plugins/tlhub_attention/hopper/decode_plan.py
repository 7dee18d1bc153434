"""Plans of decode_hopper.cuh's kernels, and which serve a problem: a choice without a measurement. Pure."""

from __future__ import annotations

from tlhub_attention.cuda.decode_plan import Plan

BARRIERS = 24
"""Bytes of a stage's barriers."""

_SHARED = 227 * 1024  # bytes that a block may have
_IN_FLIGHT = 64 * 1024  # bytes on their way to an SM that keep the memory busy
_MOST_STAGES = 24

CLUSTERS = (8, 4, 2)
"""Blocks of the clusters that share a tile, by the first that a call is for."""

GRID = "(SMS < 8 ? SMS : SMS / 8 * 8)"
"""The blocks of a launch: so many that several heads, whose keys lie beside each other, are read at the same time."""


def threads(plan: Plan) -> int:
    """Return the threads of a block: of the warps that compute, and of the one that loads, or where 8 compute, for
    which registers are dealt out anew, of its group."""
    computing = plan.turns * plan.warps
    return 32 * (computing + (4 if computing == 8 else 1))


def together(plan: Plan, blocks: int) -> str:
    """Return the condition, in C, that a call of B * H_kv tiles is for clusters of so many blocks.

    Measured on an H200: adding up in a cluster saves 1 to 3 us, which more than 8 units of a block lose; or 4, where
    clusters of more than two blocks are too many to have an SM for each.
    """
    units, tiles = blocks * plan.keys, f"B * H_kv * {blocks}"
    few = f"S_kv <= ({tiles} <= SMS / 2 ? {8 * units} : {4 * units})" if blocks > 2 else f"S_kv <= {8 * units}"
    return f"{tiles} <= SMS && {few}"


def exchange(d_v: int) -> int:
    """Return the bytes of shared memory in which blocks of a cluster add up rows."""
    return 16 * (-(-d_v // 16) * 16 + 2) * 4


def plans(d: int, d_v: int) -> tuple[Plan, ...]:
    """Return the plans for heads of *d* channels of q and k, and *d_v* of v: by rows, the fewest first.

    More rows take the last, several times, which reads the keys as often.
    """
    kept = d + 2 * d_v  # four times the registers that a row's q and o take of a thread
    if kept > 640:
        return (_fit(Plan(16, 4, 0), d, d_v),)
    if kept > 384:
        return tuple(_fit(Plan(rows, 4, 0), d, d_v) for rows in (16, 32, 64))
    more = [Plan(64, 4, 0, turns=2, chunk=64)] if d_v % 64 == 0 else [Plan(32, 8, 0), Plan(64, 8, 0)]
    return tuple(_fit(plan, d, d_v) for plan in (Plan(16, 4, 0, turns=2), *more))


def plan_of_clusters(d: int, d_v: int) -> Plan:
    """Return the plan for few tiles, each of a cluster. Two blocks of an SM let clusters fit into a device whatever its
    parts of SMs are."""
    plan = _fit(Plan(16, 4, 0), d, d_v)
    twice = 2 * (plan.shared(d, d_v, BARRIERS) + exchange(d_v) + 1024) <= _SHARED + 1024
    return plan._replace(blocks=2 if twice and d + 2 * d_v <= 384 else 1)


def _fit(plan: Plan, d: int, d_v: int) -> Plan:
    """Return *plan* with its stages.

    Measured on an H200, few rows read as fast with 64 KiB on their way to an SM as with more. More rows, which take
    longer to compute, have the stages that there is room for.
    """
    if plan.rows == 16:
        units = max(2, _IN_FLIGHT // (plan.chunks * plan.stage(d, d_v)))
        return plan._replace(stages=units * plan.chunks)
    room = plan.filled(d, d_v, _SHARED, BARRIERS)
    return room._replace(stages=min(_MOST_STAGES, room.stages))
