"""Plans of decode_hopper.cuh's kernels, and which serve a problem: a choice without a measurement. Pure."""

from __future__ import annotations

import re
from typing import NamedTuple

from tlhub.errors import BuildError

KEYS = 64
"""Keys of a unit of work."""

_BOX = 64 * KEYS * 2  # bytes: 64 channels of a unit's keys, or values
_SHARED = 227 * 1024  # bytes that a block may have
_IN_FLIGHT = 64 * 1024  # bytes on their way to an SM that keep the memory busy
_MOST_STAGES = 12
_TEXT = re.compile(r"(\d+)x(\d+)x(\d+)")


class Plan(NamedTuple):
    """One kernel: tiles of ``rows``, queries of the heads that share a kv head, for ``warps``, and a ring of ``stages``
    units. Written as ``16x4x6``."""

    rows: int
    warps: int
    stages: int

    @classmethod
    def parse(cls, text: str) -> Plan:
        """Return the plan that ``str`` wrote. Raises BuildError."""
        match = _TEXT.fullmatch(text)
        if not match:
            raise BuildError(f"{text!r} is no plan; it is the rows of a tile, warps and stages, as in '16x4x6'")
        return cls(*map(int, match.groups()))

    def __str__(self) -> str:
        return "x".join(map(str, self))

    @property
    def threads(self) -> int:
        """Of a block: the warps that compute, and the one that loads."""
        return 32 * (self.warps + 1)

    def shared(self, d: int, d_v: int) -> int:
        """Return the bytes of shared memory of a block: the ring, what warps put together at a tile's end, barriers."""
        along_rows = self.rows // 16
        slots = along_rows * (self.warps // along_rows // 2)
        return self.stages * (unit(d, d_v) + 16) + slots * 32 * 4 * (-(-d_v // 16) * 8 + 4)

    def scratch(self, d_v: int) -> str:
        """Return the bytes of scratch memory, as a C expression: two parts of a tile for each block."""
        return f"SMS * {2 * self.rows * (d_v + 2) * 4}"


def unit(d: int, d_v: int) -> int:
    """Return the bytes of a unit: boxes of 64 channels of keys and of values."""
    return (-(-d // 64) + -(-d_v // 64)) * _BOX


def plans(d: int, d_v: int) -> tuple[Plan, ...]:
    """Return the plans for heads of *d* channels of q and k, and *d_v* of v: by rows, the fewest first.

    More rows take the last, several times, which reads the keys as often. Four warps and the one that loads have all
    registers that there can be, and eight two thirds of that.
    """
    kept = d + 2 * d_v  # four times the registers that a row's q and o take of a thread
    each = (16, 32, 64) if kept <= 640 else (16,)
    return tuple(_fit(Plan(rows, 8 if rows > 16 and kept <= 384 else 4, 0), d, d_v) for rows in each)


def _fit(plan: Plan, d: int, d_v: int) -> Plan:
    """Return *plan* with its stages.

    Measured on an H200, blocks of few rows that have more on their way get out of step and read 5% slower. More rows,
    which take longer to compute, have the stages that there is room for.
    """
    if plan.rows == 16:
        return plan._replace(stages=max(2, _IN_FLIGHT // unit(d, d_v)))
    return plan._replace(stages=min(_MOST_STAGES, (_SHARED - plan.shared(d, d_v)) // (unit(d, d_v) + 16)))
