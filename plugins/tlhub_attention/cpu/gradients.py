"""The private functions of the backward program alone. Layouts are those of ``cpu_tiles``; imported in workers only.

A panel's lanes are queries in the pass for dq, and keys in the pass for dk and dv; what it goes through, the rows of
``weights`` and ``pull``, are the others. A query that takes no part has an lse of +inf here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm import tirx

from tlhub_attention.cpu.blocks import Blocks
from tlhub_attention.cpu.ir import Expr, Function, Memory, bind, branch, i64, loop, positive, registers, when
from tlhub_attention.cpu.math import LOG2E, Vector


@dataclass(frozen=True)
class Gradients:
    """``blocks``: the arrays and tiles of the program."""

    blocks: Blocks

    @property
    def vector(self) -> Vector:
        return self.blocks.tiles.vector

    def sums(self) -> Function:
        """Find lse in base 2 and delta of *count* queries of a head, from items on."""
        blocks, scalar = self.blocks, self.blocks.scalar
        acc = blocks.acc

        def body(dout: Memory, o: Memory, lse: Memory, base2: Memory, delta: Memory, *numbers: Expr) -> None:
            at_dout, at_o, at_lse, to, count, step_dout, step_o, step_lse, dout_c, o_c, d_v = numbers
            (total,) = registers(1, 1, acc)
            with loop(0, positive(count)) as i:
                scalar.store(total, i64(0), scalar.number(0.0))
                first_dout, first_o = bind(at_dout + i * step_dout), bind(at_o + i * step_o)
                with loop(0, d_v, "c") as c:
                    x = blocks.read("dout", dout, first_dout + c * dout_c, scalar)
                    y = blocks.read("o", o, first_o + c * o_c, scalar)
                    scalar.store(total, i64(0), scalar.load(total, i64(0)) + x * y)
                delta[to + i] = scalar.load(total, i64(0))
                value = scalar.keep(tirx.Cast(acc, lse[at_lse + i * step_lse]))
                dead = value == scalar.number(0.0) - scalar.infinity()
                base2[to + i] = tirx.Select(dead, scalar.infinity(), value * scalar.number(LOG2E))

        arrays = [("dout", f"*{blocks.storage('dout')}"), ("o", f"*{blocks.storage('o')}"), ("lse", "*float32")]
        names = "at_dout at_o at_lse to count step_dout step_o step_lse dout_c o_c d_v".split()
        kinds = [*arrays, ("base2", f"*{acc}"), ("delta", f"*{acc}"), *[(n, "int64") for n in names]]
        return Function("attention_sums", kinds, body)

    def gradient(self, lanes: bool) -> Function:
        """weights = P and pull = dS, from logits in base 2 and dout v^T. *bend*: 1 / cap in base 2, 0 without one.

        *lanes*: lse and delta are the lanes' and not the rows', of which those that take no part are 0. With a bias the
        logits have none yet: it is the lanes' slope times the distance of their place to that of a row, from *row0* on.
        """
        v, tiles, biased = self.vector, self.blocks.tiles, self.blocks.biased

        def body(weights: Memory, pull: Memory, lse: Memory, delta: Memory, bend: Expr, *others: Any) -> None:
            *of_bias, rows, vectors = others
            rows, vectors = positive(rows), positive(vectors)
            zero, one, curve = v.number(0.0), v.number(1.0), bind(v.fill(bend))
            most = v.number(128.0 if v.bits == 32 else 1024.0)  # from where on 2**x is infinite

            def bias(j: Expr, start: Expr) -> Expr:
                place, slope, row0 = of_bias
                row = v.fill(tirx.Cast("int32", row0 + j))
                return v.load(slope, start) * v.distance(v.load(place, start), row)

            def compute(at: Expr, base: Expr, mean: Expr, j: Expr, start: Expr) -> None:
                logit = v.keep(v.load(weights, at))
                whole = v.keep(logit - bias(j, start)) if biased else logit
                weight = v.keep(v.exp2(tirx.min(most, v.keep(whole - base))))
                t = v.keep(logit * curve)
                slope = tirx.Select(curve == zero, one, one - t * t)
                v.store(weights, at, weight)
                v.store(pull, at, weight * (v.load(pull, at) - mean) * slope)

            with loop(0, rows, "j") as j, loop(0, vectors, "n") as n:
                start = n * i64(v.lanes)
                at = bind(j * i64(tiles.panel) + start, "at")
                if lanes:
                    compute(at, v.load(lse, start), v.load(delta, start), j, start)
                else:

                    def clear(at: Expr = at) -> None:
                        v.store(weights, at, zero)
                        v.store(pull, at, zero)

                    def fill(at: Expr = at, j: Expr = j, start: Expr = start) -> None:
                        compute(at, bind(v.fill(lse[j])), bind(v.fill(delta[j])), j, start)

                    branch(lse[j] == self.blocks.scalar.infinity(), clear, fill)

        kinds = [(n, f"*{v.dtype}") for n in ("weights", "pull", "lse", "delta")]
        name = "attention_gradient_of_lanes" if lanes else "attention_gradient_of_rows"
        of_bias = [("place", "*int32"), ("slope", f"*{v.dtype}"), ("row0", "int64")] if biased else []
        return Function(name, [*kinds, ("bend", v.dtype), *of_bias, ("rows", "int64"), ("vectors", "int64")], body)

    def clear_lanes(self) -> Function:
        """out[channel, lanes] = 0 in a panel, for the lanes that take no part."""
        v, tiles = self.vector, self.blocks.tiles

        def body(out: Memory, lse: Memory, channels: Expr, vectors: Expr) -> None:
            depth, used = positive(channels), positive(vectors)
            with loop(0, depth, "c") as c, loop(0, used, "n") as n:
                start = n * i64(v.lanes)
                at = bind(c * i64(tiles.panel) + start, "at")
                dead = v.load(lse, start) == v.infinity()
                v.store(out, at, tirx.Select(dead, v.number(0.0), v.load(out, at)))

        kinds = [("out", f"*{v.dtype}"), ("lse", f"*{v.dtype}"), ("channels", "int64"), ("vectors", "int64")]
        return Function("attention_clear_lanes", kinds, body)

    def clear_rows(self) -> Function:
        """Clear the rows that take no part in *tiles* tiles of (rows, channels)."""
        narrow, height = self.blocks.narrow, i64(self.blocks.tiles.tile * self.blocks.tiles.block)

        def body(packed: Memory, lse: Memory, tiles: Expr, rows: Expr) -> None:
            columns = positive(tiles)
            with loop(0, positive(rows), "j") as j, when(lse[j] == self.blocks.scalar.infinity()):
                with loop(0, columns, "t") as t:
                    narrow.store(packed, t * height + j * i64(self.blocks.tiles.tile), narrow.number(0.0))

        kinds = [("packed", f"*{self.blocks.acc}"), ("lse", f"*{self.blocks.acc}")]
        return Function("attention_clear_rows", [*kinds, ("tiles", "int64"), ("rows", "int64")], body)
