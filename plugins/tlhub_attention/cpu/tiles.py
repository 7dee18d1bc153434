"""The private functions of the attention program that work on a panel of queries and a block of keys.

A panel is ``vectors`` vectors of lanes, one lane a query. ``weights`` holds (keys, lanes): logits in base 2,
then the weights. Pointers are to the first key of concern; counts are at least 1, and ``keys`` is a multiple of the
tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.tirx.script.builder import ir as T

from tlhub_attention.cpu.ir import Expr, Function, Memory, bind, i64, loop, positive, registers
from tlhub_attention.cpu.math import Vector


@dataclass(frozen=True)
class Tiles:
    """``tile``: rows (keys or channels) of a register tile; ``block``: keys of a block."""

    vector: Vector
    vectors: int
    tile: int
    block: int

    @property
    def panel(self) -> int:
        return self.vector.lanes * self.vectors

    @property
    def starts(self) -> list[int]:
        return [i * self.vector.lanes for i in range(self.vectors)]

    def scores(self, narrow: bool) -> Function:
        """weights[j, lanes] = K[j, :] Q[:, lanes] for *tiles* tiles of keys; of two times the height if narrow.

        *narrow*: for the first vector of the panel alone, where it holds every query there is.
        """
        v, acc = self.vector, self.vector.dtype
        rows, starts = (2 * self.tile, [0]) if narrow else (self.tile, self.starts)

        def body(q: Memory, k: Memory, weights: Memory, d: Expr, tiles: Expr) -> None:
            depth = positive(d)
            with loop(0, positive(tiles), "t") as t:
                key = bind(t * i64(rows), "key")
                sums = self._product(
                    depth,
                    1,
                    [v.number(0.0)] * (rows * len(starts)),
                    lambda c: [v.load(q, c * i64(self.panel) + i64(i)) for i in starts],
                    lambda c: [k[(key + i64(i)) * depth + c] for i in range(rows)],
                )
                for n, total in enumerate(sums):
                    row, column = divmod(n, len(starts))
                    v.store(weights, (key + i64(row)) * i64(self.panel) + i64(starts[column]), total)

        kinds = [("q", f"*{acc}"), ("k", f"*{acc}"), ("weights", f"*{acc}")]
        name = "attention_scores_narrow" if narrow else "attention_scores"
        return Function(name, [*kinds, ("d", "int64"), ("tiles", "int64")], body)

    def clear(self) -> Function:
        """memory[i] = 0 for *vectors* vectors."""
        v = self.vector

        def body(memory: Memory, vectors: Expr) -> None:
            with loop(0, positive(vectors)) as i:
                v.store(memory, i * i64(v.lanes), v.number(0.0))

        return Function("attention_clear", [("memory", f"*{v.dtype}"), ("vectors", "int64")], body)

    def divide(self) -> Function:
        """out[channel, lanes] = out / total[lanes] * factor in *panels* panels; 0 where a total is 0."""
        v = self.vector

        def body(
            out: Memory, total: Memory, factor: Expr, d: Expr, channels: Expr, panels: Expr, vectors: Expr
        ) -> None:
            zero, width, depth, used = v.number(0.0), i64(self.panel), positive(d), positive(vectors)
            times = v.fill(factor)
            with loop(0, positive(panels), "panel") as panel, loop(0, used, "n") as n:
                sums = bind(v.load(total, panel * width + n * i64(v.lanes)), "sums")
                with loop(0, depth, "c") as c:
                    at = bind((panel * channels + c) * width + n * i64(v.lanes), "at")
                    v.store(out, at, tirx.Select(sums == zero, zero, v.load(out, at) / sums * times))

        numbers = [(n, "int64") for n in ("d", "channels", "panels", "vectors")]
        kinds = [("out", f"*{v.dtype}"), ("total", f"*{v.dtype}"), ("factor", v.dtype)]
        return Function("attention_divide", [*kinds, *numbers], body)

    def multiply(self) -> Function:
        """packed[c, lanes] = packed * factors[lanes], for *d* rows of each of *panels* panels."""
        v = self.vector

        def body(packed: Memory, factors: Memory, d: Expr, panels: Expr) -> None:
            depth, width = positive(d), i64(self.panel)
            with loop(0, positive(panels), "panel") as panel, loop(0, i64(self.vectors), "n") as n:
                factor = bind(v.load(factors, panel * width + n * i64(v.lanes)), "factor")
                with loop(0, depth, "c") as c:
                    at = bind((panel * depth + c) * width + n * i64(v.lanes), "at")
                    v.store(packed, at, v.load(packed, at) * factor)

        kinds = [("packed", f"*{v.dtype}"), ("factors", f"*{v.dtype}"), ("d", "int64"), ("panels", "int64")]
        return Function("attention_multiply", kinds, body)

    def accumulate(self, narrow: bool) -> Function:
        """out[channel, lanes] = out * correction + V[:, channel] weights[:, lanes]; V in tiles of (keys, channels).

        *narrow*: for the first vector alone; even and odd keys are summed apart, to have sums enough in flight.
        """
        v, acc = self.vector, self.vector.dtype
        phases, starts = (2, [0]) if narrow else (1, self.starts)

        def body(values: Memory, weights: Memory, out: Memory, correction: Memory, tiles: Expr, keys: Expr) -> None:
            factor = [bind(v.load(correction, i64(i))) for i in starts]
            count = positive(tirx.truncdiv(keys, i64(phases)))
            places = [i * self.panel + start for i in range(self.tile) for start in starts]
            with loop(0, positive(tiles), "t") as t:
                target = bind(t * i64(self.tile * self.panel), "target")
                source = bind(t * i64(self.tile * self.block), "source")
                old = [v.load(out, target + i64(p)) * factor[n % len(starts)] for n, p in enumerate(places)]
                sums = self._product(
                    count,
                    phases,
                    old + [v.number(0.0)] * (len(old) * (phases - 1)),
                    lambda j: [v.load(weights, j * i64(self.panel) + i64(i)) for i in starts],
                    lambda j: [values[source + j * i64(self.tile) + i64(i)] for i in range(self.tile)],
                )
                for place, total in zip(places, sums, strict=True):
                    v.store(out, target + i64(place), total)

        kinds = [(n, f"*{acc}") for n in ("values", "weights", "out", "correction")]
        name = "attention_accumulate_narrow" if narrow else "attention_accumulate"
        return Function(name, [*kinds, ("tiles", "int64"), ("keys", "int64")], body)

    def _product(self, steps: Expr, phases: int, initial: list[Expr], lanes: Any, numbers: Any) -> list[Expr]:
        """Return a register tile: *initial* plus the outer products of *numbers(i)* and *lanes(i)* over a loop.

        *phases*: steps of the sum that one turn of the loop takes, each with sums of its own.
        """
        v = self.vector
        sums = registers(len(initial), v.lanes, v.dtype)
        for register, value in zip(sums, initial, strict=True):
            v.store(register, i64(0), value)
        with loop(0, steps, "step") as i:
            places = iter(sums)
            for phase in range(phases):
                step = i * i64(phases) + i64(phase)
                right = [bind(x) for x in lanes(step)]
                for number in numbers(step):
                    left = bind(v.fill(number))
                    for x in right:
                        register = next(places)
                        v.store(register, i64(0), v.load(register, i64(0)) + left * x)
        size = len(sums) // phases
        return [sum((v.load(r, i64(0)) for r in sums[n + size :: size]), v.load(sums[n], i64(0))) for n in range(size)]

    def accumulate_seen(self) -> Function:
        """Do as ``accumulate``, with the products of the keys alone that a lane sees: slow, for poisoned blocks."""
        v, acc = self.vector, self.vector.dtype

        def body(
            values: Memory,
            weights: Memory,
            out: Memory,
            correction: Memory,
            low: Memory,
            high: Memory,
            key0: Expr,
            tiles: Expr,
            keys: Expr,
            vectors: Expr,
        ) -> None:
            count, used = positive(keys), positive(vectors)
            (total,) = registers(1, v.lanes, acc)
            with loop(0, positive(tiles) * i64(self.tile), "c") as c, loop(0, used, "n") as n:
                start = n * i64(v.lanes)
                target = bind(c * i64(self.panel) + start, "target")
                source = bind(
                    (tirx.truncdiv(c, i64(self.tile)) * i64(self.block * self.tile)) + tirx.truncmod(c, i64(self.tile))
                )
                v.store(total, i64(0), v.load(out, target) * v.load(correction, start))
                with loop(0, count, "j") as j:
                    key = v.fill(tirx.Cast("int32", key0 + j))
                    old = bind(v.load(total, i64(0)))
                    weight = v.load(weights, j * i64(self.panel) + start)
                    new = bind(old + v.fill(values[source + j * i64(self.tile)]) * weight)
                    new = tirx.Select(key < v.load(high, start), new, old)
                    v.store(total, i64(0), tirx.Select(key < v.load(low, start), old, new))
                v.store(out, target, v.load(total, i64(0)))

        kinds = [(n, f"*{acc}") for n in ("values", "weights", "out", "correction")]
        limits = [("low", "*int32"), ("high", "*int32")]
        numbers = [(n, "int64") for n in ("key0", "tiles", "keys", "vectors")]
        return Function("attention_accumulate_seen", [*kinds, *limits, *numbers], body)

    def cap(self) -> Function:
        """weights = cap tanh(weights)."""
        v, acc = self.vector, self.vector.dtype

        def body(weights: Memory, cap: Expr, keys: Expr, vectors: Expr) -> None:
            used = positive(vectors)
            with loop(0, positive(keys), "j") as j:
                row = bind(j * i64(self.panel), "row")
                if acc == "float64":
                    with loop(0, used * i64(v.lanes)) as i:
                        weights[row + i] = T.call_extern("float64", "tanh", weights[row + i]) * cap
                else:
                    with loop(0, used, "n") as n:
                        at = bind(row + n * i64(v.lanes), "at")
                        v.store(weights, at, v.tanh(v.load(weights, at)) * v.fill(cap))

        numbers = [("cap", acc), ("keys", "int64"), ("vectors", "int64")]
        return Function("attention_cap", [("weights", f"*{acc}"), *numbers], body)

    def bias(self) -> Function:
        """weights[j, lane] -= slope |place - key| of the lane, for the keys from *key0* on."""
        v, acc = self.vector, self.vector.dtype

        def body(weights: Memory, place: Memory, slope: Memory, key0: Expr, keys: Expr, vectors: Expr) -> None:
            count = positive(keys)
            with loop(0, positive(vectors), "n") as n:
                start = bind(n * i64(v.lanes), "start")
                places, slopes = bind(v.load(place, start)), bind(v.load(slope, start))
                with loop(0, count, "j") as j:
                    at = bind(j * i64(self.panel) + start, "at")
                    key = bind(v.fill(tirx.Cast("int32", key0 + j)))
                    v.store(weights, at, v.load(weights, at) - slopes * v.distance(places, key))

        kinds = [("weights", f"*{acc}"), ("place", "*int32"), ("slope", f"*{acc}")]
        return Function("attention_bias", [*kinds, *[(n, "int64") for n in ("key0", "keys", "vectors")]], body)

    def mask(self, cleared: bool = False) -> Function:
        """weights[j, lane] = -inf, or 0 if *cleared*, for the keys from *key0* that the lane does not see."""
        v, acc = self.vector, self.vector.dtype

        def body(weights: Memory, low: Memory, high: Memory, key0: Expr, keys: Expr, vectors: Expr) -> None:
            count = positive(keys)
            nothing = bind(v.number(0.0) if cleared else v.number(0.0) - v.infinity())
            with loop(0, positive(vectors), "n") as n:
                start = bind(n * i64(v.lanes), "start")
                lows, highs = bind(v.load(low, start)), bind(v.load(high, start))
                with loop(0, count, "j") as j:
                    key = bind(v.fill(tirx.Cast("int32", key0 + j)))
                    at = bind(j * i64(self.panel) + start, "at")
                    seen = tirx.Select(key < highs, v.load(weights, at), nothing)
                    v.store(weights, at, tirx.Select(key < lows, nothing, seen))

        kinds = [("weights", f"*{acc}"), ("low", "*int32"), ("high", "*int32")]
        return Function("attention_mask", [*kinds, *[(n, "int64") for n in ("key0", "keys", "vectors")]], body)

    def softmax(self) -> Function:
        """weights = 2**(weights - peak): brings the lanes' running *peak* and *total* up to date.

        Stores the *correction* of what was summed before.
        """
        v, acc = self.vector, self.vector.dtype
        width = i64(self.panel)

        def body(weights: Memory, peak: Memory, total: Memory, correction: Memory, keys: Expr, vectors: Expr) -> None:
            count, zero = positive(keys), i64(0)
            nothing = bind(v.number(0.0) - v.infinity())
            most, sums = registers(2, v.lanes, acc)
            with loop(0, positive(vectors), "n") as n:
                start = bind(n * i64(v.lanes), "start")
                old = v.keep(v.load(peak, start))
                v.store(most, zero, old)
                with loop(0, count, "j") as j:
                    # a NaN may be lost here; its weight is one nevertheless
                    v.store(most, zero, tirx.max(v.load(most, zero), v.load(weights, j * width + start)))
                v.store(peak, start, v.load(most, zero))
                # a lane that saw no key yet: 2**(-inf - 0) is 0
                base = v.keep(tirx.Select(v.load(most, zero) == nothing, v.number(0.0), v.load(most, zero)))
                factor = v.keep(v.exp2(old - base))
                v.store(correction, start, factor)
                v.store(sums, zero, v.load(total, start) * factor)
                with loop(0, count, "j") as j:
                    at = bind(j * width + start, "at")
                    weight = v.keep(v.exp2(v.load(weights, at) - base))
                    v.store(weights, at, weight)
                    v.store(sums, zero, v.load(sums, zero) + weight)
                v.store(total, start, v.load(sums, zero))

        kinds = [(n, f"*{acc}") for n in ("weights", "peak", "total", "correction")]
        return Function("attention_softmax", [*kinds, ("keys", "int64"), ("vectors", "int64")], body)
