"""The entry of an attention program: its parameters, its tasks, and their scratch memory. Imported in workers only."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from tvm import tirx
from tvm.tirx.script.builder import ir as T

from tlhub.specs import DTYPES, Problem
from tlhub_attention.cpu.blocks import Blocks
from tlhub_attention.cpu.ir import Expr, Frame, Function, Memory, bind, ceil_div, i64, pointer
from tlhub_attention.cpu.math import LOG2E, Vector
from tlhub_attention.cpu.tiles import Tiles

AXES = {"q": "B S H D", "k": "B S_kv H_kv D", "v": "B S_kv H_kv D_v", "o": "B S H D_v", "lse": "B H S"}
AXES |= {"dout": AXES["o"], "dq": AXES["q"], "dk": AXES["k"], "dv": AXES["v"]}
"""The dims of each array that has rows."""
HEADS = {"slopes": "H", "q_scale": "B H", "k_scale": "B H_kv", "v_scale": "B H_kv"}
"""The dims of the arrays that have a number a head."""
_MANY_TASKS = 32
"""From so many tasks on, blocks of rows are whole: fewer are cut in four, so that every core gets some."""


def stride_names(arrays: Sequence[str], axes: Mapping[str, str]) -> list[str]:
    """Return the names under which a frame keeps the strides of *arrays*: ``q_S``."""
    return [f"{name}_{axis}" for name in arrays for axis in axes[name].split()]


class Entry(NamedTuple):
    """The parameters of a program, with the frame that holds dims, strides, ``window`` and whether it is ``capped``.

    ``factor`` and ``cap``: products times the factor are logits in base 2, or, with a cap, what tanh takes to give
    such logits times the cap.
    """

    frame: Frame
    dims: Mapping[str, Expr]
    pointers: list[Expr]
    factor: Expr
    cap: Expr
    scale: Expr


def declare(
    problem: Problem,
    arrays: Sequence[str],
    blocks: Blocks,
    axes: Mapping[str, str],
    roles: Mapping[str, str],
) -> Entry:
    """Declare the parameters (*arrays* in order, scale, window, softcap), and fill a new frame.

    *axes*: the dims of each array; *roles*: for a dim of the problem, the dim of ``attention`` whose part it plays.
    """
    symbols: dict[str, Expr] = {}
    dims = {
        roles.get(name, name): i64(extent)
        if isinstance(extent, int)
        else symbols.setdefault(extent, tirx.Var(name, "int64"))
        for name, extent in problem.dims
    }
    handles = {n: T.arg(n, T.handle()) for n in arrays}
    scale, window, softcap = (
        T.arg(n, kind()) for n, kind in (("scale", T.float64), ("window", T.int64), ("softcap", T.float64))
    )
    # any strides; aligned to the items and no more
    strides = {n: [tirx.Var(f"{n}_stride_{a}", "int64") for a in axes[n].split()] for n in arrays}
    buffers = {
        n: T.match_buffer(
            handles[n],
            [dims[axis] for axis in axes[n].split()],
            blocks.storage(n),
            strides=strides[n],
            align=DTYPES[blocks.dtypes[n]][1] // 8,
            offset_factor=1,
        )
        for n in arrays
    }
    # the host shim knows shapes, and not that one extent divides another
    heads = dims["H_kv"]
    shared = tirx.And(heads > i64(0), tirx.truncmod(dims["H"], tirx.max(heads, i64(1))) == i64(0))
    demand(shared, problem.kernel, "k", "heads (H_kv) that divide those of q (H)")
    frame = Frame.new(blocks.names)
    for name, extent in dims.items():
        frame.put(name, extent)
    for n in arrays:
        for axis, stride in zip(axes[n].split(), strides[n], strict=True):
            frame.put(f"{n}_{axis}", stride)
    frame.put("window", window)
    # read from memory, the number is news to LLVM, which would copy every loop of so few turns
    frame.put("vectors", i64(blocks.tiles.vectors))
    frame.put("group", tirx.truncdiv(dims["H"], tirx.max(heads, i64(1))))
    frame.put("shift", dims["S_kv"] - dims["S"] + i64(1))
    double = Vector("float64", 1)
    uncapped = bind(softcap == double.number(0.0), "uncapped")
    frame.put("capped", tirx.Select(uncapped, i64(0), i64(1)))
    factor = tirx.Select(uncapped, scale * double.number(LOG2E), scale / softcap)
    numbers = (factor, softcap * double.number(LOG2E), scale)
    pointers = [b.data for b in buffers.values()]
    return Entry(frame, dims, pointers, *(bind(tirx.Cast(blocks.acc, x)) for x in numbers))


def demand(condition: Expr, kernel: str, name: str, expected: str) -> None:
    """Refuse the call unless *condition* holds: the array *name* is not as *expected*."""
    with T.Assert(condition, f"{kernel}: argument {name!r}: expected {expected}, got others", "ValueError"):
        pass


def block_rows(heads: Expr, rows: Expr, block: int, panel: int) -> Expr:
    """Return how many of the *rows* of a head a task takes: *block*, or a quarter where there are few tasks."""
    part = -(-block // 4 // panel) * panel
    return tirx.Select(heads * ceil_div(rows, block) >= i64(_MANY_TASKS), i64(block), i64(part))


def deal(task: Expr, blocks: Expr, each: Expr, rows: Expr) -> tuple[Expr, Expr, Expr]:
    """Return head, first row and number of rows of a task; a head has *blocks* of *each* rows.

    Early and late blocks alternate: under a causal mask contiguous runs of tasks are then equal work.
    """
    head = bind(tirx.truncdiv(task, blocks), "head")
    turn = bind(task - head * blocks, "turn")
    half = bind(tirx.truncdiv(turn, i64(2)))
    block = tirx.Select(turn - half * i64(2) == i64(1), blocks - i64(1) - half, half)
    row0 = bind(block * each, "row0")
    return head, row0, bind(tirx.min(each, rows - row0), "count")


def lay_out(frame: Frame, sizes: Mapping[str, Expr]) -> None:
    """Put where each part of a task's scratch memory begins, and as ``scratch`` the size of it all, in items."""
    end = i64(0)
    for name, size in sizes.items():
        at = frame.put(name, end)
        end = at + ceil_div(i64(size), 16) * i64(16)  # whole cache lines
    frame.put("scratch", end)


