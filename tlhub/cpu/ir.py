"""A few words over TVM's IR builder, so that the programs read like the loops that they are.

Imported in workers only. Everything here works with apache-tvm 0.25 to 0.27.
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
"""A TIR expression (its Python class differs between versions)."""

_UNTYPED_CALLS = tvm.__version__.startswith("0.25.")
"""Whether a call of a global variable must name its type, which later versions take from the variable."""

_STRING = tirx.StringImm if _UNTYPED_CALLS else tvm.ir.StringImm

_ENDLESS = 1 << 40
"""The extent of a pointer's view: bounds are the loops' business."""


def i64(value: int) -> Expr:
    return tirx.IntImm("int64", value)


def dtype_of(value: Expr) -> str:
    """Return the name of an expression's dtype, which versions keep in different places."""
    return str(value.dtype if hasattr(value, "dtype") else value.ty.dtype)


def bind(value: Expr) -> Expr:
    """Compute *value* here, once.

    An integer goes through an intrinsic that costs no instruction: TVM's simplifier would otherwise carry its
    whole derivation into every index made from it, and take seconds.
    """
    if dtype_of(value) == "int64" and not isinstance(value, (tirx.Var, tirx.IntImm)):
        value = T.call_llvm_intrin("int64", "llvm.expect", value, i64(0))
    return T.Bind(value)


def ceil_div(a: Expr, b: Expr) -> Expr:
    """Return a / b rounded up, for a >= 0 and b > 0."""
    return tirx.truncdiv(a + b - i64(1), b)


def minimum(a: Expr, b: Expr) -> Expr:
    return tirx.min(a, b)


def maximum(a: Expr, b: Expr) -> Expr:
    return tirx.max(a, b)


def splat(value: Expr, lanes: int) -> Expr:
    return value if lanes == 1 else T.broadcast(value, lanes)


def const(value: float, dtype: str, lanes: int = 1) -> Expr:
    return splat(tirx.const(value, dtype), lanes)


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


@contextmanager
def loop(start: Expr | int, stop: Expr | int) -> Iterator[Expr]:
    """A serial loop with an int64 variable, ``with loop(0, n) as i``, that LLVM leaves as it is.

    Its step is loaded each time from a place that LLVM knows nothing of, so the number of rounds cannot be told:
    no unrolling, no versions for this stride and that, no induction variables; that takes most of the time of
    compiling. For a loop whose own instructions count there is ``tight``.
    """
    index = local(1, "int64")
    index.store(0, i64(start) if isinstance(start, int) else start)
    last = bind(i64(stop) if isinstance(stop, int) else stop)
    with T.While(index.load(0) < last):
        yield T.Bind(index.load(0))
        index.store(0, index.load(0) + _unmoved(_steps[-1], "int64", 0))


_steps: list[Expr] = []
"""Of the functions under construction: the pointer to a 1, the step of their loops."""


@contextmanager
def stepping() -> Iterator[None]:
    """The body of the function that calls the others: it owns the step of their loops."""
    step = local(1, "int64")
    step.store(0, i64(1))
    _steps.append(step.pointer)
    yield
    _steps.pop()


def tight(start: Expr | int, stop: Expr | int) -> Any:
    """A serial loop with an int64 variable for LLVM to do its best with."""
    first = i64(start) if isinstance(start, int) else start
    last = i64(stop) if isinstance(stop, int) else stop
    return T.serial(first, last)


def loop_parallel(count: int) -> Any:
    """A loop over 0 .. count - 1 that is dealt out to the threads: to each a run of iterations, in order."""
    return T.parallel(i64(0), i64(count))


def region() -> Any:
    """A part of the program that every thread runs."""
    return T.attr(tirx.IntImm("int32", 0), "pragma_parallel_launch_point", tirx.IntImm("int32", 1))


class View:
    """A pointer seen as an endless array of one dtype."""

    def __init__(self, buffer: Any, dtype: str) -> None:
        self.buffer, self.dtype = buffer, dtype

    def _index(self, index: Expr, lanes: int) -> list[Expr]:
        index = i64(index) if isinstance(index, int) else index
        return [index if lanes == 1 else T.ramp(index, i64(1), lanes)]

    def prefetch(self, index: Expr, level: int = 1) -> None:
        """Ask for the cache line of an element, which need not exist, into the cache of *level*."""
        reading_near = (tirx.IntImm("int32", n) for n in (0, 4 - level, 1))
        T.evaluate(T.call_intrin("void", "tirx.prefetch", T.address_of(self.load(index)), *reading_near))

    def load(self, index: Expr | int, lanes: int = 1) -> Expr:
        return tirx.BufferLoad(self.buffer, self._index(index, lanes))

    def store(self, index: Expr | int, value: Expr, lanes: int = 1) -> None:
        T.buffer_store(self.buffer, value, self._index(index, lanes))

    @property
    def pointer(self) -> Expr:
        return self.buffer.data


