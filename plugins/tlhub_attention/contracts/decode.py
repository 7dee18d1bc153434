"""The contract of decoding: attention of the last few queries of each sequence to all of its keys.

As ``attention`` with S_kv = lengths[b] for sequence b, whose keys are the first that there is room for, or lie on the
pages that row b of ``table`` names, in order. So query i stands at key p = i + lengths[b] - S, and a sequence of length
0 gives 0, and an lse of -inf. Keys beyond the length never reach a result, whatever they hold.

Only the entries of ``table`` for keys within the length are read, ceil(lengths[b] / page) of a row. That these name
pages of the pool, and that lengths are from 0 to what there is room for, is the caller's duty; a CPU tells, a GPU takes
the nearest length that can be, and reads wherever a wrong entry leads.
"""

from __future__ import annotations

from collections.abc import Mapping

from tlhub.specs import Arg, Dim, Kernel, Option, Problem
from tlhub_attention.contracts import forward as contract
from tlhub_attention.contracts.forward import ALIBI, ATTENTION, LSE, OUT_DTYPE, SLOPES

_MOST_QUERIES = 16
_CONTIGUOUS, _PAGED = {"paged": False}, {"paged": True}


def check(problem: Problem) -> str | None:
    """Return why no such decoding can exist, or None."""
    queries, page = problem.dim["S"], problem.dim.get("page")
    if isinstance(queries, int) and queries > _MOST_QUERIES:
        return f"S={queries} queries of a sequence; it takes at most {_MOST_QUERIES}, and attention any number"
    if page == 0:
        return "page=0; a page holds at least 1 key"
    return contract.check(problem)


def flops(dims: Mapping[str, int]) -> float:
    """Return the operations of one call where every sequence is as long as there is room for."""
    keys = dims["S_kv"] if "S_kv" in dims else dims["L"] * dims["page"]
    return contract.flops({**dims, "S_kv": keys, "causal": False})


DECODE = Kernel(
    name="attention_decode",
    revision=2,
    doc="attention of a few queries of each sequence to all of its keys, by lengths; contiguous or paged keys",
    dims=(
        Dim("B", doc="sequences"),
        Dim("S", doc="queries of a sequence, at most 16"),
        Dim("H", doc="query heads"),
        Dim("D", doc="channels of q and k"),
        Dim("H_kv", default="H", doc="heads of k and v; divides H"),
        Dim("S_kv", when=_CONTIGUOUS, doc="keys of a sequence that there is room for"),
        Dim("P", when=_PAGED, doc="pages of the pool"),
        Dim("page", when=_PAGED, doc="keys of a page"),
        Dim("L", when=_PAGED, doc="pages of a sequence that there is room for"),
        Dim("D_v", default="D", doc="channels of v and o"),
    ),
    inputs=(
        Arg("q", ("B", "S", "H", "D")),
        Arg("k", ("B", "S_kv", "H_kv", "D"), when=_CONTIGUOUS),
        Arg("k", ("P", "page", "H_kv", "D"), when=_PAGED),
        Arg("v", ("B", "S_kv", "H_kv", "D_v"), when=_CONTIGUOUS),
        Arg("v", ("P", "page", "H_kv", "D_v"), when=_PAGED),
        Arg("lengths", ("B",), dtype="int32", doc="keys of each sequence"),
        Arg("table", ("B", "L"), dtype="int32", when=_PAGED, doc="the pages of each sequence"),
        SLOPES,
    ),
    outputs=ATTENTION.outputs,
    dtypes=contract.DTYPES,
    options=(
        Option("causal", (False, True), True, "hide the keys after a query, aligned at the end"),
        LSE,
        OUT_DTYPE,
        Option("paged", (False, True), False, "keys and values lie on the pages of a pool"),
        ALIBI,
    ),
    scalars=ATTENTION.scalars,
    patterns=(
        ("S_kv", "P", "L"),
        ("B", "S_kv", "P", "L"),
        ("B", "S", "H", "D", "H_kv", "S_kv", "P", "page", "L", "D_v"),
    ),
    check=check,
    flops=flops,
    reference="tlhub_attention.references.decode:reference",
    tolerance="tlhub_attention.references.decode:tolerance",
    prepare="tlhub_attention.references.decode:prepare",
    peers={
        "torch": "tlhub_attention.peers.sequences:torch_decode",
        "cuda:torch": "tlhub_attention.peers.sequences:torch_gpu_decode",
        "cuda:torch-flash": "tlhub_attention.peers.sequences:torch_gpu_flash_decode",
    },
)
