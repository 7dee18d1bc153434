"""The parameters of a program: arrays of any stride, and numbers that its functions read. Imported in workers only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tvm import tirx
from tvm.tirx.script.builder import ir as T

from tlhub.cpu.elements import Element
from tlhub.cpu.ir import Expr, bind, i64, local, view
from tlhub.specs import Problem


@dataclass(frozen=True)
class Operand:
    """An array argument: its element, where it begins, and its strides by dim, in elements."""

    element: Element
    data: Expr
    at: Expr
    strides: Mapping[str, Expr]


def declare(
    problem: Problem, axes: Mapping[str, Sequence[str]], half: bool
) -> tuple[dict[str, Expr], dict[str, Operand]]:
    """Declare the arrays of *axes* (their dims), in order; return the dims that they have, and the arrays.

    *half*: the machine converts float16.
    """
    dtypes = dict(problem.dtypes)
    handles = {name: T.arg(name, T.handle()) for name in axes}
    symbols: dict[str, Expr] = {}
    dims = {
        name: i64(extent) if isinstance(extent, int) else symbols.setdefault(extent, tirx.Var(name, "int64"))
        for name, extent in problem.dims
        if any(name in names for names in axes.values())
    }
    operands = {}
    for name, names in axes.items():
        element = Element(dtypes[name], half)
        strides = [tirx.Var(f"{name}_{axis}", "int64") for axis in names]
        buffer = T.match_buffer(
            handles[name],
            [dims[axis] for axis in names],
            element.storage,
            strides=strides or None,  # of no dims, TVM takes no list
            align=element.size,
            offset_factor=1,
            layout=None,
        )
        operands[name] = Operand(
            element, buffer.data, T.cast(buffer.elem_offset, "int64"), dict(zip(names, strides, strict=True))
        )
    return dims, operands


class Fields:
    """Named int64 numbers on the stack of the entry, for functions that are given a pointer to them."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)

    def store(self, values: Mapping[str, Expr]) -> Expr:
        """Store *values* here, and return the pointer."""
        memory = local(len(self.names), "int64")
        for i, name in enumerate(self.names):
            memory.store(i, values[name])
        return memory.pointer

    def read(self, pointer: Expr, *names: str) -> tuple[Expr, ...]:
        """Load *names* from *pointer*, here."""
        source = view(pointer, "int64")
        return tuple(bind(source.load(self.names.index(name))) for name in names)


def demand(condition: Expr, kernel: str, name: str, expected: str) -> None:
    """Refuse the call unless *condition* holds: the array *name* is not as *expected*."""
    with T.Assert(condition, f"{kernel}: argument {name!r}: expected {expected}, got others", "ValueError"):
        pass
