"""Tensor maps of sequences that lie end to end: rows after a sequence's end are out of bounds, wherever that is.

A map has dims (channel, row, head, place): a box's rows, and the place that they are counted from, both in steps of a
row, from as many rows before the array as a box has. Of n rows from place p on, the box at row ``rows - n`` and place
``p + n`` has just these: what follows is past the end of the rows, reads as zero, and is not stored.
"""

from __future__ import annotations

from tlhub.build.program import TensorMap
from tlhub.specs import DTYPES, Problem


def tensor_map(problem: Problem, name: str, box: tuple[int, int]) -> TensorMap:
    """Return the tensor map of array *name*, (position, head, channel), in boxes of (channels, rows) of one head,
    swizzled by their width; backward_memory.cuh's corner() has the coordinates."""
    dtype = dict(problem.dtypes)[name]
    item, (width, rows) = DTYPES[dtype][1] // 8, box
    row, head = (f"(EXTENT({name}, {dim}) == 1 ? 16 : STRIDE({name}, {dim}) * {item})" for dim in (0, 1))
    return TensorMap(
        dtype,
        f"((char *)DATA({name}) - {rows} * {row})",
        (f"EXTENT({name}, 2)", rows, f"EXTENT({name}, 1)", f"EXTENT({name}, 0) + 1"),
        (row, head, row),
        (width, rows, 1, 1),
        swizzle=width * item,
    )
