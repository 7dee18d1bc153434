"""The private functions of the attention program that read and write arrays: packing, and results.

Packed: queries in panels of (D, lanes), keys in rows of D, values in tiles of (keys, channels). Offsets and
strides count items.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tvm import tirx
from tvm.tirx.script.builder import ir as T

from tlhub_attention.cpu.ir import Expr, Frame, Function, Memory, bind, ceil_div, i64, loop, positive, registers, when
from tlhub_attention.cpu.math import Vector
from tlhub_attention.cpu.tiles import Tiles

_ROWS_AHEAD = 8


class Packing(NamedTuple):
    """What packs rows of an array of one dtype: by tiles where items lie side by side, the rest one by one."""

    by_tiles: Function
    by_items: Function
    tile: int

    @property
    def functions(self) -> tuple[Function, Function]:
        return self.by_tiles, self.by_items

    def __call__(
        self,
        source: Expr,
        target: Expr,
        at: Expr,
        rows: Expr,
        width: Expr,
        strides: tuple[Expr, Expr],
        places: tuple[Expr, Expr],
    ) -> None:
        """Pack the *width* items of each row; row j's tile c goes to j * places[0] + c * places[1]."""
        tile = i64(self.tile)
        tiles = bind(tirx.Select(strides[1] == i64(1), tirx.truncdiv(width, tile), i64(0)), "whole")
        with when(tiles > i64(0)):
            self.by_tiles(source, target, at, rows, *strides, *places, i64(0), tiles)
        rest = bind(tiles * tile, "rest")
        with when(rest < width):
            self.by_items(source, target, at, rows, *strides, *places, rest, width - rest)


