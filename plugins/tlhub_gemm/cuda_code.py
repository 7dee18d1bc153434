"""Gemm's CUDA programs: the text of the files in cuda/, and the expressions that their launches share.

Strides are of op(A), M x K, and of op(B) transposed, N x K, however a and b are stored. A program has
``tlhub/cuda/elements.cuh`` among its schedule's ``sources``.
"""

from __future__ import annotations

from pathlib import Path

from tlhub.build.program import Parameter, TensorMap
from tlhub.cuda import tensor_cores
from tlhub.specs import DTYPES, Problem

SMALL = " && ".join(f"{dim} < 0x7ffff000" for dim in "BMNK")
"""The condition that the extents, up to the end of the last tile, are ints: coordinates of tensor maps are."""

_ELEMENTS = tensor_cores.FILE.with_name("elements.cuh")
_TYPES = {
    # the C++ type of a dtype, and the header that declares it
    "float64": ("double", None),
    "float32": ("float", None),
    "float16": ("__half", "cuda_fp16.h"),
    "bfloat16": ("__nv_bfloat16", "cuda_bf16.h"),
    "float8_e4m3fn": ("__nv_fp8_e4m3", "cuda_fp8.h"),
    "float8_e5m2": ("__nv_fp8_e5m2", "cuda_fp8.h"),
    "int8": ("signed char", None),
    "int32": ("int", None),
}

_PTX = {"float16": "f16", "bfloat16": "bf16"}
"""The names of operands of tensor cores in PTX."""


def source(problem: Problem, *names: str | Path) -> str:
    """Return one source: what *problem* defines, elements.cuh, epilogue.cuh, call.cuh, and *names*, files of cuda/ or
    whole paths."""
    folder = Path(__file__).parent / "cuda"
    texts = ((folder / name).read_text(encoding="utf-8") for name in (_ELEMENTS, "epilogue.cuh", "call.cuh", *names))
    return "\n".join([_prologue(problem), *texts])


def _prologue(problem: Problem) -> str:
    """Return the declarations that epilogue.cuh expects, and the headers that they need."""
    option, dtypes = problem.option, dict(problem.dtypes)
    beside = dtypes.get("bias") or dtypes.get("residual") or dtypes["c"]
    used = {"A": dtypes["a"], "B": dtypes["b"], "C": dtypes["c"], "Beside": beside, "Sum": str(option["accum"])}
    headers = sorted({header for header in (_TYPES[dtype][1] for dtype in used.values()) if header})
    flags = ", ".join(f"{name.upper()} = {str(option[name]).lower()}" for name in _FLAGS)
    return "\n".join(
        [
            *(f"#include <{header}>" for header in ("cstdint", *headers)),
            *(f"using {name} = {_TYPES[dtype][0]};" for name, dtype in used.items()),
            *(f'#define PTX_A "{name}"' for name in [_PTX.get(dtypes["a"])] if name),
            f"#define ACTIVATION {str(option['epilogue']).upper()}",
            f"[[maybe_unused]] constexpr bool {flags};\n",
        ]
    )


_FLAGS = ("trans_a", "trans_b", "glu", "bias", "residual")


def columns(problem: Problem) -> str:
    """Return the name of the dim that is the columns of c."""
    return "N_2" if problem.option["glu"] else "N"


def even(problem: Problem) -> tuple[str, ...]:
    """Return the condition of a call that there are as many gates as values, where *problem* has some."""
    return ("N % 2 == 0",) if problem.option["glu"] else ()


def strides(problem: Problem, name: str) -> tuple[str, str, str]:
    """Return the strides (batch, row, column) of a, b, c or residual, in elements."""
    # the second operand's rows are columns of op(B)
    swapped = problem.option["trans_a"] if name == "a" else name == "b" and not problem.option["trans_b"]
    row, column = (2, 1) if swapped else (1, 2)
    return f"STRIDE({name}, 0)", f"STRIDE({name}, {row})", f"STRIDE({name}, {column})"


def aligned(problem: Problem, name: str, size: int) -> str:
    """Return the condition that *name* is stored in rows without gaps between elements, all aligned to *size* bytes.

    Strides of dims of extent 1 do not count.
    """
    item = DTYPES[dict(problem.dtypes)[name]][1] // 8
    steps = " && ".join(
        f"(EXTENT({name}, {dim}) == 1 || ALIGNED(STRIDE({name}, {dim}) * {item}, {size}))" for dim in (0, 1)
    )
    return f"STRIDE({name}, 2) == 1 && ALIGNED(DATA({name}), {size}) && {steps}"


def mappable(problem: Problem, name: str, size: int) -> str:
    """Return the condition that array *name* can have a tensor map: ``aligned``, not empty, and strides above 0."""
    steps = " && ".join(f"(EXTENT({name}, {dim}) == 1 || STRIDE({name}, {dim}) > 0)" for dim in (0, 1))
    return f"{aligned(problem, name, size)} && EXTENT({name}, 2) > 0 && EXTENT({name}, 1) > 0 && {steps}"


def tensor_map(problem: Problem, name: str, box: tuple[int, int]) -> TensorMap:
    """Return the tensor map of array *name* as it is stored, in boxes of (columns, rows) of one batch."""
    item = DTYPES[dict(problem.dtypes)[name]][1] // 8
    steps = tuple(f"(EXTENT({name}, {dim}) == 1 ? 16 : STRIDE({name}, {dim}) * {item})" for dim in (1, 0))
    extents = tuple(f"EXTENT({name}, {dim})" for dim in (2, 1, 0))
    return TensorMap(dict(problem.dtypes)[name], f"DATA({name})", extents, steps, (*box, 1))


def parameters(problem: Problem) -> tuple[Parameter, ...]:
    """Return the values of call.cuh's CALL_PARAMETERS."""

    def index(*values: str) -> list[Parameter]:
        return [Parameter("int64_t", value) for value in values]

    def array(name: str) -> list[Parameter]:
        if name not in dict(problem.dtypes):  # a problem without bias or residual
            return [Parameter("void *", 0), *index(*["0"] * (1 if name == "bias" else 3))]
        steps = ("STRIDE(bias, 0)",) if name == "bias" else strides(problem, name)
        return [Parameter("void *", f"DATA({name})"), *index(*steps)]

    arrays = [parameter for name in ("a", "b", "bias", "residual", "c") for parameter in array(name)]
    factors = (Parameter("double", name) for name in ("alpha", "out_scale"))
    return (*index("B", "M", columns(problem), "K"), *arrays, *factors)
