"""Plans of decode_hopper.cuh's kernels, and which serve a problem: a choice without a measurement. Pure."""

from __future__ import annotations

from tlhub_attention.cuda.decode_plan import Plan, chunk

BARRIERS = 16
"""Bytes of a stage's barriers."""

_SHARED = 227 * 1024  # bytes that a block may have
_IN_FLIGHT = 64 * 1024  # bytes on their way to an SM that keep the memory busy
_MOST_STAGES = 24


def threads(plan: Plan) -> int:
    """Return the threads of a block: of the warps that compute, and of the one that loads, or where registers are dealt
    out anew of its group."""
    return 32 * (plan.warps + (4 if plan.warps == 8 else 1))


def plans(d: int, d_v: int) -> tuple[Plan, ...]:
    """Return the plans for heads of *d* channels of q and k, and *d_v* of v: by rows, the fewest first.

    More rows take the last, several times, which reads the keys as often.
    """
    kept = d + 2 * d_v  # four times the registers that a row's q and o take of a thread
    each = (16, 32, 64) if kept <= 640 else (16,)
    return tuple(_fit(Plan(rows, 8 if rows > 16 and kept <= 384 else 4, 0), d, d_v) for rows in each)


def _fit(plan: Plan, d: int, d_v: int) -> Plan:
    """Return *plan* with its stages.

    Measured on an H200, blocks of few rows that have more on their way read 5% slower. More rows, which take longer to
    compute, have the stages that there is room for.
    """
    if plan.rows == 16:
        units = max(2, _IN_FLIGHT // (plan.chunks * chunk(d, d_v)))
        return plan._replace(stages=units * plan.chunks)
    room = plan.filled(d, d_v, _SHARED, BARRIERS)
    return room._replace(stages=min(_MOST_STAGES, room.stages))
