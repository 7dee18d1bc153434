"""The plan of backward_mma.cuh's kernel: its tiles, and what they take. Pure."""

from __future__ import annotations

from typing import NamedTuple

ITEM = 2
"""Bytes of an element of all arrays but lse."""

_KEPT = 640  # bytes of what a block keeps of its call


class Plan(NamedTuple):
    """Tiles of ``queries`` and of ``keys``, of which two warps have ``strip``; ``stages``: tiles of queries held.

    As text 64x128x32x2.
    """

    queries: int
    keys: int
    strip: int
    stages: int

    def __str__(self) -> str:
        return "x".join(map(str, self))

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.keys // self.strip * 64

    @property
    def stats(self) -> int:
        """Bytes of what a tile keeps of its queries: two floats of each."""
        return self.queries * 8

    def sums(self, d: int, d_v: int) -> int:
        """Return the bytes of the sums of a tile's dq."""
        return self.queries * widths(d, d_v)[0] * 4

    def shared(self, d: int, d_v: int) -> int:
        """Return the bytes of shared memory of a block: keys, tiles of queries, P and dS, stats, and its call."""
        rows = self.keys + self.stages * self.queries
        return (rows * sum(widths(d, d_v)) + 2 * self.keys * self.queries) * ITEM + self.stages * self.stats + _KEPT


def widths(d: int, d_v: int) -> tuple[int, int]:
    """Return the channels in shared memory of q and k, and of v, for heads of *d* and *d_v*."""
    step = 128 if max(d, d_v) > 64 else 64
    return -(-d // step) * step, -(-d_v // step) * step


_SQUARE, _ROOM = Plan(128, 128, 32, 2), 200 * 1024
"""For narrow heads where there are so many bytes, but with ALiBi, which takes the registers that it needs."""
_NARROW = (Plan(64, 64, 32, 2), Plan(64, 128, 32, 2))
_MIDDLE = (Plan(64, 128, 32, 2), Plan(32, 64, 16, 2))
_WIDE = (Plan(64, 64, 16, 2), Plan(32, 64, 16, 2), Plan(32, 32, 16, 1))


def plans(d: int, d_v: int, shared_memory: int, alibi: bool = False) -> tuple[Plan, ...]:
    """Return the plans for heads of *d* channels of q and k and *d_v* of v that fit *shared_memory* bytes, the
    fastest on an H200 first."""
    most = max(d, d_v)
    narrow = (*((_SQUARE,) if shared_memory > _ROOM and not alibi else ()), *_NARROW)
    some = narrow if most <= 64 else _MIDDLE if most <= 128 else _WIDE
    return tuple(plan for plan in some if plan.shared(d, d_v) <= shared_memory)
