"""A call and its parts: what the entry tells a task, and how the threads come by their parts of the work.

The caller's threads each take a part of C and share nothing but the operands. The work is cut into SLICES;
a thread's part is ``count`` of them, up to and including ``last``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm import tirx
from tvm.tirx.script.builder import ir as T

from tlhub.cpu.elements import Element
from tlhub.cpu.ir import Expr, Function, bind, i64, local, loop_parallel, region, view, when, workspace
from tlhub_gemm.cpu_tiles import Plan

SLICES = 1 << 30
"""So many that a thread can tell the number of threads by its share."""

FIELDS = (
    *("batch", "m", "n", "k"),
    *("a_at", "a_b", "a_m", "a_k", "b_at", "b_b", "b_k", "b_n", "c_at", "c_b", "c_m", "c_n"),
    *("bias_at", "bias_m", "bias_n", "r_at", "r_b", "r_m", "r_n", "alpha", "out_scale", "kind"),
)
"""Of a call, in order: extents (n: columns of C), offsets and strides, in elements; the bits of alpha, in a plain plan
times out_scale, and of that; which task it is for."""

PART = ("count", "last", "bytes", "groups", "blocks", "depth", "widest", "right", "sums")
"""Of a part: its slices, the bytes of scratch that it needs, and how it is cut (see ``cpu_blocks``)."""


@dataclass(frozen=True)
class Task:
    """``measure(call, part)`` completes a part from its slices; ``run`` computes it."""

    measure: Function
    run: Function


@dataclass(frozen=True)
class Operands:
    """Pointers: to a, b, c, bias and residual (absent ones are another's, never read), the call, the part, scratch."""

    a: Expr
    b: Expr
    c: Expr
    bias: Expr
    residual: Expr
    call: Expr
    part: Expr
    scratch: Expr

    @property
    def pointers(self) -> tuple[Expr, ...]:
        return (self.a, self.b, self.c, self.bias, self.residual, self.call, self.part, self.scratch)


Numbers = dict[str, Expr]
"""Fields of a call or a part by name."""


def task(
    plan: Plan,
    name: str,
    elements: tuple[Element, Element],
    measure: Callable[[Numbers, Numbers], Numbers],
    body: Callable[[Operands, Numbers, Numbers], None],
) -> Task:
    """Make a task. *measure* maps the fields of a call and ``count`` to the other fields of a part."""

    def measured(call: Expr, part: Expr) -> None:
        target = view(part, "int64")
        for field, value in measure(read(FIELDS, call), read(("count",), part)).items():
            target.store(PART.index(field), value)

    def run(*args: Expr) -> None:
        o, _ = operands(args)
        body(o, read(FIELDS, o.call), read(PART, o.part))

    return Task(
        Function(f"measure_{name}", [("call", "*int64"), ("part", "*int64")], measured),
        Function(name, pointers(plan, elements), run),
    )


def choose(plan: Plan, straight: tuple[Task, ...], mirrored: Task | None) -> Task:
    """Return the task that is, by the call's ``kind``, one of *straight* or, for the number after, *mirrored*.

    *mirrored*, which is absent with gates and values, is given B in place of A and A in place of B.
    """
    every = (*straight, *([mirrored] if mirrored else []))

    def measure(call: Expr, part: Expr) -> None:
        kind = read(("kind",), call)["kind"]
        for i, chosen in enumerate(every):
            with when(tirx.EQ(kind, i64(i))):
                chosen.measure(call, part)

    def run(*args: Expr) -> None:
        o, _ = operands(args)
        kind = read(("kind",), o.call)["kind"]
        for i, chosen in enumerate(straight):
            with when(tirx.EQ(kind, i64(i))):
                chosen.run(*args)
        if mirrored:
            with when(tirx.EQ(kind, i64(len(straight)))):
                mirrored.run(o.b, o.a, *args[2:])

    return Task(
        Function("measure", [("call", "*int64"), ("part", "*int64")], measure),
        Function("run", pointers(plan, (plan.a, plan.b)), run),
    )


def pointers(plan: Plan, elements: tuple[Element, Element]) -> list[tuple[str, str]]:
    """Return the parameters that ``Operands`` holds, for a and b of *elements*."""
    beside = f"*{plan.beside.storage}"
    params = [("a", f"*{elements[0].storage}"), ("b", f"*{elements[1].storage}"), ("c", f"*{plan.c.storage}")]
    params += [("bias", beside), ("residual", beside)]
    return [*params, ("call", "*int64"), ("part", "*int64"), ("scratch", f"*{plan.acc}")]


def operands(args: tuple[Expr, ...]) -> tuple[Operands, tuple[Expr, ...]]:
    """Return what a function with the parameters of ``pointers`` was given, and its further arguments."""
    return Operands(*args[:8]), args[8:]


def read(names: tuple[str, ...], pointer: Expr) -> Numbers:
    """Load fields of a call or a part, here."""
    source = view(pointer, "int64")
    table = FIELDS if names[0] in FIELDS else PART
    return {name: bind(source.load(table.index(name))) for name in names}


def share(units: Expr, slices: Expr) -> Expr:
    """Return units * slices / SLICES, rounded down, without leaving 64 bits."""
    whole, rest = tirx.truncdiv(units, i64(SLICES)), tirx.truncmod(units, i64(SLICES))
    return whole * slices + tirx.truncdiv(rest * slices, i64(SLICES))


def span(units: Expr, part: dict[str, Expr]) -> tuple[Expr, Expr]:
    """Return the first of *units* that belongs to *part*, and the first beyond it."""
    stop = part["last"] + i64(1)
    return bind(share(units, stop - part["count"])), bind(share(units, stop))


def cut(begin: Expr, end: Expr, index: Expr, count: Expr) -> tuple[Expr, Expr]:
    """Return the *index*-th of *count* even runs of begin .. end."""
    length = bind(end - begin)
    first = bind(begin + tirx.truncdiv(length * index, count))
    return first, bind(begin + tirx.truncdiv(length * (index + i64(1)), count))


def run_alone(chosen: Task, acc: str, args: tuple[Expr, ...], call: Expr) -> None:
    """Run the whole of *chosen* on the caller's thread."""
    part = local(len(PART), "int64")
    part.store(0, i64(SLICES))
    part.store(1, i64(SLICES - 1))
    _run(chosen, acc, args, call, part.pointer)


def run_shared(chosen: Task, acc: str, args: tuple[Expr, ...], call: Expr) -> None:
    """Run *chosen* on all threads, each with its part.

    A parallel loop gives a thread a run of its iterations; their number and the last one say which part is
    its own. The compiler turns the counting into a closed form.
    """
    with region():
        part = local(len(PART), "int64")
        part.store(0, i64(0))
        part.store(1, i64(0))
        with loop_parallel(SLICES) as i:
            part.store(0, part.load(0) + i64(1))
            part.store(1, i)
        _run(chosen, acc, args, call, part.pointer)


def _run(chosen: Task, acc: str, args: tuple[Expr, ...], call: Expr, part: Expr) -> None:
    chosen.measure(call, part)
    size = view(part, "int64").load(PART.index("bytes"))
    with workspace(T.cast(size, "uint64"), acc) as scratch:
        chosen.run(*args, call, part, scratch)
