"""Tiles of the kernels for a few rows, and how a config names them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from tlhub.errors import BuildError
from tlhub.specs import Config
from tlhub_gemm.arch import is_hopper

TOKENS = (8, 16, 32, 64)
"""The most rows of C that a kernel serves."""

NAME = "skinny_{}"
"""The name of the kernel for so many rows, and of the knob that has its tile."""


class Tile(NamedTuple):
    """What a block of a kernel does: ``rows`` columns of C, a ``split``-th of K, in a ring of ``stages`` tiles, each
    ``depth`` of K deep (on Hopper 64)."""

    rows: int
    split: int
    depth: int
    stages: int

    @classmethod
    def parse(cls, text: str) -> Tile:
        """Return the tile that ``str`` wrote. Raises BuildError."""
        parts = text.split("x")
        if len(parts) != 4 or not all(part.isdigit() for part in parts):
            raise BuildError(
                f"{text!r} is no tile; it is four numbers: rows, split, depth and stages, as in '64x2x64x6'"
            )
        return cls(*map(int, parts))

    def __str__(self) -> str:
        return "x".join(map(str, self))

    def warps(self, tokens: int) -> tuple[int, int]:
        """Return how many warps share the rows, and how many the depth: four in all, more where the sums need it."""
        pieces = self.rows // 16
        most = 2 if tokens == 64 else 4
        along_n = next(n for n in range(1, pieces + 1) if pieces % n == 0 and pieces // n <= most)
        along_k = next((k for k in (4, 2) if along_n * k <= 4 and self.depth % (16 * k) == 0), 1)
        return along_n, along_k

    def threads(self, tokens: int, arch: str) -> int:
        """Return the threads of a block."""
        if is_hopper(arch):
            return 2 * self.rows + 32  # a warp group for 64 rows, and the warp that loads
        along_n, along_k = self.warps(tokens)
        return 32 * along_n * along_k

    def shared(self, tokens: int, trans_b: bool, arch: str) -> int:
        """Return the bytes of shared memory that a block needs: of the ring, or of the sums that take its place."""
        if is_hopper(arch):
            barriers = 16 * self.stages
            return max(self.stages * (self.rows + tokens) * 128, 4 * tokens * (self.rows + 4)) + barriers
        outer, inner = (self.rows, self.depth) if trans_b else (self.depth, self.rows)
        stage = 2 * (outer * (inner + 8) + tokens * (self.depth + 8))
        return max(self.stages * stage, 4 * self.warps(tokens)[1] * tokens * (self.rows + 4))


def config(tiles: Mapping[int, Tile]) -> dict[str, str]:
    """Return the knobs of kernels with *tiles* by number of tokens."""
    return {NAME.format(tokens): str(tile) for tokens, tile in tiles.items()}


def tiles(config: Config) -> dict[int, Tile]:
    """Return the tiles that a config names, fewest tokens first."""
    found = ((tokens, config.get(NAME.format(tokens))) for tokens in TOKENS)
    return {tokens: Tile.parse(str(text)) for tokens, text in found if text}
