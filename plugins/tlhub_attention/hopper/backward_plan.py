"""The plan of backward_hopper.cuh's kernel: its tile of queries, and what that takes. Pure."""

from __future__ import annotations

from typing import NamedTuple

KEYS = 128
"""Keys of a tile, half of them a consumer's."""

THREADS = 384
"""Of a block: two consumers, and the producer's warp group."""

ITEM = 2
"""Bytes of an element of all arrays but lse."""

PART = 64 * 64 * 4
"""Bytes of one of the two parts that a tile's sums of dq are in."""

_STAGES = 2  # of the rings


class Plan(NamedTuple):
    """Tiles of ``queries``: 128 for up to 64 channels, or 64 for up to 128."""

    queries: int

    @property
    def channels(self) -> int:
        """Channels of q and k in shared memory."""
        return 8192 // self.queries

    @property
    def stats(self) -> int:
        """Bytes of what a tile keeps of its queries: two floats of each."""
        return self.queries * 8

    def shared(self, d_v: int) -> int:
        """Return the bytes of shared memory of a block: keys, two rings, dS, dq, and barriers."""
        channels = self.channels + round_up(d_v, 64)
        ring = self.queries * channels * ITEM + KEYS * self.queries * ITEM + self.stats
        return KEYS * channels * ITEM + _STAGES * ring + 2 * PART + 8 * (2 + 4 * _STAGES) + 8


def round_up(x: int, to: int) -> int:
    return -(-x // to) * to


def plans(d: int, d_v: int) -> tuple[Plan, Plan]:
    """Return the plans for heads of *d* channels of q and k and *d_v* of v: for plain logits, and for capped ones,
    which take more registers."""
    return Plan(128 if max(d, d_v) <= 64 else 64), Plan(64)
