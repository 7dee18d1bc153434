"""The plan of backward_hopper.cuh's kernels: tiles of queries and of keys, and what they take. Pure."""

from __future__ import annotations

from typing import NamedTuple

THREADS = 384
"""Of a block: two consumers, and the producer's warp group."""

ITEM = 2
"""Bytes of an element of all arrays but lse."""

PART = 64 * 64 * 4
"""Bytes of a part of a tile's sums of dq, and of what is handed on in shared memory at a time."""

_STAGES = 2  # of the rings
_CONSUMERS = 2
_ROOM = 227 * 1024  # bytes of shared memory that a block may have


class Plan(NamedTuple):
    """Tiles of ``queries``, and ``channels`` of q and k in shared memory. ``wide``: consumers share out the sums of
    dk and dv, not the keys. ``paired``: blocks are in clusters of two, that have a tile of keys together."""

    queries: int
    channels: int
    wide: bool = False
    paired: bool = False

    @property
    def keys(self) -> int:
        """Keys of a block."""
        return 64 if self.wide else 128

    @property
    def cluster(self) -> int:
        """Blocks of a tile of keys."""
        return 2 if self.paired else 1

    @property
    def parts(self) -> int:
        """Parts of a tile's sums of dq."""
        return self.channels // 64 if self.wide else _CONSUMERS

    @property
    def stats(self) -> int:
        """Bytes of what a tile keeps of its queries: two floats of each."""
        return self.queries * 8

    @property
    def arguments(self) -> str:
        """Those of Plan in CUDA."""
        return f"{self.queries}, {str(self.wide).lower()}, {str(self.paired).lower()}"

    def shared(self, d_v: int) -> int:
        """Return the bytes of shared memory of a block: keys, two rings, dS, what is handed on, what another block
        sends, barriers, and the tile."""
        channels = self.channels + round_up(d_v, 64)
        ring = _STAGES * (self.queries * channels * ITEM + self.stats)
        slopes = _STAGES * self.keys * self.queries * ITEM
        handed = (1 if self.wide else _CONSUMERS) * PART
        peer = slopes + self.keys * self.channels * ITEM if self.paired else 0
        return self.keys * channels * ITEM + ring + slopes + handed + peer + 8 * (2 + 6 * _STAGES) + 64


def round_up(x: int, to: int) -> int:
    return -(-x // to) * to


def plans(d: int, d_v: int) -> tuple[Plan, Plan]:
    """Return the plans for heads of *d* channels of q and k and *d_v* of v: for plain logits, and for capped ones,
    which take more registers."""
    if max(d, d_v) > 128:
        paired = Plan(64, round_up(d, 64), wide=True, paired=True)
        wide = paired if paired.shared(d_v) <= _ROOM else paired._replace(paired=False)
        return wide, wide
    return Plan(128, 64) if max(d, d_v) <= 64 else Plan(64, 128), Plan(64, 128)