def parts(frame: Frame, names: Sequence[str], scratch: Memory, integers: Sequence[str]) -> dict[str, Memory]:
    """Return the parts of *scratch* by name; those named in *integers* hold int32."""
    found = {}
    for name in names:
        kind = "int32" if name in integers else scratch.dtype
        found[name] = Memory(name, pointer("address_of", kind, scratch[frame[name]]), kind)
    return found


class Program(ABC):
    """A kind of attention program: its entry, and its private ``functions``, which a kind adds to as it makes them.

    ``axes`` and ``roles`` are those of ``declare``; ``numbers`` are names of the frame besides dims and strides.
    """

    axes: ClassVar[Mapping[str, str]] = {**AXES, **HEADS}
    roles: ClassVar[Mapping[str, str]] = {}
    numbers: ClassVar[Sequence[str]] = ()

    def __init__(self, problem: Problem, blocks: Blocks, block: int) -> None:
        self.problem, self.blocks, self.tiles, self.arrays = problem, blocks, blocks.tiles, list(blocks.dtypes)
        self.block, self.acc = block, blocks.acc
        self.functions: list[Function] = []

    @abstractmethod
    def build(self) -> Any:
        """Return the module."""

    def _around(self, task: Function, axis: str) -> Function:
        """Return what the entry calls in place of *task*, which takes a block of rows along *axis*: S or S_kv."""
        return task

    def _declare(self) -> Entry:
        """Declare the parameters, and refuse the call where arrays hold what they may not."""
        return declare(self.problem, self.arrays, self.blocks, self.axes, self.roles)

    def _blocks(self, frame: Frame, rows: Expr, each: Expr) -> Expr:
        """Return how many blocks of *each* rows there are for one head of keys, which has *rows*."""
        return ceil_div(rows, each)


def build(kind: type[Program], problem: Problem, config: Mapping[str, Any], arch: str) -> Any:
    """Return the module of *problem*, a program of that *kind*.

    *config*: ``lanes`` of a float32 vector, ``vectors`` and ``tile`` of a register tile, ``block_q`` rows in the lanes
    of a task (a multiple of a panel) and ``block_k`` rows packed at a time (a multiple of the tile).
    """
    dtypes = dict(problem.dtypes)
    acc = "float64" if "float64" in [dtypes[n] for n in "qkv"] else "float32"
    lanes = int(config["lanes"]) // (2 if acc == "float64" else 1)
    tiles = Tiles(Vector(acc, lanes), int(config["vectors"]), int(config["tile"]), int(config["block_k"]))
    dims, strides = [kind.roles.get(name, name) for name, _ in problem.dims], stride_names(list(dtypes), kind.axes)
    names = [*dims, *kind.numbers, *strides, "scratch"]
    blocks = Blocks(tiles, dtypes, names, arch != "cpu:x86-64-v2", bool(problem.option["causal"]))
    return kind(problem, blocks, int(config["block_q"])).build()
