"""Plans of decode_mma.cuh's kernels, and which serve a problem: a choice without a measurement. Pure."""

from __future__ import annotations

from tlhub_attention.cuda.decode_plan import Plan

_IN_FLIGHT = 64 * 1024  # bytes on their way to an SM that keep the memory busy
_WARPS = {16: (4, 2), 32: (8, 4), 64: (8, 4)}  # of a tile's rows, as there is room in shared memory
_RESERVED = 1024  # bytes of shared memory of each block besides its own


def plans(d: int, d_v: int, shared_memory: int) -> tuple[Plan, ...]:
    """Return the plans for heads of *d* channels of q and k, and *d_v* of v: by rows, the fewest first.

    More rows take the last, several times, which reads the keys as often.
    """
    kept = d + 2 * d_v  # four times the registers that a row's q and o take of a thread
    fitting = (_fit(rows, d, d_v, shared_memory) for rows in _WARPS if rows == 16 or kept <= 640)
    return tuple(plan for plan in fitting if plan)


def _fit(rows: int, d: int, d_v: int, shared_memory: int) -> Plan | None:
    """Return the plan of tiles of *rows*, or None if there is no room.

    A warp holds two chunks at least, one of which is on its way. Two blocks of an SM, where registers and shared memory
    are enough, hide what each waits for.
    """
    for warps in _WARPS[rows]:
        for blocks in (2, 1) if rows == 16 else (1,):
            plan = Plan(rows, warps, 0, blocks)
            room = (shared_memory + _RESERVED) // blocks - _RESERVED
            units = plan.filled(d, d_v, room).stages // plan.chunks
            if units >= 2:
                held = 1 + max(1, _IN_FLIGHT // (blocks * plan.chunks * plan.stage(d, d_v)))
                return plan._replace(stages=min(units, held) * plan.chunks)
    return None
