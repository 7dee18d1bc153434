"""Programs whose tasks each have a frame of their own: attention, or its backward, of one sequence after the other.

A task of attention reads sizes and strides from a frame. Before it runs, these programs give it a frame of its own,
with the numbers of its sequence. Imported in workers only.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

from tvm import tirx
from tvm.tirx.script.builder import ir as T

from tlhub.specs import Problem
from tlhub_attention.cpu.blocks import Blocks
from tlhub_attention.cpu.entry import AXES, HEADS, Entry, Program, demand
from tlhub_attention.cpu.ir import Expr, Frame, Function, Memory, bind, i64, loop, registers, when


class Sequences(Program):
    """``checked``: arrays that a function looks through before the tasks, and what they are to hold."""

    checked: ClassVar[Mapping[str, str]]

    def __init__(self, problem: Problem, blocks: Blocks, block: int) -> None:
        super().__init__(problem, blocks, block)
        arrays = [(n, "*int32") for n in self.checked]
        self.check = Function("attention_check", [*arrays, ("frame", "*int64")], self._look_through)
        self.functions.append(self.check)

    def _around(self, task: Function, axis: str) -> Function:
        around = Function(f"{task.name}_of_sequence", task.params, partial(self._sequence, task, axis))
        self.functions.append(around)
        return around

    def _declare(self) -> Entry:
        entry = super()._declare()
        pointers = dict(zip(self.arrays, entry.pointers, strict=True))
        self.check(*[pointers[n] for n in self.checked], entry.frame.address)
        for name, expected in self.checked.items():
            demand(entry.frame[f"wrong_{name}"] == i64(0), self.problem.kernel, name, expected)
        return entry

    def _look_through(self, *args: Any) -> None:
        """Set ``wrong_NAME`` in the frame, the last of *args*, to 1 where that array holds what it may not, or to 0."""
        *arrays, memory = args
        f = Frame(self.blocks.names, memory)
        for name in self.checked:
            f.put(f"wrong_{name}", i64(0))
        self._check(dict(zip(self.checked, arrays, strict=True)), f)

    @abstractmethod
    def _check(self, arrays: Mapping[str, Memory], f: Frame) -> None:
        """Set ``wrong_NAME`` in the frame to 1 for each of the ``checked`` *arrays* that is wrong."""

    def _sequence(self, task: Function, axis: str, *args: Any) -> None:
        """Call *task* with a frame of its own. *args*: those of the task."""
        arrays = dict(zip(self.arrays, args, strict=False))
        memory, *others, b, h_kv, row0, count = args[len(self.arrays) :]
        shared, own = Frame(self.blocks.names, memory), Frame.new(self.blocks.names)
        with loop(0, len(self.blocks.names)) as i:
            own.memory[i] = shared.memory[i]
        b, row0, count = self._place(arrays, own, axis, b, row0, count)
        own.put("shift", own["S_kv"] - own["S"] + i64(1))
        with when(count > i64(0)):
            pointers = [arrays[n].buffer.data for n in self.arrays]
            known = [x.buffer.data if isinstance(x, Memory) else x for x in others]
            task(*pointers, own.address, *known, b, h_kv, row0, count)

    @abstractmethod
    def _place(
        self, arrays: Mapping[str, Memory], own: Frame, axis: str, b: Expr, row0: Expr, count: Expr
    ) -> tuple[Expr, Expr, Expr]:
        """Put the numbers of the sequence into the frame of a task along *axis*; return b, row0 and count for it."""


_STARTS = {"S": "starts", "S_kv": "starts_kv"}
_BLOCK = {"S": "query_rows", "S_kv": "key_rows"}


class Starts(Sequences):
    """Sequence n has the queries from ``starts[n]`` and the keys from ``starts_kv[n]`` to before those of n + 1.

    Queries of none make two more sequences, the first and the last, which have no keys; and keys of none, two that have
    no queries. A sequence gets more blocks than it may need, so that the first of each is known from where it starts
    alone: with n sequences before it that have r rows, block r // rows of a block + n.
    """

    axes = {name: axes.removeprefix("B ") for name, axes in AXES.items()} | HEADS | {"starts": "N1", "starts_kv": "N1"}
    roles = {"T": "S", "T_kv": "S_kv"}
    numbers = (*[f"wrong_{n}" for n in _STARTS.values()], *[f"{n}_B" for n in AXES], "first")
    checked = dict.fromkeys(_STARTS.values(), "numbers that never decrease, within the array")

    def _declare(self) -> Entry:
        entry = super()._declare()
        for name in AXES:
            entry.frame.put(f"{name}_B", i64(0))
        return entry._replace(dims={**entry.dims, "B": i64(1)})

    def _blocks(self, frame: Frame, rows: Expr, each: Expr) -> Expr:
        return tirx.truncdiv(rows, each) + frame["N1"] + i64(1)

    def _check(self, arrays: Mapping[str, Memory], f: Frame) -> None:
        for axis, name in _STARTS.items():
            (last,) = registers(1, 1, "int64")
            T.buffer_store(last, i64(0), [i64(0)])
            with when(f["N1"] == i64(0)):
                f.put(f"wrong_{name}", i64(1))
            with loop(0, f["N1"], "n") as n:
                start = bind(tirx.Cast("int64", arrays[name][n * f[f"{name}_N1"]]))
                with when(tirx.Or(start < tirx.BufferLoad(last, [i64(0)]), start > f[axis])):
                    f.put(f"wrong_{name}", i64(1))
                T.buffer_store(last, start, [i64(0)])

    def _place(
        self, arrays: Mapping[str, Memory], own: Frame, axis: str, b: Expr, row0: Expr, count: Expr
    ) -> tuple[Expr, Expr, Expr]:
        each, sequences, tokens = own[_BLOCK[axis]], own["N1"], own[axis]
        group = own["group"] if axis == "S" else i64(1)

        def start(axis: str, n: Expr) -> Expr:
            """Return ``starts[n - 1]``, for n from 1 to N1."""
            name = _STARTS[axis]
            return tirx.Cast("int64", arrays[name][(n - i64(1)) * own[f"{name}_N1"]])

        def begin(n: Expr) -> Expr:
            """Return the first token of sequence n, counted from that before the first."""
            inside = start(axis, tirx.min(tirx.max(n, i64(1)), sequences))
            return tirx.Select(n < i64(1), i64(0), tirx.Select(n > sequences, tokens, inside))

        def block(n: Expr) -> Expr:
            return tirx.truncdiv(begin(n) * group, each) + n

        turn = bind(tirx.truncdiv(row0, each), "turn")
        n = _last(lambda n: block(n) <= turn, sequences)
        at = bind(tirx.min(tirx.max(n, i64(1)), sequences))
        real = bind(tirx.And(n > i64(0), n < sequences))
        first = {x: bind(begin(n) if x == axis else start(x, at), "first") for x in _STARTS}
        for x in _STARTS:
            end = begin(n + i64(1)) if x == axis else start(x, bind(tirx.min(at + i64(1), sequences)))
            own.put(x, end - first[x] if x == axis else tirx.Select(real, end - first[x], i64(0)))
        own.put("first", first["S"])
        for name in AXES:
            if name in arrays:
                x = "S_kv" if "S_kv" in self.axes[name].split() else "S"
                own.put(f"{name}_B", first[x] * own[f"{name}_{x}"])
        row0 = bind((turn - block(n)) * each, "row0_own")
        return i64(1), row0, bind(tirx.min(each, own[axis] * group - row0), "count_own")


def _last(holds: Callable[[Expr], Expr], most: Expr) -> Expr:
    """Return the last n from 0 to *most* for which *holds*; it does for 0, and for all before that."""
    low, high = registers(2, 1, "int64")
    T.buffer_store(low, i64(0), [i64(0)])
    T.buffer_store(high, most, [i64(0)])
    with loop(0, 32):
        a, b = (bind(tirx.BufferLoad(x, [i64(0)])) for x in (low, high))
        middle = bind(tirx.truncdiv(a + b + i64(1), i64(2)))
        good = bind(holds(middle))
        T.buffer_store(low, tirx.Select(good, middle, a), [i64(0)])
        T.buffer_store(high, tirx.Select(good, b, middle - i64(1)), [i64(0)])
    return bind(tirx.BufferLoad(low, [i64(0)]), "n")
