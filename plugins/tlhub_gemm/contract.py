"""The contract of gemm: the product x = alpha op(A) op(B), and what happens to it before it is written, declared whole.

    y = act(x + bias)
    y = act(x_0 + bias_0) (x_1 + bias_1)    with ``glu``, where x_0 is the first N/2 columns, and x_1 the others
    c = (y + residual) out_scale

so SwiGLU is ``glu`` with ``epilogue="silu"``, and gates and values lie side by side in b as in a merged gate_up_proj.

Sums are kept in ``accum``; the epilogue is computed in it too (in float64 for int32 sums, in float32 for float16 ones)
and rounded once, to ``out_dtype``, to nearest even. ``bias`` and ``residual`` have the dtype of c; where that is float8
or int8 they are float32. float8 and integer outputs saturate, and a NaN stays one, as an integer 0; a float16 or
bfloat16 result beyond its range is infinite. K = 0 makes the product 0. NaN and infinities in an operand reach what
IEEE 754 says they reach, and nothing else; old contents of c, and bytes outside an operand, reach nothing. int32 sums
are exact while K is at most 131071, and wrap beyond if they must. float16 sums are a tensor core's: products are added
in the order of K, at least four at a time; of an element whose sums on the way may leave float16's range, which ends at
65504, nothing is promised.
"""

from __future__ import annotations

from collections.abc import Mapping

from tlhub.specs import Arg, Dim, Kernel, Option, Problem, Scalar

FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
DTYPES = ("float64", "float32", "float16", "bfloat16", *FLOAT8, "int8")
OUTPUTS = (*DTYPES, "int32")

_ACCUM = {"float64": "float64", "float32": "float32", "float16": "float32", "bfloat16": "float32", "int8": "int32"}
_OUT = {"float64": "float64", "float32": "float32", "float16": "float16", "bfloat16": "bfloat16", "int8": "int32"}


def check(problem: Problem) -> str | None:
    """Return why no such product can exist, or None."""
    option, dtypes = problem.option, dict(problem.dtypes)
    a, b, accum, out = dtypes["a"], dtypes["b"], str(option["accum"]), str(option["out_dtype"])
    if a != b and not (a in FLOAT8 and b in FLOAT8):
        return f"a is {a} and b is {b}; only the two float8 types mix"
    compute, fast = option["compute"], option["fast_accum"]
    if (a == "int8") != (accum == "int32"):
        return f"accum={accum!r} with {a} inputs; allowed: " + ("'int32'" if a == "int8" else "a float")
    if accum == "float16" and a not in ("float16", *FLOAT8):
        return f"accum='float16' with {a} inputs; allowed: 'float32' or 'float64'"
    if a in ("float32", "float64") and _BITS[accum] < _BITS[a]:
        return f"accum={accum!r} is narrower than the {a} inputs"
    if out == "int32" and a != "int8":
        return f"out_dtype='int32' with {a} inputs; allowed: a float, or 'int8'"
    if compute != "ieee" and (a, accum) != ("float32", "float32"):
        return f"compute={compute!r} with {a} inputs and accum={accum!r}; it is for float32 in both"
    if compute != "ieee" and option["tensor_core"] is False:
        return f"compute={compute!r} with tensor_core=False; it is what tensor cores do"
    if fast and (a not in FLOAT8 or accum != "float32"):
        return f"fast_accum with {a} inputs and accum={accum!r}; it is for float8 with accum='float32'"
    if fast and option["tensor_core"] is False:
        return "fast_accum with tensor_core=False; it is what tensor cores do"
    if out == "int32" and option["epilogue"] not in ("none", "relu"):
        return f"epilogue={option['epilogue']!r} with out_dtype='int32'; allowed: 'none', 'relu'"
    if option["glu"] and out == "int32":
        return "glu with out_dtype='int32', which has no room for products of sums; allowed: a float, or 'int8'"
    columns = problem.dim["N"]
    if option["glu"] and isinstance(columns, int) and columns % 2:
        return f"N={columns} with glu=True; N counts gates and values, so it is even"
    return None


