"""The reference of the backward of attention over sequences end to end, its tolerance, and inputs that fit together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from tlhub.specs import Problem
from tlhub_attention.references import backward as backward
from tlhub_attention.references import sequences
from tlhub_attention.references import varlen as varlen_reference
from tlhub_attention.references.forward import attend
from tlhub_attention.references.rows import Array


def split(
    problem: Problem, inputs: Mapping[str, Array], outputs: tuple[Array, ...]
) -> Iterator[tuple[dict[str, Array], tuple[Array, ...]]]:
    """Yield what ``attention_bwd`` takes of each sequence, as a batch of one, and its part of *outputs*."""
    dq, dk, dv = outputs
    for rows, keys in varlen_reference.places(inputs):
        one = {name: inputs[name][None, keys if name in "kv" else rows] for name in ("dout", "q", "k", "v", "o")}
        one |= {"lse": inputs["lse"][None, :, rows], **sequences.shared(inputs)}
        yield one, (dq[None, rows], dk[None, keys], dv[None, keys])


def reference(problem: Problem, inputs: Mapping[str, Array], scalars: Mapping[str, float]) -> tuple[Array, ...]:
    """Return dq, dk and dv in float64, of the shapes of q, k and v."""
    outputs = tuple(np.zeros(inputs[n].shape, like=inputs[n]) for n in "qkv")
    return sequences.reference(split, backward.reference, problem, inputs, scalars, outputs)


def tolerance(
    problem: Problem, inputs: Mapping[str, Array], scalars: Mapping[str, float], outputs: tuple[Array, ...]
) -> tuple[Array, ...]:
    """Return the largest errors allowed, element-wise and absolute: those of the backward of each sequence."""
    return sequences.tolerance(split, backward.tolerance, problem, inputs, scalars, outputs)


def prepare(
    problem: Problem, inputs: Mapping[str, Array], scalars: Mapping[str, float], rng: np.random.Generator | None
) -> dict[str, Array]:
    """Return where sequences begin and end, slopes, and o and lse of the forward of each, in float64."""
    given = varlen_reference.prepare(problem, inputs, scalars, rng)
    o, lse = np.zeros(inputs["o"].shape, like=inputs["o"]), np.zeros(inputs["lse"].shape, like=inputs["o"]) - np.inf
    for one, (view, view_lse) in varlen_reference.split(problem, {**inputs, **given}, (o, lse)):
        view[...], view_lse[...] = attend(problem, one, scalars)
    return {"o": o, "lse": lse, **given}
