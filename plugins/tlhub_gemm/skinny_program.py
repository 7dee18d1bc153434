"""The program of gemm for a few rows: kernels by the number of rows, and the CUDA cores for what is not aligned."""

from __future__ import annotations

from pathlib import Path

from tlhub.build.program import Branch, CudaProgram, Launch, TensorMap
from tlhub.cuda import tensor_cores
from tlhub.specs import Config, Problem
from tlhub_gemm import cuda_code, simt_program
from tlhub_gemm.arch import capability, is_hopper
from tlhub_gemm.skinny_plan import NAME, Tile, tiles


def program(problem: Problem, config: Config, arch: str) -> CudaProgram:
    """Return the program: the kernels of *config*, and those on the CUDA cores for what they leave."""
    texts = cuda_code.source(problem, *files(arch), *simt_program.FILES)
    products = tensor_cores.from_shared(dict(problem.dtypes)["a"], tiles(config) if is_hopper(arch) else ())
    source = texts + products + kernels(problem, config, arch)
    return CudaProgram(source, (*branches(problem, config, arch), *simt_program.branches(problem)))


def files(arch: str) -> tuple[str | Path, ...]:
    """Return the texts that the kernels are in."""
    return (tensor_cores.FILE, "skinny.cuh", *(["operand.cuh", "skinny_hopper.cuh"] if is_hopper(arch) else []))


def kernels(problem: Problem, config: Config, arch: str) -> str:
    """Return the source of the kernels of *config*, to follow that of ``files`` and, on Hopper, of their products."""
    lines = [""]
    for tokens, tile in tiles(config).items():
        macro, loop = ("SKINNY_HOPPER", ()) if is_hopper(arch) else ("SKINNY", (*tile.warps(tokens), tile.depth))
        shared = tile.shared(tokens, bool(problem.option["trans_b"]), arch)
        numbers = (shared, tokens, tile.rows, tile.split, *loop, tile.stages)
        lines.append(f"{macro}({', '.join(map(str, numbers))})")
    return "\n".join([*lines, ""])


def branches(problem: Problem, config: Config, arch: str) -> tuple[Branch, ...]:
    """Return the branches of the kernels of *config*: few rows, and operands that 16 bytes at once can be read of."""
    fits = cuda_code.mappable if is_hopper(arch) else cuda_code.aligned
    small = (cuda_code.SMALL,) if is_hopper(arch) else ()
    served = " && ".join([*small, *cuda_code.even(problem), *(fits(problem, x, 16) for x in "ab")])
    return tuple(
        Branch((_launch(problem, tokens, tile, arch),), f"M <= {tokens} && {served}")
        for tokens, tile in tiles(config).items()
    )


def _launch(problem: Problem, tokens: int, tile: Tile, arch: str) -> Launch:
    trans_b, rows = bool(problem.option["trans_b"]), tile.rows // (2 if problem.option["glu"] else 1)
    maps: tuple[TensorMap, ...] = ()
    if is_hopper(arch):
        maps = (
            cuda_code.tensor_map(problem, "a", (64, tokens)),
            cuda_code.tensor_map(problem, "b", (64, rows if trans_b else 64)),
        )
    return Launch(
        kernel=NAME.format(tokens),
        grid=(f"B * CEIL_DIV(N, {tile.rows}) * {tile.split}", 1, 1),
        block=(tile.threads(tokens, arch), 1, 1),
        parameters=(*maps, *cuda_code.parameters(problem)),
        shared=tile.shared(tokens, trans_b, arch),
        cluster=(tile.split, 1, 1),
        programmatic=capability(arch) >= 90,
    )
