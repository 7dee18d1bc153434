"""The reference of decoding in float64, its tolerance, and lengths and tables of pages for tests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from tlhub.specs import Problem
from tlhub_attention.references import forward as attention
from tlhub_attention.references import sequences
from tlhub_attention.references.rows import Array, slopes


def split(
    problem: Problem, inputs: Mapping[str, Array], outputs: tuple[Array, ...]
) -> Iterator[tuple[dict[str, Array], tuple[Array, ...]]]:
    """Yield q, k and v of each sequence as a batch of one, its valid keys in order, with the slopes of all, and its
    part of *outputs*."""
    for b, length in enumerate(map(int, inputs["lengths"])):
        one = {"q": inputs["q"][b : b + 1]}
        for name in "kv":
            array = inputs[name]
            if problem.option["paged"]:
                pages = inputs["table"][b, : -(-length // array.shape[1])].astype(np.int64)
                one[name] = array[pages].reshape(1, len(pages) * array.shape[1], *array.shape[2:])[:, :length]
            else:
                one[name] = array[b : b + 1, :length]
        yield one | sequences.shared(inputs), tuple(o[b : b + 1] for o in outputs)


def reference(problem: Problem, inputs: Mapping[str, Array], scalars: Mapping[str, float]) -> tuple[Array, ...]:
    """Return (o,) of shape (B, S, H, D_v), or (o, lse) with lse of shape (B, H, S), in float64."""
    q, d_v = inputs["q"], inputs["v"].shape[3]
    o, lse = (np.zeros(shape, like=q) for shape in ((*q.shape[:3], d_v), (q.shape[0], q.shape[2], q.shape[1])))
    outputs = (o, lse) if problem.option["lse"] else (o,)
    return sequences.reference(split, attention.reference, problem, inputs, scalars, outputs)


def tolerance(
    problem: Problem, inputs: Mapping[str, Array], scalars: Mapping[str, float], outputs: tuple[Array, ...]
) -> tuple[Array, ...]:
    """Return the largest errors allowed, element-wise and absolute: those of attention to the keys that are valid."""
    return sequences.tolerance(split, attention.tolerance, problem, inputs, scalars, outputs)


def prepare(
    problem: Problem, inputs: Mapping[str, Array], scalars: Mapping[str, float], rng: np.random.Generator | None
) -> dict[str, Array]:
    """Return lengths from 0 to all that there is room for, and tables of pages in random order, no two the same where
    there are enough. In a measurement, which has no *rng*, all lengths are the longest."""
    dim, paged = problem.dim, bool(problem.option["paged"])
    count, pages = int(dim["B"]), int(dim["P"]) if paged else 0
    room = int(dim["L"]) * int(dim["page"]) if paged else int(dim["S_kv"])
    if paged and not pages:
        room = 0
    if rng is None:
        lengths, rng = np.full(count, room), np.random.default_rng(0)
    else:
        lengths = rng.integers(0, room + 1, count)
    if not paged:
        return {"lengths": lengths, **slopes(problem)}
    entries = count * int(dim["L"])
    places = rng.permutation(pages)[:entries] if entries <= pages else rng.integers(0, max(pages, 1), entries)
    return {"lengths": lengths, "table": places.reshape(count, int(dim["L"])), **slopes(problem)}
