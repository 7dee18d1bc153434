"""Plans of the kernels that decode on tensor cores: what a block has. Pure."""

from __future__ import annotations

import re
from typing import NamedTuple

from tlhub.errors import BuildError

_BOX = 64 * 2  # bytes: 64 channels of a key, or of a value
_TEXT = re.compile(r"x".join([r"(\d+)"] * 6))


class Plan(NamedTuple):
    """One kernel: tiles of ``rows``, queries of the heads that share a kv head, for ``warps``; ``stages`` chunks of
    keys in shared memory; ``blocks`` of an SM; ``turns``, sets of that many warps, which have tiles by turns, so that
    one adds up its own while another reads; ``chunk``, keys that a warp multiplies at once, 64 by wgmma. Written as
    ``16x4x8x1x2x16``."""

    rows: int
    warps: int
    stages: int
    blocks: int = 1
    turns: int = 1
    chunk: int = 16

    @classmethod
    def parse(cls, text: str) -> Plan:
        """Return the plan that ``str`` wrote. Raises BuildError."""
        match = _TEXT.fullmatch(text)
        if not match:
            raise BuildError(
                f"{text!r} is no plan; it is rows of a tile, warps, stages, blocks of an SM, turns and keys of a chunk,"
                " as in '16x4x8x1x2x16'"
            )
        return cls(*map(int, match.groups()))

    def __str__(self) -> str:
        return "x".join(map(str, self))

    @property
    def wide(self) -> bool:
        """Whether products are by wgmma, whose operands lie by 64 channels."""
        return self.chunk == 64

    @property
    def chunks(self) -> int:
        """Of a unit: one of each warp that computes, or of those that have the rows of a tile."""
        return self.warps // (self.rows // 16)

    @property
    def keys(self) -> int:
        """Of a unit."""
        return self.chunks * self.chunk

    def stage(self, d: int, d_v: int) -> int:
        """Return the bytes of a chunk in shared memory, whose channels are a multiple of 64."""
        return self.chunk * (-(-d // 64) + -(-d_v // 64)) * _BOX

    def meeting(self, d_v: int) -> int:
        """Return the bytes of shared memory in which warps add up what they have at a tile's end."""
        return self.turns * (self.warps - self.rows // 16) * _slot(d_v)

    def shared(self, d: int, d_v: int, barriers: int = 0) -> int:
        """Return the bytes of shared memory of a block; *barriers*: those of a stage."""
        return self.stages * (self.stage(d, d_v) + barriers) + self.meeting(d_v)

    def filled(self, d: int, d_v: int, shared_memory: int, barriers: int = 0) -> Plan:
        """Return the plan with as many stages as there is room for, the same number for each chunk of a unit."""
        left = shared_memory - self.meeting(d_v)
        return self._replace(stages=left // (self.chunks * (self.stage(d, d_v) + barriers)) * self.chunks)

    @property
    def grid(self) -> str:
        """The blocks of a launch, as a C expression."""
        return f"SMS * {self.blocks}"

    def scratch(self, d_v: int) -> str:
        """Return the bytes of scratch memory, as a C expression: for each block a part of a tile, and as many tags."""
        return f"{self.grid} * {self.rows // 16 * 2 * _slot(d_v)}"


def _slot(d_v: int) -> int:
    """Return the bytes of what a warp has of 16 rows: sums by channel, and of each row a peak and a total."""
    return 32 * 4 * (-(-d_v // 16) * 8 + 4)
