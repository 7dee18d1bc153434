"""Plans of hopper.cuh's kernel, and what a call costs by each: a choice without a measurement. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from tlhub.errors import BuildError

BLOCK = 3 * 128
"""Threads: a producer and two consumers, a warp group each."""

DEPTH = 64
"""Elements of K in a stage."""

ITEM = 2
"""Bytes of an element of a and b."""

_WIDEST = 128  # bytes of a row of a box
_SHARED = 227 * 1024  # bytes that a block may have
_MOST_STAGES = 8
_NEVER = 1 << 60  # a cost
_LOADS = ((128, 19), (64, 28), (32, 33), (16, 49))
"""What an operand's rows are aligned to, in bytes, and tenths of a cycle to load 128 bytes of one with all SMs busy."""
_PLAIN, _FULL = 8, 16
"""Cycles of an epilogue for each of its tile's products with a stage: one that only converts, and any other."""

_BAND = 2048  # rows of C that are walked column by column
_TEXT = re.compile(r"(coop|ping)-(\d+)x(\d+)(?:-a(\d+))?(?:-b(\d+))?(?:-k(\d+))?")


class Plan(NamedTuple):
    """One kernel: tiles of ``rows`` x ``columns``, by consumers that ``ping``-pong or cooperate.

    ``share_a`` blocks beside each other share A, or ``share_b`` below each other share B; ``split`` share a tile, each
    a part of K. Together they are a cluster. Written as ``coop-128x256-b2``.
    """

    ping: bool
    rows: int
    columns: int
    share_a: int = 1
    share_b: int = 1
    split: int = 1

    @classmethod
    def parse(cls, text: str) -> Plan:
        """Return the plan that ``str`` wrote. Raises BuildError."""
        match = _TEXT.fullmatch(text)
        if not match:
            raise BuildError(
                f"{text!r} is no plan; it is coop or ping, a tile, and what blocks share, as in 'coop-128x256-b2': "
                "-aN share A, -bN share B, -kN split K"
            )
        scheme, *numbers = match.groups()
        rows, columns, *shared = (int(n or 1) for n in numbers)
        return cls(scheme == "ping", rows, columns, *shared)

    def __str__(self) -> str:
        shared = ((letter, n) for letter, n in zip("abk", self[3:], strict=True) if n > 1)
        return f"{'ping' if self.ping else 'coop'}-{self.rows}x{self.columns}" + "".join(f"-{s}{n}" for s, n in shared)

    @property
    def cluster(self) -> int:
        return self.share_a * self.share_b * self.split

    @property
    def sums(self) -> int:
        """Registers of a consumer's thread that hold sums."""
        return self.rows * self.columns // (128 if self.ping else 256)

    @property
    def least_k(self) -> int:
        """What K exceeds, so that each block of a split has something of it."""
        return DEPTH * (self.split - 1)

    @property
    def band(self) -> int:
        """Rows of clusters that are walked column by column."""
        return max(1, _BAND // (self.rows * self.share_b))

    def chunk(self, item: int, glu: bool = False) -> int:
        """Return how many columns of C, of *item* bytes, a warp stages at once. *glu*: C has half of the columns."""
        columns = self.columns // self.split // (2 if glu else 1)
        return next(n for n in (128, 64, 32, 16) if columns % n == 0 and n * item <= _WIDEST)

    def stages(self, item: int, glu: bool = False) -> int:
        """Return how many stages of the ring there is room for beside the rest."""
        return min(_MOST_STAGES, (_SHARED - self._beside(item, glu)) // self._stage)

    def shared(self, item: int, glu: bool = False) -> int:
        """Return the bytes of shared memory of a block: the ring with two barriers a stage, and the rest."""
        return self.stages(item, glu) * self._stage + self._beside(item, glu)

    @property
    def _stage(self) -> int:
        return (self.rows + self.columns) * DEPTH * ITEM + 16

    def _beside(self, item: int, glu: bool) -> int:
        """Return the bytes beside the ring: of C's staging, and of what comes from the other blocks of a split."""
        chunk = self.chunk(item, glu)
        chunks = self.columns // self.split // (2 if glu else 1) // chunk * (self.rows // (1 if self.ping else 2) // 64)
        received = (self.split - 1) * self.rows * self.columns // self.split * 4
        return 8 * min(2, chunks) * 16 * chunk * item + received + 8

    def _cycles(self, trans_b: bool, finish: int) -> tuple[int, int, int]:
        """Cycles of a stage, of an epilogue, and of a call whose blocks share operands, beyond those of others."""
        products = self.rows * self.columns * DEPTH // 2048  # of the tensor cores, so many a cycle
        narrow = self.columns // 3 if self.columns % 64 and not trans_b else 0  # boxes of b
        shared = self.share_a * self.share_b > 1
        return products + narrow + (140 if shared else 120), finish * products + 500, 4000 if shared else 0

    def cost(
        self, b: int, m: int, n: int, k: int, *, trans_a: bool, trans_b: bool, processors: int, finish: int = _PLAIN
    ) -> int:
        """Return what a product of arrays without gaps is expected to take, in cycles: waves of a block a processor,
        stages, epilogues.

        A stage takes its products and something to get going, or what its loads take, if that is more: rows that are
        not aligned to 128 bytes are slow, and then it pays that blocks share them. *finish* says how long an epilogue
        is; where consumers ping-pong only the last is not hidden. The numbers are fitted to times of squares and of the
        shapes of Llama's layers on an H200, and choose within 0.8 % of the best on average.
        """
        if k <= self.least_k:
            return _NEVER
        stage, epilogue, call = self._cycles(trans_b, finish)
        of_a, of_b = (_load(ITEM * row) for row in (m if trans_a else k, k if trans_b else n))
        stage = max(stage, (self.rows // self.share_a * of_a + self.columns // self.share_b * of_b) // 10)
        clusters = b * _ceil_div(m, self.rows * self.share_b) * _ceil_div(n, self.columns * self.share_a)
        waves = _ceil_div(clusters, processors // self.cluster)
        stages = _ceil_div(_ceil_div(k, DEPTH), self.split)
        return waves * stages * stage + (1 if self.ping else waves) * epilogue + call

    def price(self, trans_b: bool, finish: int = _PLAIN) -> str:
        """Return ``cost`` of a call as a C expression in which ``load_a`` and ``load_b`` are what ``load`` returns."""
        stage, epilogue, call = self._cycles(trans_b, finish)
        loads = f"({self.rows // self.share_a} * load_a + {self.columns // self.share_b} * load_b) / 10"
        clusters = f"B * CEIL_DIV(M, {self.rows * self.share_b}) * CEIL_DIV(N, {self.columns * self.share_a})"
        waves = f"CEIL_DIV({clusters}, SMS / {self.cluster})"
        stages = f"CEIL_DIV(CEIL_DIV(K, {DEPTH}), {self.split})"
        cost = f"{waves} * {stages} * MAX({stage}, {loads}) + {1 if self.ping else waves} * {epilogue} + {call}"
        return f"(K > {self.least_k} ? {cost} : {_NEVER}LL)" if self.split > 1 else f"({cost})"


def plain(option: Mapping[str, object]) -> bool:
    """Tell whether c is the product, but for a factor, by the options of a problem."""
    return option["epilogue"] == "none" and not option["glu"] and not option["bias"] and not option["residual"]


def finish(option: Mapping[str, object]) -> int:
    """Return how long an epilogue is, as ``Plan.cost`` has it, by the options of a problem."""
    return _PLAIN if plain(option) else _FULL


def load(name: str) -> str:
    """Return what ``_LOADS`` has for the rows of array *name* of a call, gaps and all, as a C expression."""
    row = f"STRIDE({name}, 1) * {ITEM}"
    choices = "".join(f"ALIGNED({row}, {size}) ? {tenths} : " for size, tenths in _LOADS)
    return f"{choices}{_LOADS[0][1]}"


def _load(row: int) -> int:
    """Return what ``_LOADS`` has for rows of so many bytes; others are copied, and aligned then."""
    return next((tenths for size, tenths in _LOADS if row % size == 0), _LOADS[0][1])


def _ceil_div(x: int, y: int) -> int:
    return -(-x // y)
