"""Vector arithmetic as TIR expressions: conversions between dtypes, 2**x and tanh. Imported in workers only."""

from __future__ import annotations

import math
from typing import Any

from tvm import tirx
from tvm.tirx.script.builder import ir as T

from tlhub_attention.cpu.ir import Expr, registers

LOG2E = 1.4426950408889634

# 2**f on [-0.5, 0.5] with p(0) = 1 exactly, and tanh(y) = y + y**3 q(y**2) on [0, 0.625]: fitted for the least
# relative error (Lawson's iteration): 0.8 and 0.04 ulp of float32 before rounding.
_EXP2_FLOAT32 = (
    0.6931470036506653,
    0.24022242426872253,
    0.05550733581185341,
    0.00967151578515768,
    0.0013264735462144017,
)
_TANH_FLOAT32 = (
    -0.3333328068256378,
    0.13331441581249237,
    -0.05373970791697502,
    0.02063906006515026,
    -0.005704954266548157,
)
# bits, those of the mantissa, the exponent's bias, and the least bits beside the sign that are of no finite number
_NARROW = {"float16": (16, 10, 15, 0x7C00), "float8_e4m3fn": (8, 3, 7, 0x7F), "float8_e5m2": (8, 2, 15, 0x7C)}
# Taylor's terms, of which 13 leave 0.02 ulp of float64.
_EXP2_FLOAT64 = tuple(math.log(2.0) ** k / math.factorial(k) for k in range(1, 14))


