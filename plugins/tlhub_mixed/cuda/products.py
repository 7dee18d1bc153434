"""Products of tiles on Hopper's tensor cores, of operands that lie along K: wgmma by the number of columns."""

from __future__ import annotations

from collections.abc import Iterable

_PTX = {
    # the name of an operand's type in PTX, and how many elements are 32 bytes
    "float8_e4m3fn": ("e4m3", 32),
    "float8_e5m2": ("e5m2", 32),
    "int8": ("s8", 32),
    "float32": ("tf32", 8),
    "float16": ("f16", 16),
    "bfloat16": ("bf16", 16),
}


def products(a: str, b: str, columns: Iterable[int]) -> str:
    """Return ``product::Product`` for each number of *columns*, of operands of dtypes *a* and *b*, to follow
    product_hopper.cuh."""
    return "".join(_wgmma(a, b, n) for n in sorted(set(columns)))


def _wgmma(a: str, b: str, columns: int) -> str:
    """Return one product: an instruction that has a register for each number of the sum."""
    (of_a, depth), (of_b, _) = _PTX[a], _PTX[b]
    integer = a == "int8"
    kind, letter, ptx = ("int", "r", "s32") if integer else ("float", "f", "f32")
    count = columns // 2
    sums = ", ".join(f"%{i}" for i in range(count))
    written = ", ".join(f'"+{letter}"(sum[{i}])' for i in range(count))
    signs = "" if integer else ", 1, 1, 0, 0" if depth == 16 else ", 1, 1"  # those of 16 bits may lie across, too
    return f"""
template <> struct product::Product<{columns}> {{
  static __device__ __forceinline__ void add({kind} (&sum)[{count}], uint64_t a, uint64_t b, int add) {{
    asm volatile(
        "{{\\n.reg .pred add;\\nsetp.ne.b32 add, %{count + 2}, 0;\\n"
        "wgmma.mma_async.sync.aligned.m64n{columns}k{depth}.{ptx}.{of_a}.{of_b}"
        " {{{sums}}}, %{count}, %{count + 1}, add{signs};\\n}}"
        : {written}
        : "l"(a), "l"(b), "r"(add));
  }}
}};
"""
