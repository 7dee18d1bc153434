"""What tensor_cores.cuh leaves to Python: products of tiles, by the number of their columns."""

from __future__ import annotations

from collections.abc import Sequence

FILE = "tensor_cores.cuh"
"""The file of cuda/ that kernels on tensor cores begin with."""


def from_shared(columns: int) -> str:
    """Return tensor_cores.cuh's FromShared of *columns*."""
    return _wgmma("FromShared", columns, "uint64_t a", ['"l"(a)'], "{}", "0, 0")


def from_registers(columns: int) -> str:
    """Return tensor_cores.cuh's FromRegisters of *columns*."""
    operands = [f'"r"(a[{i}])' for i in range(4)]
    return _wgmma("FromRegisters", columns, "const uint32_t (&a)[4]", operands, "{{{}}}", "1")


def _wgmma(name: str, columns: int, parameter: str, operands: Sequence[str], form: str, layout: str) -> str:
    """Return one product: an instruction that has a register for each float of the sum."""
    count = columns // 2
    sums = ", ".join(f"%{i}" for i in range(count))
    written = ", ".join(f'"+f"(sum[{i}])' for i in range(count))
    a = form.format(", ".join(f"%{count + i}" for i in range(len(operands))))
    b, add = (f"%{count + len(operands) + i}" for i in range(2))
    return f"""
template <> struct tensor_cores::{name}<{columns}> {{
  static __device__ __forceinline__ void add(float (&sum)[{count}], {parameter}, uint64_t b, int add) {{
    asm volatile(
        "{{\\n.reg .pred add;\\nsetp.ne.b32 add, {add}, 0;\\n"
        "wgmma.mma_async.sync.aligned.m64n{columns}k16.f32." PTX_T "." PTX_T
        " {{{sums}}}, {a}, {b}, add, 1, 1, {layout};\\n}}"
        : {written}
        : {", ".join(operands)}, "l"(b), "r"(add));
  }}
}};
"""
