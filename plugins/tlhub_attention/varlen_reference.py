"""The reference of attention over sequences end to end in float64, its tolerance, and lengths for tests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from tlhub.specs import Problem
from tlhub_attention import sequences
from tlhub_attention.rows import Array


def split(
    problem: Problem, inputs: Mapping[str, Array], outputs: tuple[Array, ...]
) -> Iterator[tuple[dict[str, Array], tuple[Array, ...]]]:
    """Yield q, k and v of each sequence as a batch of one, and its part of *outputs*."""
    ends, ends_kv = ([int(n) for n in inputs[name]] for name in ("starts", "starts_kv"))
    queries = [slice(*pair) for pair in zip(ends, ends[1:], strict=False)]
    keys = [slice(*pair) for pair in zip(ends_kv, ends_kv[1:], strict=False)]
    for rows, seen in zip(queries, keys, strict=True):
        one = {name: inputs[name][None, rows if name == "q" else seen] for name in "qkv"}
        yield one, (outputs[0][None, rows], *(lse[None, :, rows] for lse in outputs[1:]))


def reference(problem: Problem, inputs: Mapping[str, Array], scalars: Mapping[str, float]) -> tuple[Array, ...]:
    """Return (o,) of shape (T, H, D_v), or (o, lse) with lse of shape (H, T), in float64."""
    q, d_v = inputs["q"], inputs["v"].shape[2]
    o, lse = np.zeros((*q.shape[:2], d_v), like=q), np.zeros((q.shape[1], q.shape[0]), like=q) - np.inf
    return sequences.reference(split, problem, inputs, scalars, (o, lse) if problem.option["lse"] else (o,))


def tolerance(
    problem: Problem, inputs: Mapping[str, Array], scalars: Mapping[str, float], outputs: tuple[Array, ...]
) -> tuple[Array, ...]:
    """Return the largest errors allowed, element-wise and absolute: those of attention of each sequence."""
    return sequences.tolerance(split, problem, inputs, scalars, outputs)


def prepare(
    problem: Problem, inputs: Mapping[str, Array], scalars: Mapping[str, float], rng: np.random.Generator | None
) -> dict[str, Array]:
    """Return where sequences begin and end: anywhere, so some are empty; equally far apart in a measurement, which has
    no *rng*."""
    count = int(problem.dim["N1"])

    def cut(tokens: int) -> Array:
        if rng is None:
            return np.linspace(0, tokens, count).round()
        return np.sort(rng.integers(0, tokens + 1, count))

    return {"starts": cut(int(problem.dim["T"])), "starts_kv": cut(int(problem.dim["T_kv"]))}
