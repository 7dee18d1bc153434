"""The private functions of the attention program that read and write arrays: packing, and results.

Packed: queries in panels of (D, lanes), keys in rows of D, values in tiles of (keys, channels). Offsets and
strides count items.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tvm import tirx
from tvm.tirx.script.builder import ir as T

from tlhub_attention.cpu_ir import Expr, Frame, Function, Memory, bind, ceil_div, i64, loop, positive, registers, when
from tlhub_attention.cpu_math import Vector
from tlhub_attention.cpu_tiles import Tiles

_ROWS_AHEAD = 8


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
        return "uint16" if dtype == "bfloat16" or (dtype == "float16" and not self.native_half) else dtype

    @property
    def acc(self) -> str:
        return self.tiles.vector.dtype

    @property
    def scalar(self) -> Vector:
        return Vector(self.acc, 1)

    @property
    def narrow(self) -> Vector:
        return Vector(self.acc, self.tiles.tile)

    def _read(self, name: str, memory: Memory, at: Expr, vector: Vector) -> Expr:
        return vector.widen(vector.load(memory, at), self.dtypes[name], self.native_half)

    def start(self) -> Function:
        """Find which keys each row of a block sees, and clear its sums. Lanes past the last row repeat it."""

        def body(
            peak: Memory, total: Memory, low: Memory, high: Memory, frame: Memory, row0: Expr, count: Expr
        ) -> None:
            f, zero = Frame(self.names, frame), i64(0)
            group, keys, shift, window = f["group"], f["S_kv"], f["shift"], f["window"]
            with loop(0, self._padded(count)) as i:
                row = bind(row0 + tirx.min(i, count - i64(1)), "row")
                end = bind(tirx.truncdiv(row, group) + shift, "end")
                seen = tirx.min(keys, tirx.max(zero, end))
                since = tirx.min(keys, tirx.max(zero, end - window))
                high[i] = tirx.Cast("int32", seen if self.causal else tirx.Select(window > zero, seen, keys))
                low[i] = tirx.Cast("int32", tirx.Select(window > zero, since, zero))
                peak[i] = self.scalar.number(0.0) - self.scalar.infinity()
                total[i] = self.scalar.number(0.0)

        arrays = [("peak", f"*{self.acc}"), ("total", f"*{self.acc}"), ("low", "*int32"), ("high", "*int32")]
        return Function("attention_start", [*arrays, ("frame", "*int64"), ("row0", "int64"), ("count", "int64")], body)

    def _padded(self, count: Expr) -> Expr:
        width = i64(self.tiles.panel)
        return positive(ceil_div(count, width) * width)

    def pack_queries(self) -> Function:
        """Pack a block of query rows from the item *first* into panels, times *factor*."""

        def body(
            source: Memory, packed: Memory, frame: Memory, factor: Expr, first: Expr, row0: Expr, count: Expr
        ) -> None:
            f, width = Frame(self.names, frame), i64(self.tiles.panel)
            group, stride_s, stride_h, stride_d = f["group"], f["q_S"], f["q_H"], f["q_D"]
            d = positive(f["D"])
            with loop(0, self._padded(count)) as i:
                row = bind(row0 + tirx.min(i, count - i64(1)), "row")
                s = bind(tirx.truncdiv(row, group), "s")
                at = bind(first + s * stride_s + (row - s * group) * stride_h, "at")
                panel = bind(tirx.truncdiv(i, width), "panel")
                target = bind(panel * d * width + (i - panel * width), "target")
                with loop(0, d, "c") as c:
                    source.prefetch(at + c * stride_d)
                    packed[target + c * width] = self._read("q", source, at + c * stride_d, self.scalar) * factor

        arrays = [("q", f"*{self.storage('q')}"), ("packed", f"*{self.acc}"), ("frame", "*int64")]
        numbers = [("factor", self.acc), *[(n, "int64") for n in ("first", "row0", "count")]]
        return Function("attention_pack_queries", [*arrays, *numbers], body)

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
                        x = self._read(name, source, at + c * tile, vector)
                        vector.store(packed, j * row + c * column, x)
                    else:
                        d = bind(start + c, "d")
                        source.prefetch(at + d * stride_d)
                        t = bind(tirx.truncdiv(d, tile), "t")
                        x = self._read(name, source, at + d * stride_d, vector)
                        packed[j * row + t * column + (d - t * tile)] = x

        arrays = [(name, f"*{self.storage(name)}"), ("packed", f"*{self.acc}")]
        numbers = ("first", "keys", "stride_s", "stride_d", "row", "column", "start", "count")
        kind = "tiles" if vectors else "items"
        return Function(f"attention_pack_{name}_{kind}", [*arrays, *[(n, "int64") for n in numbers]], body)

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

    def finish(self) -> Function:
        """Divide by the totals and write a block of o; a row that saw no key is 0."""

        def body(
            out: Memory, total: Memory, target: Memory, frame: Memory, first: Expr, row0: Expr, count: Expr
        ) -> None:
            f, width, v = Frame(self.names, frame), i64(self.tiles.panel), self.tiles.vector
            d, vectors = positive(f["D_v"]), positive(f["vectors"])
            group, channels = f["group"], f["channels"]
            stride_s, stride_h, stride_d = f["o_S"], f["o_H"], f["o_D_v"]
            zero = v.number(0.0)
            with loop(0, positive(ceil_div(count, width)), "panel") as panel, loop(0, vectors, "n") as n:
                sums = bind(v.load(total, panel * width + n * i64(v.lanes)), "sums")
                with loop(0, d, "c") as c:
                    at = bind((panel * channels + c) * width + n * i64(v.lanes), "at")
                    v.store(out, at, tirx.Select(sums == zero, zero, v.load(out, at) / sums))
            with loop(0, positive(count)) as i:
                row = bind(row0 + i, "row")
                s = bind(tirx.truncdiv(row, group), "s")
                at = bind(first + s * stride_s + (row - s * group) * stride_h, "at")
                panel = bind(tirx.truncdiv(i, width), "panel")
                base = bind(panel * channels * width + (i - panel * width), "base")
                with loop(0, d, "c") as c:
                    out.prefetch(base + c * width)
                    x = self.scalar.narrow(self.scalar.keep(out[base + c * width]), self.dtypes["o"], self.native_half)
                    target[at + c * stride_d] = x

        acc = f"*{self.acc}"
        arrays = [("out", acc), ("total", acc), ("o", f"*{self.storage('o')}"), ("frame", "*int64")]
        return Function("attention_finish", [*arrays, *[(n, "int64") for n in ("first", "row0", "count")]], body)

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
