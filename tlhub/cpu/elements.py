"""Elements: storage to accumulator, accumulator through the epilogue to storage, a scalar or a vector at a time.

Narrow floats are converted by integer arithmetic on their bits where the machine has no instruction for it.
Conversions round to nearest even; float8 and integers saturate; a NaN stays one, and is 0 as an integer.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx
from tvm.tirx.script.builder import ir as T

from tlhub.cpu.ir import Expr, View, bind, const, dtype_of, splat

_FLOAT8 = {
    # name: (bits of the mantissa, bias, largest finite value)
    "float8_e4m3fn": (3, 7, 448.0),
    "float8_e5m2": (2, 15, 57344.0),
}


@dataclass(frozen=True)
class Element:
    """A dtype of the contract as the program stores it: its own, or an unsigned integer of the same width."""

    dtype: str
    native_half: bool = True

    @property
    def storage(self) -> str:
        if self.dtype in _FLOAT8 or self.dtype == "float8_e8m0fnu":
            return "uint8"
        if self.dtype == "bfloat16" or (self.dtype == "float16" and not self.native_half):
            return "uint16"
        return self.dtype

    @property
    def size(self) -> int:
        """Bytes."""
        return int("".join(c for c in self.storage if c.isdigit())) // 8

    def load(self, source: View, index: Expr, lanes: int, into: str) -> Expr:
        """Return *lanes* elements from *index* on, converted to *into* (exactly, or from wider by rounding)."""
        raw = source.load(index, lanes)
        if self.storage != self.dtype:
            raw = self._decode(raw, lanes)
        return T.cast(raw, vector(into, lanes))

    def store(self, target: View, index: Expr, value: Expr, lanes: int) -> None:
        """Convert *value* (float32 or float64, for int32 float64) and store it from *index* on."""
        value = bind(value)
        if dtype_of(value).startswith("float64") and self.dtype not in ("float64", "float32", "int32", "int8"):
            value = bind(_to_odd(value, lanes))
        target.store(index, self._encode(value, lanes), lanes)

    def _decode(self, raw: Expr, lanes: int) -> Expr:
        """Return the float32 value of storage bits."""
        bits = bind(T.cast(raw, vector("uint32", lanes)))
        if self.dtype == "bfloat16":
            return _float(_shl(bits, 16, lanes), lanes)
        if self.dtype == "float8_e8m0fnu":
            # 0 is the subnormal 2^-127, and 255 is NaN
            power = tirx.Select(tirx.EQ(bits, _u32(0, lanes)), _u32(1 << 22, lanes), _shl(bits, 23, lanes))
            return _float(tirx.Select(tirx.EQ(bits, _u32(255, lanes)), _u32(0x7FC00000, lanes), power), lanes)
        if self.dtype == "float16":
            mantissa, bias, top = 10, 15, 31
        else:
            mantissa, bias, _ = _FLOAT8[self.dtype]
            top = 31 if self.dtype == "float8_e5m2" else 0x7F
        width = 15 if self.dtype == "float16" else 7
        shift = 23 - mantissa
        body = bind(bits & _u32((1 << width) - 1, lanes))
        sign = _shl(bits & _u32(1 << width, lanes), 31 - width, lanes)
        normal = _shl(body, shift, lanes) + _u32((127 - bias) << 23, lanes)
        # below the least normal value the mantissa counts units; no subnormal float32 is ever formed
        unit = const(2.0 ** (1 - bias - mantissa), "float32", lanes)
        tiny = _bits(T.cast(body, vector("float32", lanes)) * unit, lanes)
        value = tirx.Select(body < _u32(1 << mantissa, lanes), tiny, normal)
        if top == 0x7F:
            value = tirx.Select(tirx.EQ(body, _u32(0x7F, lanes)), _u32(0x7FC00000, lanes), value)
        else:
            wide = _shl(body, shift, lanes) | _u32(0x7F800000, lanes)
            value = tirx.Select(body >= _u32(top << mantissa, lanes), wide, value)
        return _float(value | sign, lanes)

    def _encode(self, value: Expr, lanes: int) -> Expr:
        if self.dtype in ("int8", "int32"):
            low, high = (-128, 127) if self.dtype == "int8" else (-(2**31), 2**31 - 1)
            kind = dtype_of(value).partition("x")[0]
            number = tirx.Select(_is_nan(value, kind, lanes), const(0, kind, lanes), value)
            clipped = tirx.min(tirx.max(number, const(low, kind, lanes)), const(high, kind, lanes))
            return T.cast(T.cast(T.nearbyint(clipped), vector("int32", lanes)), vector(self.dtype, lanes))
        if self.storage == self.dtype:
            return T.cast(value, vector(self.dtype, lanes))
        bits = bind(_bits(value, lanes))
        if self.dtype == "bfloat16":
            even = _shr(bits, 16, lanes) & _u32(1, lanes)
            rounded = _shr(bits + _u32(0x7FFF, lanes) + even, 16, lanes)
            quiet = _shr(bits, 16, lanes) | _u32(0x40, lanes)
            nan = (bits & _u32(0x7FFFFFFF, lanes)) > _u32(0x7F800000, lanes)
            return T.cast(tirx.Select(nan, quiet, rounded), vector("uint16", lanes))
        if self.dtype == "float16":
            return T.cast(_narrow(bits, 10, 15, 65536.0, 0x7C00, 0x7E00, 16, lanes), vector("uint16", lanes))
        mantissa, bias, largest = _FLOAT8[self.dtype]
        code = {"float8_e4m3fn": (0x7E, 0x7F), "float8_e5m2": (0x7B, 0x7E)}[self.dtype]
        # from the largest value on, everything saturates to its code
        return T.cast(_narrow(bits, mantissa, bias, largest, *code, 8, lanes), vector("uint8", lanes))


def _to_odd(value: Expr, lanes: int) -> Expr:
    """Return float64 *value* as float32, an inexact one with an odd last bit, so that rounding again is harmless.

    Boldo and Melquiond, "When double rounding is odd" (2005).
    """
    near = bind(T.cast(value, vector("float32", lanes)))
    back = bind(T.cast(near, vector("float64", lanes)))
    bits = bind(_bits(near, lanes))
    one = _u32(1, lanes)
    closer = tirx.Select(_abs(back, "float64", lanes) < _abs(value, "float64", lanes), bits + one, bits - one)
    # a NaN is neither above nor below
    inexact = tirx.Or(back < value, value < back)
    even = tirx.EQ(bits & one, _u32(0, lanes))
    return _float(tirx.Select(tirx.And(inexact, even), closer, bits), lanes)


def _narrow(bits: Expr, mantissa: int, bias: int, limit: float, over: int, nan: int, width: int, lanes: int) -> Expr:
    """Return float32 *bits* rounded to a narrower float's code: *over* from magnitude *limit* on, *nan* for NaN."""
    shift = 23 - mantissa
    # by shifts: TVM's analyzer takes the mask for an int32
    body = bind(_shr(_shl(bits, 1, lanes), 1, lanes))
    even = _shr(body, shift, lanes) & _u32(1, lanes)
    rounded = _shr(body + _u32((1 << (shift - 1)) - 1, lanes) + even, shift, lanes)
    normal = rounded - _u32((127 - bias) << mantissa, lanes)
    # below the least normal value: count units, rounded to even by adding 2**23
    units = _float(body, lanes) * const(2.0 ** (bias - 1 + mantissa), "float32", lanes)
    tiny = _bits(units + const(2.0**23, "float32", lanes), lanes) & _u32((2 << mantissa) - 1, lanes)
    least = _u32((128 - bias) << 23, lanes)
    code = tirx.Select(body < least, tiny, normal)
    exponent = limit.hex().split("p")
    top = (int(exponent[1]) + 127) << 23 | int(float.fromhex(exponent[0] + "p0") * 2**23) & 0x7FFFFF
    code = tirx.Select(body >= _u32(top, lanes), _u32(over, lanes), tirx.min(code, _u32(over, lanes)))
    code = tirx.Select(body > _u32(0x7F800000, lanes), _u32(nan, lanes), code)
    return code | _shl(_shr(bits, 31, lanes), width - 1, lanes)


