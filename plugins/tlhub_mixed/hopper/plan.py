"""Plans of product_hopper.cuh's kernel, and what a call costs by each: a choice without a measurement. Pure."""

from __future__ import annotations

import re
from typing import NamedTuple

from tlhub.errors import BuildError
from tlhub_mixed.cuda.operands import BYTES, OF_BLOCKS, OF_ROWS

_SHARED = 227 * 1024  # bytes that blocks of a processor may have, but for 1024 of each but the first
_MOST_STAGES = 8
_LEAST_CHUNK = 32  # bytes of a row of C that a warp stages
_BAND = 2048  # rows of C that are walked column by column
_LOAD = 23  # tenths of a cycle to load 128 bytes of an operand with all SMs busy
_TEXT = re.compile(r"(\d+)x(\d+)(?:-b(\d+))?(?:-k(\d+))?")


class Plan(NamedTuple):
    """One kernel: tiles of ``rows`` x ``columns``, of which ``share`` blocks below each other share B as a cluster, or
    ``split`` blocks have one tile, and a part of K each. Written as ``128x256-b2``, ``64x64-k4``."""

    rows: int
    columns: int
    share: int = 1
    split: int = 1

    @classmethod
    def parse(cls, text: str) -> Plan:
        """Return the plan that ``str`` wrote. Raises BuildError."""
        match = _TEXT.fullmatch(text)
        if not match:
            raise BuildError(f"{text!r} is no plan; it is a tile, and how many share B or split K, as in '128x256-b2'")
        return cls(*(int(n or 1) for n in match.groups()))

    def __str__(self) -> str:
        shared, split = (f"-{name}{n}" if n > 1 else "" for name, n in (("b", self.share), ("k", self.split)))
        return f"{self.rows}x{self.columns}{shared}{split}"

    @property
    def cluster(self) -> int:
        """Blocks of a cluster."""
        return self.share * self.split

    @property
    def consumers(self) -> int:
        """Warp groups that multiply: they have rows each, or of a tile of 64 rows columns."""
        return 1 if self.rows == 64 and not self._beside else 2

    @property
    def resident(self) -> int:
        """Blocks that a processor has room for."""
        return 2 if self.consumers == 1 else 1

    @property
    def _beside(self) -> bool:
        return self.rows == 64 and self.columns > 128

    def halves(self, glu: bool) -> int:
        """Return of how many boxes B's tile is: of those that share it, or of each consumer's gates and values."""
        return (4 if self._beside else 2) if glu else self.share

    def at_once(self, promoted: bool) -> int:
        """Return the columns of a product: what registers allow where sums are *promoted*."""
        columns = self.columns // 2 if self._beside else self.columns
        return columns // 2 if promoted and columns > 192 else columns

    def finished(self, glu: bool) -> int:
        """Return the columns of C that a consumer of a block finishes."""
        return self.columns // (2 if self._beside else 1) // self.split // (2 if glu else 1)

    def serves(self, item: int, glu: bool) -> bool:
        """Tell whether a warp has whole chunks of C, of *item* bytes, and gates and values are whole boxes of B."""
        return self.finished(glu) * item >= _LEAST_CHUNK and not (glu and self.columns % 128)

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
        fits = (n for n in (128, 64, 32, 16) if self.finished(glu) % n == 0 and _LEAST_CHUNK <= n * item <= BYTES)
        return next(fits)

    def stages(self, item: int, glu: bool, scales: int) -> int:
        """Return how many stages of the ring there is room for beside the rest, *scales* among it."""
        room = (_SHARED + 1024) // self.resident - 1024
        return min(_MOST_STAGES, (room - self._staging(item, glu, scales)) // self._stage(scales))

    def shared(self, item: int, glu: bool, scales: int) -> int:
        """Return the bytes of shared memory of a block: a ring with two barriers a stage, what is staged, *scales*."""
        return self.stages(item, glu, scales) * self._stage(scales) + self._staging(item, glu, scales)

    def _stage(self, scales: int) -> int:
        return (self.rows + self.columns) * BYTES + 16 + (4 * (self.rows + 8) if scales == OF_BLOCKS else 0)

    def _staging(self, item: int, glu: bool, scales: int) -> int:
        chunk = self.chunk(item, glu)
        pieces = 1 if self._beside else self.rows // self.consumers // 64
        chunks = self.finished(glu) // chunk * pieces
        of_columns = 4 * self.columns // (2 if self._beside else 1) if scales == OF_ROWS else 0
        return self.consumers * (4 * min(2, chunks) * 16 * chunk * item + of_columns)

    def _cycles(self, promoted: bool, scales: int) -> tuple[int, int, int]:
        """Cycles of a stage, of a tile's end, and of the last one's, which nothing hides."""
        products = self.rows * self.columns // 32
        loads = (self.rows + self.columns // self.share) * _LOAD // 10
        split = 1300 * self.split if self.split > 1 else 0
        if promoted and self.consumers == 2 and scales != OF_BLOCKS:
            waits = {512: 128, 768: 180, 1024: 272}.get(products, products // 4)  # of one product, one, two
            return max(products + waits, loads), 1024, 4096 + split
        end, last = products // self.split, (4 if promoted else 2) * products // self.split + split
        waits = 180 if self.columns <= 64 and self.consumers == 1 else 450  # the tensor core, while sums are added up
        return max(products + (waits if promoted else 120), loads) + (40 if self.share > 1 else 0), end, last

    def price(self, clusters: str, promoted: bool, scales: int, depth: int, parts: int) -> str:
        """Return what a product is expected to take, in cycles, as a C expression: waves of a block a processor, stages
        of *depth* elements, tiles' ends. *clusters*: how many have a tile."""
        stage, end, last = self._cycles(promoted, scales)
        waves = f"CEIL_DIV({clusters}, SMS * {self._fit} / 8 / {self.cluster})"
        return f"{waves} * (CEIL_DIV(K, {depth * self.split}) * {parts * stage} + {end}) + {last}"

    def cost(
        self, b: int, m: int, n: int, k: int, *, promoted: bool, scales: int, depth: int, parts: int, processors: int
    ) -> int:
        """Return what ``price`` computes."""
        stage, end, last = self._cycles(promoted, scales)
        clusters = b * -(-m // (self.rows * self.share)) * -(-n // self.columns)
        waves = -(-clusters // (processors * self._fit // 8 // self.cluster))
        return waves * (-(-k // (depth * self.split)) * parts * stage + end) + last

    @property
    def _fit(self) -> int:
        """Eighths of the processors that clusters of this size find room on."""
        return 8 if self.cluster <= 2 else 7


def _plans(text: str) -> tuple[Plan, ...]:
    return tuple(map(Plan.parse, text.split()))


_SMALL = "128x192 128x128 128x64 128x128-k2 128x128-k4 128x32 64x192 64x128 64x64 64x32 64x128-k2 64x64-k2 64x64-k4"

PLAIN = _plans(f"128x256 128x256-b2 256x128 256x128-b2 64x256 {_SMALL}")
"""The plans worth considering where sums stay in the tensor core's registers; the first of equals is chosen."""

PROMOTED = _plans(f"128x256 256x128 256x128-b2 {_SMALL} 128x192-b2")
"""Likewise where they are added up in registers of their own."""

SCALED = _plans(f"128x256 128x256-b2 128x192-b2 {_SMALL}")
"""Likewise where that is with scales of blocks."""
