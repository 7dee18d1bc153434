"""Packing: weights of 4 and 8 bits as gemm_w4a16 and gemm_w8a16 take them, made from codes or from others' layouts.

All functions take and return arrays of NumPy.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from tlhub.errors import ArgumentError
from tlhub_mixed.contracts.weights import GROUPS, MIDDLE

Array = np.ndarray[Any, Any]

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The column, of eight, of each half byte of AWQ's words, from the lowest on."""


class Weights(NamedTuple):
    """What the kernels take after a, and their options ``group`` and ``zero_point``.

    ``w``: (N, K/2) uint8, two codes a byte, or of 8 bits (N, K). ``scale``: (N, G). ``zero``: (N, G) uint8, or None
    where codes are around 8, or signed. ``bits``: of a code; ``depth``: K.
    """

    w: Array
    scale: Array
    zero: Array | None
    group: int
    bits: int
    depth: int

    @property
    def arrays(self) -> tuple[Array, ...]:
        """The inputs, in order."""
        return (self.w, self.scale) if self.zero is None else (self.w, self.scale, self.zero)

    @property
    def options(self) -> dict[str, Any]:
        """The options of a look-up."""
        return {"group": self.group, "zero_point": self.zero is not None}


def pack(codes: Array) -> Array:
    """Return *codes* (N, K) of 0 to 15 as bytes (N, K/2, rounded up): k = 2 j in the low half of byte j, 2 j + 1 above.

    Raises ArgumentError.
    """
    codes = _in_range("codes", codes, 0, 15)
    even = np.zeros((codes.shape[0], -(-codes.shape[1] // 2) * 2), np.uint8)
    even[:, : codes.shape[1]] = codes
    return even[:, ::2] | even[:, 1::2] << 4


def unpack(packed: Array, k: int | None = None) -> Array:
    """Return the codes (N, *k*) of bytes that ``pack`` made; without *k*, two of each byte. Raises ArgumentError."""
    if _array("packed", packed).dtype != np.uint8 or packed.ndim != 2:
        raise _wrong("packed", "bytes (N, K/2) of uint8", f"{packed.dtype} of shape {packed.shape}")
    if k is not None and not 0 <= k <= 2 * packed.shape[1]:
        raise _wrong("k", f"0 to {2 * packed.shape[1]}, two codes of each byte", str(k))
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), 2 * packed.shape[1])
    return codes[:, :k]


def assemble(codes: Array, scale: Array, zero: Array | None = None, *, bits: int = 4) -> Weights:
    """Return weights (codes - zero) scale as the kernels take them.

    *codes*: (N, K) of 0 to 2^bits - 1; of 8 bits without *zero*, of -128 to 127. *scale*, *zero*: (N, G), for G groups
    along K. Raises ArgumentError where something is out of range, or G groups are none of the kernels'.
    """
    if bits not in (4, 8):
        raise _wrong("bits", "4 or 8", str(bits))
    if _array("codes", codes).ndim != 2 or _array("scale", scale).ndim != 2 or len(scale) != len(codes):
        raise _wrong("scale", "(N, G) for codes (N, K)", f"{scale.shape} for {codes.shape}")
    depth, groups = codes.shape[1], scale.shape[1]
    group = 0 if groups == 1 else depth // max(groups, 1)
    if group not in GROUPS or (group and group * groups != depth):
        raise _wrong("scale", f"groups of 32, 64 or 128 of K={depth}, or one for the row", f"{groups} groups")
    if zero is not None:
        if _array("zero", zero).shape != scale.shape:
            raise _wrong("zero", f"the shape of scale, {scale.shape}", str(zero.shape))
        # 16 is what GPTQ's stored 15 stands for
        zero = _in_range("zero", zero, 0, 2**bits).astype(np.uint8) if bits == 4 else _in_range("zero", zero, 0, 255)
    low, high = (-128, 127) if bits == 8 and zero is None else (0, 2**bits - 1)
    made = pack(codes) if bits == 4 else _in_range("codes", codes, low, high)
    return Weights(made, np.ascontiguousarray(scale), zero, group, bits, depth)


def from_gptq(
    qweight: Array,
    qzeros: Array,
    scales: Array,
    *,
    bits: int = 4,
    g_idx: Array | None = None,
    minus_one: bool = True,
) -> Weights:
    """Return weights of GPTQ's layout.

    *qweight*: int32 (K/8, N), of 8 bits (K/4, N): k = 8 r + i in the i-th lowest 4 bits of row r. *qzeros*: int32
    (G, N/8), in the same order along N; *minus_one*: one less than the zero point, as the first version of the format
    has it. *scales*: (G, N). *g_idx*: (K), the group of each k, which must be k / group: with another order
    (``desc_act``) groups are not consecutive. Raises ArgumentError.
    """
    per = _words(bits)
    codes = _split("qweight", qweight, bits).swapaxes(1, 2).reshape(per * len(qweight), qweight.shape[1])
    zero = _split("qzeros", qzeros, bits).reshape(len(qzeros), per * qzeros.shape[1]).astype(np.int32) + int(minus_one)
    columns = qweight.shape[1]
    if qzeros.shape[1] != -(-columns // per):  # of other bits, or with padding
        raise _wrong("qzeros", f"(G, N/{per}) for qweight (K/{per}, N), N={columns}", str(qzeros.shape))
    _two_dims("scales", scales)
    if scales.shape != (len(zero), columns):
        raise _wrong("scales", f"(G, N), {(len(zero), columns)} for qweight and qzeros", str(scales.shape))
    in_order = np.arange(len(codes)) * len(scales) // max(len(codes), 1)
    if g_idx is not None and not np.array_equal(np.asarray(g_idx), in_order):
        raise _wrong("g_idx", "k / group for each k", "another order: groups are not consecutive (desc_act)")
    return assemble(codes.T, scales.T, zero[:, :columns].T, bits=bits)


def from_awq(qweight: Array, qzeros: Array, scales: Array) -> Weights:
    """Return weights of AWQ's layout (of its version ``gemm``), of 4 bits.

    *qweight*: int32 (K, N/8): of the columns from 8 c on, the lowest half byte of word c holds the first, and the next
    ones those with number 2, 4, 6, 1, 3, 5, 7. *qzeros*: int32 (G, N/8) in the same order. *scales*: (G, N).
    Raises ArgumentError.
    """
    place = np.argsort(AWQ_ORDER)
    codes, zero = (
        _split(name, x, 4)[:, :, place].reshape(len(x), 8 * x.shape[1])
        for name, x in (("qweight", qweight), ("qzeros", qzeros))
    )
    _two_dims("scales", scales)
    if not codes.shape[1] == zero.shape[1] == scales.shape[1] or len(zero) != len(scales):
        raise _wrong("scales", f"(G, N), {(len(zero), codes.shape[1])} for qweight (K, N/8)", str(scales.shape))
    return assemble(codes.T, scales.T, zero.T)


def dequantize(weights: Weights) -> Array:
    """Return w (N, K) in float32: (codes - zero) scale."""
    codes = unpack(weights.w, weights.depth) if weights.bits == 4 else weights.w
    group = weights.group or weights.depth
    zero: Any = MIDDLE if weights.bits == 4 else 0
    if weights.zero is not None:
        zero = np.repeat(weights.zero.astype(np.float32), group, axis=1)
    return (codes.astype(np.float32) - zero) * np.repeat(weights.scale.astype(np.float32), group, axis=1)


def _words(bits: int) -> int:
    """Return how many codes a word of 32 bits holds."""
    if bits not in (4, 8):
        raise _wrong("bits", "4 or 8", str(bits))
    return 32 // bits


def _split(name: str, words: Array, bits: int) -> Array:
    """Return the codes of int32 *words* along a new last axis, the lowest bits first."""
    if _array(name, words).ndim != 2 or words.dtype != np.int32:
        raise _wrong(name, "two dims of int32", f"{words.dtype} of shape {words.shape}")
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    return (words.view(np.uint32)[:, :, None] >> shifts & np.uint32(2**bits - 1)).astype(np.uint8)


def _array(name: str, x: Any) -> Array:
    """Return *x*, an array of NumPy. Raises ArgumentError for anything else."""
    if not isinstance(x, np.ndarray):
        raise _wrong(name, "an array of NumPy", type(x).__name__, hint=f"numpy.asarray({name})")
    return x


def _two_dims(name: str, x: Any) -> None:
    if _array(name, x).ndim != 2:
        raise _wrong(name, "two dims (G, N)", f"shape {x.shape}")


def _in_range(name: str, x: Array, low: int, high: int) -> Array:
    """Return integers *x* in the least dtype that holds the range. Raises ArgumentError where one is out of it."""
    if _array(name, x).dtype.kind not in "iu" or x.ndim != 2:
        raise _wrong(name, f"integers from {low} to {high}, of two dims", f"{x.dtype} of shape {x.shape}")
    if x.size and (x.min() < low or x.max() > high):
        raise _wrong(name, f"integers from {low} to {high}", f"{x.min()} to {x.max()}")
    return np.ascontiguousarray(x, np.int8 if low < 0 else np.uint8)


def _wrong(name: str, expected: str, got: str, hint: str = "help(tlhub_mixed.packing)") -> ArgumentError:
    return ArgumentError(
        f"argument {name!r}: expected {expected}, got {got}",
        argument=name,
        expected=expected,
        got=got,
        hint=hint,
    )
