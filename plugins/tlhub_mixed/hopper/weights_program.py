"""The program of products with narrow weights on Hopper: tiles by TMA, few rows of a by mma.sync, more by wgmma."""

from __future__ import annotations

from tlhub.build.program import Branch, CudaProgram, Expression, Launch, Parameter, TensorMap
from tlhub.cuda import tensor_cores, warp_mma
from tlhub.specs import DTYPES, Config, Problem
from tlhub_mixed.cuda import code, weights_program

_COLUMNS = (8, 16, 32, 64, 128, 256)
"""Rows of a of a block; a call takes the least that suffice, or blocks of the most. The first are for mma.sync."""
_ROWS, _THREADS = 128, 384  # of w, of a block; its threads
_CODES = 64  # bytes of a row of w in a stage
_SHARED = 227 * 1024  # bytes that blocks of a processor may have, but for 1024 of each but the first
_MOST_STAGES = 8


def program(problem: Problem, config: Config, arch: str) -> CudaProgram:
    """Return the program for any number of rows."""
    files = ("pack.cuh", tensor_cores.FILE, warp_mma.FILE, *weights_program.FILES, "weights_hopper.cuh")
    rest = weights_program.KERNELS[-1:]  # where codes are not 16 bytes side by side
    source = [
        weights_program.HEADERS,
        code.source(problem, {**weights_program.numbers(problem), "PARTS": 1}, *files),
        tensor_cores.from_registers(problem.dtype, _COLUMNS[2:]),
        *weights_program.kernels(problem, rest),
        *(_instance(problem, columns) for columns in _COLUMNS),
        "",
    ]
    branches = (
        *(branch for columns in _COLUMNS for branch in _branches(problem, columns)),
        *weights_program.branches(problem, arch, rest),
    )
    values = {
        "fits_a": _mappable("a", 2),
        "padded": "CEIL_DIV(K, 64) * 64",
    }
    return CudaProgram("\n".join(source), branches, values=values)


def _name(columns: int) -> str:
    return f"tile_{columns}"


def _blocks(columns: int) -> int:
    """Return for how many blocks a processor has room."""
    return 2 if columns <= 64 else 1


def _splits(columns: int) -> int:
    """Return how many blocks may share K at most; more, each with a processor of its own, may not find room at once."""
    return 2 if _blocks(columns) == 1 else 8


def _stages(problem: Problem, columns: int) -> tuple[int, int]:
    """Return the number of stages of the ring, and the bytes of one: codes, and what belongs to them of a."""
    stage = _ROWS * _CODES + columns * 2 * (_CODES * 8 // weights_program.bits(problem))
    blocks = _blocks(columns)
    return min(_MOST_STAGES, ((_SHARED + 1024) // blocks - 1024) // (stage + 16)), stage


def _shared(problem: Problem, columns: int) -> int:
    """Return the bytes of shared memory of a block: the ring with two barriers a stage."""
    stages, stage = _stages(problem, columns)
    return stages * (stage + 16)


def _instance(problem: Problem, columns: int) -> str:
    stages, _ = _stages(problem, columns)
    return f"TILE_ROWS({_name(columns)}, {_shared(problem, columns)}, {columns}, {stages}, {_blocks(columns)})"


def _branches(problem: Problem, columns: int) -> list[Branch]:
    """Return the branches of a kernel: by how many blocks share K, and on a as it is, or on a copy."""
    rows = _ROWS // 2 if problem.option["glu"] else _ROWS
    across, most = f"CEIL_DIV({code.columns(problem)}, {rows})", _COLUMNS[-1]
    blocks = f"{across} * CEIL_DIV(M, {columns})"
    enough = f"M <= {columns}"
    if columns == most // 2:  # rather half of them than idle processors
        enough = f"({enough} || {across} * CEIL_DIV(M, {most}) * {_splits(most)} < SMS * 7 / 8)"
    fits = [weights_program.SMALL, _mappable("w", 1), enough if columns < most else ""]
    found = []
    for split, busy in weights_program.splits(blocks, _splits(columns)):
        when = " && ".join(filter(None, ["M > 0", *fits, busy]))
        as_it_is, copied = (_product(problem, columns, rows, blocks, split, copied) for copied in (False, True))
        found += [Branch((as_it_is,), f"fits_a && {when}"), Branch((_copy(), copied), when, "M * padded * 2")]
    return found


def _mappable(name: str, item: int) -> str:
    """Return the condition that a tensor map can be made of a matrix where it is, of elements of *item* bytes: not
    empty, elements side by side, and an address and a stride that are multiples of 16 bytes."""
    row = f"(EXTENT({name}, 0) == 1 || STRIDE({name}, 0) > 0 && ALIGNED(STRIDE({name}, 0) * {item}, 16))"
    return f"N > 0 && K > 0 && STRIDE({name}, 1) == 1 && ALIGNED(DATA({name}), 16) && {row}"


def _map(
    dtype: str, address: str, extents: tuple[Expression, Expression], pitch: str, box: tuple[int, int]
) -> TensorMap:
    """Return the tensor map of a matrix, columns by rows, in boxes swizzled by their rows."""
    swizzle = box[0] * DTYPES[dtype][1] // 8
    return TensorMap(dtype, address, (*extents, 1), (pitch, f"{pitch} * {extents[1]}"), (*box, 1), swizzle=swizzle)


def _pitch(name: str, item: int) -> str:
    return f"(EXTENT({name}, 0) == 1 ? 16 : STRIDE({name}, 0) * {item})"


def _copy() -> Launch:
    """Return the launch that copies a to the scratch memory."""
    a = (
        Parameter("void *", "DATA(a)"),
        *(Parameter("int64_t", step) for step in ("0", "STRIDE(a, 0)", "STRIDE(a, 1)")),
    )
    none = (Parameter("void *", 0), *(Parameter("int64_t", 0) for _ in range(3)), Parameter("void *", 0))
    sizes = (Parameter("int64_t", value) for value in (1, "K", "padded"))
    to = (Parameter("void *", "WORKSPACE"), Parameter("int64_t", "M"))
    return Launch("pack_operands", ("SMS * 8", 1, 1), (256, 1, 1), (*sizes, *a, *to, *none, Parameter("int64_t", 0)))


def _product(problem: Problem, columns: int, rows: int, blocks: str, split: int, copied: bool) -> Launch:
    width = "K_2" if weights_program.bits(problem) == 4 else "K"
    a = ("WORKSPACE", ("padded", "M"), "padded * 2") if copied else ("DATA(a)", ("K", "M"), _pitch("a", 2))
    return Launch(
        kernel=_name(columns),
        grid=(blocks, split, 1),
        block=(_THREADS, 1, 1),
        parameters=(
            _map(problem.dtype, *a, (64, columns)),
            _map("uint8", "DATA(w)", (width, "N"), _pitch("w", 1), (_CODES, rows)),
            *weights_program.weights(problem),
            *code.parameters(problem),
        ),
        shared=_shared(problem, columns),
        cluster=(1, split, 1),
        programmatic=True,
    )
