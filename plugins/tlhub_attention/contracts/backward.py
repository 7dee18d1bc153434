"""The contract of attention's backward: the gradients of sum(dout * o) with respect to q, k and v.

All that the contract of attention says of dims, layout, logits, mask and window holds. From the o and the lse that the
forward returned, with P = exp(logits - lse), delta the sum of dout * o over the channels, and c = 1 - (logits /
softcap)^2 the slope of the soft cap at logits that no bias is added to yet, 1 where there is none:

    dv = P^T dout        dS = P (dout v^T - delta) c        dq = scale dS k        dk = scale dS^T q

where the heads that share a key head add up. ``slopes`` get no gradient. o and lse are taken as they are given: the
gradients are true ones where they are the forward's of the same q, k, v and slopes, options and scalars.
A pair of a query and a key that the mask hides takes no part in any sum, whatever the two hold, and nor does a query
whose lse is -inf: one that sees no key gives 0.
"""

from __future__ import annotations

from collections.abc import Mapping

from tlhub.specs import Arg, Kernel, Option, Problem
from tlhub_attention.contracts import forward as contract

DTYPES = tuple(d for d in contract.DTYPES if d not in contract.FLOAT8)


def check(problem: Problem) -> str | None:
    """Return why no such backward can exist, or None."""
    return contract.check(problem, ("dout", "q", "k", "v", "o"))


def flops(dims: Mapping[str, int]) -> float:
    """Return the operations of one call: five products over every pair of a query and a key, the forward has two."""
    return 2.5 * contract.flops(dims)


ATTENTION_BWD = Kernel(
    name="attention_bwd",
    revision=2,
    doc="dq, dk, dv of o = attention(q, k, v), from dout, o and lse",
    dims=contract.DIMS,
    inputs=(
        Arg("dout", ("B", "S", "H", "D_v"), doc="the gradient of o"),
        *contract.QKV,
        Arg("o", ("B", "S", "H", "D_v"), doc="what the forward returned"),
        Arg("lse", ("B", "H", "S"), dtype="float32", doc="what the forward returned with lse"),
        contract.SLOPES,
    ),
    outputs=tuple(Arg(f"d{x.name}", x.dims, f"as:{x.name}", doc=f"the gradient of {x.name}") for x in contract.QKV),
    dtypes=DTYPES,
    options=(
        contract.CAUSAL,
        Option("deterministic", (False, True), False, "the same bits on every call"),
        contract.ALIBI,
    ),
    scalars=contract.SCALARS,
    patterns=contract.PATTERNS,
    check=check,
    flops=flops,
    reference="tlhub_attention.references.backward:reference",
    tolerance="tlhub_attention.references.backward:tolerance",
    prepare="tlhub_attention.references.backward:prepare",
    peers={
        "torch": "tlhub_attention.peers.dense:torch_backward",
        "cuda:torch": "tlhub_attention.peers.dense:torch_gpu_backward",
        "cuda:torch-flash": "tlhub_attention.peers.dense:torch_gpu_flash_backward",
    },
)