@dataclass(frozen=True)
class Blocks:
    """``dtypes`` of the arguments; ``names`` of the frame's numbers; ``native_half``: the CPU converts float16."""

    tiles: Tiles
    dtypes: Mapping[str, str]
    names: Sequence[str]
    native_half: bool
    causal: bool

    def storage(self, name: str) -> str:
        """Return the dtype that a program declares for an argument: integers where it converts by itself."""
        dtype = self.dtypes[name]
        if dtype.startswith("float8"):
            return "uint8"
        return "uint16" if dtype == "bfloat16" or (dtype == "float16" and not self.native_half) else dtype

    @property
    def biased(self) -> bool:
        return "slopes" in self.dtypes

    @property
    def acc(self) -> str:
        return self.tiles.vector.dtype

    @property
    def scalar(self) -> Vector:
        return Vector(self.acc, 1)

    @property
    def narrow(self) -> Vector:
        return Vector(self.acc, self.tiles.tile)

    def read(self, name: str, memory: Memory, at: Expr, vector: Vector) -> Expr:
        return vector.widen(vector.load(memory, at), self.dtypes[name], self.native_half)

    def start(self) -> Function:
        """Clear the sums of a block of rows."""

        def body(peak: Memory, total: Memory, count: Expr) -> None:
            with loop(0, self._padded(count)) as i:
                peak[i] = self.scalar.number(0.0) - self.scalar.infinity()
                total[i] = self.scalar.number(0.0)

        return Function(
            "attention_start", [("peak", f"*{self.acc}"), ("total", f"*{self.acc}"), ("count", "int64")], body
        )

    def limits(self, keys: bool) -> Function:
        """Find which keys, *low* to before *high*, each row of a block sees. Lanes past the last row repeat it.

        *keys*: the block is one of keys, and found is which queries see each.
        """

        def body(low: Memory, high: Memory, frame: Memory, row0: Expr, count: Expr) -> None:
            f, zero = Frame(self.names, frame), i64(0)
            group, shift = f["group"], f["shift"]
            window = bind(tirx.min(f["window"], f["S"] + f["S_kv"]), "window")  # more hides nothing
            most = f["S"] if keys else f["S_kv"]
            with loop(0, self._padded(count)) as i:
                row = bind(row0 + tirx.min(i, count - i64(1)), "row")
                if keys:  # query s sees the keys before s + shift, and with a window those from s + shift - window on
                    start = bind(row + i64(1) - shift, "start")
                    end = start + window
                else:
                    end = bind(tirx.truncdiv(row, group) + shift, "end")
                    start = end - window
                start, end = (tirx.min(most, tirx.max(zero, x)) for x in (start, end))
                # the end that the window alone sets, and the one that a causal mask sets as well
                if not keys or not self.causal:
                    start = tirx.Select(window > zero, start, zero)
                if keys or not self.causal:
                    end = tirx.Select(window > zero, end, most)
                low[i], high[i] = tirx.Cast("int32", start), tirx.Cast("int32", end)

        arrays = [("low", "*int32"), ("high", "*int32"), ("frame", "*int64")]
        name = "attention_limits_of_keys" if keys else "attention_limits"
        return Function(name, [*arrays, ("row0", "int64"), ("count", "int64")], body)

    def places(self) -> Function:
        """Find the place of each row of a block among the keys, that of row r being r // group + shift - 1."""

        def body(place: Memory, row0: Expr, count: Expr, group: Expr, shift: Expr) -> None:
            with loop(0, self._padded(count)) as i:
                row = bind(row0 + tirx.min(i, count - i64(1)), "row")
                place[i] = tirx.Cast("int32", tirx.truncdiv(row, group) + shift - i64(1))

        numbers = [(n, "int64") for n in ("row0", "count", "group", "shift")]
        return Function("attention_places", [("place", "*int32"), *numbers], body)

    def spread(self) -> Function:
        """Give each row of a block, as ``pack_lanes`` counts them, its head's number from the item *first*, times
        *factor*."""

        def body(source: Memory, lanes: Memory, factor: Expr, *numbers: Expr) -> None:
            first, row0, count, group, stride = numbers
            with loop(0, self._padded(count)) as i:
                row = bind(row0 + tirx.min(i, count - i64(1)), "row")
                at = self._place(first, row, group, i64(0), stride)
                lanes[i] = tirx.Cast(self.acc, source[at]) * factor

        arrays = [("source", "*float32"), ("lanes", f"*{self.acc}"), ("factor", self.acc)]
        numbers = ("first", "row0", "count", "group", "stride")
        return Function("attention_spread", [*arrays, *[(n, "int64") for n in numbers]], body)

    def _padded(self, count: Expr) -> Expr:
        width = i64(self.tiles.panel)
        return positive(ceil_div(count, width) * width)

    def pack_lanes(self, name: str) -> Function:
        """Pack a block of rows from the item *first* into panels, times *factor*.

        Row r is item r // group along *stride_s* and r % group along *stride_h*; it has *width* items.
        """

        def body(source: Memory, packed: Memory, factor: Expr, first: Expr, *numbers: Expr) -> None:
            row0, count, group, stride_s, stride_h, stride_d, items = numbers
            width, d = i64(self.tiles.panel), positive(items)
            with loop(0, self._padded(count)) as i:
                row = bind(row0 + tirx.min(i, count - i64(1)), "row")
                at = self._place(first, row, group, stride_s, stride_h)
                panel = bind(tirx.truncdiv(i, width), "panel")
                target = bind(panel * d * width + (i - panel * width), "target")
                with loop(0, d, "c") as c:
                    source.prefetch(at + c * stride_d)
                    packed[target + c * width] = self.read(name, source, at + c * stride_d, self.scalar) * factor

        arrays = [(name, f"*{self.storage(name)}"), ("packed", f"*{self.acc}"), ("factor", self.acc)]
        numbers = ("first", "row0", "count", "group", "stride_s", "stride_h", "stride_d", "width")
        return Function(f"attention_pack_lanes_{name}", [*arrays, *[(n, "int64") for n in numbers]], body)

    @staticmethod
    def _place(first: Expr, row: Expr, group: Expr, stride_s: Expr, stride_h: Expr) -> Expr:
        s = bind(tirx.truncdiv(row, group), "s")
        return bind(first + s * stride_s + (row - s * group) * stride_h, "at")

    def pack(self, name: str, vectors: bool) -> Function:
        """Copy *count* tiles, or single items, of each of *keys* rows of k or v, from the item *first*.

        Tile c of row j goes to the packed item j * row + c * column. *start* is the column of the first item; tiles
        begin at 0, and have stride 1.
        """
        vector = self.narrow if vectors else self.scalar

        def body(
            source: Memory,
            packed: Memory,
            first: Expr,
            keys: Expr,
            stride_s: Expr,
            stride_d: Expr,
            row: Expr,
            column: Expr,
            start: Expr,
            count: Expr,
        ) -> None:
            tile, columns = i64(self.tiles.tile), positive(count)
            ahead = bind(stride_s * i64(_ROWS_AHEAD), "ahead")  # rows lie far apart, where no hardware looks for them
            with loop(0, positive(keys), "j") as j:
                at = bind(first + j * stride_s, "at")
                with loop(0, columns, "c") as c:
                    if vectors:
                        source.prefetch(at + c * tile + ahead)
                        x = self.read(name, source, at + c * tile, vector)
                        vector.store(packed, j * row + c * column, x)
                    else:
                        d = bind(start + c, "d")
                        source.prefetch(at + d * stride_d)
                        t = bind(tirx.truncdiv(d, tile), "t")
                        x = self.read(name, source, at + d * stride_d, vector)
                        packed[j * row + t * column + (d - t * tile)] = x

        arrays = [(name, f"*{self.storage(name)}"), ("packed", f"*{self.acc}")]
        numbers = ("first", "keys", "stride_s", "stride_d", "row", "column", "start", "count")
        kind = "tiles" if vectors else "items"
        return Function(f"attention_pack_{name}_{kind}", [*arrays, *[(n, "int64") for n in numbers]], body)

    def packing(self, name: str) -> Packing:
        return Packing(self.pack(name, vectors=True), self.pack(name, vectors=False), self.tiles.tile)

    def inspect(self) -> Function:
        """Set *flag* to 1 if a packed value is NaN or infinite, else 0."""
        bits = self.scalar.bits
        int_type, infinite = f"int{bits}", 0x7F800000 if bits == 32 else 0x7FF << 52

        def body(packed: Memory, flag: Memory, tiles: Expr, keys: Expr) -> None:
            narrow, tile, height = self.narrow, i64(self.tiles.tile), i64(self.tiles.tile * self.tiles.block)
            (largest,) = registers(1, self.tiles.tile, int_type)
            narrow.store(largest, i64(0), narrow.integer(0, int_type))
            rows = positive(keys)
            with loop(0, positive(tiles), "t") as t, loop(0, rows, "j") as j:
                exponent = tirx.reinterpret(narrow.type(int_type), narrow.load(packed, t * height + j * tile))
                exponent = tirx.bitwise_and(exponent, narrow.integer(infinite, int_type))
                narrow.store(largest, i64(0), tirx.max(narrow.load(largest, i64(0)), exponent))
            flag[0] = tirx.IntImm("int32", 0)
            for i in range(self.tiles.tile):
                with when(tirx.BufferLoad(largest, [i64(i)]) == tirx.IntImm(int_type, infinite)):
                    flag[0] = tirx.IntImm("int32", 1)

        arrays = [("packed", f"*{self.acc}"), ("flag", "*int32")]
        return Function("attention_inspect", [*arrays, ("tiles", "int64"), ("keys", "int64")], body)

    def scatter(self, name: str) -> Function:
        """Write a block of rows, which lie in panels of (channels, lanes), times *factor*; rows as ``pack_lanes``."""

        def body(out: Memory, target: Memory, factor: Expr, first: Expr, *numbers: Expr) -> None:
            row0, count, group, stride_s, stride_h, stride_d, items, channels = numbers
            width, d = i64(self.tiles.panel), positive(items)
            with loop(0, positive(count)) as i:
                at = self._place(first, bind(row0 + i, "row"), group, stride_s, stride_h)
                panel = bind(tirx.truncdiv(i, width), "panel")
                base = bind(panel * channels * width + (i - panel * width), "base")
                with loop(0, d, "c") as c:
                    out.prefetch(base + c * width)
                    x = self.scalar.keep(out[base + c * width] * factor)
                    target[at + c * stride_d] = self.scalar.narrow(x, self.dtypes[name], self.native_half)

        arrays = [("out", f"*{self.acc}"), (name, f"*{self.storage(name)}"), ("factor", self.acc)]
        numbers = ("first", "row0", "count", "group", "stride_s", "stride_h", "stride_d", "width", "channels")
        return Function(f"attention_scatter_{name}", [*arrays, *[(n, "int64") for n in numbers]], body)

    def finish_lse(self) -> Function:
        """Write a block of lse: the natural log of the sum of exp(logits), -inf where no key was seen."""

        def body(
            peak: Memory, total: Memory, target: Memory, frame: Memory, first: Expr, row0: Expr, count: Expr
        ) -> None:
            f = Frame(self.names, frame)
            group, stride_s, stride_h = f["group"], f["lse_S"], f["lse_H"]
            with loop(0, positive(count)) as i:
                row = bind(row0 + i, "row")
                s = bind(tirx.truncdiv(row, group), "s")
                log = T.call_extern("float64", "log", tirx.Cast("float64", total[i]))
                value = tirx.Cast("float64", peak[i]) * tirx.FloatImm("float64", math.log(2.0)) + log
                target[first + s * stride_s + (row - s * group) * stride_h] = tirx.Cast("float32", value)

        acc = f"*{self.acc}"
        arrays = [("peak", acc), ("total", acc), ("lse", "*float32"), ("frame", "*int64")]
        return Function("attention_finish_lse", [*arrays, *[(n, "int64") for n in ("first", "row0", "count")]], body)
