"""Tensor cores: tensor_cores.cuh, and what it leaves to Python, products of tiles by the number of their columns.

A schedule that uses them has ``tlhub.cuda.tensor_cores`` and ``tlhub/cuda/tensor_cores.cuh`` among its ``sources``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

FILE = Path(__file__).with_suffix(".cuh")
"""The text that comes before those of the kernels."""

_PTX = {"float16": "f16", "bfloat16": "bf16"}


def from_shared(dtype: str, columns: Iterable[int]) -> str:
    """Return FromShared for each number of *columns*, to follow ``FILE``: of tiles of *dtype*, summed in float32."""
    across = ("ACROSS_A", "ACROSS_B")
    return "".join(_wgmma("FromShared", dtype, n, "uint64_t a", ['"l"(a)'], across) for n in sorted(set(columns)))


def from_registers(dtype: str, columns: Iterable[int]) -> str:
    """Return FromRegisters likewise."""
    a, registers = "const uint32_t (&a)[4]", [f'"r"(a[{i}])' for i in range(4)]
    return "".join(_wgmma("FromRegisters", dtype, n, a, registers, ["ACROSS_B"]) for n in sorted(set(columns)))


def _wgmma(name: str, dtype: str, columns: int, parameter: str, a: Sequence[str], across: Sequence[str]) -> str:
    """Return one product: an instruction that has a register for each float of the sum."""
    count, ptx = columns // 2, _PTX[dtype]
    sums = ", ".join(f"%{i}" for i in range(count))
    written = ", ".join(f'"+f"(sum[{i}])' for i in range(count))
    first = ", ".join(f"%{count + i}" for i in range(len(a)))
    b, add, *ways = (f"%{count + len(a) + i}" for i in range(2 + len(across)))
    return f"""
template <{", ".join(f"bool {way}" for way in across)}> struct tensor_cores::{name}<{columns}, {", ".join(across)}> {{
  static __device__ __forceinline__ void add(float (&sum)[{count}], {parameter}, uint64_t b, int add) {{
    asm volatile(
        "{{\\n.reg .pred add;\\nsetp.ne.b32 add, {add}, 0;\\n"
        "wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{ptx}.{ptx}"
        " {{{sums}}}, {first if len(a) == 1 else f"{{{first}}}"}, {b}, add, 1, 1, {", ".join(ways)};\\n}}"
        : {written}
        : {", ".join(a)}, "l"(b), "r"(add), {", ".join(f'"n"({way})' for way in across)});
  }}
}};
"""
