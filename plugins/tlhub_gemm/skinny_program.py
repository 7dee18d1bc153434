"""The program of gemm for a few rows: kernels by the number of rows, and the CUDA cores for what is not aligned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from tlhub.build.program import Branch, CudaProgram, Launch, TensorMap
from tlhub.errors import BuildError
from tlhub.specs import Config, Problem
from tlhub_gemm import cuda_code, simt_program

TOKENS = (8, 16, 32, 64)
"""The most rows of C that a kernel serves."""

_KNOB = "skinny_{}"


class Tile(NamedTuple):
    """What a block of a kernel does: ``rows`` columns of C, a ``split``-th of K, in a ring of ``stages`` tiles, each
    ``depth`` of K deep (on Hopper 64)."""

    rows: int
    split: int
    depth: int
    stages: int

    @classmethod
    def parse(cls, text: str) -> Tile:
        """Return the tile that ``str`` wrote. Raises BuildError."""
        parts = text.split("x")
        if len(parts) != 4 or not all(part.isdigit() for part in parts):
            raise BuildError(
                f"{text!r} is no tile; it is four numbers: rows, split, depth and stages, as in '64x2x64x6'"
            )
        return cls(*map(int, parts))

    def __str__(self) -> str:
        return "x".join(map(str, self))

    def warps(self, tokens: int) -> tuple[int, int]:
        """Return how many warps share the rows, and how many the depth: four in all, more where the sums need it."""
        pieces = self.rows // 16
        most = 2 if tokens == 64 else 4
        along_n = next(n for n in range(1, pieces + 1) if pieces % n == 0 and pieces // n <= most)
        along_k = next((k for k in (4, 2) if along_n * k <= 4 and self.depth % (16 * k) == 0), 1)
        return along_n, along_k

    def threads(self, tokens: int, arch: str) -> int:
        """Return the threads of a block."""
        if is_hopper(arch):
            return 2 * self.rows + 32  # a warp group for 64 rows, and the warp that loads
        along_n, along_k = self.warps(tokens)
        return 32 * along_n * along_k

    def shared(self, tokens: int, trans_b: bool, arch: str) -> int:
        """Return the bytes of shared memory that a block needs: of the ring, or of the sums that take its place."""
        if is_hopper(arch):
            barriers = 16 * self.stages
            return max(self.stages * (self.rows + tokens) * 128, 4 * tokens * (self.rows + 4)) + barriers
        outer, inner = (self.rows, self.depth) if trans_b else (self.depth, self.rows)
        stage = 2 * (outer * (inner + 8) + tokens * (self.depth + 8))
        return max(self.stages * stage, 4 * self.warps(tokens)[1] * tokens * (self.rows + 4))


def config(tiles: Mapping[int, Tile]) -> dict[str, str]:
    """Return the knobs of kernels with *tiles* by number of tokens."""
    return {_KNOB.format(tokens): str(tile) for tokens, tile in tiles.items()}


def tiles(config: Config) -> dict[int, Tile]:
    """Return the tiles that a config names, fewest tokens first."""
    found = ((tokens, config.get(_KNOB.format(tokens))) for tokens in TOKENS)
    return {tokens: Tile.parse(str(text)) for tokens, text in found if text}


def program(problem: Problem, config: Config, arch: str) -> CudaProgram:
    """Return the program: the kernels of *config*, and those on the CUDA cores for what they leave."""
    texts = cuda_code.source(problem, *files(arch), *simt_program.FILES)
    source = texts + kernels(problem, config, arch)
    return CudaProgram(source, (*branches(problem, config, arch), *simt_program.branches(problem)))


def files(arch: str) -> tuple[str, ...]:
    """Return the files of cuda/ that the kernels are in."""
    return ("hopper.cuh", "skinny.cuh", "skinny_hopper.cuh") if is_hopper(arch) else ("skinny.cuh",)


def kernels(problem: Problem, config: Config, arch: str) -> str:
    """Return the source of the kernels of *config*, to follow that of ``files``."""
    lines = [""]
    for tokens, tile in tiles(config).items():
        if is_hopper(arch):
            lines.append(_wgmma(tokens, bool(problem.option["trans_b"])))
            lines.append(f"SKINNY_HOPPER({tokens}, {tile.rows}, {tile.split}, {tile.stages})")
        else:
            numbers = (tokens, tile.rows, tile.split, *tile.warps(tokens), tile.depth, tile.stages)
            lines.append(f"SKINNY({', '.join(map(str, numbers))})")
    return "\n".join([*lines, ""])


def _wgmma(tokens: int, trans_b: bool) -> str:
    """Return wgmma's 64 x *tokens* product, whose first operand, of b, lies along K if *trans_b*."""
    count = tokens // 2
    sums = ", ".join(f"%{i}" for i in range(count))
    operands = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    return f"""namespace skinny {{
template <> __device__ __forceinline__ void wgmma<{tokens}>(float (&d)[{count}], uint64_t weights, uint64_t tokens) {{
  asm volatile("{{.reg .pred add; setp.eq.u32 add, 0, 0;"
               "wgmma.mma_async.sync.aligned.m64n{tokens}k16.f32." PTX_A "." PTX_A
               " {{{sums}}}, %{count}, %{count + 1}, add, 1, 1, {int(not trans_b)}, 0;}}"
               : {operands}
               : "l"(weights), "l"(tokens));
}}
}}"""


def branches(problem: Problem, config: Config, arch: str) -> tuple[Branch, ...]:
    """Return the branches of the kernels of *config*: few rows, and operands that 16 bytes at once can be read of."""
    fits = cuda_code.mappable if is_hopper(arch) else cuda_code.aligned
    served = " && ".join(fits(problem, name, 16) for name in ("a", "b"))
    return tuple(
        Branch((_launch(problem, tokens, tile, arch),), f"M <= {tokens} && {served}")
        for tokens, tile in tiles(config).items()
    )


def _launch(problem: Problem, tokens: int, tile: Tile, arch: str) -> Launch:
    trans_b = bool(problem.option["trans_b"])
    maps: tuple[TensorMap, ...] = ()
    if is_hopper(arch):
        maps = (
            cuda_code.tensor_map(problem, "a", (64, tokens)),
            cuda_code.tensor_map(problem, "b", (64, tile.rows if trans_b else 64)),
        )
    return Launch(
        kernel=_KNOB.format(tokens),
        grid=(f"B * CEIL_DIV(N, {tile.rows}) * {tile.split}", 1, 1),
        block=(tile.threads(tokens, arch), 1, 1),
        parameters=(*maps, *cuda_code.parameters(problem)),
        shared=tile.shared(tokens, trans_b, arch),
        cluster=(tile.split, 1, 1),
        programmatic=capability(arch) >= 90,
    )


def is_hopper(arch: str) -> bool:
    """Tell whether *arch* has the instructions of sm_90a, which no later one has."""
    return arch.endswith("sm_90a")


def capability(arch: str) -> int:
    """Return the compute capability of an arch, as one number: 90 of ``cuda:sm_90a``."""
    return int(arch.rpartition("_")[2].rstrip("af"))