class Vector:
    """Expressions over ``lanes`` numbers of ``dtype`` (float32 or float64); one lane is a scalar."""

    def __init__(self, dtype: str, lanes: int) -> None:
        self.dtype, self.lanes = dtype, lanes
        self.bits = 32 if dtype == "float32" else 64

    def type(self, dtype: str) -> str:
        return dtype if self.lanes == 1 else f"{dtype}x{self.lanes}"

    def fill(self, scalar: Expr) -> Expr:
        return scalar if self.lanes == 1 else tirx.Broadcast(scalar, self.lanes)

    def number(self, value: float) -> Expr:
        return self.fill(tirx.FloatImm(self.dtype, value))

    def integer(self, value: int, dtype: str) -> Expr:
        return self.fill(tirx.IntImm(dtype, value))

    def infinity(self) -> Expr:
        """Return +inf, made of its bits: a literal would have to survive printing."""
        bits = 0x7F800000 if self.bits == 32 else 0x7FF << 52
        return tirx.reinterpret(self.type(self.dtype), self.integer(bits, f"int{self.bits}"))

    def load(self, memory: Any, base: Expr) -> Expr:
        return tirx.BufferLoad(getattr(memory, "buffer", memory), [self._lanes(base)])

    def store(self, memory: Any, base: Expr, value: Expr) -> None:
        T.buffer_store(getattr(memory, "buffer", memory), value, [self._lanes(base)])

    def keep(self, value: Expr, dtype: str = "") -> Expr:
        """Put *value* (of *dtype*, default this vector's) in a register of its own, and return it.

        A register is memory to TVM: it would put a bound value back into what uses it, at every use, and then take
        a tenth of a second to simplify what grew.
        """
        (register,) = registers(1, self.lanes, dtype or self.dtype)
        self.store(register, tirx.IntImm("int64", 0), value)
        return self.load(register, tirx.IntImm("int64", 0))

    def _lanes(self, base: Expr) -> Expr:
        return base if self.lanes == 1 else tirx.Ramp(base, tirx.IntImm("int64", 1), self.lanes)

    # -- functions ---------------------------------------------------------------------------------

    def exp2(self, x: Expr) -> Expr:
        """Return 2**x for x <= 0, within 2 ulp; exactly 1 for 0, exactly 0 below the least exponent, NaN for NaN.

        Rounds x to n + f with |f| <= 1/2 by adding a large number whose low bits then hold n, and adds n to
        the exponent of the polynomial's value. The clamp is at the exponent that makes 1.0 into +0; operands
        of max are ordered so that NaN passes.
        """
        low, magic, shift = (-127.0, 1.5 * 2.0**23, 23) if self.bits == 32 else (-1023.0, 1.5 * 2.0**52, 52)
        coefficients = _EXP2_FLOAT32 if self.bits == 32 else _EXP2_FLOAT64
        int_type = f"int{self.bits}"
        x = self.keep(tirx.max(self.number(low), x))
        # as an integer in between, for TVM takes the sum and the difference as one and drops both
        rounded = self.keep(tirx.reinterpret(self.type(int_type), x + self.number(magic)), int_type)
        f = self.keep(x - (tirx.reinterpret(self.type(self.dtype), rounded) - self.number(magic)))
        p = self.number(coefficients[-1])
        for c in (*coefficients[-2::-1], 1.0):
            p = p * f + self.number(c)
        exponent = tirx.shift_left(rounded, self.integer(shift, int_type))
        return tirx.reinterpret(self.type(self.dtype), tirx.reinterpret(self.type(int_type), p) + exponent)

    def tanh(self, y: Expr) -> Expr:
        """Return tanh(y) in float32 within 3 ulp: a polynomial near 0, else 1 - 2 / (1 + exp(2|y|))."""
        y = self.keep(y)
        bits = self.keep(tirx.reinterpret(self.type("uint32"), y), "uint32")
        size = self.keep(tirx.reinterpret(self.type("float32"), bits & self.integer(0x7FFFFFFF, "uint32")))
        sign = bits & self.integer(0x80000000, "uint32")
        square = self.keep(y * y)
        q = self.number(_TANH_FLOAT32[-1])
        for c in _TANH_FLOAT32[-2::-1]:
            q = q * square + self.number(c)
        near = y + y * square * q
        # exp2 takes x <= 0: 1 - 2 e / (1 + e) with e = exp(-2|y|)
        e = self.keep(self.exp2(size * self.number(-2.0 / math.log(2.0))))
        far = self.number(1.0) - (e + e) / (self.number(1.0) + e)
        far = tirx.reinterpret(self.type("uint32"), far) | sign
        return tirx.Select(size < self.number(0.625), near, tirx.reinterpret(self.type("float32"), far))

    def distance(self, a: Expr, b: Expr) -> Expr:
        """Return |a - b| of vectors of int32."""
        return self._cast(self.dtype, tirx.max(a - b, b - a))

    # -- conversions -------------------------------------------------------------------------------

    def widen(self, x: Expr, dtype: str, native_half: bool) -> Expr:
        """Return *x*, loaded from the storage of *dtype*, in this vector's dtype: exact, NaN and Inf kept."""
        if dtype == "bfloat16":
            bits = tirx.shift_left(self._cast("uint32", x), self.integer(16, "uint32"))
            x = tirx.reinterpret(self.type("float32"), bits)
        elif dtype in _NARROW and not (dtype == "float16" and native_half):
            x = self._from_narrow(self._cast("uint32", x), *_NARROW[dtype])
        return x if dtype == self.dtype else self._cast(self.dtype, x)

    def narrow(self, x: Expr, dtype: str, native_half: bool) -> Expr:
        """Return *x* of this vector's dtype as *dtype*'s storage holds it: to nearest even, NaN and Inf kept."""
        if dtype == self.dtype:
            return x
        if dtype == "float64" or (dtype == "float16" and native_half and self.bits == 32):
            return self._cast(dtype, x)
        single = self.keep(self._cast("float32", x) if self.bits == 64 else x, "float32")
        if dtype == "float32":
            return single
        if self.bits == 64:
            single = self._to_odd(x, single)
        if dtype == "float16" and native_half:
            return self._cast("float16", single)
        bits = self.keep(tirx.reinterpret(self.type("uint32"), single), "uint32")
        half = self._to_bfloat16(bits) if dtype == "bfloat16" else self._to_half(bits)
        return self._cast("uint16", half)

    def _cast(self, dtype: str, x: Expr) -> Expr:
        return tirx.Cast(self.type(dtype), x)

    def _to_odd(self, x: Expr, single: Expr) -> Expr:
        """Return float32 of the float64 *x* rounded to odd: so that rounding once more rounds right."""
        one = self.integer(1, "uint32")
        back = self._cast("float64", single)
        bits = tirx.reinterpret(self.type("uint32"), single)
        grew = tirx.Select(x < self.number(0.0), bits - one, bits)  # where back < x
        shrank = tirx.Select(x > self.number(0.0), bits - one, bits)  # where back > x
        bits = tirx.Select(back < x, grew | one, tirx.Select(back > x, shrank | one, bits))
        return tirx.reinterpret(self.type("float32"), bits)

    def _from_narrow(self, h: Expr, bits: int, mantissa: int, bias: int, infinite: int) -> Expr:
        def u(value: int) -> Expr:
            return self.integer(value, "uint32")

        sign = 1 << (bits - 1)
        magnitude = h & u(sign - 1)
        shifted = tirx.shift_left(magnitude, u(23 - mantissa))
        # what the exponents differ by; the multiplication is exact for subnormals as well
        exponent = self.fill(tirx.FloatImm("float32", 2.0 ** (127 - bias)))
        scaled = tirx.reinterpret(self.type("float32"), shifted) * exponent
        finite = tirx.reinterpret(self.type("uint32"), scaled)
        value = tirx.Select(magnitude < u(infinite), finite, shifted | u(0x7F800000))
        return tirx.reinterpret(self.type("float32"), value | tirx.shift_left(h & u(sign), u(32 - bits)))

    def _to_bfloat16(self, bits: Expr) -> Expr:
        def u(value: int) -> Expr:
            return self.integer(value, "uint32")

        rounded = tirx.shift_right(bits + u(0x7FFF) + (tirx.shift_right(bits, u(16)) & u(1)), u(16))
        quiet = tirx.shift_right(bits, u(16)) | u(0x40)
        return tirx.Select((bits & u(0x7FFFFFFF)) > u(0x7F800000), quiet, rounded)

    def _to_half(self, bits: Expr) -> Expr:
        def u(value: int) -> Expr:
            return self.integer(value, "uint32")

        magnitude = bits & u(0x7FFFFFFF)
        rounded = magnitude + u(0xFFF) + (tirx.shift_right(magnitude, u(13)) & u(1)) - u(112 << 23)
        normal = tirx.min(tirx.shift_right(rounded, u(13)), u(0x7C00))
        # 0.5 has the unit of half's subnormals as its last place: the addition rounds
        half = self.fill(tirx.FloatImm("float32", 0.5))
        sum_ = tirx.reinterpret(self.type("float32"), magnitude) + half
        subnormal = tirx.reinterpret(self.type("uint32"), sum_) - u(0x3F000000)
        value = tirx.Select(magnitude < u(0x38800000), subnormal, normal)
        value = tirx.Select(magnitude > u(0x7F800000), u(0x7E00), value)
        return value | (tirx.shift_right(bits, u(16)) & u(0x8000))
