"""The CUDA programs of products: the text of the files in cuda/, and the expressions that their launches share.

Strides are of op(A), M x K, and of op(B) transposed, N x K, however a and b are stored.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from tlhub.build.program import Parameter
from tlhub.cuda import tensor_cores
from tlhub.specs import Problem

ELEMENTS = tensor_cores.FILE.with_name("elements.cuh")
TYPES = {
    # the C++ type of a dtype, and the header that declares it
    "float32": ("float", None),
    "float16": ("__half", "cuda_fp16.h"),
    "bfloat16": ("__nv_bfloat16", "cuda_bf16.h"),
    "float8_e4m3fn": ("__nv_fp8_e4m3", "cuda_fp8.h"),
    "float8_e5m2": ("__nv_fp8_e5m2", "cuda_fp8.h"),
    "int8": ("signed char", None),
    "int32": ("int", None),
}


def source(problem: Problem, constants: Mapping[str, object], *names: str | Path, operand: str | None = None) -> str:
    """Return one source: what *problem* defines with *constants*, which *names* expect, call.cuh, and *names*,
    files of cuda/ or whole paths. *operand*: the C++ type by which a and b are read,
    where it is not their own."""
    folder = Path(__file__).parent
    texts = ((folder / name).read_text(encoding="utf-8") for name in (ELEMENTS, "call.cuh", *names))
    option, dtypes = problem.option, dict(problem.dtypes)
    beside = dtypes.get("bias") or dtypes.get("residual") or dtypes["c"]
    used = {"A": dtypes["a"], "B": dtypes.get("b", dtypes["a"]), "C": dtypes["c"], "Beside": beside}
    headers = sorted({header for header in (TYPES[dtype][1] for dtype in used.values()) if header})
    types = {name: operand if operand and name in "AB" else TYPES[dtype][0] for name, dtype in used.items()}
    integer = dtypes["a"] == "int8"
    flags = [f"{name.upper()} = {str(option.get(name, False)).lower()}" for name in ("bias", "residual", "glu")]
    prologue = [
        *(f"#include <{header}>" for header in ("cstdint", *headers)),
        *(f"using {name} = {ctype};" for name, ctype in types.items()),
        f"using Scale = {'uint8_t' if dtypes.get('a_scale') == 'float8_e8m0fnu' else 'float'};",
        f"using Sum = {'int' if integer else 'float'};",
        f"using Real = {'double' if integer and batched(problem) else 'float'};",
        f"#define ACTIVATION {str(option['epilogue']).upper()}",
        f"[[maybe_unused]] constexpr bool {', '.join(flags)};",
        *(f"[[maybe_unused]] constexpr int {name} = {int(str(value))};" for name, value in constants.items()),
    ]
    return "\n".join([*prologue, "", *texts])


def number(arch: str) -> int:
    """Return the number of an arch: 90 of ``cuda:sm_90a``."""
    found = re.search(r"_(\d+)", arch)
    return int(found[1]) if found else 0


def batched(problem: Problem) -> bool:
    """Tell whether *problem* is of gemm, whose arrays are batches; of gemm_scaled they are matrices."""
    return problem.kernel == "gemm"


def extents(problem: Problem, name: str) -> tuple[str, str, str]:
    """Return the extents (batches, rows, columns) of a, b or c, by the names of dims."""
    batch = "B" if batched(problem) else "1"
    return (batch, *{"a": ("M", "K"), "b": ("N", "K"), "c": ("M", columns(problem))}[name])


def columns(problem: Problem) -> str:
    """Return the name of the dim that is the columns of c."""
    return "N_2" if problem.option.get("glu") else "N"


def strides(problem: Problem, name: str) -> tuple[str, str, str]:
    """Return the strides (batch, row, column) of a, b, c or residual, in elements."""
    option = problem.option
    # the second operand's rows are columns of op(B)
    swapped = option.get("trans_a", False) if name == "a" else name == "b" and not option.get("trans_b", True)
    first = int(batched(problem))
    row, column = (first + 1, first) if swapped else (first, first + 1)
    return (f"STRIDE({name}, 0)" if first else "0"), f"STRIDE({name}, {row})", f"STRIDE({name}, {column})"


def parameters(problem: Problem) -> tuple[Parameter, ...]:
    """Return the values of call.cuh's CALL_PARAMETERS."""
    dtypes, option = dict(problem.dtypes), problem.option

    def array(name: str, steps: Sequence[str]) -> list[Parameter]:
        there = name in dtypes
        return [
            Parameter("void *", f"DATA({name})" if there else 0),
            *(Parameter("int64_t", step if there else 0) for step in steps),
        ]

    def scales(name: str) -> list[Parameter]:
        row, block = f"STRIDE({name}, 0)", f"STRIDE({name}, 1)"
        if name == "b_scale" and not option.get("trans_b", True):
            row, block = block, row
        steps = {"tensor": ("0", "0"), "row": (f"STRIDE({name}, 0)", "0"), "block": (row, block)}
        return array(name, steps[str(option.get("scaling", "tensor"))])

    sizes = [Parameter("int", name) for name in (*extents(problem, "c"), "K")]
    others = [p for name in ("residual", "c") for p in array(name, strides(problem, name))]
    factors = ("alpha" if batched(problem) else "1", "out_scale")
    return (
        *sizes,
        *scales("a_scale"),
        *scales("b_scale"),
        *array("bias", ("STRIDE(bias, 0)",)),
        *others,
        *(Parameter("double", factor) for factor in factors),
    )
