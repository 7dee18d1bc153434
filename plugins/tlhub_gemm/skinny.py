"""The schedule of gemm for at most 64 rows, bound by reading b: what it serves, and by which tiles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tlhub.specs import Config, DeviceFacts, Problem, Schedule
from tlhub_gemm import skinny_plan
from tlhub_gemm.arch import capability, is_hopper
from tlhub_gemm.simt import SIMT
from tlhub_gemm.skinny_plan import TOKENS, Tile

_DTYPES = ("float16", "bfloat16")
_MOST = TOKENS[-1]


def supports(problem: Problem, facts: DeviceFacts) -> str | None:
    """Return why the schedule does not serve *problem*, or None."""
    rows = problem.dim["M"]
    if isinstance(rows, str):
        return f"M is symbolic, and it is for at most {_MOST} rows"
    if rows > _MOST:
        return f"M is {rows}, and it is for at most {_MOST} rows"
    return serves(problem, facts)


def serves(problem: Problem, facts: DeviceFacts) -> str | None:
    """Return why the kernels do not serve *problem* with few rows, or None."""
    option = problem.option
    if problem.dtype not in _DTYPES:
        return f"it multiplies {' and '.join(_DTYPES)}, not {problem.dtype}"
    if capability(facts.arch) < 80:
        return f"it needs the asynchronous copies of compute capability 8.0, and this is {facts.arch}"
    if option["trans_a"]:
        return "trans_a=True; it reads a along K"
    if option["glu"] and not option["trans_b"]:
        return "glu without trans_b; it reads gates and values along K"
    if option["tensor_core"] is False:
        return "tensor_core=False, and this schedule uses them"
    if option["accum"] != "float32":
        return f"accum={option['accum']!r}; it adds up in 'float32'"
    return None


def configs(problem: Problem, facts: DeviceFacts) -> Sequence[Config]:
    """Return the configs worth trying: one kernel, by the tile that ``best`` names and those around it.

    ``skinny_8``, ``skinny_16``, ...: for up to so many rows, a tile as ``skinny_plan.Tile`` writes it.
    """
    rows = problem.dim["M"]
    tokens = next(t for t in TOKENS if isinstance(rows, int) and rows <= t)
    first = best(problem, tokens, facts)
    around = [first._replace(stages=first.stages + step) for step in (-1, 1, -2, 2, 4)]
    if is_hopper(facts.arch):
        for split in (first.split * 2, first.split // 2):
            around.append(first._replace(split=split, stages=first.stages * first.split // split if split else 0))
        around.append(first._replace(rows=128, split=2, stages=4))
    fitting = [t for t in (first, *around) if t.stages >= 2 and 1 <= t.split <= _LARGEST_CLUSTER]
    fitting = [t for t in fitting if _shared(problem, t, tokens, facts) <= _memory(facts)]
    return [skinny_plan.config({tokens: tile}) for tile in dict.fromkeys(fitting)]


def config(problem: Problem, facts: DeviceFacts) -> dict[str, str]:
    """Return the knobs of a kernel for each number of rows, to go into the config of a schedule for any M."""
    return skinny_plan.config({tokens: best(problem, tokens, facts) for tokens in TOKENS})


def best(problem: Problem, tokens: int, facts: DeviceFacts) -> Tile:
    """Return the tile for *tokens* rows. Dims that are symbolic count as middling."""
    extents = problem.dim
    dim = {name: e if isinstance(e := extents[name], int) else middling for name, middling in _MIDDLING.items()}
    choose = _hopper if is_hopper(facts.arch) else _ampere
    return choose(problem, tokens, facts, dim)


_MIDDLING = {"B": 1, "M": 1, "N": 8192, "K": 8192}
_LARGEST_CLUSTER = 8  # that every device has


def _hopper(problem: Problem, tokens: int, facts: DeviceFacts, dim: Mapping[str, int]) -> Tile:
    """Return 64 columns a block, K split until each SM has one, and stages for 64 KiB of b on their way to an SM.

    Measured on an H200 (132 SMs, Llama's matrices): fewer bytes leave the memory idle, and with more, blocks that have
    an SM for themselves get ahead of those that share one. Room that is left on an SM lets the next launch start early.
    With so many blocks that they come one after another neither matters.
    """
    blocks, slices = max(1, dim["B"] * -(-dim["N"] // 64)), dim["K"] // 64
    split = 1
    while split < _LARGEST_CLUSTER and 2 * split * blocks <= facts.cores and slices >= 16 * split:
        split *= 2
    blocks *= split
    many = blocks > (2 if tokens >= 32 else 6) * facts.cores
    together = 2 if blocks <= facts.cores or (many and tokens >= 32) else 3  # blocks that fit an SM at least
    wanted = min(8 if many else round(8 * facts.cores / blocks), slices // split)
    return _fit(problem, Tile(64, split, 64, wanted), tokens, facts, together)


def _ampere(problem: Problem, tokens: int, facts: DeviceFacts, dim: Mapping[str, int]) -> Tile:
    """Return the fewest columns a block that give each SM at most two blocks, and the stages that fit then."""
    rows = next((r for r in (32, 48, 64, 96) if dim["B"] * -(-dim["N"] // r) <= 2 * facts.cores), 128)
    return _fit(problem, Tile(rows, 1, 128 if rows <= 64 else 64, 6), tokens, facts, 2)


def _fit(problem: Problem, tile: Tile, tokens: int, facts: DeviceFacts, together: int) -> Tile:
    """Return *tile* with at most as many stages as *together* blocks of an SM have room for, and at least 3 (or 2)."""
    room = (_memory(facts) + _RESERVED) // together - _RESERVED
    least = 3 if _shared(problem, tile._replace(stages=3), tokens, facts) <= _memory(facts) else 2
    while tile.stages > least and _shared(problem, tile, tokens, facts) > room:
        tile = tile._replace(stages=tile.stages - 1)
    return tile._replace(stages=max(least, tile.stages))


_RESERVED = 1024  # bytes of shared memory that the system takes of each block
_LEAST_MEMORY = 99 * 1024  # of a block, of any GPU that the kernels run on


def _memory(facts: DeviceFacts) -> int:
    return facts.shared_memory or _LEAST_MEMORY


def _shared(problem: Problem, tile: Tile, tokens: int, facts: DeviceFacts) -> int:
    return tile.shared(tokens, bool(problem.option["trans_b"]), facts.arch)


SKINNY = Schedule(
    name="skinny",
    kernel="gemm",
    kernel_revision=2,
    revision=2,
    targets=("cuda",),
    toolchain="cuda",
    program="tlhub_gemm.skinny_program:program",
    supports=supports,
    configs=configs,
    sources=(
        *(f"tlhub_gemm.{name}" for name in ("skinny", "skinny_plan", "skinny_program", "arch")),
        "tlhub/cuda/tensor_cores.cuh",
        *(f"tlhub_gemm/cuda/{name}.cuh" for name in ("operand", "skinny", "skinny_hopper")),
        *SIMT.sources,  # the CUDA cores have what is left
    ),
    priority=30,
    doc="few rows: b streams once through a ring of tiles to the tensor cores",
)
