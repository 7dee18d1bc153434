"""Plans of product_mma.cuh's kernel, of which each call takes the cheapest by a model. Pure."""

from __future__ import annotations

from typing import NamedTuple

from tlhub_mixed.cuda.operands import BYTES

_BAND = 1024  # rows of C that are walked column by column


class Plan(NamedTuple):
    """One kernel: tiles of ``rows`` x ``columns``, warps ``down`` and ``across`` them, ``stages`` of the ring.

    What a stage takes, in cycles, was measured with int8 on an H200: of a block ``alone``, and of each ``among`` many.
    """

    rows: int
    columns: int
    down: int
    across: int
    stages: int
    alone: int
    among: int

    @property
    def name(self) -> str:
        """The name of the kernel."""
        return f"product_{self.rows}x{self.columns}"

    @property
    def threads(self) -> int:
        """Of a block."""
        return 32 * self.down * self.across

    def shared(self, split: bool) -> int:
        """Return the bytes of shared memory of a block: the ring, and a stage of low parts of operands that are
        *split*; sums take its place in the end, in rows with a gap."""
        stages = self.stages + (1 if split else 0)
        return max(stages * (self.rows + self.columns) * BYTES, self.rows * (self.columns + 8) * 4)

    @property
    def band(self) -> int:
        """Rows of tiles that are walked column by column."""
        return max(1, _BAND // self.rows)

    def price(self, tiles: str, depth: int) -> str:
        """Return what a product is expected to take, in cycles, as a C expression: stages of *depth* elements, by the
        *tiles* of a processor, of which there are so many in all; and as much as two more for the end."""
        many = f"CEIL_DIV({tiles}, SMS) * {self.among}"
        return f"(CEIL_DIV(K, {depth}) + 2) * ({many} > {self.alone} ? {many} : {self.alone})"


PLANS = (
    Plan(128, 128, 2, 4, 2, alone=1870, among=1500),
    Plan(64, 64, 2, 2, 3, alone=760, among=430),
    Plan(64, 32, 2, 2, 5, alone=530, among=310),
    Plan(16, 32, 1, 2, 8, alone=390, among=140),
)
"""All have room in the 99 KiB that a block may have on the smallest of these GPUs, and two in what others have."""
