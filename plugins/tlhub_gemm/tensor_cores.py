"""What tensor_cores.cuh leaves to Python: products of tiles, by the number of their columns."""

from __future__ import annotations

from collections.abc import Iterable

FILE = "tensor_cores.cuh"
"""The file of cuda/ that kernels on tensor cores begin with."""


def products(columns: Iterable[int]) -> str:
    """Return tensor_cores.cuh's Wgmma for each number of *columns*, to follow that file."""
    return "".join(map(_wgmma, sorted(set(columns))))


def _wgmma(columns: int) -> str:
    """Return one Wgmma: an instruction that has a register for each float of the sum."""
    count = columns // 2
    sums = ", ".join(f"%{i}" for i in range(count))
    operands = ", ".join(f'"+f"(sum[{i}])' for i in range(count))
    a, b, add, across_a, across_b = (f"%{count + i}" for i in range(5))
    return f"""
template <bool ACROSS_A, bool ACROSS_B> struct tensor_cores::Wgmma<{columns}, ACROSS_A, ACROSS_B> {{
  static __device__ __forceinline__ void add(float (&sum)[{count}], uint64_t a, uint64_t b, int add) {{
    asm volatile(
        "{{\\n.reg .pred add;\\nsetp.ne.b32 add, {add}, 0;\\n"
        "wgmma.mma_async.sync.aligned.m64n{columns}k16.f32." PTX_A "." PTX_A
        " {{{sums}}}, {a}, {b}, add, 1, 1, {across_a}, {across_b};\\n}}"
        : {operands}
        : "l"(a), "l"(b), "r"(add), "n"(ACROSS_A), "n"(ACROSS_B));
  }}
}};
"""
