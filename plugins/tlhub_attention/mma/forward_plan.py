"""Plans of forward_mma.cuh's kernel, and which serves a problem on a device: a choice without a measurement. Pure."""

from __future__ import annotations

import re
from typing import NamedTuple

from tlhub.errors import BuildError

ITEM = 2
"""Bytes of an element of q, k and v."""

_STAGES = 2  # of the ring of blocks of keys
_KEPT = 1024  # bytes of shared memory that the system has of each block
_REGISTERS = 65536  # of an SM
_MOST_REGISTERS = 255  # of a thread
_BESIDE = 60  # registers of a thread besides logits and sums
_FINISHING = 12  # and more, where logits are finished before their maximum is taken
_TEXT = re.compile(r"(\d+)x(\d+)x(\d+)x(\d+)")


class Room(NamedTuple):
    """Bytes of shared memory that a ``block`` may have, and those of all blocks of an ``sm``."""

    block: int
    sm: int

    @classmethod
    def of(cls, arch: str, block: int) -> Room:
        """Return that of an arch, where a block may have so much: an SM has hardly more. Code for every device is for
        the least that a block may have, and for an SM like that of compute capability 8.0."""
        return cls(block, 164 * 1024 if arch.startswith("cuda:compute_") else block + _KEPT)


class Plan(NamedTuple):
    """One kernel: tiles of ``queries``, 16 or 32 a warp, against blocks of ``keys``, by ``warps``; ``blocks``: how many
    of threads an SM has at once. Written as ``128x64x4x2``."""

    queries: int
    keys: int
    warps: int
    blocks: int

    @classmethod
    def parse(cls, text: str) -> Plan:
        """Return the plan that ``str`` wrote. Raises BuildError."""
        match = _TEXT.fullmatch(text)
        if not match:
            raise BuildError(
                f"{text!r} is no plan; it is the queries of a tile, the keys of a block, warps, and blocks of an SM, "
                "as in '128x64x4x2'"
            )
        return cls(*map(int, match.groups()))

    def __str__(self) -> str:
        return "x".join(map(str, self))

    @property
    def threads(self) -> int:
        """Of a block."""
        return 32 * self.warps

    def shared(self, d: int, d_v: int) -> int:
        """Return the bytes of shared memory of a block: q, and the ring of k and v."""
        wide, wide_v = round_up(d, 16), round_up(d_v, 16)
        return (self.queries * wide + _STAGES * self.keys * (wide + wide_v)) * ITEM

    def registers(self, d_v: int) -> int:
        """Return how many registers of a thread have logits and sums."""
        return self.queries // self.warps // 16 * (self.keys + round_up(d_v, 16)) // 2

    def finished(self, d_v: int) -> Plan:
        """Return the plan where logits are finished before their maximum is taken."""
        room = self.registers(d_v) + _BESIDE + _FINISHING <= _MOST_REGISTERS
        return self if room else self._replace(keys=self.keys - 16)

    def fits(self, d: int, d_v: int, room: Room) -> bool:
        """Return whether an SM holds its blocks."""
        shared, most = self.shared(d, d_v), min(_REGISTERS // (self.blocks * self.threads), _MOST_REGISTERS)
        return (
            shared <= room.block and self.blocks * (shared + _KEPT) <= room.sm and self.registers(d_v) + _BESIDE <= most
        )


_PLANS = (
    *(Plan(128, keys, 4, 2) for keys in (64, 48, 32)),
    *(Plan(128, keys, 8, 1) for keys in (64, 48, 32)),
    Plan(64, 32, 4, 1),
)
"""From the fastest on; the last fits every device of compute capability 8.0 and newer."""


def plan(d: int, d_v: int, room: Room) -> Plan:
    """Return the plan for heads of *d* channels of q and k, and *d_v* of v."""
    return next(plan for plan in _PLANS if plan.fits(d, d_v, room))


def round_up(x: int, to: int) -> int:
    return -(-x // to) * to
