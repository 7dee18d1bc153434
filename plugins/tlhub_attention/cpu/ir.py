"""A few words over TVM's IR builder: loops, branches, memory and private functions. Imported in workers only.

Works with apache-tvm 0.25 to 0.27. A program is cut into private functions because TVM's region analysis and
simplifier, and LLVM, take time that grows faster than the size of one function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tvm
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script.builder import ir as T

Expr = Any
"""A TIR expression; its Python class differs between versions."""

_ENDLESS = 2**40
_CALL_NAMES_TYPE = tvm.__version__.startswith("0.25.")
_StringImm = tirx.StringImm if hasattr(tirx, "StringImm") else tvm.ir.StringImm


def i64(value: Expr | int) -> Expr:
    return tirx.IntImm("int64", value) if isinstance(value, int) else value


def bind(value: Expr, name: str = "") -> Expr:
    """Compute *value* here, once."""
    var = T.Bind(value)
    if name:
        IRBuilder.name(name, var)
    return var


def ceil_div(a: Expr, b: Expr | int) -> Expr:
    """Return a / b rounded up, for a >= 0 and b > 0."""
    return tirx.truncdiv(a + i64(b) - i64(1), i64(b))


@contextmanager
def loop(start: Expr | int, stop: Expr | int, name: str = "i", kind: Any = T.serial) -> Iterator[Expr]:
    with kind(i64(start), i64(stop)) as i:
        IRBuilder.name(name, i)
        yield i


def positive(count: Expr) -> Expr:
    """Compute *count*, of which the caller knows that it is at least 1, so that LLVM knows as well.

    It would else make two copies of every loop around this one, for the case that there is nothing to do.
    """
    return bind(tirx.max(count, i64(1)))


@contextmanager
def when(condition: Expr) -> Iterator[None]:
    with T.If(condition), T.Then():
        yield


def branch(condition: Expr, then: Callable[[], None], otherwise: Callable[[], None]) -> None:
    with T.If(condition):
        with T.Then():
            then()
        with T.Else():
            otherwise()


class Memory:
    """A pointer, seen as an endless array of one dtype."""

    def __init__(self, name: str, pointer: Expr, dtype: str) -> None:
        self.buffer = T.decl_buffer((i64(_ENDLESS),), dtype, data=pointer, align=1, layout=None)
        self.dtype = dtype
        IRBuilder.name(f"{name}_items", self.buffer)

    def __getitem__(self, index: Expr | int) -> Expr:
        return tirx.BufferLoad(self.buffer, [i64(index)])

    def __setitem__(self, index: Expr | int, value: Expr) -> None:
        T.buffer_store(self.buffer, value, [i64(index)])

    def prefetch(self, index: Expr) -> None:
        """Ask for the cache line of an item, which need not exist.

        In a loop over single items it keeps LLVM from adding vector code for each of the loop's strides: what should
        be vectors is written as vectors, and compiling takes half the time.
        """
        numbers = (tirx.IntImm("int32", n) for n in (0, 3, 1))
        T.evaluate(T.call_intrin("void", "tirx.prefetch", self.at(index), *numbers))

    def at(self, index: Expr) -> Expr:
        """Return the address of an element."""
        return T.address_of(self[index])


def registers(count: int, size: int, dtype: str) -> list[Any]:
    """Return *count* small arrays on the stack, each of a vector's size, that LLVM keeps in registers."""
    return [T.alloc_buffer((size,), dtype, layout=None) for _ in range(count)]


def pointer(op: str, dtype: str, *args: Expr) -> Expr:
    """Compute what an operator of TVM returns, as a pointer to items of *dtype*, here, once."""
    kind, called = tvm.ir.PointerType(tvm.ir.PrimType(dtype)), tvm.ir.Op.get(f"tirx.{op}")
    if _CALL_NAMES_TYPE:
        return T.Bind(tirx.Call("handle", called, args), kind)
    return T.Bind(tvm.ir.Call(called, args, ret_ty=kind))


@contextmanager
def workspace(size: Expr, dtype: str) -> Iterator[Expr]:
    """The address of *size* items, 64-byte aligned. Fails the call if there is no memory.

    Asks the hook itself, for TVM hoists the allocations that it sees out of branches.
    """
    cpu = (tirx.IntImm("int32", 1), tirx.IntImm("int32", 0))
    kind = (tirx.IntImm("int32", 2), tirx.IntImm("int32", 32))
    count = tirx.Cast("uint64", size * i64(4 if dtype == "float32" else 8))
    base = pointer("TVMBackendAllocWorkspace", dtype, *cpu, count, *kind)
    with when(T.isnullptr(base)):
        T.evaluate(T.tvm_throw_last_error())
    yield base
    T.evaluate(T.call_intrin("int32", "tirx.TVMBackendFreeWorkspace", *cpu, base))


class Frame:
    """Named int64 numbers on the stack of the entry, for its private functions to read.

    It also keeps TVM from putting the numbers' expressions into each other, which grow beyond all bounds.
    """

    def __init__(self, names: Sequence[str], memory: Memory) -> None:
        self.slots, self.memory = {name: i for i, name in enumerate(names)}, memory

    @classmethod
    def new(cls, names: Sequence[str]) -> Frame:
        kind = _StringImm("shape")
        base = pointer("tvm_stack_alloca", "int64", kind, tirx.IntImm("int32", len(names)))
        return cls(names, Memory("frame", base, "int64"))

    def put(self, name: str, value: Expr) -> Expr:
        """Store a number, and return it as it was stored."""
        self.memory[self.slots[name]] = value
        return self[name]

    def __getitem__(self, name: str) -> Expr:
        return bind(self.memory[self.slots[name]], name)

    @property
    def address(self) -> Expr:
        return self.memory.buffer.data


class Function:
    """A private function of the program, and the way to call it.

    ``params``: names with a dtype for numbers, or ``*dtype`` for pointers, which *body* gets as Memory.
    """

    def __init__(self, name: str, params: Sequence[tuple[str, str]], body: Callable[..., None]) -> None:
        self.name, self.params, self.var = name, params, tvm.ir.GlobalVar(name)
        with IRBuilder() as builder:
            with T.prim_func(is_private=True):
                T.func_name(name)
                args = [T.arg(n, T.handle(kind[1:]) if kind[0] == "*" else getattr(T, kind)()) for n, kind in params]
                views = [
                    Memory(n, a, kind[1:]) if kind[0] == "*" else a for a, (n, kind) in zip(args, params, strict=True)
                ]
                body(*views)
            self.function = builder.get()

    def __call__(self, *args: Expr | int) -> None:
        values = [i64(a) for a in args]
        T.evaluate(tirx.Call("void", self.var, values) if _CALL_NAMES_TYPE else self.var(*values))


def module(name: str, entry: Any, functions: Sequence[Function]) -> Any:
    """Return the IRModule of *entry* and its private functions."""
    return tvm.IRModule({tvm.ir.GlobalVar(name): entry, **{f.var: f.function for f in functions}})
