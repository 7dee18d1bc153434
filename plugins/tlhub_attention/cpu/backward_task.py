"""A task of the backward program: a block of rows in the lanes, and what is done to it. Imported in workers only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from tvm import tirx

from tlhub_attention.cpu.blocks import Blocks, Packing
from tlhub_attention.cpu.entry import parts
from tlhub_attention.cpu.gradients import Gradients
from tlhub_attention.cpu.ir import Expr, Frame, Function, Memory, bind, branch, ceil_div, i64, loop, when
from tlhub_attention.cpu.math import LOG2E

PARTS = "left right out out_v rows rows_v packed packed_v weights pull lse delta ones slope".split()
PARTS += ["low", "high", "place", "flag", "flag_v"]
_INTEGERS = ("low", "high", "place", "flag", "flag_v")
_CHANNELS = {"q": "D", "k": "D", "v": "D_v", "dout": "D_v", "dq": "D", "dk": "D", "dv": "D_v"}


class Sum(NamedTuple):
    """What is added up over a block, by the names of its parts: ``out`` plus the rows ``packed`` times ``weights``.

    ``flag``: whether something packed is not finite; ``tiles``: how many there are of a row.
    """

    packed: str
    flag: str
    tiles: str
    weights: str
    out: str


DQ_DK = Sum("packed", "flag", "tiles", "pull", "out")
DV = Sum("packed_v", "flag_v", "tiles_v", "weights", "out_v")


class Functions:
    """The private functions of the program: attributes, by the names of what makes them, and ``all`` of them."""

    def __init__(self, blocks: Blocks) -> None:
        b, t, g = blocks, blocks.tiles, Gradients(blocks)
        self.blocks = blocks
        self.all: list[Function] = []
        self.sums, self.inspect = self._add(g.sums()), self._add(b.inspect())
        self.query_limits, self.key_limits = self._add(b.limits(keys=False)), self._add(b.limits(keys=True))
        self.pack_lanes = self._by_dtype(b.pack_lanes, "dout", *"qkv")
        self.packing: dict[str, Packing] = self._by_dtype(b.packing, "dout", *"qkv")
        self.scatter = self._by_dtype(b.scatter, "dq", "dk", "dv")
        self.clear, self.cap, self.mask = self._add(t.clear()), self._add(t.cap()), self._add(t.mask(cleared=True))
        self.scores, self.accumulate = self._add(t.scores(narrow=False)), self._add(t.accumulate(narrow=False))
        self.accumulate_seen = self._add(t.accumulate_seen())
        if b.biased:
            self.places, self.spread = self._add(b.places()), self._add(b.spread())
        self.gradient_of_lanes, self.gradient_of_rows = self._add(g.gradient(True)), self._add(g.gradient(False))
        self.clear_lanes, self.clear_rows = self._add(g.clear_lanes()), self._add(g.clear_rows())

    def _add(self, made: Any) -> Any:
        self.all += made.functions if isinstance(made, Packing) else [made]
        return made

    def _by_dtype(self, make: Callable[[str], Any], *names: str) -> dict[str, Any]:
        """Return what is made for each array; arrays of one dtype share it."""
        made: dict[str, Any] = {}
        for name in names:
            dtype = self.blocks.dtypes[name]
            if dtype not in made:
                made[dtype] = self._add(make(name))
        return {name: made[self.blocks.dtypes[name]] for name in names}


class Task:
    """A block of rows in the lanes: where its arrays and its parts of the scratch memory are, and what is done to them.

    ``f``: the frame; ``m`` and ``p``: the parts as memory, and as pointers.
    """

    def __init__(self, functions: Functions, args: tuple[Any, ...]) -> None:
        self.has, self.tiles = functions, functions.blocks.tiles
        names = functions.blocks.dtypes
        self.arrays = {n: x.buffer.data for n, x in zip(names, args, strict=False)}
        frame, self.lse2, self.delta, scratch, *numbers = args[len(names) :]
        self.factor, self.cap, self.scale, self.b, self.h_kv, self.row0, self.count = numbers
        self.f, self.address = Frame(functions.blocks.names, frame), frame.buffer.data
        self.m = parts(self.f, PARTS, scratch, _INTEGERS)
        self.p = {name: memory.buffer.data for name, memory in self.m.items()}
        one = self.one = functions.blocks.scalar.number(1.0)
        self.bend = bind(tirx.Select(self.f["capped"] == i64(1), one / self.cap, one - one), "bend")
        self.panel_count = bind(ceil_div(self.count, self.tiles.panel), "panels")
        self.padded = bind(self.panel_count * i64(self.tiles.panel), "padded")
        with loop(0, self.tiles.panel) as i:
            self.m["ones"][i] = one

    # -- places ----------------------------------------------------------------------------------------

    def first(self, name: str, g: Expr | None = None) -> Expr:
        """Return the first item of the keys' head, or of query head *g* (default 0) of those that share it."""
        f = self.f
        if name in ("k", "v", "dk", "dv"):
            return bind(self.b * f[f"{name}_B"] + self.h_kv * f[f"{name}_H_kv"])
        head = self.h_kv * f["group"] + (i64(0) if g is None else g)
        return bind(self.b * f[f"{name}_B"] + head * f[f"{name}_H"])

    def saved(self, g: Expr) -> Expr:
        """Return where lse and delta of query head *g* of those that share the keys begin."""
        f = self.f
        return self.b * f["saved_B"] + (self.h_kv * f["group"] + g) * f["saved_H"]

    def _lanes(self, name: str) -> tuple[Expr, ...]:
        """Return first item, rows, group, strides and width of an array whose rows lie in the lanes."""
        f, queries = self.f, name in ("q", "dout", "dq")
        axes = (f["group"], f[f"{name}_S"], f[f"{name}_H"]) if queries else (i64(1), f[f"{name}_S_kv"], i64(0))
        channels = _CHANNELS[name]
        return (self.first(name), self.row0, self.count, *axes, f[f"{name}_{channels}"], f[channels])

    # -- steps -----------------------------------------------------------------------------------------

    def pack_lanes(self, name: str, part: str, factor: Expr) -> None:
        with when(self.f[_CHANNELS[name]] > i64(0)):
            self.has.pack_lanes[name](self.arrays[name], self.p[part], factor, *self._lanes(name))

    def place(self, group: Expr, shift: Expr) -> None:
        """Find the places of the rows in the lanes, as ``Blocks.places`` does, where there is a bias."""
        if self.has.blocks.biased:
            self.has.places(self.p["place"], self.row0, self.count, group, shift)

    def slope(self, g: Expr, group: Expr) -> None:
        """Give the lanes the slopes of *group* query heads from *g* on of those that share the keys, in turn."""
        if self.has.blocks.biased:
            stride = self.f["slopes_H"]
            first = (self.h_kv * self.f["group"] + g) * stride
            log2e = self.has.blocks.scalar.number(LOG2E)
            self.has.spread(self.arrays["slopes"], self.p["slope"], log2e, first, self.row0, self.count, group, stride)

    def clear_sums(self, part: str, tiles: str) -> None:
        count = self.f[tiles]
        with when(count > i64(0)):
            vectors = self.panel_count * i64(self.tiles.vectors * self.tiles.tile)
            self.has.clear(self.p[part], vectors * count)

    def scatter(self, name: str, part: str, tiles: str, factor: Expr) -> None:
        channels = self.f[tiles] * i64(self.tiles.tile)
        with when(channels > i64(0)):
            self.has.scatter[name](self.p[part], self.arrays[name], factor, *self._lanes(name), channels)

    def walk(self, step: Callable[[Expr, Expr], None]) -> None:
        """Take *step(first, count)* with each block of what the lanes see."""
        block = i64(self.tiles.block)
        low = bind(tirx.Cast("int64", self.m["low"][0]), "low0")
        high = bind(tirx.Cast("int64", self.m["high"][self.count - i64(1)]), "high0")
        with loop(0, ceil_div(tirx.max(high - low, i64(0)), block), "step") as i:
            first = bind(low + i * block, "first")
            step(first, bind(tirx.min(block, high - first), "rows"))

    def pack(
        self, name: str, rows: str, packed: str, tiles: str, row0: Expr, count: Expr, g: Expr | None = None
    ) -> None:
        """Pack *count* rows of an array from *row0* on: as *rows*, and, unless that is "", as the tiles *packed*."""
        f, tile, block = self.f, i64(self.tiles.tile), i64(self.tiles.block)
        channels = _CHANNELS[name]
        width, stride = f[channels], f[f"{name}_{'S_kv' if name in 'kv' else 'S'}"]
        at, strides = bind(self.first(name, g) + row0 * stride), (stride, f[f"{name}_{channels}"])
        self.has.packing[name](self.arrays[name], self.p[rows], at, count, width, strides, (width, tile))
        if not packed:
            return
        # channels up to a whole tile, and rows up to a whole block: what lies there is weighed with 0
        with when(f[tiles] > i64(0)):
            self.has.clear(
                self.p[packed], f[tiles] * i64(self.tiles.tile * self.tiles.block // self.tiles.vector.lanes)
            )
        self.has.packing[name](self.arrays[name], self.p[packed], at, count, width, strides, (tile, tile * block))

    def panels(
        self,
        row0: Expr,
        rows: Expr,
        lse: Memory,
        delta: Memory,
        sums: Sequence[Sum],
        place0: Expr,
        saved: Expr | None = None,
    ) -> None:
        """Take every panel through a packed block, from row *row0* of what the lanes see, at *place0* of the keys.

        *saved*: where lse and delta of the rows begin; without it they are the lanes'.
        """
        f, m, p = self.f, self.m, self.p
        tile, width = i64(self.tiles.tile), i64(self.tiles.panel)
        vectors = f["vectors"]
        # A weight of zero would not hide a NaN or an infinity from the lanes that do not see it.
        low_most = tirx.Cast("int64", m["low"][self.count - i64(1)])
        high_least = tirx.Cast("int64", m["high"][0])
        in_part = bind(tirx.Or(high_least < row0 + rows, low_most > row0), "in_part")
        for x in sums:
            m[x.flag][0] = tirx.IntImm("int32", 0)
            with when(tirx.And(f[x.tiles] > i64(0), in_part)):
                self.has.inspect(p[x.packed], p[x.flag], f[x.tiles], rows)
        with loop(0, self.panel_count, "panel") as panel:
            lane = bind(panel * width, "lane")
            last = bind(lane + width - i64(1), "last")
            low, high, low_last, high_last = (
                bind(tirx.Cast("int64", m[name][at]) - row0)
                for name, at in (("low", lane), ("high", lane), ("low", last), ("high", last))
            )
            first = bind(tirx.truncdiv(tirx.max(low, i64(0)), tile) * tile, "first")
            end = bind(ceil_div(tirx.max(tirx.min(high_last, rows), i64(0)), tile) * tile, "end")
            with when(first < end):
                taken = bind(end - first, "taken")
                lows, highs = m["low"].at(lane), m["high"].at(lane)
                for left, right, out, channels in (
                    ("left", "rows", "weights", "D"),
                    ("right", "rows_v", "pull", "D_v"),
                ):
                    self._product(m[left], m[right], m[out], f[channels], lane, first, taken)
                with when(f["capped"] == i64(1)):
                    self.has.cap(m["weights"].at(first * width), self.cap, taken, vectors)
                gradient, at = self.has.gradient_of_lanes, lane
                if saved is not None:
                    gradient, at = self.has.gradient_of_rows, bind(saved + first, "at")
                weighed = [m[name].at(first * width) for name in ("weights", "pull")]
                of_bias = []
                if self.has.blocks.biased:
                    of_bias = [m["place"].at(lane), m["slope"].at(lane), place0 + first]
                gradient(*weighed, lse.at(at), delta.at(at), self.bend, *of_bias, taken, vectors)
                for start, stop in ((bind(tirx.max(first, high)), end), (first, bind(tirx.min(end, low_last)))):
                    with when(start < stop):
                        for x in sums:
                            cleared = m[x.weights].at(start * width)
                            self.has.mask(cleared, lows, highs, row0 + start, stop - start, vectors)
                hidden = bind(tirx.Or(low_last > first, high < end), "hidden")
                for x in sums:
                    tiles, out = f[x.tiles], m[x.out].at(lane * f[x.tiles] * tile)
                    product = [m[x.packed].at(first * tile), m[x.weights].at(first * width), out, p["ones"]]
                    seen = [*product, lows, highs, row0 + first, tiles, taken, vectors]
                    with when(tiles > i64(0)):
                        branch(
                            tirx.And(m[x.flag][0] == tirx.IntImm("int32", 1), hidden),
                            partial(self.has.accumulate_seen, *seen),
                            partial(self.has.accumulate, *product, tiles, taken),
                        )

    def _product(
        self, left: Memory, right: Memory, out: Memory, depth: Expr, lane: Expr, first: Expr, taken: Expr
    ) -> None:
        """out[row, lanes] = right[row, :] left[:, lanes]."""
        target = out.at(first * i64(self.tiles.panel))
        tiles = tirx.truncdiv(taken, i64(self.tiles.tile))
        branch(
            depth > i64(0),
            lambda: self.has.scores(left.at(lane * depth), right.at(first * depth), target, depth, tiles),
            lambda: self.has.clear(target, taken * i64(self.tiles.vectors)),
        )
