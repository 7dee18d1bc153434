"""The contract of the backward of attention over sequences of various lengths, laid end to end.

Each sequence is ``attention_bwd`` of its own, over the tokens that the contract of ``attention_varlen`` says are its:
queries and keys of no sequence get gradients of 0.
"""

from __future__ import annotations

from collections.abc import Mapping

from tlhub.specs import Arg, Kernel, Problem
from tlhub_attention.contracts import varlen as varlen_contract
from tlhub_attention.contracts.backward import ATTENTION_BWD
from tlhub_attention.contracts.varlen import VARLEN


def check(problem: Problem) -> str | None:
    """Return why no such backward can exist, or None."""
    return varlen_contract.check(problem, ("dout", "q", "k", "v", "o"))


def flops(dims: Mapping[str, int]) -> float:
    """Return the operations of one call where all sequences are equally long."""
    return 2.5 * varlen_contract.flops(dims)


_Q, _K, _V, *_REST = VARLEN.inputs

VARLEN_BWD = Kernel(
    name="attention_varlen_bwd",
    revision=2,
    doc="dq, dk, dv of o = attention_varlen(q, k, v, starts, starts_kv), from dout, o and lse",
    dims=VARLEN.dims,
    inputs=(
        Arg("dout", ("T", "H", "D_v"), doc="the gradient of o"),
        *(_Q, _K, _V),
        Arg("o", ("T", "H", "D_v"), doc="what the forward returned"),
        Arg("lse", ("H", "T"), dtype="float32", doc="what the forward returned with lse"),
        *_REST,
    ),
    outputs=tuple(Arg(f"d{x.name}", x.dims, f"as:{x.name}", doc=f"the gradient of {x.name}") for x in (_Q, _K, _V)),
    dtypes=ATTENTION_BWD.dtypes,
    options=ATTENTION_BWD.options,
    scalars=VARLEN.scalars,
    patterns=VARLEN.patterns,
    check=check,
    flops=flops,
    reference="tlhub_attention.references.varlen_backward:reference",
    tolerance="tlhub_attention.references.varlen_backward:tolerance",
    prepare="tlhub_attention.references.varlen_backward:prepare",
)
