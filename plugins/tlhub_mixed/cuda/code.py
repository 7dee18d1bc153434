"""The CUDA programs of products: the text of the files in cuda/, and the expressions that their launches share.

Strides are of op(A), M x K, and of op(B) transposed, N x K, however a and b are stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tlhub.build.program import Parameter
from tlhub.cuda import tensor_cores
from tlhub.specs import Problem

_ELEMENTS = tensor_cores.FILE.with_name("elements.cuh")
_TYPES = {
    # the C++ type of a dtype, and the header that declares it
    "float32": ("float", None),
    "float16": ("__half", "cuda_fp16.h"),
    "bfloat16": ("__nv_bfloat16", "cuda_bf16.h"),
    "float8_e4m3fn": ("__nv_fp8_e4m3", "cuda_fp8.h"),
    "float8_e5m2": ("__nv_fp8_e5m2", "cuda_fp8.h"),
    "int8": ("signed char", None),
    "int32": ("int", None),
}


def source(problem: Problem, constants: Mapping[str, object], *names: str | Path) -> str:
    """Return one source: what *problem* defines with *constants* (``SCALES``, ``PROMOTED``, ``PARTS``), call.cuh, and
    *names*, files of cuda/ or whole paths."""
    folder = Path(__file__).parent
    texts = ((folder / name).read_text(encoding="utf-8") for name in (_ELEMENTS, "call.cuh", *names))
    option, dtypes = problem.option, dict(problem.dtypes)
    used = {name.upper(): dtypes[name] for name in "abc"}
    headers = sorted({header for header in (_TYPES[dtype][1] for dtype in used.values()) if header})
    integer, scaled = dtypes["a"] == "int8", bool(constants["SCALES"])
    flags = [f"{name.upper()} = {str(option[name]).lower()}" for name in ("bias", "residual")]
    prologue = [
        *(f"#include <{header}>" for header in ("cstdint", *headers)),
        *(f"using {name} = {_TYPES[dtype][0]};" for name, dtype in used.items()),
        f"using Sum = {'int' if integer else 'float'};",
        f"using Real = {'double' if integer and not scaled else 'float'};",
        f"#define ACTIVATION {str(option['epilogue']).upper()}",
        f"[[maybe_unused]] constexpr bool {', '.join(flags)};",
        *(f"[[maybe_unused]] constexpr int {name} = {int(str(value))};" for name, value in constants.items()),
    ]
    return "\n".join([*prologue, "", *texts])


def strides(problem: Problem, name: str) -> tuple[str, str, str]:
    """Return the strides (batch, row, column) of a, b, c or residual, in elements."""
    # the second operand's rows are columns of op(B)
    swapped = problem.option["trans_a"] if name == "a" else name == "b" and not problem.option["trans_b"]
    row, column = (2, 1) if swapped else (1, 2)
    return f"STRIDE({name}, 0)", f"STRIDE({name}, {row})", f"STRIDE({name}, {column})"


def parameters(problem: Problem) -> tuple[Parameter, ...]:
    """Return the values of call.cuh's CALL_PARAMETERS, of a problem of gemm."""

    def index(*values: str) -> list[Parameter]:
        return [Parameter("int64_t", value) for value in values]

    def array(name: str, steps: tuple[str, ...]) -> list[Parameter]:
        there = name in dict(problem.dtypes)
        return [Parameter("void *", f"DATA({name})" if there else 0), *index(*(steps if there else ["0"] * len(steps)))]

    sizes = [Parameter("int", name) for name in ("B", "M", "N", "K")]
    scales = [p for name in ("a_scale", "b_scale") for p in array(name, (f"STRIDE({name}, 0)", f"STRIDE({name}, 1)"))]
    bias = array("bias", ("STRIDE(bias, 0)",))
    others = [p for name in ("residual", "c") for p in array(name, strides(problem, name))]
    return (*sizes, *scales, *bias, *others, Parameter("double", "alpha"))
