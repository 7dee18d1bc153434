"""Plans of product_hopper.cuh's kernel, and what a call costs by each: a choice without a measurement. Pure."""

from __future__ import annotations

import re
from typing import NamedTuple

from tlhub.errors import BuildError

BYTES = 128
"""Bytes of K in a stage."""

_SHARED = 227 * 1024  # bytes that a block may have
_MOST_STAGES = 8
_BAND = 2048  # rows of C that are walked column by column
_LOAD = 19  # tenths of a cycle to load 128 bytes of an operand with all SMs busy
_TEXT = re.compile(r"(\d+)x(\d+)(?:-b(\d+))?")


class Plan(NamedTuple):
    """One kernel: tiles of ``rows`` x ``columns``, of which ``share`` blocks below each other share B as a cluster.
    Written as ``128x256-b2``."""

    rows: int
    columns: int
    share: int = 1

    @classmethod
    def parse(cls, text: str) -> Plan:
        """Return the plan that ``str`` wrote. Raises BuildError."""
        match = _TEXT.fullmatch(text)
        if not match:
            raise BuildError(f"{text!r} is no plan; it is a tile, and how many share B, as in '128x256-b2'")
        return cls(*(int(n or 1) for n in match.groups()))

    def __str__(self) -> str:
        return f"{self.rows}x{self.columns}" + (f"-b{self.share}" if self.share > 1 else "")

    @property
    def consumers(self) -> int:
        """Warp groups that multiply."""
        return 1 if self.rows == 64 else 2

    @property
    def threads(self) -> int:
        """Of a block: the consumers', and the producer's."""
        return (self.consumers + 1) * 128

    @property
    def band(self) -> int:
        """Rows of clusters that are walked column by column."""
        return max(1, _BAND // (self.rows * self.share))

    def chunk(self, item: int, glu: bool) -> int:
        """Return how many columns of C, of *item* bytes, a warp stages at once. *glu*: C has half the columns."""
        columns = self.columns // (2 if glu else 1)
        return next(n for n in (128, 64, 32) if columns % n == 0 and n * item <= 128)

    def stages(self, item: int, glu: bool) -> int:
        """Return how many stages of the ring there is room for beside the rest."""
        return min(_MOST_STAGES, (_SHARED - self._staging(item, glu)) // self._stage)

    def shared(self, item: int, glu: bool) -> int:
        """Return the bytes of shared memory of a block: the ring with two barriers a stage, and what is staged."""
        return self.stages(item, glu) * self._stage + self._staging(item, glu)

    @property
    def _stage(self) -> int:
        return (self.rows + self.columns) * BYTES + 16

    def _staging(self, item: int, glu: bool) -> int:
        chunk = self.chunk(item, glu)
        chunks = self.columns // (2 if glu else 1) // chunk * (self.rows // self.consumers // 64)
        return 4 * self.consumers * min(2, chunks) * 16 * chunk * item

    def _cycles(self, promoted: bool) -> tuple[int, int]:
        """Cycles of a stage, and of an epilogue."""
        products = self.rows * self.columns // 32
        loads = (self.rows + self.columns // self.share) * _LOAD // 10
        alone = 60 if self.consumers == 1 else 0  # the tensor core waits while sums are added up
        stage = max(products, loads) + (180 + alone if promoted else 120) + (20 if self.share > 1 else 0)
        return stage, 8 * products + 500

    def price(self, clusters: str, promoted: bool, depth: int, parts: int) -> str:
        """Return what a product is expected to take, in cycles, as a C expression: waves of a block a processor, stages
        of *depth* elements, epilogues. *clusters*: how many have a tile."""
        stage, epilogue = self._cycles(promoted)
        waves = f"CEIL_DIV({clusters}, SMS / {self.share})"
        return f"{waves} * (CEIL_DIV(K, {depth}) * {parts * stage} + {epilogue})"

    def cost(self, b: int, m: int, n: int, k: int, *, promoted: bool, depth: int, parts: int, processors: int) -> int:
        """Return what ``price`` computes."""
        stage, epilogue = self._cycles(promoted)
        waves = -(-(b * -(-m // (self.rows * self.share)) * -(-n // self.columns)) // (processors // self.share))
        return waves * (-(-k // depth) * parts * stage + epilogue)


PLAIN = tuple(
    Plan.parse(text)
    for text in (
        "128x256 128x256-b2 256x128 256x128-b2 128x192 128x128 128x64 128x32 64x256 64x128 64x64 64x32"
    ).split()
)
"""The plans worth considering where sums stay in the tensor core's registers; the first of equals is chosen."""

PROMOTED = tuple(
    Plan.parse(text)
    for text in ("256x128 256x128-b2 128x128-b2 128x128 128x192 128x192-b2 128x64 128x32 64x128 64x64 64x32").split()
)
"""Likewise where they are added up in registers of their own."""
