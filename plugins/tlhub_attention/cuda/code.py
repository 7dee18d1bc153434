"""Attention's CUDA programs: the text of the files in cuda/, and the expressions that their launches share."""

from __future__ import annotations

from pathlib import Path

from tlhub.build.program import Parameter, TensorMap
from tlhub.specs import DTYPES, Problem

_TYPES = {"float32": "float", "float16": "__half", "bfloat16": "__nv_bfloat16"}

MOST = 0x3FFF0000
"""What positions, and tiles, stay below, so that twice as many are ints."""

_ALIGNMENT = 16  # bytes, of addresses and strides in tensor maps
_CHANNELS, _OTHERS = 3, (1, 2, 0)  # dims of an array, in the order of tensor maps


def source(problem: Problem, *names: str | Path) -> str:
    """Return one source: types, dims and options of *problem*, call.cuh, and *names*, files of cuda/ or whole paths."""
    folder = Path(__file__).parent
    texts = ((folder / name).read_text(encoding="utf-8") for name in ("call.cuh", *names))
    dim, dtypes = problem.dim, dict(problem.dtypes)
    prologue = [
        *(f"#include <{header}>" for header in ("cstdint", "cuda_bf16.h", "cuda_fp16.h")),
        f"using T = {_TYPES[dtypes['q']]};",
        f"using O = {_TYPES[dtypes['o']]};",
        f"constexpr int D = {dim['D']}, D_V = {dim['D_v']};",
        f"constexpr bool CAUSAL = {str(problem.option['causal']).lower()};\n",
    ]
    return "\n".join(["\n".join(prologue), *texts])


def mappable(name: str, item: int) -> str:
    """Return the condition that array *name*, of *item* bytes an element, can have a tensor map: not empty, channels
    side by side, and an address and strides above 0 that are multiples of 16 bytes. Strides of dims of extent 1 do not
    count."""
    steps = (
        f"(EXTENT({name}, {dim}) == 1 || "
        f"STRIDE({name}, {dim}) > 0 && ALIGNED(STRIDE({name}, {dim}) * {item}, {_ALIGNMENT}))"
        for dim in _OTHERS
    )
    filled = (f"EXTENT({name}, {dim}) > 0" for dim in range(4))
    return " && ".join([f"STRIDE({name}, 3) == 1", f"ALIGNED(DATA({name}), {_ALIGNMENT})", *filled, *steps])


def tensor_map(problem: Problem, name: str, box: tuple[int, int]) -> TensorMap:
    """Return the tensor map of array *name*, in boxes of (channels, positions) of one head, swizzled by their width."""
    dtype = dict(problem.dtypes)[name]
    item = DTYPES[dtype][1] // 8
    steps = tuple(f"(EXTENT({name}, {dim}) == 1 ? 16 : STRIDE({name}, {dim}) * {item})" for dim in _OTHERS)
    extents = tuple(f"EXTENT({name}, {dim})" for dim in (_CHANNELS, *_OTHERS))
    return TensorMap(dtype, f"DATA({name})", extents, steps, (*box, 1, 1), swizzle=box[0] * item)


def parameters(problem: Problem) -> tuple[Parameter, ...]:
    """Return the values of call.cuh's CALL_PARAMETERS."""

    def index(*values: str) -> list[Parameter]:
        return [Parameter("int64_t", value) for value in values]

    def array(name: str) -> list[Parameter]:
        return [Parameter("void *", f"DATA({name})"), *index(*(f"STRIDE({name}, {dim})" for dim in range(4)))]

    lse = [Parameter("void *", 0), *index("0", "0", "0")]
    if problem.option["lse"]:
        lse = [Parameter("void *", "DATA(lse)"), *index(*(f"STRIDE(lse, {dim})" for dim in range(3)))]
    window = f"(window < 0 ? 0 : window < {MOST} ? window : {MOST})"
    scalars = (Parameter("double", "scale"), Parameter("int", window), Parameter("double", "softcap"))
    arrays = [parameter for name in "qkvo" for parameter in array(name)]
    sizes = (Parameter("int", name) for name in ("B", "S", "H", "S_kv", "H_kv"))
    return (*sizes, *arrays, *lse, *scalars)
