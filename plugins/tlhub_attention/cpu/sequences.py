"""The programs of the CPU schedules of decoding and of sequences end to end. Imported in workers only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tvm import tirx

from tlhub.specs import Problem
from tlhub_attention.cpu.entry import Entry, build, demand
from tlhub_attention.cpu.frames import Sequences, Starts
from tlhub_attention.cpu.ir import Expr, Frame, Memory, bind, ceil_div, i64, loop, when
from tlhub_attention.cpu.program import Attention

_MOST_QUERIES = 16  # of a sequence, as the contract of decoding has it


def decode(problem: Problem, config: Mapping[str, Any], arch: str) -> Any:
    """Return the module of *problem*, whose entry takes the arrays in the contract's order, scale, window, softcap.

    *config*: that of attention.
    """
    return build(_Paged if problem.option["paged"] else _Decode, problem, config, arch)


def varlen(problem: Problem, config: Mapping[str, Any], arch: str) -> Any:
    """Return the module of *problem*, whose entry takes the arrays in the contract's order, scale, window, softcap.

    *config*: that of attention.
    """
    return build(_Varlen, problem, config, arch)


class _Decode(Sequences, Attention):
    """Sequence b has ``lengths[b]`` keys."""

    axes = {**Attention.axes, "lengths": "B"}
    numbers = (*Attention.numbers, "wrong_lengths")
    checked = {"lengths": "numbers from 0 to S_kv"}

    def _declare(self) -> Entry:
        entry = super()._declare()
        few = entry.dims["S"] <= i64(_MOST_QUERIES)
        demand(few, self.problem.kernel, "q", f"at most {_MOST_QUERIES} queries of a sequence (S)")
        return entry

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
        self, arrays: Mapping[str, Memory], own: Frame, axis: str, b: Expr, row0: Expr, count: Expr
    ) -> tuple[Expr, Expr, Expr]:
        own.put("S_kv", tirx.Cast("int64", arrays["lengths"][b * own["lengths_B"]]))
        return b, row0, count


class _Paged(_Decode):
    """Key j of sequence b lies on page ``table[b, j // page]``, at j % page. In the frame of all, S_kv counts pages."""

    axes = {**Attention.axes, "k": "P page H_kv D", "v": "P page H_kv D_v", "lengths": "B", "table": "B S_kv"}
    roles = {"L": "S_kv"}
    numbers = (*_Decode.numbers, "wrong_table", "k_B", "v_B", "k_S_kv", "v_S_kv")
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
        self, arrays: Mapping[str, Memory], own: Frame, axis: str, b: Expr, row0: Expr, count: Expr
    ) -> tuple[Expr, Expr, Expr]:
        for n in "kv":
            own.put(f"{n}_B", i64(0))
            own.put(f"{n}_S_kv", own[f"{n}_page"])
        return super()._place(arrays, own, axis, b, row0, count)

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


class _Varlen(Starts, Attention):
    """A task takes a block of queries of one sequence."""

    numbers = (*Attention.numbers, *Starts.numbers)
