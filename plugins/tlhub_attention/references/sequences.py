"""References of kernels that are attention, or its backward, of one sequence after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TypeAlias

import numpy as np

from tlhub.specs import Problem
from tlhub_attention.references.rows import Array

Arrays: TypeAlias = "Mapping[str, Array]"
Split: TypeAlias = "Callable[[Problem, Arrays, tuple[Array, ...]], Iterator[tuple[Arrays, tuple[Array, ...]]]]"
"""``split(problem, inputs, outputs)`` yields of each sequence the inputs as ``attention`` takes them, a batch of one,
and the views of *outputs* that are its own."""


def shared(inputs: Arrays) -> dict[str, Array]:
    """Return those of *inputs* that are the same for all sequences."""
    return {name: x for name, x in inputs.items() if name == "slopes"}


def reference(
    split: Split,
    compute: Callable[[Problem, Arrays, Mapping[str, float]], tuple[Array, ...]],
    problem: Problem,
    inputs: Arrays,
    scalars: Mapping[str, float],
    outputs: tuple[Array, ...],
) -> tuple[Array, ...]:
    """Fill *outputs*, float64, with what *compute*, a reference, makes of each sequence, and return them."""
    for one, views in split(problem, inputs, outputs):
        for view, found in zip(views, compute(problem, one, scalars), strict=True):
            view[...] = found
    return outputs


def tolerance(
    split: Split,
    bound: Callable[[Problem, Arrays, Mapping[str, float], tuple[Array, ...]], tuple[Array, ...]],
    problem: Problem,
    inputs: Arrays,
    scalars: Mapping[str, float],
    outputs: tuple[Array, ...],
) -> tuple[Array, ...]:
    """Return the largest errors allowed: each sequence's are those of *bound*, a tolerance."""
    bounds = tuple(np.zeros(o.shape, like=o) for o in outputs)
    found, allowed = split(problem, inputs, outputs), split(problem, inputs, bounds)
    for (one, results), (_, views) in zip(found, allowed, strict=True):
        for view, most in zip(views, bound(problem, one, scalars, results), strict=True):
            view[...] = most
    return bounds