# -- activations -----------------------------------------------------------------------------------

_HALF_ERFCX = (
    # 0.5 exp(z^2) erfc(z) = t P(t) with t = 1 / (1 + 0.4 z): least squares on Chebyshev nodes,
    # reweighted to even out the relative error, which is 1.9e-8 at most for z >= 0
    0.11284506347238858,
    0.1126477860993326,
    0.10596459913438161,
    0.07210814763604184,
    0.11423563558116934,
    -0.10026982325867315,
    0.22190915895663393,
    -0.20960379550847896,
    0.08171672864601079,
    -0.01155349167430857,
)
_EXP = (1.0, 1.0, 1 / 2, 1 / 6, 1 / 24, 1 / 120, 1 / 720)
"""Taylor's series: off by 1.2e-7 of an ulp's size at |r| <= ln(2) / 2."""


def activate(kind: str, x: Expr, dtype: str, lanes: int) -> Expr:
    """Return the activation of *x*. Infinities and NaN come out as from the formula x * weight(x)."""
    if kind == "none":
        return x
    x = bind(x)
    zero = const(0.0, dtype, lanes)
    if kind == "relu":
        # written so that a NaN stays
        return tirx.Select(x < zero, zero, x)
    if kind == "gelu":
        return x * _normal_cdf(x, dtype, lanes)
    if kind == "silu":
        return x * _sigmoid(x, dtype, lanes)
    # gelu_tanh: (1 + tanh u) / 2 = sigmoid(2 u)
    cubic = x * x * x * const(0.044715, dtype, lanes)
    return x * _sigmoid(const(1.5957691216057308, dtype, lanes) * (x + cubic), dtype, lanes)


