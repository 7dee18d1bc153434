"""Attention's CUDA programs: the text of the files in cuda/, and the expressions that their launches share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tlhub.build.program import Parameter, TensorMap
from tlhub.specs import DTYPES, Problem

_TYPES = {
    "float32": "float",
    "float16": "__half",
    "bfloat16": "__nv_bfloat16",
    "float8_e4m3fn": "__nv_fp8_e4m3",
    "float8_e5m2": "__nv_fp8_e5m2",
}

MOST = 0x3FFF0000
"""What positions, and tiles, stay below, so that twice as many are ints."""

_ALIGNMENT = 16  # bytes, of addresses and strides in tensor maps
_FULL = 4  # dims of an array: batch, position, head, channel


def source(problem: Problem, *names: str | Path) -> str:
    """Return one source: types, dims and options of *problem*, call.cuh, and *names*, files of cuda/ or whole paths."""
    folder = Path(__file__).parent
    texts = ((folder / name).read_text(encoding="utf-8") for name in ("call.cuh", *names))
    dim, dtypes = problem.dim, dict(problem.dtypes)
    alibi = problem.option["alibi"]
    flags = {"CAUSAL": problem.option["causal"], "ALIBI": alibi, "VARLEN": varlen(problem)}
    prologue = [
        *(f"#include <{header}>" for header in ("cstdint", "cuda_bf16.h", "cuda_fp16.h")),
        f"using T = {_TYPES[dtypes['q']]};",
        f"using O = {_TYPES[dtypes['o']]};",
        f"constexpr int D = {dim['D']}, D_V = {dim['D_v']};",
        f"constexpr bool {', '.join(f'{name} = {str(flag).lower()}' for name, flag in flags.items())};\n",
    ]
    return "\n".join(["\n".join(prologue), *texts])


def varlen(problem: Problem) -> bool:
    """Return whether *problem* is of sequences that lie end to end, in arrays (position, head, channel)."""
    return "N1" in problem.dim


def rank(problem: Problem) -> int:
    """Return how many dims q, k, v and o have."""
    return 3 if varlen(problem) else _FULL


def values(problem: Problem) -> dict[str, str]:
    """Return the values that a program has: of sequences end to end B, S and S_kv, those of one that is all of them."""
    return {"B": "1", "S": "T", "S_kv": "T_kv"} if varlen(problem) else {}


def mappable(name: str, item: int, rank: int = _FULL) -> str:
    """Return the condition that array *name*, of *item* bytes an element and *rank* dims, can have a tensor map: not
    empty, channels side by side, and an address and strides above 0 that are multiples of 16 bytes. Strides of dims of
    extent 1 do not count."""
    steps = (
        f"(EXTENT({name}, {dim}) == 1 || "
        f"STRIDE({name}, {dim}) > 0 && ALIGNED(STRIDE({name}, {dim}) * {item}, {_ALIGNMENT}))"
        for dim in _others(rank)
    )
    filled = (f"EXTENT({name}, {dim}) > 0" for dim in range(rank))
    return " && ".join([f"STRIDE({name}, {rank - 1}) == 1", f"ALIGNED(DATA({name}), {_ALIGNMENT})", *filled, *steps])


def tensor_map(problem: Problem, name: str, box: tuple[int, int]) -> TensorMap:
    """Return the tensor map of array *name*, in boxes of (channels, positions) of one head, swizzled by their width.
    It has four dims; where sequences lie end to end a batch of one."""
    dtype = dict(problem.dtypes)[name]
    item, last = DTYPES[dtype][1] // 8, rank(problem) - 1
    steps = [f"(EXTENT({name}, {dim}) == 1 ? 16 : STRIDE({name}, {dim}) * {item})" for dim in _others(last + 1)]
    extents = [f"EXTENT({name}, {dim})" for dim in (last, *_others(last + 1))]
    lacking = _FULL - 1 - last
    return TensorMap(
        dtype,
        f"DATA({name})",
        (*extents, *["1"] * lacking),
        (*steps, *["16"] * lacking),
        (*box, 1, 1),
        swizzle=box[0] * item,
    )


def array(problem: Problem, name: str) -> tuple[Parameter, ...]:
    """Return the address and the strides of array *name*, as a pointer and call.cuh's STRIDES."""
    return _view(name, (None, 0, 1, 2) if varlen(problem) else (0, 1, 2, 3))


def parameters(problem: Problem) -> tuple[Parameter, ...]:
    """Return the values of call.cuh's CALL_PARAMETERS."""
    packed, option = varlen(problem), problem.option
    sizes = ("N1 - 1", "T", "H", "T_kv", "H_kv") if packed else ("B", "S", "H", "S_kv", "H_kv")
    window = f"(window < 0 ? 0 : window < {MOST} ? window : {MOST})"
    return (
        *(Parameter("int", size) for size in sizes),
        *(parameter for name in "qkvo" for parameter in array(problem, name)),
        *_view("lse" if option["lse"] else None, (None, 0, 1) if packed else (0, 1, 2)),
        *_view("slopes" if option["alibi"] else None, (0,)),
        *(parameter for name in ("starts", "starts_kv") for parameter in _view(name if packed else None, (0,))),
        *(Parameter("double", "scale"), Parameter("int", window), Parameter("double", "softcap")),
    )


def _view(name: str | None, dims: Sequence[int | None]) -> tuple[Parameter, ...]:
    """Return the address of array *name* and its strides of *dims*: 0 for what it does not have."""
    address = Parameter("void *", f"DATA({name})" if name else 0)
    return (
        address,
        *(Parameter("int64_t", f"STRIDE({name}, {dim})" if name and dim is not None else "0") for dim in dims),
    )


def _others(rank: int) -> tuple[int, ...]:
    """Return the dims of an array but its channels, in the order of tensor maps: position, head, batch."""
    return (rank - 3, rank - 2, *range(rank - 3))
