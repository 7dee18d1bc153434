"""The program of quantize on any GPU: a team of threads for each block that has a scale."""

from __future__ import annotations

from pathlib import Path

from tlhub.build.program import Branch, CudaProgram, Launch, Parameter
from tlhub.formats import RANGE
from tlhub.specs import DTYPES, Config, Problem
from tlhub_mixed.contracts.quantize import BLOCK, E8M0
from tlhub_mixed.cuda.code import ELEMENTS, TYPES

_THREADS = 256
_BLOCKS = "SMS * 8"
_TEAMS = {"row": (1, 0, _THREADS), "1x128": (1, BLOCK, 32), "128x128": (BLOCK, BLOCK, _THREADS)}
"""Elements of a block down and along (0: all), and the threads that have it, by ``scaling``."""


def program(problem: Problem, config: Config, arch: str) -> CudaProgram:
    """Return the program; ``_whole`` kernels load and store four neighbours at once, ``_any`` take any strides."""
    whole, one = _whole(problem), problem.option["scaling"] == "tensor"
    names = ["quantize_all"] if one else ["quantize"]
    if one and not problem.option["given"]:
        names.insert(0, "find_largest")
    two = len(names) > 1

    def branch(kind: str, when: str) -> Branch:
        launches = (_launch(problem, f"{name}_{kind}", two) for name in names)
        return Branch(tuple(launches), when, f"{_BLOCKS} * 4" if two else 0)

    source = "\n".join([_prologue(problem), _text(ELEMENTS), _text(_FILE), *(f"QUANTIZE({n})" for n in names), ""])
    return CudaProgram(source, (branch("whole", whole), branch("any", "")))


_FILE = Path(__file__).with_name("quantize.cuh")


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _prologue(problem: Problem) -> str:
    """Return the declarations that quantize.cuh expects, and the headers that they need."""
    option, dtypes = problem.option, dict(problem.dtypes)
    used = {"X": dtypes["x"], "Q": dtypes["q"]}
    headers = sorted({header for header in (TYPES[dtype][1] for dtype in used.values()) if header})
    down, along, team = _TEAMS.get(str(option["scaling"]), (1, 0, _THREADS))
    return "\n".join(
        [
            *(f"#include <{header}>" for header in ("cstdint", *headers)),
            "typedef long long index_t;",
            *(f"using {name} = {TYPES[dtype][0]};" for name, dtype in used.items()),
            f"using Scale = {'uint8_t' if option['scale_dtype'] == E8M0 else 'float'};",
            f"constexpr float LARGEST = {RANGE[dtypes['q']][1]}f;",
            f"constexpr bool GIVEN = {str(option['given']).lower()};",
            f"[[maybe_unused]] constexpr int DOWN = {down}, ALONG = {along}, TEAM = {team};\n",
        ]
    )


def _whole(problem: Problem) -> str:
    """Return the condition that four neighbours of x, and of q, are one aligned access."""
    found = []
    for name in "xq":
        size = 4 * DTYPES[dict(problem.dtypes)[name]][1] // 8
        row = f"(M == 1 || ALIGNED(STRIDE({name}, 0) * {size // 4}, {size}))"
        found.append(f"STRIDE({name}, 1) == 1 && ALIGNED(DATA({name}), {size}) && {row}")
    return " && ".join(found)


def _launch(problem: Problem, kernel: str, scratch: bool) -> Launch:
    def array(name: str, steps: list[str]) -> list[Parameter]:
        return [Parameter("void *", f"DATA({name})"), *(Parameter("int64_t", step) for step in steps)]

    scaling = problem.option["scaling"]
    rank = {"tensor": 0, "row": 1}.get(str(scaling), 2)
    of_scale = [f"STRIDE(scale, {dim})" if dim < rank else "0" for dim in range(2)]
    grid = _BLOCKS
    if scaling != "tensor":
        along = f"CEIL_DIV(K, {BLOCK})"
        each = {"row": "M", "1x128": f"CEIL_DIV(M * {along}, 8)", "128x128": f"CEIL_DIV(M, {BLOCK}) * {along}"}
        blocks = each[str(scaling)]
        grid = f"({blocks} < SMS * 32 ? {blocks} : SMS * 32)"
    parameters = (
        *array("x", ["STRIDE(x, 0)", "STRIDE(x, 1)"]),
        *array("q", ["STRIDE(q, 0)", "STRIDE(q, 1)"]),
        *array("scale", of_scale),
        Parameter("int64_t", "M"),
        Parameter("int64_t", "K"),
        Parameter("void *", "WORKSPACE" if scratch else 0),
    )
    return Launch(kernel, (grid, 1, 1), (_THREADS, 1, 1), parameters)
