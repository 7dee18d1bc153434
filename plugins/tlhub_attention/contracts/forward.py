"""The contract of attention: o = softmax(mask(cap(scale q k^T))) v, declared whole.

Arrays are (batch, sequence, heads, channels); one that is stored (batch, heads, sequence, channels) is passed as a
transposed view, for strides are free. Query head h reads the keys of head h // (H / H_kv).

Logits are scale q k^T; with a soft cap they become softcap tanh(logits / softcap), the same for softcap and -softcap.
Positions are aligned at the end: query i stands at key p = i + S_kv - S. With ``alibi`` head h then adds
-slopes[h] |p - j| to the logit of key j. Last comes the mask, a true -inf: ``causal`` hides the keys after p, and a
``window`` of W > 0 shows the keys p - W + 1 to p, so it hides those after p with and without ``causal``.
With ``scaled``, for float8 alone, q, k and v are the numbers given times q_scale, k_scale and v_scale, one a head of a
batch; strides are free, so that one for a whole tensor is a view of it that repeats it.
A key that a query does not see never reaches its results, whatever it holds.
A query that sees no key gives 0, and an lse of -inf. ``lse`` is the natural log of the sum of exp(logits).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tlhub.specs import Arg, Dim, Kernel, Option, Problem, Scalar

FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
DTYPES = ("float64", "float32", "float16", "bfloat16", *FLOAT8)


DIMS = (
    Dim("B", doc="batch"),
    Dim("S", doc="queries"),
    Dim("H", doc="query heads"),
    Dim("D", doc="channels of q and k"),
    Dim("H_kv", default="H", doc="heads of k and v; divides H"),
    Dim("S_kv", default="S", doc="keys"),
    Dim("D_v", default="D", doc="channels of v and o"),
)
PATTERNS = (("S", "S_kv"), ("B", "S", "S_kv"), tuple(d.name for d in DIMS))
QKV = (
    Arg("q", ("B", "S", "H", "D")),
    Arg("k", ("B", "S_kv", "H_kv", "D")),
    Arg("v", ("B", "S_kv", "H_kv", "D_v")),
)
SLOPES = Arg("slopes", ("H",), "float32", {"alibi": True}, "how much a logit falls with each place of distance")
SCALES = tuple(
    Arg(f"{x.name}_scale", ("B", x.dims[2]), "float32", {"scaled": True}, f"factors of {x.name}, by heads") for x in QKV
)
CAUSAL = Option("causal", (False, True), False, "hide the keys after a query, aligned at the end")
ALIBI = Option("alibi", (False, True), False, "logits fall with the distance of query and key, by the slopes of heads")
LSE = Option("lse", (False, True), False, "return lse as well")
OUT_DTYPE = Option(
    "out_dtype",
    ("float64", "float32", "float16", "bfloat16"),
    {**{d: d for d in DTYPES if d not in FLOAT8}, **dict.fromkeys(FLOAT8, "bfloat16")},
    "the type of o",
)
SCALARS = (
    Scalar("scale", default="1/sqrt(D)", doc="factor of the logits"),
    Scalar("window", kind="int", default=0, doc="keys that a query sees, itself counted; 0: all"),
    Scalar("softcap", default=0.0, doc="bound of the logits; 0: none"),
)


def check(problem: Problem, inputs: Sequence[str] = "qkv") -> str | None:
    """Return why no such attention can exist, or None. *inputs*: those that have the problem's dtype."""
    dims, dtypes = problem.dim, dict(problem.dtypes)
    heads, kv_heads = dims["H"], dims["H_kv"]
    if isinstance(heads, int) and isinstance(kv_heads, int) and (heads % kv_heads if kv_heads else heads):
        return f"H={heads} query heads cannot share H_kv={kv_heads} key heads evenly; H_kv must divide H"
    kinds = {dtypes[n] for n in inputs}
    if "float64" in kinds and len(kinds) > 1:
        return f"{', '.join(f'{n} is {dtypes[n]}' for n in inputs)}; float64 does not mix with other types"
    if problem.option.get("scaled") and not kinds <= set(FLOAT8):
        wide = next(n for n in inputs if dtypes[n] not in FLOAT8)
        return f"scaled=True, and {wide} is {dtypes[wide]}; scales are for q, k and v in float8"
    return None


def flops(dims: Mapping[str, int]) -> float:
    """Return the operations of one call: two products over every pair of a query and a key.

    Where *dims* also holds a true ``causal``, half of that, as is customary.
    """
    pairs = float(dims["B"]) * dims["H"] * dims["S"] * dims["S_kv"]
    return 2.0 * pairs * (dims["D"] + dims["D_v"]) * (0.5 if dims.get("causal") else 1.0)


ATTENTION = Kernel(
    name="attention",
    revision=2,
    doc="o = softmax(scale q k^T, masked) v, by heads; grouped and multi-query heads by H_kv",
    dims=DIMS,
    inputs=(*QKV, *SCALES, SLOPES),
    outputs=(
        Arg("o", ("B", "S", "H", "D_v"), dtype="option:out_dtype"),
        Arg("lse", ("B", "H", "S"), dtype="float32", when={"lse": True}, doc="log of the sum of exp(logits)"),
    ),
    dtypes=DTYPES,
    options=(
        CAUSAL,
        LSE,
        OUT_DTYPE,
        ALIBI,
        Option("scaled", (False, True), False, "q, k and v in float8 have factors, by heads"),
    ),
    scalars=SCALARS,
    patterns=PATTERNS,
    check=check,
    flops=flops,
    reference="tlhub_attention.references.forward:reference",
    tolerance="tlhub_attention.references.forward:tolerance",
    prepare="tlhub_attention.references.forward:prepare",
    peers={
        "torch": "tlhub_attention.peers.dense:torch_attention",
        "cuda:torch": "tlhub_attention.peers.dense:torch_gpu_attention",
        "cuda:torch-flash": "tlhub_attention.peers.dense:torch_gpu_flash",
        "cuda:torch-flash4": "tlhub_attention.peers.dense:flash4",
    },
)
