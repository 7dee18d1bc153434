"""The programs of the CPU schedules of decoding and of sequences end to end: each sequence is attention of its own.

A task of attention reads sizes and strides from a frame. Before it runs, these programs give it a frame of its own,
with the numbers of its sequence. Imported in workers only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

from tvm import tirx
from tvm.tirx.script.builder import ir as T

from tlhub.specs import Problem
from tlhub_attention.cpu_entry import AXES, Entry, demand
from tlhub_attention.cpu_ir import Expr, Frame, Function, Memory, bind, ceil_div, i64, loop, registers, when
from tlhub_attention.cpu_program import Attention, build


def decode(problem: Problem, config: Mapping[str, Any], arch: str) -> Any:
    """Return the module of *problem*, whose entry takes (q, k, v, lengths[, table], o[, lse], scale, window, softcap).

    *config*: that of attention.
    """
    return build(_Paged if problem.option["paged"] else _Decode, problem, config, arch)


def varlen(problem: Problem, config: Mapping[str, Any], arch: str) -> Any:
    """Return the module of *problem*, whose entry takes (q, k, v, starts, starts_kv, o[, lse], scale, window, softcap).

    *config*: that of attention.
    """
    return build(_Varlen, problem, config, arch)


class _Sequences(Attention):
    """``checked``: arrays that a function looks through before the tasks, and what they are to hold."""

    checked: ClassVar[Mapping[str, str]]

    def _around(self, params: Sequence[tuple[str, str]]) -> list[Function]:
        arrays = [(n, "*int32") for n in self.checked]
        self.check = Function("attention_check", [*arrays, ("frame", "*int64")], self._look_through)
        return [self.check, Function("attention_sequence", params, self._sequence)]

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

    def _check(self, arrays: Mapping[str, Memory], f: Frame) -> None:
        """Set ``wrong_NAME`` in the frame to 1 for each of the ``checked`` *arrays* that is wrong."""
        raise NotImplementedError

    def _sequence(self, *args: Any) -> None:
        """Call the task with a frame of its own. *args*: those of the task."""
        arrays = dict(zip(self.arrays, args, strict=False))
        memory, scratch, factor, cap, b, h_kv, row0, count = args[len(self.arrays) :]
        shared, own = Frame(self.blocks.names, memory), Frame.new(self.blocks.names)
        with loop(0, len(self.blocks.names)) as i:
            own.memory[i] = shared.memory[i]
        b, row0, count = self._place(arrays, own, b, row0, count)
        own.put("shift", own["S_kv"] - own["S"] + i64(1))
        with when(count > i64(0)):
            pointers = [arrays[n].buffer.data for n in self.arrays]
            self.task(*pointers, own.address, scratch.buffer.data, factor, cap, b, h_kv, row0, count)

    def _place(
        self, arrays: Mapping[str, Memory], own: Frame, b: Expr, row0: Expr, count: Expr
    ) -> tuple[Expr, Expr, Expr]:
        """Put the numbers of the task's sequence into its frame; return b, row0 and count for it."""
        raise NotImplementedError


class _Decode(_Sequences):
    """Sequence b has ``lengths[b]`` keys."""

    axes = {**AXES, "lengths": "B"}
    numbers: ClassVar[Sequence[str]] = ("wrong_lengths",)
    checked = {"lengths": "numbers from 0 to S_kv"}

    def _check(self, arrays: Mapping[str, Memory], f: Frame) -> None:
        with loop(0, f["B"], "b") as b:
            self._check_sequence(arrays, f, b, bind(tirx.Cast("int64", arrays["lengths"][b * f["lengths_B"]])))

    def _check_sequence(self, arrays: Mapping[str, Memory], f: Frame, b: Expr, length: Expr) -> None:
        with when(tirx.Or(length < i64(0), length > self._room(f))):
            f.put("wrong_lengths", i64(1))

    def _room(self, f: Frame) -> Expr:
        """Return the number of keys of a sequence that there is room for."""
        return f["S_kv"]

    def _place(
        self, arrays: Mapping[str, Memory], own: Frame, b: Expr, row0: Expr, count: Expr
    ) -> tuple[Expr, Expr, Expr]:
        own.put("S_kv", tirx.Cast("int64", arrays["lengths"][b * own["lengths_B"]]))
        return b, row0, count


