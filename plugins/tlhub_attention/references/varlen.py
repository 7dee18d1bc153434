"""The reference of attention over sequences end to end in float64, its tolerance, and lengths for tests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from tlhub.specs import Problem
from tlhub_attention.references import forward as attention
from tlhub_attention.references import sequences
from tlhub_attention.references.rows import Array, slopes


def places(inputs: Mapping[str, Array]) -> Iterator[tuple[slice, slice]]:
    """Yield where the queries and where the keys of each sequence are."""
    starts, starts_kv = ([int(n) for n in inputs[name]] for name in ("starts", "starts_kv"))
    for n in range(len(starts) - 1):
        yield slice(starts[n], starts[n + 1]), slice(starts_kv[n], starts_kv[n + 1])


def split(
    problem: Problem, inputs: Mapping[str, Array], outputs: tuple[Array, ...]
) -> Iterator[tuple[dict[str, Array], tuple[Array, ...]]]:
    """Yield q, k and v of each sequence as a batch of one, with the slopes of all, and its part of *outputs*."""
    for rows, keys in places(inputs):
        one = {name: inputs[name][None, rows if name == "q" else keys] for name in "qkv"}
        yield one | sequences.shared(inputs), (outputs[0][None, rows], *(lse[None, :, rows] for lse in outputs[1:]))


def reference(problem: Problem, inputs: Mapping[str, Array], scalars: Mapping[str, float]) -> tuple[Array, ...]:
    """Return (o,) of shape (T, H, D_v), or (o, lse) with lse of shape (H, T), in float64."""
    q, d_v = inputs["q"], inputs["v"].shape[2]
    o, lse = np.zeros((*q.shape[:2], d_v), like=q), np.zeros((q.shape[1], q.shape[0]), like=q) - np.inf
    outputs = (o, lse) if problem.option["lse"] else (o,)
    return sequences.reference(split, attention.reference, problem, inputs, scalars, outputs)


def tolerance(
    problem: Problem, inputs: Mapping[str, Array], scalars: Mapping[str, float], outputs: tuple[Array, ...]
) -> tuple[Array, ...]:
    """Return the largest errors allowed, element-wise and absolute: those of attention of each sequence."""
    return sequences.tolerance(split, attention.tolerance, problem, inputs, scalars, outputs)


def prepare(
    problem: Problem, inputs: Mapping[str, Array], scalars: Mapping[str, float], rng: np.random.Generator | None
) -> dict[str, Array]:
    """Return where sequences begin and end: anywhere, so some are empty; equally far apart in a measurement, which has
    no *rng*. And slopes, where there are some."""
    count = int(problem.dim["N1"])

    def cut(tokens: int) -> Array:
        if rng is None:
            return np.linspace(0, tokens, count).round()
        return np.sort(rng.integers(0, tokens + 1, count))

    return {"starts": cut(int(problem.dim["T"])), "starts_kv": cut(int(problem.dim["T_kv"])), **slopes(problem)}
