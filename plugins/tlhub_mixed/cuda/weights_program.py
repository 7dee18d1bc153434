"""The program of products with narrow weights, for few rows of a at a time, on any GPU with mma.sync."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from tlhub.build.program import Branch, CudaProgram, Launch, Parameter
from tlhub.cuda import tensor_cores, warp_mma
from tlhub.specs import DTYPES, Config, Problem
from tlhub_mixed.cuda import code

_ROWS, _THREADS, _GROUPS = 128, 256, 2  # of w, of a block; its threads; groups of warps that share K
_WIDTHS = (1, 2, 4)
"""Rows of a of a block, in eights; a call takes the least that suffices, or blocks of the most."""
Few: TypeAlias = "tuple[bool, int]"
"""A kernel for few rows: whether it copies 16 bytes at once, and its width."""
KERNELS: Sequence[Few] = (*((True, width) for width in _WIDTHS), (False, max(_WIDTHS)))
"""In the order of a call's choice."""
_RING = 96 * 1024  # bytes of shared memory that there are for it
_MOST_STAGES = 4
_SPLITS = (1, 2, 4, 8)
"""Blocks that share K, a cluster, where there are clusters; a call takes the least that keep most processors busy."""
SMALL = "M < 0x7fff0000 && N < 0x7fff0000 && K < 0x20000000"  # extents, and the ends of last steps, are ints
FILES = ("weights.cuh", "weights_few.cuh")
HEADERS = "#include <cuda_bf16.h>\n#include <cuda_fp16.h>"
"""What these files include, ahead of all."""


def program(problem: Problem, config: Config, arch: str) -> CudaProgram:
    """Return the program for any number of rows."""
    files = (tensor_cores.FILE, warp_mma.FILE, *FILES)
    source = [HEADERS, code.source(problem, numbers(problem), *files), *kernels(problem), ""]
    return CudaProgram("\n".join(source), branches(problem, arch))


def numbers(problem: Problem) -> dict[str, object]:
    """Return the constants that weights.cuh expects."""
    group, zeros = int(problem.option["group"] or 0), int(bool(problem.option["zero_point"]))
    return {"BITS": bits(problem), "GROUP_SIZE": group, "ZEROS": zeros}


def bits(problem: Problem) -> int:
    return 4 if problem.kernel == "gemm_w4a16" else 8


def kernels(problem: Problem, few: Sequence[Few] = KERNELS) -> list[str]:
    """Return the instances of kernels, to follow weights.cuh."""
    return [
        f"FEW_ROWS({_name(width, whole)}, {_shared(problem, width)}, {width}, {str(whole).lower()})"
        for whole, width in few
    ]


def branches(problem: Problem, arch: str, few: Sequence[Few] = KERNELS) -> tuple[Branch, ...]:
    """Return the branches of these kernels, by the number of rows of a, and of blocks."""
    found = []
    for whole, width in few:
        fits = [SMALL, _whole(problem) if whole else "", f"M <= {8 * width}" if width < max(_WIDTHS) else ""]
        for split, busy in splits(_blocks(problem, width), _SPLITS[-1] if code.number(arch) >= 90 else 1):
            launch = _few(problem, arch, width, whole, split)
            found.append(Branch((launch,), " && ".join(filter(None, [*fits, busy]))))
    return tuple(found)


def splits(blocks: str, most: int) -> list[tuple[int, str]]:
    """Return how many of *blocks* may share K, up to *most*, each with the condition under which they are enough: the
    first that holds keeps most processors busy."""
    return [(n, f"{blocks} * {n} >= SMS * 7 / 8" if n < most else "") for n in _SPLITS if n <= most]


def _name(width: int, whole: bool) -> str:
    return f"few_{8 * width}_{'whole' if whole else 'any'}"


def _whole(problem: Problem) -> str:
    """Return the condition that codes and elements of a are read 16 bytes at once."""
    found = []
    for name in ("a", "w"):
        item = DTYPES[dict(problem.dtypes)[name]][1] // 8
        row = f"(EXTENT({name}, 0) == 1 || ALIGNED(STRIDE({name}, 0) * {item}, 16))"
        found.append(f"STRIDE({name}, 1) == 1 && ALIGNED(DATA({name}), 16) && {row}")
    return " && ".join(found)


def weights(problem: Problem) -> tuple[Parameter, ...]:
    """Return the values of WEIGHTS_PARAMETERS."""
    zero = "zero" in dict(problem.dtypes)

    def array(name: str, there: bool = True) -> list[Parameter]:
        steps = (f"STRIDE({name}, {dim})" if there else 0 for dim in range(2))
        return [Parameter("void *", f"DATA({name})" if there else 0), *(Parameter("int64_t", step) for step in steps)]

    return (*array("w"), *array("scale"), *array("zero", zero), Parameter("int", "N"))


def _blocks(problem: Problem, width: int) -> str:
    rows = _ROWS // (2 if problem.option["glu"] else 1)
    return f"CEIL_DIV({code.columns(problem)}, {rows}) * CEIL_DIV(M, {8 * width})"


def _shared(problem: Problem, width: int) -> int:
    """Return the bytes of shared memory of a block: stages of a ring, in each 64 bytes of codes for a thread, and what
    belongs to them of a."""
    stage = 64 * _THREADS + _GROUPS * 8 * width * 4 * (128 // bits(problem)) * 2
    return min(_MOST_STAGES, _RING // stage) * stage


def _few(problem: Problem, arch: str, width: int, whole: bool, split: int) -> Launch:
    a = [Parameter("void *", "DATA(a)"), *(Parameter("int64_t", f"STRIDE(a, {dim})") for dim in range(2))]
    return Launch(
        kernel=_name(width, whole),
        grid=(_blocks(problem, width), split, 1),
        block=(_THREADS, 1, 1),
        parameters=(*a, *weights(problem), *code.parameters(problem)),
        shared=_shared(problem, width),
        cluster=(1, split, 1),
        programmatic=code.number(arch) >= 90,
    )