class _Paged(_Decode):
    """Key j of sequence b lies on page ``table[b, j // page]``, at j % page. In the frame of all, S_kv counts pages."""

    axes = {**AXES, "k": "P page H_kv D", "v": "P page H_kv D_v", "lengths": "B", "table": "B S_kv"}
    roles = {"L": "S_kv"}
    numbers = ("wrong_lengths", "wrong_table", "k_B", "v_B", "k_S_kv", "v_S_kv")
    checked = {"lengths": "numbers from 0 to L page", "table": "numbers of pages, from 0 to P - 1"}

    def _check_sequence(self, arrays: Mapping[str, Memory], f: Frame, b: Expr, length: Expr) -> None:
        super()._check_sequence(arrays, f, b, length)
        with when(f["wrong_lengths"] == i64(0)), loop(0, self._pages(f, length), "i") as i:
            page = bind(self._page(arrays, f, b, i))
            with when(tirx.Or(page < i64(0), page >= f["P"])):
                f.put("wrong_table", i64(1))

    def _room(self, f: Frame) -> Expr:
        return f["S_kv"] * f["page"]

    def _pages(self, f: Frame, keys: Expr) -> Expr:
        return ceil_div(keys, tirx.max(f["page"], i64(1)))

    def _page(self, arrays: Mapping[str, Memory], f: Frame, b: Expr, i: Expr) -> Expr:
        return tirx.Cast("int64", arrays["table"][b * f["table_B"] + i * f["table_S_kv"]])

    def _place(
        self, arrays: Mapping[str, Memory], own: Frame, b: Expr, row0: Expr, count: Expr
    ) -> tuple[Expr, Expr, Expr]:
        for n in "kv":
            own.put(f"{n}_B", i64(0))
            own.put(f"{n}_S_kv", own[f"{n}_page"])
        return super()._place(arrays, own, b, row0, count)

    @contextmanager
    def _runs(
        self, arrays: Mapping[str, Memory], f: Frame, b: Expr, key0: Expr, keys: Expr
    ) -> Iterator[tuple[Expr, Expr, dict[str, Expr]]]:
        """Go through the pages of the keys."""
        size = f["page"]
        with loop(tirx.truncdiv(key0, size), self._pages(f, key0 + keys), "i") as i:
            start = bind(tirx.max(key0, i * size), "start")
            end = bind(tirx.min(key0 + keys, (i + i64(1)) * size), "end")
            page = bind(self._page(arrays, f, b, i), "page_number")
            items = {n: page * f[f"{n}_P"] + (start - i * size) * f[f"{n}_page"] for n in "kv"}
            yield bind(start - key0), bind(end - start), items


class _Varlen(_Sequences):
    """Sequence n has the queries from ``starts[n]`` and the keys from ``starts_kv[n]`` to before those of n + 1.

    Queries of none make two more sequences, the first and the last, which have no keys. A sequence gets more blocks
    than it may need, so that the first of each is known from where it starts alone: with n sequences before it that
    have r rows, block r // block_rows + n.
    """

    axes = {
        "q": "S H D", "k": "S_kv H_kv D", "v": "S_kv H_kv D_v", "o": "S H D_v", "lse": "H S",
        "starts": "N1", "starts_kv": "N1",
    }  # fmt: skip
    roles = {"T": "S", "T_kv": "S_kv"}
    numbers = (*[f"wrong_{n}" for n in ("starts", "starts_kv")], *[f"{n}_B" for n in ("q", "k", "v", "o", "lse")])
    checked = dict.fromkeys(("starts", "starts_kv"), "numbers that never decrease, within the array")

    def _blocks(self, frame: Frame, rows: Expr, each: Expr) -> Expr:
        return tirx.truncdiv(rows, each) + frame["N1"] + i64(1)

    def _check(self, arrays: Mapping[str, Memory], f: Frame) -> None:
        for name, end in (("starts", f["S"]), ("starts_kv", f["S_kv"])):
            (last,) = registers(1, 1, "int64")
            T.buffer_store(last, i64(0), [i64(0)])
            with when(f["N1"] == i64(0)):
                f.put(f"wrong_{name}", i64(1))
            with loop(0, f["N1"], "n") as n:
                start = bind(tirx.Cast("int64", arrays[name][n * f[f"{name}_N1"]]))
                with when(tirx.Or(start < tirx.BufferLoad(last, [i64(0)]), start > end)):
                    f.put(f"wrong_{name}", i64(1))
                T.buffer_store(last, start, [i64(0)])

    def _place(
        self, arrays: Mapping[str, Memory], own: Frame, b: Expr, row0: Expr, count: Expr
    ) -> tuple[Expr, Expr, Expr]:
        group, each, sequences, tokens = own["group"], own["block_rows"], own["N1"], own["S"]

        def start(name: str, n: Expr) -> Expr:
            """Return ``starts[n - 1]``, for n from 1 to N1."""
            return tirx.Cast("int64", arrays[name][(n - i64(1)) * own[f"{name}_N1"]])

        def query(n: Expr) -> Expr:
            """Return the first query of sequence n, counted from that before the first."""
            inside = start("starts", tirx.min(tirx.max(n, i64(1)), sequences))
            return tirx.Select(n < i64(1), i64(0), tirx.Select(n > sequences, tokens, inside))

        def block(n: Expr) -> Expr:
            return tirx.truncdiv(query(n) * group, each) + n

        turn = bind(tirx.truncdiv(row0, each), "turn")
        n = self._last(lambda n: block(n) <= turn, sequences)
        first = bind(query(n), "first")
        queries = own.put("S", query(n + i64(1)) - first)
        rows = own.put("rows", group * queries)
        real = bind(tirx.And(n > i64(0), n < sequences))
        at = bind(tirx.min(tirx.max(n, i64(1)), sequences))
        key = bind(start("starts_kv", at))
        keys = start("starts_kv", bind(tirx.min(at + i64(1), sequences))) - key
        own.put("S_kv", tirx.Select(real, keys, i64(0)))
        for name in ("q", "k", "v", "o", "lse"):
            if name in arrays:
                own.put(f"{name}_B", key * own[f"{name}_S_kv"] if name in "kv" else first * own[f"{name}_S"])
        row0 = bind((turn - block(n)) * each, "row0_own")
        return i64(1), row0, bind(tirx.min(each, rows - row0), "count_own")

    def _last(self, holds: Any, most: Expr) -> Expr:
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
