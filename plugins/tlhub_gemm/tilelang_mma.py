"""The schedule of gemm on the tensor cores that mma.sync drives, in TileLang: Turing and everything since."""

from __future__ import annotations

from collections.abc import Sequence

from tlhub.specs import DTYPES, Config, DeviceFacts, Problem, Schedule
from tlhub_gemm.arch import capability

_INPUTS = ("float16", "bfloat16")
_OUTPUTS = (*_INPUTS, "float32")
_SUMS = ("float32", "float16")


def supports(problem: Problem, facts: DeviceFacts) -> str | None:
    """Return why the schedule does not serve *problem*, or None."""
    option, dtypes = problem.option, dict(problem.dtypes)
    if dtypes["a"] not in _INPUTS:
        return f"{dtypes['a']} inputs; it multiplies {' and '.join(_INPUTS)}"
    if dtypes["a"] == "bfloat16" and capability(facts.arch) < 80:
        return "bfloat16 inputs; tensor cores multiply them from compute capability 8.0 on"
    if option["out_dtype"] not in _OUTPUTS:
        return f"out_dtype={option['out_dtype']!r}; it writes {', '.join(_OUTPUTS)}"
    if option["glu"]:
        return "glu; it writes a product of all columns"
    if option["accum"] not in _SUMS:
        return f"accum={option['accum']!r}; it adds up in 'float32', and float16 in 'float16' too"
    if option["tensor_core"] is False:
        return "tensor_core=False, and this schedule uses them"
    return None


def configs(problem: Problem, facts: DeviceFacts) -> Sequence[Config]:
    """Return the configs worth trying for the arch of *facts*, those that its shared memory holds.

    ``large_m`` x ``large_n``: the tile of C of a block, where there are enough of them for the device, else
    ``small_m`` x ``small_n``; ``k``: the step along K; ``stages``: tiles in flight, 1 where copies to shared memory
    are not asynchronous (before compute capability 8.0); ``threads``: of a block with the large tile; ``blocks``: how
    many of those share the registers of an SM.
    """
    # what an epilogue holds would spill if two blocks had to fit
    plain = problem.option["epilogue"] == "none" and not problem.option["bias"] and not problem.option["residual"]
    blocks = 2 if plain else 1
    if capability(facts.arch) < 80:
        return [_config((128, 128), 32, 1, 256, 1), _config((128, 64), 32, 1, 128, 1)]
    # an SM has the shared memory of two blocks of the first: 64 KiB each of at least 164, or 48 of 100
    first = 4 if facts.shared_memory >= 2 * 64 * 1024 else 3
    tried = [
        _config((128, 128), 32, first, 256, blocks),
        _config((128, 128), 32, first, 128, blocks),
        *(_config((128, 128), 64, stages, 256, blocks) for stages in (3, 2)),
        *(_config(large, 32, first, 128, blocks) for large in ((128, 64), (64, 128))),
    ]
    fits = [c for c in tried if not facts.shared_memory or _shared(problem, c) <= facts.shared_memory]
    return fits or tried[:1]


def _config(large: tuple[int, int], k: int, stages: int, threads: int, blocks: int) -> dict[str, int]:
    tiles = {"large_m": large[0], "large_n": large[1], "small_m": 64, "small_n": 64}
    return {**tiles, "k": k, "stages": stages, "threads": threads, "blocks": blocks}


def _shared(problem: Problem, config: dict[str, int]) -> int:
    """Return the bytes of shared memory of a block with the large tile."""
    item = DTYPES[problem.dtype][1] // 8
    return config["stages"] * (config["large_m"] + config["large_n"]) * config["k"] * item


MMA = Schedule(
    name="tilelang_mma",
    kernel="gemm",
    kernel_revision=2,
    revision=2,
    targets=("cuda",),
    toolchain="tilelang",
    program="tlhub_gemm.tilelang_program:program",
    supports=supports,
    configs=configs,
    symbolic=("B", "M", "N", "K"),
    sources=tuple(f"tlhub_gemm.{name}" for name in ("tilelang_mma", "tilelang_program", "arch")),
    priority=10,
    doc="tiles in shared memory and mma.sync; loads in vectors where operands are aligned, else one by one",
)
