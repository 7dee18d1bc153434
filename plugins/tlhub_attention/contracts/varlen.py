"""The contract of attention over sequences of various lengths, laid end to end in one array.

Sequence n has the queries starts[n] to starts[n + 1] - 1 and the keys starts_kv[n] to starts_kv[n + 1] - 1; each is
``attention`` of its own, and may be empty. Queries before the first sequence and after the last are of none: they see
no key, so give 0, and an lse of -inf. Keys outside a sequence never reach its results, whatever they hold.

That starts never decrease and end within the arrays is the caller's duty. A CPU tells where they do not; a GPU takes
each as the nearest number from 0 to T (T_kv), and what the results are then is not defined.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tlhub.specs import Arg, Dim, Kernel, Problem
from tlhub_attention.contracts import forward as contract
from tlhub_attention.contracts.forward import ALIBI, ATTENTION, CAUSAL, LSE, OUT_DTYPE, SLOPES


def check(problem: Problem, inputs: Sequence[str] = "qkv") -> str | None:
    """Return why no such attention can exist, or None. *inputs*: those that have the problem's dtype."""
    if problem.dim["N1"] == 0:
        return "N1=0; starts has one more than there are sequences, so at least 1"
    return contract.check(problem, inputs)


def flops(dims: Mapping[str, int]) -> float:
    """Return the operations of one call where all sequences are equally long."""
    sequences = max(dims["N1"] - 1, 1)
    return contract.flops({**dims, "B": 1, "S": dims["T"], "S_kv": dims["T_kv"]}) / sequences


VARLEN = Kernel(
    name="attention_varlen",
    revision=2,
    doc="attention over sequences of various lengths, laid end to end; by cumulative lengths",
    dims=(
        Dim("T", doc="queries of all sequences"),
        Dim("H", doc="query heads"),
        Dim("D", doc="channels of q and k"),
        Dim("N1", doc="sequences + 1"),
        Dim("H_kv", default="H", doc="heads of k and v; divides H"),
        Dim("T_kv", default="T", doc="keys of all sequences"),
        Dim("D_v", default="D", doc="channels of v and o"),
    ),
    inputs=(
        Arg("q", ("T", "H", "D")),
        Arg("k", ("T_kv", "H_kv", "D")),
        Arg("v", ("T_kv", "H_kv", "D_v")),
        Arg("starts", ("N1",), dtype="int32", doc="where the queries of each sequence begin, and of the last end"),
        Arg("starts_kv", ("N1",), dtype="int32", doc="where the keys of each sequence begin, and of the last end"),
        SLOPES,
    ),
    outputs=(
        Arg("o", ("T", "H", "D_v"), dtype="option:out_dtype"),
        Arg("lse", ("H", "T"), dtype="float32", when={"lse": True}, doc="log of the sum of exp(logits)"),
    ),
    dtypes=contract.DTYPES,
    options=(CAUSAL, LSE, OUT_DTYPE, ALIBI),
    scalars=ATTENTION.scalars,
    patterns=(("T", "N1", "T_kv"), ("T", "H", "D", "N1", "H_kv", "T_kv", "D_v")),
    check=check,
    flops=flops,
    reference="tlhub_attention.references.varlen:reference",
    tolerance="tlhub_attention.references.varlen:tolerance",
    prepare="tlhub_attention.references.varlen:prepare",
    peers={
        "torch": "tlhub_attention.peers.sequences:torch_varlen",
        "cuda:torch": "tlhub_attention.peers.sequences:torch_gpu_varlen",
    },
)