def _sigmoid(x: Expr, dtype: str, lanes: int) -> Expr:
    x = bind(x)
    zero, one = const(0.0, dtype, lanes), const(1.0, dtype, lanes)
    decay = bind(_exp(-_abs(x, dtype, lanes), dtype, lanes))
    return tirx.Select(x < zero, decay, one) / (one + decay)


def _normal_cdf(x: Expr, dtype: str, lanes: int) -> Expr:
    if dtype == "float64":
        return const(0.5, dtype) * T.call_pure_extern("float64", "erfc", x * const(-(0.5**0.5), dtype))
    z = bind(_abs(x, dtype, lanes) * const(0.5**0.5, dtype, lanes))
    one = const(1.0, dtype, lanes)
    t = bind(one / (one + const(0.4, dtype, lanes) * z))
    tail = bind(_exp(-(z * z), dtype, lanes) * t * _horner(_HALF_ERFCX, t, dtype, lanes))
    return tirx.Select(x < const(0.0, dtype, lanes), tail, one - tail)


def _exp(y: Expr, dtype: str, lanes: int) -> Expr:
    """Return exp(y) for y <= 0."""
    if dtype == "float64":
        return T.exp(y)
    y = bind(tirx.max(y, const(-104.0, dtype, lanes)))
    n = bind(T.floor(y * const(1.4426950408889634, dtype, lanes) + const(0.5, dtype, lanes)))
    # ln 2 in two parts, the first with room for a product with n
    r = bind(y - n * const(0.693145751953125, dtype, lanes) - n * const(1.4286068203094172e-06, dtype, lanes))
    power = bind(T.cast(n, vector("int32", lanes)))
    half = bind(tirx.max(power, splat(tirx.IntImm("int32", -100), lanes)))
    # in two factors, so that results below the least normal value come out right
    return _horner(_EXP, r, dtype, lanes) * _two_to(half, lanes) * _two_to(power - half, lanes)


def _two_to(n: Expr, lanes: int) -> Expr:
    return _float(_shl(T.cast(n + splat(tirx.IntImm("int32", 127), lanes), vector("uint32", lanes)), 23, lanes), lanes)


def _horner(coefficients: tuple[float, ...], x: Expr, dtype: str, lanes: int) -> Expr:
    value = const(coefficients[-1], dtype, lanes)
    for c in reversed(coefficients[:-1]):
        value = bind(value * x + const(c, dtype, lanes))
    return value


def _is_nan(x: Expr, dtype: str, lanes: int) -> Expr:
    """Tell by the bits: of a comparison of a number with itself TVM knows the result."""
    kind, infinity = ("uint32", 0x7F800000) if dtype == "float32" else ("uint64", 0x7FF << 52)
    one, bits = splat(tirx.const(1, kind), lanes), T.reinterpret(vector(kind, lanes), x)
    return ((bits << one) >> one) > splat(tirx.const(infinity, kind), lanes)


def _abs(x: Expr, dtype: str, lanes: int) -> Expr:
    return tirx.Select(x < const(0.0, dtype, lanes), -x, x)


# -- bits ------------------------------------------------------------------------------------------


def vector(dtype: str, lanes: int) -> str:
    """Return the name of a vector of *lanes* of *dtype*."""
    return dtype if lanes == 1 else f"{dtype}x{lanes}"


def _u32(value: int, lanes: int) -> Expr:
    return splat(tirx.const(value, "uint32"), lanes)


def _shl(value: Expr, by: int, lanes: int) -> Expr:
    return value << _u32(by, lanes)


def _shr(value: Expr, by: int, lanes: int) -> Expr:
    return value >> _u32(by, lanes)


def _bits(value: Expr, lanes: int) -> Expr:
    return T.reinterpret(vector("uint32", lanes), value)


def _float(bits: Expr, lanes: int) -> Expr:
    return T.reinterpret(vector("float32", lanes), bits)
