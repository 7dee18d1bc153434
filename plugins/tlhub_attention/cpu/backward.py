"""The program of the CPU schedule of attention's backward: two passes in TIR, one binary for every size and stride.

Both are the forward's way with the softmax known: a task holds a block of rows in the lanes of vectors, packed as
panels, and walks what they see block by block, which it packs by rows, for the products over channels, and by tiles,
for those that add up. In the pass for dq the lanes are queries, and for each block of keys

    S = K Q,  A = V dO       (keys, lanes)     then P = 2**(S - lse) and dS = P (A - delta) slope
    dQ = dQ + K dS           (channels, lanes)

In the pass for dk and dv they are keys, and it goes through the queries of each head that shares them:

    S = Q K,  A = dO V       (queries, lanes)
    dV = dV + dO P,  dK = dK + Q dS

Logits are computed twice, 7 products where 5 would do; in return nobody adds to what another wrote, so that every
sum has one order, whatever the number of threads, and the only memory that grows is lse and delta of each query.
Imported in workers only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script.builder import ir as T

from tlhub.specs import Problem
from tlhub_attention.cpu.backward_task import DQ_DK, DV, PARTS, Functions, Task
from tlhub_attention.cpu.entry import Entry, Program, block_rows, build, deal, lay_out
from tlhub_attention.cpu.ir import Expr, Frame, Function, Memory, bind, ceil_div, i64, loop, module, when, workspace

_NUMBERS = "group shift queries query_rows query_blocks key_rows key_blocks tiles tiles_v window capped vectors".split()
_NUMBERS += ["saved_B", "saved_H"]  # strides of lse and delta, as they are found for both passes
_TASK = ("b", "h_kv", "row0", "count")


def program(problem: Problem, config: Mapping[str, Any], arch: str) -> Any:
    """Return the module of *problem*, whose entry takes the arrays in the contract's order, scale, window, softcap.

    *config*: as the forward's; ``block_q`` rows in the lanes of a task, ``block_k`` packed at a time.
    """
    return build(Backward, problem, config, arch)


class Backward(Program):
    """The entry, and the functions of a task of each pass."""

    numbers = (*_NUMBERS, *PARTS)

    def build(self) -> Any:
        """Return the module."""
        has = self.has = Functions(self.blocks)
        pointers = [(n, f"*{self.blocks.storage(n)}") for n in self.arrays]
        known = [("frame", "*int64"), *[(n, f"*{self.acc}") for n in ("lse2", "delta", "scratch")]]
        numbers = [*[(n, self.acc) for n in ("factor", "cap", "scale")], *[(n, "int64") for n in _TASK]]
        self.functions += has.all
        called = []
        for name, axis, body in (("queries", "S", self._queries), ("keys", "S_kv", self._keys)):
            params = [*pointers, *known, *numbers]
            task = Function(f"attention_{name}", params, lambda *args, body=body: body(Task(has, args)))
            self.functions.append(task)
            called.append(self._around(task, axis))
        with IRBuilder() as builder:
            with T.prim_func():
                T.func_name(self.problem.kernel)
                self._entry(*called)
            entry = builder.get()
        return module(self.problem.kernel, entry, self.functions)

    # -- the entry -------------------------------------------------------------------------------------

    def _entry(self, queries: Function, keys: Function) -> None:
        """Declare the parameters, fill the frame, find lse and delta of all queries, and deal out the tasks."""
        entry = self._declare()
        frame, dims = entry.frame, entry.dims
        self._sizes(frame, dims)
        heads = bind(dims["B"] * dims["H"], "heads")
        size = heads * dims["S"] + i64(self.tiles.block + self.tiles.tile)  # a block is read whole
        with workspace(size * i64(2), self.acc) as found:
            saved = Memory("saved", found, self.acc)
            delta = saved.at(size)
            with loop(0, heads, "head", T.parallel) as head, when(dims["S"] > i64(0)):
                self._sums(entry, head, found, delta)
            self._deal(queries, entry, found, delta, ("query_rows", "query_blocks"), frame["queries"])
            self._deal(keys, entry, found, delta, ("key_rows", "key_blocks"), dims["S_kv"])

    def _sizes(self, frame: Frame, dims: Mapping[str, Expr]) -> None:
        """Put what all tasks share into the frame: rows, blocks, parts of the scratch."""
        panel, tile, block = self.tiles.panel, self.tiles.tile, self.tiles.block
        rows = frame.put("queries", frame["group"] * dims["S"])
        heads = bind(dims["B"] * dims["H_kv"], "kv_heads")
        most = i64(0)
        for name, count in (("query", rows), ("key", dims["S_kv"])):
            each = frame.put(f"{name}_rows", block_rows(heads, count, self.block, panel))
            frame.put(f"{name}_blocks", self._blocks(frame, count, each))
            most = tirx.max(most, ceil_div(tirx.min(each, count), panel) * i64(panel))
        padded = bind(most, "padded")
        frame.put("saved_B", dims["H"] * frame.put("saved_H", dims["S"]))
        tiles = frame.put("tiles", ceil_div(dims["D"], tile))
        tiles_v = frame.put("tiles_v", ceil_div(dims["D_v"], tile))
        size = {"left": padded * dims["D"], "right": padded * dims["D_v"], "ones": i64(panel)}
        size |= {"out": padded * tiles * i64(tile), "out_v": padded * tiles_v * i64(tile)}
        size |= {"rows": i64(block) * dims["D"], "rows_v": i64(block) * dims["D_v"]}
        size |= {"packed": tiles * i64(tile * block), "packed_v": tiles_v * i64(tile * block)}
        size |= {name: i64(block * panel) for name in ("weights", "pull")} | {"flag": i64(1), "flag_v": i64(1)}
        lay_out(frame, {name: size.get(name, padded) for name in PARTS})

    def _sums(self, entry: Entry, head: Expr, lse2: Expr, delta: Expr) -> None:
        f, dims = entry.frame, entry.dims
        pointer = dict(zip(self.arrays, entry.pointers, strict=True))
        b = bind(tirx.truncdiv(head, dims["H"]), "b")
        h = bind(head - b * dims["H"], "h")
        at = [bind(b * f[f"{n}_B"] + h * f[f"{n}_H"]) for n in ("dout", "o", "lse")]
        steps = [f[f"{n}_S"] for n in ("dout", "o", "lse")]
        rest = (dims["S"], *steps, f["dout_D_v"], f["o_D_v"], dims["D_v"])
        self.has.sums(pointer["dout"], pointer["o"], pointer["lse"], lse2, delta, *at, head * dims["S"], *rest)

    def _deal(self, task: Function, entry: Entry, lse2: Expr, delta: Expr, names: tuple[str, str], rows: Expr) -> None:
        frame, kv_heads = entry.frame, entry.dims["H_kv"]
        each, blocks = (frame[n] for n in names)
        with loop(0, bind(entry.dims["B"] * kv_heads * blocks, "tasks"), "task", T.parallel) as i:
            head, row0, count = deal(i, blocks, each, rows)
            b = bind(tirx.truncdiv(head, kv_heads), "b")
            with workspace(frame["scratch"], self.acc) as scratch:
                numbers = (b, head - b * kv_heads, row0, count)
                known = (frame.address, lse2, delta, scratch, entry.factor, entry.cap, entry.scale)
                task(*entry.pointers, *known, *numbers)

    # -- the tasks -------------------------------------------------------------------------------------

    def _queries(self, c: Task) -> None:
        """Take a block of queries through all keys that one of them sees, and write their dq."""
        f, m, p = c.f, c.m, c.p
        self.has.query_limits(p["low"], p["high"], c.address, c.row0, c.count)
        with loop(0, c.padded) as i:
            row = bind(c.row0 + tirx.min(i, c.count - i64(1)), "row")
            s = bind(tirx.truncdiv(row, f["group"]), "s")
            at = bind(c.saved(row - s * f["group"]) + s, "at")
            m["lse"][i], m["delta"][i] = c.lse2[at], c.delta[at]
        c.place(f["group"], f["shift"])
        c.slope(i64(0), f["group"])
        c.pack_lanes("q", "left", c.factor)
        c.pack_lanes("dout", "right", c.one)
        c.clear_sums("out", "tiles")

        def step(row0: Expr, rows: Expr) -> None:
            c.pack("k", "rows", "packed", "tiles", row0, rows)
            c.pack("v", "rows_v", "", "", row0, rows)
            c.panels(row0, rows, m["lse"], m["delta"], [DQ_DK], row0)

        c.walk(step)
        with when(f["tiles"] > i64(0)), loop(0, c.panel_count, "panel") as panel:
            lane = bind(panel * i64(self.tiles.panel), "lane")
            channels = f["tiles"] * i64(self.tiles.tile)
            self.has.clear_lanes(m["out"].at(lane * channels), m["lse"].at(lane), channels, f["vectors"])
        c.scatter("dq", "out", "tiles", c.scale)

    def _keys(self, c: Task) -> None:
        """Take a block of keys through all queries that see one of them, head by head, and write their dk and dv."""
        f, p = c.f, c.p
        self.has.key_limits(p["low"], p["high"], c.address, c.row0, c.count)
        c.place(i64(1), i64(1))
        c.pack_lanes("k", "left", c.factor)
        c.pack_lanes("v", "right", c.one)
        c.clear_sums("out", "tiles")
        c.clear_sums("out_v", "tiles_v")
        with loop(0, f["group"], "g") as g:
            saved = bind(c.saved(g), "saved")
            c.slope(g, i64(1))

            def step(row0: Expr, rows: Expr) -> None:
                at = bind(saved + row0, "at")
                c.pack("q", "rows", "packed", "tiles", row0, rows, g)
                c.pack("dout", "rows_v", "packed_v", "tiles_v", row0, rows, g)
                for sum_ in (DQ_DK, DV):
                    with when(f[sum_.tiles] > i64(0)):
                        self.has.clear_rows(p[sum_.packed], c.lse2.at(at), f[sum_.tiles], rows)
                c.panels(row0, rows, c.lse2, c.delta, [DQ_DK, DV], row0 + f["shift"] - i64(1), at)

            c.walk(step)
        c.scatter("dk", "out", "tiles", c.scale)
        c.scatter("dv", "out_v", "tiles_v", c.one)
