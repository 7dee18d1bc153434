"""The contract of quantize: q = round(x / scale) and the scales, one for each block of x.

A block is all of x, a row, 1x128 or 128x128 elements by ``scaling``; the last of a row or column may be smaller.
Everything is computed in float32, and each step rounds once, to nearest even, so results are known to the bit:

1. amax = the largest |x| of the block, 0 if it has no elements; a NaN counts as larger than all.
2. scale = amax / largest, of the largest value of q's dtype: 448 (e4m3fn), 57344 (e5m2), 127 (int8).
   Where that is below 2^-126, as of a block of zeros, scale = 1.
   With ``scale_dtype="float8_e8m0fnu"`` (UE8M0) it is then rounded up to a power of two 2^e, and stored as the byte
   e + 127; what is no finite number is stored as 255, the NaN.
3. q = x / scale, rounded to float32 and then to q's dtype. It saturates: what is above the largest value becomes that,
   an infinity too. A NaN becomes a NaN, in int8 0.

So an x that is NaN or infinite makes its block's scale NaN or infinite (in UE8M0: NaN), and with it every value that
q * scale gives back NaN: it is hidden in no dtype. ``given``: the scales are an input, and taken as they are, with
step 3 alone; then the other elements of the block of a NaN keep their values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tlhub.specs import Arg, Dim, Kernel, Option

BLOCK = 128
FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
E8M0 = "float8_e8m0fnu"

SCALES: Mapping[str, tuple[str, ...]] = {
    "tensor": (),
    "row": ("M",),
    "1x128": ("M", "K_128"),
    "128x128": ("M_128", "K_128"),
}
"""The dims of the scales by ``scaling``."""


def flops(dims: Mapping[str, Any]) -> float:
    """Return the operations of one call: a division for each element, and a comparison where scales are computed."""
    return float(dims["M"]) * dims["K"] * (1 if dims.get("given") else 2)


def _scales(given: bool) -> tuple[Arg, ...]:
    when = {"given": given}
    doc = "of each block; x is about q * scale"
    return tuple(
        Arg("scale", dims, dtype="option:scale_dtype", when={**when, "scaling": scaling}, doc=doc)
        for scaling, dims in SCALES.items()
    )


QUANTIZE = Kernel(
    name="quantize",
    revision=1,
    doc="q = x / scale in float8 or int8, with a scale for each block, computed or given",
    dims=(
        Dim("M", doc="rows"),
        Dim("K", doc="columns"),
        Dim("M_128", default=f"M/{BLOCK}", doc="blocks of rows"),
        Dim("K_128", default=f"K/{BLOCK}", doc="blocks of columns"),
    ),
    inputs=(Arg("x", ("M", "K")), *_scales(True)),
    outputs=(Arg("q", ("M", "K"), dtype="option:out_dtype"), *_scales(False)),
    dtypes=("float32", "float16", "bfloat16"),
    options=(
        Option("scaling", tuple(SCALES), "1x128", "what has a scale of its own: all of x, a row, or a block"),
        Option("out_dtype", (*FLOAT8, "int8"), "float8_e4m3fn", "the type of q"),
        Option("scale_dtype", ("float32", E8M0), "float32", "the type of the scales; UE8M0 ones are powers of two"),
        Option("given", (False, True), False, "the scales are an input"),
    ),
    patterns=(("M", "M_128"), ("M", "K", "M_128", "K_128")),
    flops=flops,
    reference="tlhub_mixed.references.quantize:reference",
    tolerance="tlhub_mixed.references.quantize:tolerance",
    prepare="tlhub_mixed.references.quantize:prepare",
)
