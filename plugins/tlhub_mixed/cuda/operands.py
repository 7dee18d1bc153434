"""Operands of products on tensor cores: how a problem is computed, and copies of those that kernels cannot take as they
lie, in scratch memory (pack.cuh)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from tlhub.build.program import Expression, Launch, Parameter
from tlhub.specs import DTYPES, Problem
from tlhub_mixed.cuda import code

BYTES = 128
"""Bytes of K in a stage of the kernels, of which a row of a copy is a multiple."""

ALIGNMENT = 16
"""Bytes, of addresses and strides of what is taken as it lies."""

NO_SCALES, OF_ROWS, OF_BLOCKS = range(3)
"""What the operands' scales are of."""


class Kind(NamedTuple):
    """How a problem is computed: ``scales`` of the operands, whether sums are ``promoted``, an operand's ``parts``."""

    scales: int
    promoted: bool
    parts: int


def kind(problem: Problem) -> Kind:
    """Return how *problem*, of any product, is computed."""
    option, a = problem.option, dict(problem.dtypes)["a"]
    scaling = option.get("scaling")
    if scaling == "block":
        return Kind(OF_BLOCKS, True, 1)
    if scaling:
        return Kind(OF_ROWS, a != "int8" and not option["fast_accum"], 1)
    if a == "float32":
        split = option["compute"] == "3xtf32"
        return Kind(NO_SCALES, split, 3 if split else 1)
    return Kind(NO_SCALES, a.startswith("float8") and not option["fast_accum"], 1)


def dtype_of(problem: Problem, name: str) -> str:
    """Return the dtype of an operand or of c."""
    return dict(problem.dtypes)[name]


def item_of(problem: Problem, name: str) -> int:
    """Return the bytes of an element of an operand or of c."""
    return DTYPES[dtype_of(problem, name)][1] // 8


def aligned(problem: Problem, name: str) -> str:
    """Return the condition that *name* is taken as it lies, with rows along K, or of c along N.

    It is not empty, elements are side by side, address and strides above 0 are multiples of 16 bytes. Strides of dims
    of extent 1 do not count.
    """
    size = item_of(problem, name)
    batch, row, column = code.strides(problem, name)
    extents = code.extents(problem, name)
    steps = (
        f"({extent} == 1 || {step} > 0 && ALIGNED({step} * {size}, {ALIGNMENT}))"
        for extent, step in zip(extents, (batch, row), strict=False)
    )
    filled = (f"{extent} > 0" for extent in extents)
    return " && ".join([f"{column} == 1", f"ALIGNED(DATA({name}), {ALIGNMENT})", *filled, *steps])


def values(problem: Problem, parts: int) -> Mapping[str, Expression]:
    """Return what branches have names for: whether operands fit, and the bytes of copies; of operands in several
    *parts* there always are."""
    size = item_of(problem, "a")
    batches = code.extents(problem, "c")[0]
    return {
        "padded": f"(K < 1 ? 1 : CEIL_DIV(K, {BYTES // size})) * {BYTES // size}",
        **{f"fits_{name}": "0" if parts > 1 else aligned(problem, name) for name in "ab"},
        **{
            f"copy_{name}": f"fits_{name} ? 0 : CEIL_DIV(padded * {parts * size} * {rows} * {batches}, 256) * 256"
            for name, rows in (("a", "M"), ("b", "N"))
        },
    }


def room(at: str) -> str:
    """Return an address in the scratch memory."""
    return f"(void *)((char *)WORKSPACE + {at})"


def pack(problem: Problem) -> Launch:
    """Return the launch that copies those of a and b that do not fit."""

    def operand(name: str, at: str, rows: str) -> tuple[Parameter, ...]:
        return (
            Parameter("void *", f"DATA({name})"),
            *(Parameter("int64_t", step) for step in code.strides(problem, name)),
            Parameter("void *", f"(fits_{name} ? (void *)0 : {room(at)})"),
            Parameter("int64_t", rows),
        )

    batches = code.extents(problem, "c")[0]
    sizes = (Parameter("int64_t", value) for value in (batches, "K", "padded"))
    parameters = (*sizes, *operand("a", "0", "M"), *operand("b", "copy_a", "N"))
    return Launch("pack_operands", ("SMS * 8", 1, 1), (256, 1, 1), parameters)
