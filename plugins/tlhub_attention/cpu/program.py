"""The program of the CPU schedule: flash attention in TIR, one binary for every size and stride.

Queries lie in the lanes of vectors. A task takes one head of keys and a block of query rows (the queries of
all heads that share those keys are rows of one matrix), packs the queries once, transposed into panels, and
walks the keys block by block: it packs a block of K and V, and for each panel computes

    S = K Q       (keys, lanes)      a register tile of ``keys`` x ``vectors`` vectors over D
    P = 2**(S - max)                 the running maximum and sum of each lane
    O = O * correction + V P         (channels, lanes): the same register tile over the block's keys

so that reductions over keys never cross lanes, K and V need no transposition, and every read of an inner
loop is a broadcast or an aligned vector. Scratch is a few blocks a task, whatever the number of keys: memory
grows with S. Blocks of keys, and tiles of a block, that the mask hides from a whole panel are skipped.

The algorithm is the online softmax of Milakov and Gimelshein (2018), in blocks as in FlashAttention-2
(Dao, 2023). Imported in workers only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script.builder import ir as T

from tlhub.specs import Problem
from tlhub_attention.cpu.entry import Program, block_rows, build, deal, lay_out, parts
from tlhub_attention.cpu.ir import (
    Expr,
    Frame,
    Function,
    Memory,
    bind,
    branch,
    ceil_div,
    i64,
    loop,
    module,
    when,
    workspace,
)
from tlhub_attention.cpu.math import LOG2E

_NUMBERS = "group queries shift query_rows query_blocks channels window capped vectors padded".split()
_PARTS = "packed out keys values weights peak total correction slope factors low high place flag".split()
_INTEGERS = ("low", "high", "place", "flag")


def program(problem: Problem, config: Mapping[str, Any], arch: str) -> Any:
    """Return the module of *problem*, whose entry takes the arrays in the contract's order, scale, window, softcap.

    *config*: that of ``build``.
    """
    return build(Attention, problem, config, arch)


class Attention(Program):
    """The entry, and the function of a task: a block of query rows against the keys of one head."""

    numbers = (*_NUMBERS, *_PARTS)

    def build(self) -> Any:
        """Return the module. The private functions are attributes, by the names of what makes them."""
        b, t = self.blocks, self.tiles
        self.start, self.limits, self.inspect = b.start(), b.limits(keys=False), b.inspect()
        self.pack_queries, self.divide, self.scatter = b.pack_lanes("q"), t.divide(), b.scatter("o")
        alike = b.dtypes["k"] == b.dtypes["v"]
        self.pack = {"k": b.packing("k")}
        self.pack["v"] = self.pack["k"] if alike else b.packing("v")
        self.clear, self.cap, self.mask, self.softmax = t.clear(), t.cap(), t.mask(), t.softmax()
        self.scores, self.scores_narrow = t.scores(narrow=False), t.scores(narrow=True)
        self.accumulate, self.accumulate_narrow = t.accumulate(narrow=False), t.accumulate(narrow=True)
        self.accumulate_seen = t.accumulate_seen()
        self.functions += [self.start, self.limits, self.inspect, self.pack_queries, self.divide, self.scatter]
        self.functions += [f for name in ("k", *(() if alike else ("v",))) for f in self.pack[name].functions]
        self.functions += [self.clear, self.cap, self.mask, self.softmax, self.scores, self.scores_narrow]
        self.functions += [self.accumulate, self.accumulate_narrow, self.accumulate_seen]
        self.biased, self.scaled = b.biased, "q_scale" in self.arrays
        if self.biased or self.scaled:
            self.spread = b.spread()
            self.functions.append(self.spread)
        if self.biased:
            self.places, self.bias = b.places(), t.bias()
            self.functions += [self.places, self.bias]
        if self.scaled:
            self.multiply = t.multiply()
            self.functions.append(self.multiply)
        if "lse" in self.arrays:
            self.finish_lse = b.finish_lse()
            self.functions.append(self.finish_lse)
        pointers = [(n, f"*{b.storage(n)}") for n in self.arrays]
        numbers = [(n, "int64") for n in ("b", "h_kv", "row0", "count")]
        shared = [("frame", "*int64"), ("scratch", f"*{self.acc}"), ("factor", self.acc), ("cap", self.acc)]
        task = Function("attention_task", [*pointers, *shared, *numbers], self._task)
        self.functions.append(task)
        called = self._around(task, "S")
        with IRBuilder() as builder:
            with T.prim_func():
                T.func_name(self.problem.kernel)
                self._entry(called)
            entry = builder.get()
        return module(self.problem.kernel, entry, self.functions)

    # -- the entry -------------------------------------------------------------------------------------

    def _entry(self, task: Function) -> None:
        """Declare the parameters, fill the frame, and deal out the tasks."""
        entry = self._declare()
        frame, dims = entry.frame, entry.dims
        tasks = self._sizes(frame, dims)
        with loop(0, tasks, "task", T.parallel) as i:
            head, row0, count = deal(i, frame["query_blocks"], frame["query_rows"], frame["queries"])
            b = bind(tirx.truncdiv(head, dims["H_kv"]), "b")
            with workspace(frame["scratch"], self.acc) as scratch:
                numbers = (b, head - b * dims["H_kv"], row0, count)
                task(*entry.pointers, frame.address, scratch, entry.factor, entry.cap, *numbers)

    def _sizes(self, frame: Frame, dims: Mapping[str, Expr]) -> Expr:
        """Put what all tasks share into the frame: rows, blocks, parts of the scratch. Return the number of tasks."""
        panel = self.tiles.panel
        rows = frame.put("queries", frame["group"] * dims["S"])
        heads = bind(dims["B"] * dims["H_kv"], "heads")
        each = frame.put("query_rows", block_rows(heads, rows, self.block, panel))
        blocks = frame.put("query_blocks", self._blocks(frame, rows, each))
        channels = frame.put("channels", ceil_div(dims["D_v"], self.tiles.tile) * i64(self.tiles.tile))
        rows = frame.put("padded", ceil_div(tirx.min(each, rows), panel) * i64(panel))
        slack = self.tiles.block + self.tiles.tile  # narrow tiles are twice as high
        size = {"packed": rows * dims["D"], "out": rows * channels, "weights": slack * panel}
        size |= {"keys": i64(slack) * dims["D"], "values": i64(self.tiles.block) * channels}
        size |= {"correction": panel, "flag": 1}
        lay_out(frame, {name: size.get(name, rows) for name in _PARTS})
        return bind(heads * blocks, "tasks")

    # -- a task ----------------------------------------------------------------------------------------

    @contextmanager
    def _runs(
        self, arrays: Mapping[str, Memory], f: Frame, b: Expr, key0: Expr, keys: Expr
    ) -> Iterator[tuple[Expr, Expr, dict[str, Expr]]]:
        """Go through *keys* keys from *key0* in runs of one stride: of a run, its first key counted from *key0*, how
        many they are, and where it begins in k and v."""
        yield i64(0), keys, {n: key0 * f[f"{n}_S_kv"] for n in "kv"}

    def _task(self, *args: Any) -> None:
        """Take a block of rows through all keys that one of them sees. *args*: arrays, then as ``build`` lists them."""
        arrays = dict(zip(self.arrays, args, strict=False))
        frame, scratch, factor, cap, b, h_kv, row0, count = args[len(self.arrays) :]
        f = Frame(self.blocks.names, frame)
        address = frame.buffer.data
        row_of = {n: b * f[f"{n}_B"] + h_kv * f["group"] * f[f"{n}_H"] for n in ("q", "o", "lse") if n in arrays}
        m = parts(f, _PARTS, scratch, _INTEGERS)
        p = {name: memory.buffer.data for name, memory in m.items()}
        q, k, v, o = (arrays[n].buffer.data for n in "qkvo")
        d, d_v, channels, block = f["D"], f["D_v"], f["channels"], i64(self.tiles.block)
        lanes, tile = i64(self.tiles.vector.lanes), i64(self.tiles.tile)
        self.start(p["peak"], p["total"], count)
        self.limits(p["low"], p["high"], address, row0, count)
        with when(d > i64(0)):
            rows = (row_of["q"], row0, count, f["group"], f["q_S"], f["q_H"], f["q_D"])
            self.pack_queries(q, p["packed"], factor, *rows, d)
            if self.scaled:
                first = bind(b * f["q_scale_B"] + h_kv * f["group"] * f["q_scale_H"], "first_factor")
                of_keys = self._factor("k", arrays, f, b, h_kv)
                rows_of_heads = (first, row0, count, f["group"], f["q_scale_H"])
                self.spread(arrays["q_scale"].buffer.data, p["factors"], of_keys, *rows_of_heads)
                self.multiply(p["packed"], p["factors"], d, ceil_div(count, self.tiles.panel))
        if self.biased:
            log2e, first = self.blocks.scalar.number(LOG2E), h_kv * f["group"] * f["slopes_H"]
            self.spread(arrays["slopes"].buffer.data, p["slope"], log2e, first, row0, count, f["group"], f["slopes_H"])
            self.places(p["place"], row0, count, f["group"], f["shift"])
        with when(d_v > i64(0)):
            padded = ceil_div(count, self.tiles.panel) * i64(self.tiles.vectors)
            self.clear(p["out"], padded * channels)
        low = bind(tirx.Cast("int64", m["low"][0]), "low0")
        high = bind(tirx.Cast("int64", m["high"][count - i64(1)]), "high0")
        k0, v0 = (bind(b * f[f"{n}_B"] + h_kv * f[f"{n}_H_kv"]) for n in "kv")
        with loop(0, ceil_div(tirx.max(high - low, i64(0)), block), "step") as step:
            key0 = bind(low + step * block, "key0")
            keys = bind(tirx.min(block, high - key0), "keys")
            # channels up to a whole tile, and keys up to a whole block: what lies there is weighed with 0
            with when(tirx.And(d_v > i64(0), tirx.Or(step == i64(0), keys < block))):
                self.clear(p["values"], tirx.truncdiv(channels * block, lanes))
            with self._runs(arrays, f, b, key0, keys) as (first, run, at):
                first_k, first_v = bind(k0 + at["k"]), bind(v0 + at["v"])
                target_k, target_v = m["keys"].at(first * d), m["values"].at(first * tile)
                self.pack["k"](k, target_k, first_k, run, d, (f["k_S_kv"], f["k_D"]), (d, tile))
                self.pack["v"](v, target_v, first_v, run, d_v, (f["v_S_kv"], f["v_D_v"]), (tile, tile * block))
            self._panels(f, m, p, cap, count, key0, keys)
        with when(d_v > i64(0)):
            one = self.blocks.scalar.number(1.0)
            of_values = self._factor("v", arrays, f, b, h_kv) if self.scaled else one
            panels = ceil_div(count, self.tiles.panel)
            self.divide(p["out"], p["total"], of_values, d_v, channels, panels, f["vectors"])
            rows = (row_of["o"], row0, count, f["group"], f["o_S"], f["o_H"], f["o_D_v"])
            self.scatter(p["out"], o, one, *rows, d_v, channels)
        if "lse" in arrays:
            self.finish_lse(p["peak"], p["total"], arrays["lse"].buffer.data, address, row_of["lse"], row0, count)

    def _factor(self, name: str, arrays: Mapping[str, Memory], f: Frame, b: Expr, h_kv: Expr) -> Expr:
        """Return the factor of a head of k or v."""
        at = b * f[f"{name}_scale_B"] + h_kv * f[f"{name}_scale_H_kv"]
        return bind(tirx.Cast(self.acc, arrays[f"{name}_scale"][at]), f"factor_{name}")

    def _panels(
        self, f: Frame, m: dict[str, Memory], p: dict[str, Expr], cap: Expr, count: Expr, key0: Expr, keys: Expr
    ) -> None:
        """Take every panel of the block through the packed keys that it sees."""
        tile, width = i64(self.tiles.tile), i64(self.tiles.panel)
        d, channels, capped, vectors = f["D"], f["channels"], f["capped"], f["vectors"]
        tiles = bind(tirx.truncdiv(channels, tile), "tiles")
        # A weight of zero would not hide a NaN or an infinity from the rows that do not see it.
        low_most = tirx.Cast("int64", m["low"][count - i64(1)])
        high_least = tirx.Cast("int64", m["high"][0])
        m["flag"][0] = tirx.IntImm("int32", 0)
        with when(tirx.And(tiles > i64(0), tirx.Or(high_least < key0 + keys, low_most > key0))):
            self.inspect(p["values"], p["flag"], tiles, keys)
        with loop(0, ceil_div(count, self.tiles.panel), "panel") as panel:
            row = bind(panel * width, "row")
            last = bind(row + width - i64(1), "last")
            low, high, low_last, high_last = (
                bind(tirx.Cast("int64", m[name][at]) - key0)
                for name, at in (("low", row), ("high", row), ("low", last), ("high", last))
            )
            first = bind(tirx.truncdiv(tirx.max(low, i64(0)), tile), "first") * tile
            end = bind(ceil_div(tirx.max(tirx.min(high_last, keys), i64(0)), tile), "end") * tile
            first, end = bind(first), bind(end)
            with when(first < end):
                taken = bind(end - first, "taken")
                alone = bind(count - row <= i64(self.tiles.vector.lanes), "alone")
                used = bind(tirx.Select(alone, i64(1), vectors), "used")
                lows, highs, weights = m["low"].at(row), m["high"].at(row), m["weights"].at(first * width)
                logits = [m["packed"].at(row * d), m["keys"].at(first * d), weights, d]
                product = [m["values"].at(first * tile), weights, m["out"].at(row * channels), p["correction"]]

                def multiply() -> None:
                    branch(
                        alone,
                        lambda: self.scores_narrow(*logits, ceil_div(taken, i64(2) * tile)),
                        lambda: self.scores(*logits, tirx.truncdiv(taken, tile)),
                    )

                branch(d > i64(0), multiply, lambda: self.clear(weights, taken * i64(self.tiles.vectors)))
                with when(capped == i64(1)):
                    self.cap(weights, cap, taken, used)
                if self.biased:
                    self.bias(weights, m["place"].at(row), m["slope"].at(row), key0 + first, taken, used)
                hidden = bind(tirx.max(first, high), "hidden")
                with when(hidden < end):
                    self.mask(m["weights"].at(hidden * width), lows, highs, key0 + hidden, end - hidden, used)
                hidden = bind(tirx.min(end, low_last), "hidden")
                with when(first < hidden):
                    self.mask(weights, lows, highs, key0 + first, hidden - first, used)
                self.softmax(weights, m["peak"].at(row), m["total"].at(row), p["correction"], taken, used)

                def weigh() -> None:
                    branch(
                        alone,
                        lambda: self.accumulate_narrow(*product, tiles, taken),
                        lambda: self.accumulate(*product, tiles, taken),
                    )

                in_part = tirx.Or(low_last > first, high < end)
                with when(tiles > i64(0)):
                    branch(
                        tirx.And(m["flag"][0] == tirx.IntImm("int32", 1), in_part),
                        lambda: self.accumulate_seen(*product, lows, highs, key0 + first, tiles, taken, used),
                        weigh,
                    )
