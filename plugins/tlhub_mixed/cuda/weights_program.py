"""The program of products with narrow weights, for few rows of a at a time, on any GPU with mma.sync; and the launches
that unpack weights."""

from __future__ import annotations

import re

from tlhub.build.program import Branch, CudaProgram, Launch, Parameter
from tlhub.cuda import tensor_cores, warp_mma
from tlhub.specs import DTYPES, Config, Problem
from tlhub_mixed.cuda import code

_ROWS, _THREADS, _WARPS = 32, 256, 8  # of w of a block, and its threads and warps
_WIDTHS, _WIDTHS_ANY = (1, 2, 4, 8), (1, 4)
"""Rows of a that a block takes, in eights, of arrays that are read 16 bytes at once, and of any; a call takes the least
that suffices, or blocks of the most."""
FEW = 8 * _WIDTHS[-1]
FILES = ("weights.cuh",)


def program(problem: Problem, config: Config, arch: str) -> CudaProgram:
    """Return the program for any number of rows, FEW of them at a time."""
    constants = {"SCALES": 0, "PROMOTED": 0, "PARTS": 1, **numbers(problem)}
    files = (tensor_cores.FILE, warp_mma.FILE, *FILES)
    source = [code.source(problem, constants, *files), *kernels(), ""]
    return CudaProgram("\n".join(source), branches(problem, arch))


def numbers(problem: Problem) -> dict[str, object]:
    """Return the constants that weights.cuh expects."""
    option = problem.option
    return {"BITS": bits(problem), "GROUP_SIZE": int(option["group"] or 0), "ZEROS": int(bool(option["zero_point"]))}


def bits(problem: Problem) -> int:
    return 4 if problem.kernel == "gemm_w4a16" else 8


def kernels() -> list[str]:
    """Return the kernels' instances, to follow weights.cuh."""
    return [f"FEW_ROWS({_name(width, whole)}, {width}, {str(whole).lower()})" for width, whole in _kernels()]


def unpackers() -> list[str]:
    """Return the kernels that unpack, likewise."""
    return ["UNPACK(unpack_whole, true)", "UNPACK(unpack_any, false)"]


def branches(problem: Problem, arch: str, when: str = "") -> tuple[Branch, ...]:
    """Return the branches for calls *when* (a condition), by the number of rows of a."""
    found = []
    for width, whole in _kernels():
        most = (_WIDTHS if whole else _WIDTHS_ANY)[-1]
        conditions = [when, "" if width == most else f"M <= {8 * width}", _whole(problem) if whole else ""]
        found.append(Branch((_few(problem, arch, width, whole),), " && ".join(filter(None, conditions))))
    return tuple(found)


def number(arch: str) -> int:
    """Return the number of an arch: 90 of ``cuda:sm_90a``."""
    found = re.search(r"_(\d+)", arch)
    return int(found[1]) if found else 0


def _kernels() -> list[tuple[int, bool]]:
    """Return the width of each kernel, and whether it reads 16 bytes at once, in the order of a call's choice."""
    return [*((width, True) for width in _WIDTHS), *((width, False) for width in _WIDTHS_ANY)]


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


def _few(problem: Problem, arch: str, width: int, whole: bool) -> Launch:
    rows = 16 if problem.option["glu"] else _ROWS
    a = [Parameter("void *", "DATA(a)"), *(Parameter("int64_t", f"STRIDE(a, {dim})") for dim in range(2))]
    return Launch(
        kernel=_name(width, whole),
        grid=(f"CEIL_DIV({code.columns(problem)}, {rows})", f"CEIL_DIV(M, {8 * width})", 1),
        block=(_THREADS, 1, 1),
        parameters=(*a, *weights(problem), *code.parameters(problem)),
        shared=_WARPS * _ROWS * 8 * width * 4,
        programmatic=number(arch) >= 90,
    )


def unpack(problem: Problem, to: str, pitch: str) -> list[tuple[str, Launch]]:
    """Return the launches that write the weights to *to*, in rows of *pitch* elements, each with its condition."""
    parameters = (*weights(problem), Parameter("void *", to), Parameter("int", "K"), Parameter("int64_t", pitch))
    grid = f"(CEIL_DIV(N, {_WARPS}) < SMS * 8 ? CEIL_DIV(N, {_WARPS}) : SMS * 8)"
    return [
        (when, Launch(f"unpack_{kind}", (grid, 1, 1), (_THREADS, 1, 1), parameters))
        for kind, when in (("whole", _whole(problem)), ("any", ""))
    ]
