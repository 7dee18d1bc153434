"""The contract of gemm_scaled: c = epilogue((a a_scale) (b b_scale)) of float8 or int8 operands.

``scaling`` says what has a scale of its own, and so the shape of both arrays of scales; it is never read off an extent:

    tensor   a_scale (), b_scale ()
    row      a_scale (M), of each row of a; b_scale (N), of each column of b
    block    a_scale (M, K/128), b_scale (K/128, N/128), with trans_b (N/128, K/128); quotients rounded up

The product of a block of 128 along K is added up in float32 (of int8: all of K, in int32, exactly while K is at most
131071), multiplied with its scales, and these are added up. Scales are float32, for blocks UE8M0 too. One that is NaN
makes what it scales NaN.

On tensor cores sums of float8 products are kept in less than float32, of 128 of K at a time, then added up in float32;
with ``fast_accum`` of all of K. ``tensor_core=False`` is float32 throughout.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tlhub.specs import Arg, Dim, Kernel, Option, Problem
from tlhub_mixed.contracts import epilogue
from tlhub_mixed.contracts.epilogue import FLOAT8
from tlhub_mixed.contracts.quantize import BLOCK, E8M0


def check(problem: Problem) -> str | None:
    """Return why no such product can exist, or None."""
    option, dtypes = problem.option, dict(problem.dtypes)
    a, b, scaling = dtypes["a"], dtypes["b"], option["scaling"]
    if a != b and not (a in FLOAT8 and b in FLOAT8):
        return f"a is {a} and b is {b}; only the two float8 types mix"
    if scaling == "block" and a == "int8":
        return "scaling='block' with int8 operands; allowed: 'tensor' or 'row', one sum and one scale for all of K"
    if scaling != "block" and option["scale_dtype"] == E8M0:
        return f"scale_dtype={E8M0!r} with scaling={scaling!r}; allowed: 'float32', and powers of two for 'block'"
    if option["fast_accum"] and (a == "int8" or scaling == "block" or option["tensor_core"] is False):
        return (
            f"fast_accum with {a} operands, scaling={scaling!r} and tensor_core={option['tensor_core']}; it is for "
            "float8 on tensor cores, with 'tensor' or 'row'"
        )
    return epilogue.check(problem)


def flops(dims: Mapping[str, Any]) -> float:
    """Return the operations of one product: a multiplication and an addition for each (m, n, k)."""
    return 2.0 * dims["M"] * dims["N"] * dims["K"]


def _scale(name: str, scaling: str, dims: tuple[str, ...], **when: bool) -> Arg:
    return Arg(name, dims, dtype="option:scale_dtype", when={"scaling": scaling, **when})


SCALED = Kernel(
    name="gemm_scaled",
    revision=1,
    doc="c = epilogue((a a_scale) (b b_scale)), float8 or int8 with scales by tensor, row and column, or block",
    dims=(
        Dim("M", doc="rows of c"),
        Dim("N", doc="columns of b; with glu those of c are half of them"),
        Dim("K", doc="the contracted dim"),
        Dim("N_128", default=f"N/{BLOCK}", doc="blocks of N"),
        Dim("K_128", default=f"K/{BLOCK}", doc="blocks of K"),
        epilogue.HALF,
    ),
    inputs=(
        Arg("a", ("M", "K")),
        Arg("b", ("K", "N"), when={"trans_b": False}),
        Arg("b", ("N", "K"), when={"trans_b": True}),
        _scale("a_scale", "tensor", ()),
        _scale("a_scale", "row", ("M",)),
        _scale("a_scale", "block", ("M", "K_128")),
        _scale("b_scale", "tensor", ()),
        _scale("b_scale", "row", ("N",)),
        _scale("b_scale", "block", ("K_128", "N_128"), trans_b=False),
        _scale("b_scale", "block", ("N_128", "K_128"), trans_b=True),
        *epilogue.INPUTS,
    ),
    outputs=epilogue.OUTPUT,
    dtypes=(*FLOAT8, "int8"),
    options=(
        Option("trans_b", (False, True), False, "b is stored (N, K), and its blocks' scales (N/128, K/128)"),
        Option("scaling", ("tensor", "row", "block"), "tensor", "what has a scale of its own"),
        Option("scale_dtype", ("float32", E8M0), "float32", "the type of the scales"),
        Option("fast_accum", (False, True), False, "float8: leave sums of all of K in the tensor core's own precision"),
        Option("tensor_core", (None, True, False), None, "may (none), must, or must not use tensor cores"),
        *epilogue.options("bfloat16"),
    ),
    scalars=epilogue.SCALARS,
    patterns=(("M",), ("M", "N", "K", "N_128", "K_128", "N_2")),
    check=check,
    flops=flops,
    reference="tlhub_mixed.references.scaled:reference",
    tolerance="tlhub_mixed.references.scaled:tolerance",
    prepare="tlhub_mixed.references.scaled:prepare",
    peers={
        "torch": "tlhub_mixed.peers.products:torch_scaled",
        "cuda:torch": "tlhub_mixed.peers.products:torch_gpu_scaled",
    },
)
