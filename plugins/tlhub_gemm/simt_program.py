"""The program of gemm on the CUDA cores: three kernels, of which a call takes the first that fits."""

from __future__ import annotations

from tlhub.build.program import Branch, CudaProgram, Launch
from tlhub.specs import DTYPES, Config, Problem
from tlhub_gemm import cuda_code

FILES = ("simt.cuh",)
"""The files of cuda/ that the kernels are in."""

_DEPTH = 8  # of a tile: DEPTH in simt.cuh
_THREADS = 256


def program(problem: Problem, config: Config, arch: str) -> CudaProgram:
    """Return the program, which leaves every dim symbolic."""
    return CudaProgram(cuda_code.source(problem, *FILES), branches(problem))


def branches(problem: Problem) -> tuple[Branch, ...]:
    """Return the branches: large and small tiles where vectors of 16 bytes can be read, and one that reads anything."""
    even = cuda_code.even(problem)
    vectors = [cuda_code.aligned(problem, name, _widest(problem, name)) for name in ("a", "b")]
    if problem.option["glu"] and not problem.option["trans_b"]:  # values lie N_2 elements behind their gates
        vectors.append(f"ALIGNED(N_2 * {_item(problem, 'b')}, {_widest(problem, 'b')})")
    wide = " && ".join([*even, *vectors])
    rows = 128 if problem.option["accum"] == "float64" else 256
    full = f"3 * B * CEIL_DIV(M, {rows}) * CEIL_DIV(N, 128) >= 2 * SMS"  # else many SMs would have no tile
    return (
        _branch(problem, "simt_large", rows, 128, f"{full} && {wide}"),
        _branch(problem, "simt_small", 64, 64, wide),
        _branch(problem, "simt_any", 64, 64, *even),
    )


def _branch(problem: Problem, kernel: str, rows: int, columns: int, when: str = "") -> Branch:
    tiles = f"B * CEIL_DIV(M, {rows}) * CEIL_DIV(N, {columns})"
    return Branch((Launch(kernel, (tiles, 1, 1), (_THREADS, 1, 1), cuda_code.parameters(problem)),), when)


def _widest(problem: Problem, name: str) -> int:
    """Return the bytes of the vectors that array *name* is read in."""
    return min(16, _DEPTH * _item(problem, name))


def _item(problem: Problem, name: str) -> int:
    """Return the bytes of an element of array *name*."""
    return DTYPES[dict(problem.dtypes)[name]][1] // 8
