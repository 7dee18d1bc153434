"""Plans of forward_hopper.cuh's kernel, and which serves a problem: a choice without a measurement. Pure."""

from __future__ import annotations

import re
from typing import NamedTuple

from tlhub.errors import BuildError

ITEM = 2
"""Bytes of an element of q, k and v."""

_STAGES = 2  # of the rings of keys and of values
_SHARED = 227 * 1024  # bytes that a block may have
_TEXT = re.compile(r"(\d+)x(\d+)")


class Plan(NamedTuple):
    """One kernel: tiles of ``queries``, 64 a consumer, against blocks of ``keys``. Written as ``128x176``."""

    queries: int
    keys: int

    @classmethod
    def parse(cls, text: str) -> Plan:
        """Return the plan that ``str`` wrote. Raises BuildError."""
        match = _TEXT.fullmatch(text)
        if not match:
            raise BuildError(
                f"{text!r} is no plan; it is the queries of a tile and the keys of a block, as in '128x128'"
            )
        return cls(*map(int, match.groups()))

    def __str__(self) -> str:
        return f"{self.queries}x{self.keys}"

    @property
    def groups(self) -> int:
        """Consumers, a warp group each."""
        return self.queries // 64

    @property
    def capped(self) -> Plan:
        """The plan where logits are capped, which takes more registers than three consumers have."""
        return Plan(min(self.queries, 128), self.keys)

    @property
    def threads(self) -> int:
        """Of a block: the consumers', and the producer's warp group."""
        return (self.groups + 1) * 128

    def tiles(self, d: int, d_v: int, item: int) -> int:
        """Return how many tiles' queries there is room for, beside a chunk of o: 1, or 2 that overlap."""
        return 2 if self._beside(d, d_v, 2) + self._chunks(d_v, item) <= _SHARED else 1

    def buffers(self, d: int, d_v: int, item: int) -> int:
        """Return how many chunks of o, of *item* bytes an element, a warp can stage; 0 where the plan has no room."""
        room = _SHARED - self._beside(d, d_v, self.tiles(d, d_v, item))
        return max(0, min(2, room // self._chunks(d_v, item), -(-d_v // chunk(d_v, item))))

    def shared(self, d: int, d_v: int, item: int) -> int:
        """Return the bytes of shared memory of a block: q, two rings, what is staged, and barriers."""
        return self._beside(d, d_v, self.tiles(d, d_v, item)) + self.buffers(d, d_v, item) * self._chunks(d_v, item)

    def price(self, d: int, d_v: int, item: int, keys: str = "S_kv") -> str:
        """Return what a tile is expected to take, as a C expression: its *keys*, what a block has besides, and what a
        tile has that does not begin as another ends. The numbers are fitted to times on an H200."""
        alone = 320 if self.tiles(d, d_v, item) == 1 else 0
        return f"(CEIL_DIV({keys}, {self.keys}) * {self.keys + 35} + {alone})"

    def _chunks(self, d_v: int, item: int) -> int:
        """Return the bytes of a chunk of o of each warp."""
        return 4 * self.groups * 16 * chunk(d_v, item) * item

    def _beside(self, d: int, d_v: int, tiles: int) -> int:
        """Return the bytes of all but what is staged."""
        wide = round_up(d, 64)
        rings = _STAGES * self.keys * (wide + round_up(d_v, 32)) * ITEM
        return tiles * self.queries * wide * ITEM + rings + 8 * (2 * tiles + 4 * _STAGES)


def box(d_v: int) -> int:
    """Return the channels of a box of v."""
    return 64 if round_up(d_v, 32) % 64 == 0 else 32


def chunk(d_v: int, item: int) -> int:
    """Return how many channels of o, of *item* bytes, a warp stages at once."""
    return 32 if item == 4 else box(d_v)


def round_up(x: int, to: int) -> int:
    return -(-x // to) * to


def plans(d: int, d_v: int, causal: bool) -> tuple[Plan, ...]:
    """Return the plans for heads of *d* channels of q and k, and *d_v* of v, of which a call takes the cheapest; the
    last is for capped logits too."""
    if max(d, d_v) <= 64:
        return (Plan(192, 128),)
    if max(d, d_v) <= 128:
        return (Plan(128, 128),) if causal else (Plan(128, 160), Plan(128, 128))
    if d <= 192 and d_v <= 128:
        return (Plan(128, 128),)
    return (Plan(128, 96),) if max(d, d_v) <= 192 else (Plan(128, 64),)
