"""The contracts of gemm_w4a16 and gemm_w8a16: c = epilogue(a w^T) with weights of 4 or 8 bits, scaled by groups.

Weight w[n, k] is (q - zero) scale, of its code q and the scale and zero point of its group of ``group`` consecutive
k, or with ``group=0`` of the whole row n. Without ``zero_point`` zero is 8 for codes of 4 bits, and the codes of 8 bits
are signed. The arithmetic of a w^T is that of float32; a GPU may round each weight to the type of a first.

Codes of 4 bits lie two in a byte: byte j of row n holds k = 2 j in its low half, and k = 2 j + 1 in its high one, whose
value means nothing where there is no such k. ``tlhub_mixed.packing`` makes this layout, of others' too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tlhub.specs import Arg, Dim, Kernel, Option, Problem
from tlhub_mixed.contracts import epilogue

DTYPES = ("float16", "bfloat16")
GROUPS = (128, 64, 32, 0)
MIDDLE = 8
"""The zero point of codes of 4 bits that have none of their own."""


def check(problem: Problem) -> str | None:
    """Return why no such product can exist, or None."""
    group, depth = int(problem.option["group"] or 0), problem.dim["K"]
    if group and isinstance(depth, int) and depth % group:
        return f"K={depth} is no multiple of group={group}; allowed: a group that divides K, or 0 for whole rows"
    return epilogue.check(problem)


def flops(dims: Mapping[str, Any]) -> float:
    """Return the operations of one product: a multiplication and an addition for each (m, n, k)."""
    return 2.0 * dims["M"] * dims["N"] * dims["K"]


def _kernel(bits: int, dims: tuple[Dim, ...], weights: tuple[Arg, ...]) -> Kernel:
    return Kernel(
        name=f"gemm_w{bits}a16",
        revision=1,
        doc=f"c = epilogue(a w^T) with weights of {bits} bits, scaled by groups along K",
        dims=(
            Dim("M", doc="rows of c"),
            Dim("N", doc="rows of w; with glu the columns of c are half of them"),
            Dim("K", doc="the contracted dim"),
            *dims,
            Dim("G", default="K/group", doc="groups of a row"),
            epilogue.HALF,
        ),
        inputs=(
            Arg("a", ("M", "K")),
            *weights,
            Arg("scale", ("N", "G"), dtype="as:a", doc="of each group"),
            Arg("zero", ("N", "G"), dtype="uint8", when={"zero_point": True}, doc="the code that stands for 0"),
            *epilogue.INPUTS,
        ),
        outputs=epilogue.OUTPUT,
        dtypes=DTYPES,
        options=(
            Option("group", GROUPS, GROUPS[0], "consecutive k that share a scale; 0: all of a row"),
            Option("zero_point", (False, True), False, "groups have zero points of their own"),
            *epilogue.options({dtype: dtype for dtype in DTYPES}, n="rows of w"),
        ),
        scalars=epilogue.SCALARS,
        patterns=(("M",), ("M", "N", "K", *(d.name for d in dims), "G", "N_2")),
        check=check,
        flops=flops,
        reference="tlhub_mixed.references.weights:reference",
        tolerance="tlhub_mixed.references.weights:tolerance",
        prepare="tlhub_mixed.references.weights:prepare",
        peers={
            "torch": "tlhub_mixed.peers.products:torch_linear",
            "cuda:torch": "tlhub_mixed.peers.products:torch_gpu_linear",
        },
    )


W4A16 = _kernel(
    4,
    (Dim("K_2", default="K/2", doc="bytes of a row of w"),),
    (Arg("w", ("N", "K_2"), dtype="uint8", doc="two codes a byte, the lower half first"),),
)
W8A16 = _kernel(
    8,
    (),
    (
        Arg("w", ("N", "K"), dtype="int8", when={"zero_point": False}),
        Arg("w", ("N", "K"), dtype="uint8", when={"zero_point": True}),
    ),
)