_BITS = {"float16": 16, "float32": 32, "float64": 64, "int32": 32}


def flops(dims: Mapping[str, int]) -> float:
    """Return the operations of one product: a multiplication and an addition for each (m, n, k)."""
    return 2.0 * dims["B"] * dims["M"] * dims["N"] * dims["K"]


def _beside(out: str) -> str:
    """Return the dtype of what is added to a result of dtype *out*."""
    return "float32" if out in (*FLOAT8, "int8") else out


GEMM = Kernel(
    name="gemm",
    revision=2,
    doc="C = (act(alpha op(A) op(B) + bias) + residual) out_scale, row-major, batched; with glu act(gate) value",
    dims=(
        Dim("B", default=1, elide=True, doc="independent products"),
        Dim("M", doc="rows of C"),
        Dim("N", doc="columns of op(B); with glu those of C are half of them"),
        Dim("K", doc="the contracted dim"),
        Dim("N_2", default="N/2", when={"glu": True}, doc="columns of C with glu"),
    ),
    inputs=(
        Arg("a", ("B", "M", "K"), when={"trans_a": False}),
        Arg("a", ("B", "K", "M"), when={"trans_a": True}),
        Arg("b", ("B", "K", "N"), when={"trans_b": False}),
        Arg("b", ("B", "N", "K"), when={"trans_b": True}),
        *(Arg("bias", ("N",), _beside(out), {"bias": True, "out_dtype": out}) for out in OUTPUTS),
        *(
            Arg("residual", ("B", "M", columns), _beside(out), {"residual": True, "out_dtype": out, "glu": glu})
            for glu, columns in ((False, "N"), (True, "N_2"))
            for out in OUTPUTS
        ),
    ),
    outputs=(
        Arg("c", ("B", "M", "N"), dtype="option:out_dtype", when={"glu": False}),
        Arg("c", ("B", "M", "N_2"), dtype="option:out_dtype", when={"glu": True}),
    ),
    dtypes=DTYPES,
    options=(
        Option("trans_a", (False, True), False, "a is stored (K, M)"),
        Option("trans_b", (False, True), False, "b is stored (N, K)"),
        Option(
            "accum",
            ("float64", "float32", "float16", "int32"),
            {**_ACCUM, **dict.fromkeys(FLOAT8, "float32")},
            "the type in which products are added up",
        ),
        Option(
            "out_dtype",
            OUTPUTS,
            {**_OUT, **dict.fromkeys(FLOAT8, "bfloat16")},
            "the type of c; float8 and integers saturate",
        ),
        Option("compute", ("ieee", "tf32", "3xtf32"), "ieee", "how float32 inputs are multiplied"),
        Option("fast_accum", (False, True), False, "float8: leave partial sums in the tensor core's own precision"),
        Option("tensor_core", (None, True, False), None, "may (none), must, or must not use tensor cores"),
        Option("epilogue", ("none", "relu", "gelu", "gelu_tanh", "silu"), "none", "act, applied after the bias"),
        Option("glu", (False, True), False, "the columns of op(B) are N/2 gates and then N/2 values: act(gate) value"),
        Option("bias", (False, True), False, "add bias[n] before act"),
        Option("residual", (False, True), False, "add residual[b, m, n] after act"),
    ),
    scalars=(
        Scalar("alpha", default=1.0, doc="factor of the product"),
        Scalar("out_scale", default=1.0, doc="factor of the result"),
    ),
    patterns=(("M",), ("M", "N", "K", "N_2"), ("B", "M", "N", "K", "N_2")),
    check=check,
    flops=flops,
    reference="tlhub_gemm.reference:reference",
    tolerance="tlhub_gemm.reference:tolerance",
    peers={
        "numpy": "tlhub_gemm.peers:numpy_product",
        "cuda:torch": "tlhub_gemm.peers:torch_product",
        "cuda:cupy": "tlhub_gemm.peers:cupy_product",
    },
)
