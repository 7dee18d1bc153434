"""The parameters of a program: arrays of any stride, and numbers that its functions read. Imported in workers only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tvm import tirx
from tvm.tirx.script.builder import ir as T

from tlhub.cpu.elements import Element
from tlhub.cpu.ir import Expr, View, bind, i64, local, view
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
    """Declare the arrays of *axes* (their dims), in order; return the problem's dims, and the arrays.

    *half*: the machine converts float16.
    """
    dtypes = dict(problem.dtypes)
    handles = {name: T.arg(name, T.handle()) for name in axes}
    symbols: dict[str, Expr] = {}
    dims = {
        name: i64(extent) if isinstance(extent, int) else symbols.setdefault(extent, tirx.Var(name, "int64"))
        for name, extent in problem.dims
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
    """Named int64 numbers on the stack of the entry, for functions that are given ``pointer``."""

    def __init__(self, names: Sequence[str], memory: View) -> None:
        self.names, self.memory = tuple(names), memory

    @classmethod
    def new(cls, values: Mapping[str, Expr]) -> Fields:
        """Store *values* here."""
        made = cls(tuple(values), local(len(values), "int64"))
        for i, value in enumerate(values.values()):
            made.memory.store(i, value)
        return made

    @property
    def pointer(self) -> Expr:
        return self.memory.pointer

    def read(self, pointer: Expr) -> dict[str, Expr]:
        """Load all of them from *pointer*, here."""
        source = view(pointer, "int64")
        return {name: bind(source.load(i)) for i, name in enumerate(self.names)}