def view(pointer: Expr, dtype: str) -> View:
    return View(T.decl_buffer((i64(_ENDLESS),), dtype, data=pointer, layout=None), dtype)


def _unmoved(source: Expr, dtype: str, index: int) -> Expr:
    """Load an element here, in every round of a loop, for LLVM cannot tell that it stays the same."""
    number = tvm.target.codegen.llvm_lookup_intrinsic_id("llvm.launder.invariant.group")
    here = pointer("call_llvm_intrin", dtype, tirx.IntImm("uint32", number), source)
    return bind(view(here, dtype).load(index))


def local(count: int, dtype: str) -> View:
    """An array on the stack of the function, or of the part of a parallel region, that says so.

    Not an allocation of TVM's: it would hoist that to the function's head, where the threads of a region share
    it. LLVM keeps what it can in registers.
    """
    words = -(-count * int("".join(c for c in dtype if c.isdigit())) // 64)
    return view(pointer("tvm_stack_alloca", dtype, _STRING("shape"), tirx.IntImm("int32", words)), dtype)


@contextmanager
def workspace(size: Expr, dtype: str) -> Iterator[Expr]:
    """Memory of *size* bytes (uint64), 64-byte aligned, as a pointer to *dtype*; without it, the function fails.

    Asked for by the hook itself: an allocation that TVM sees would be hoisted out of branches and regions.
    """
    cpu = (tirx.IntImm("int32", 1), tirx.IntImm("int32", 0))
    flat = (tirx.IntImm("int32", 2), tirx.IntImm("int32", 32))
    memory = pointer("TVMBackendAllocWorkspace", dtype, *cpu, size, *flat)
    with when(T.isnullptr(memory)):
        T.evaluate(T.tvm_throw_last_error())
    yield memory
    T.evaluate(T.call_intrin("int32", "tirx.TVMBackendFreeWorkspace", *cpu, memory))


def pointer(op: str, dtype: str, *args: Expr) -> Expr:
    """Bind what an operator of TVM returns as a pointer to *dtype*."""
    kind = tvm.ir.PointerType(tvm.ir.PrimType(dtype))
    if _UNTYPED_CALLS:
        return T.Bind(tirx.Call("handle", tvm.ir.Op.get(f"tirx.{op}"), args), kind)
    return T.Bind(tvm.ir.Call(tvm.ir.Op.get(f"tirx.{op}"), args, ret_ty=kind))


class Function:
    """A private function of the module under construction, and the way to call it.

    ``params``: names with ``"int64"`` or ``"float64"`` for numbers, ``"*dtype"`` for pointers.
    """

    def __init__(self, name: str, params: Sequence[tuple[str, str]], body: Callable[..., None]) -> None:
        self.name, self.var = name, tvm.ir.GlobalVar(name)
        with IRBuilder() as builder:
            with T.prim_func(is_private=True):
                T.func_name(name)
                args = [T.arg(n, _parameter(kind)) for n, kind in params]
                step = T.arg("step", T.handle("int64"))
                _steps.append(step)
                # never taken: LLVM does not inline what calls itself, and takes twice as long over deep nests of loops
                with when(view(step, "int64").load(0) < i64(0)):
                    self(*args)
                body(*args)
                _steps.pop()
            self.prim = builder.get()

    def __call__(self, *args: Expr) -> None:
        values = [*(i64(a) if isinstance(a, int) else a for a in args), _steps[-1]]
        T.evaluate(tirx.Call("void", self.var, values) if _UNTYPED_CALLS else self.var(*values))


def _parameter(kind: str) -> Expr:
    return T.handle(kind[1:]) if kind.startswith("*") else getattr(T, kind)()


def module(name: str, entry: Any, functions: Sequence[Function]) -> Any:
    """Return an IRModule with *entry*, whose global symbol is *name*, and the private *functions*."""
    table = {f.var: f.prim for f in functions}
    table[tvm.ir.GlobalVar(name)] = entry
    return tvm.IRModule(table)
