"""The reference of quantize: the contract's steps in NumPy's float32, bit for bit.

It asks for NumPy's arrays: the conversions are those of ml_dtypes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from tlhub.formats import RANGE
from tlhub.specs import Problem
from tlhub_mixed.contracts.quantize import BLOCK, E8M0, SCALES

Array = np.ndarray[Any, Any]

_LEAST = np.float32(2.0**-126)


def reference(problem: Problem, inputs: Mapping[str, Array], scalars: Mapping[str, float]) -> tuple[Array, ...]:
    """Return ``(q, scale)``, or ``(q,)`` with given scales, in float64: their values in their own dtypes."""
    x, option = np.asarray(inputs["x"]).astype(np.float32), problem.option
    out, power = str(option["out_dtype"]), option["scale_dtype"] == E8M0
    blocks, sides = _blocks(problem)
    if option["given"]:
        scale = np.asarray(inputs["scale"]).astype(np.float32)
    else:
        scale = scales(_largest(x, blocks, sides), out, power).reshape(_shape(problem))
    spread = np.repeat(np.repeat(scale.reshape(blocks), sides[0], 0), sides[1], 1)
    with np.errstate(all="ignore"):
        q = narrow(x / spread[: x.shape[0], : x.shape[1]], out).astype(np.float64)
    return (q,) if option["given"] else (q, scale.astype(np.float64))


def tolerance(
    problem: Problem, inputs: Mapping[str, Array], scalars: Mapping[str, float], outputs: tuple[Array, ...]
) -> tuple[Array, ...]:
    """Return zeros: every step is one operation of float32 that rounds to nearest, so there is one right result."""
    return tuple(np.zeros(np.shape(x)) for x in outputs)


def prepare(
    problem: Problem, inputs: Mapping[str, Array], scalars: Mapping[str, float], rng: np.random.Generator | None
) -> dict[str, Array]:
    """Return given scales as they are in use: positive, for values of about 1."""
    if not problem.option["given"]:
        return {}
    rng = rng or np.random.default_rng(0)
    return {"scale": np.asarray(np.exp2(rng.integers(-8, 3, np.shape(inputs["scale"]))), np.float32)}


def scales(amax: Array, out: str, power: bool) -> Array:
    """Return the scales, in float32, of blocks whose largest magnitudes are *amax*; *power*: powers of two."""
    with np.errstate(all="ignore"):
        scale = amax.astype(np.float32) / np.float32(RANGE[out][1])
    scale = np.where(scale < _LEAST, np.float32(1), scale)
    if not power:
        return scale
    mantissa, exponent = np.frexp(scale)
    up = np.ldexp(np.float32(1), np.where(mantissa == 0.5, exponent - 1, exponent))
    return np.where(np.isfinite(scale), up, np.float32(np.nan)).astype(np.float32)


def narrow(x: Array, dtype: str) -> Array:
    """Return float32 *x* in *dtype*: to nearest even, saturated; a NaN stays one, in int8 it is 0."""
    if dtype == "int8":
        return np.nan_to_num(np.clip(np.rint(x), -128, 127), nan=0.0).astype(np.int8)
    return np.clip(x, *RANGE[dtype]).astype(getattr(ml_dtypes, dtype))


def _shape(problem: Problem) -> tuple[int, ...]:
    """Return the shape of the scales."""
    return tuple(int(problem.dim[d]) for d in SCALES[str(problem.option["scaling"])])


def _blocks(problem: Problem) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return how many blocks there are, down and along, and how many rows and columns one has."""
    rows, columns = int(problem.dim["M"]), int(problem.dim["K"])
    sides = {"tensor": (rows, columns), "row": (1, columns), "1x128": (1, BLOCK), "128x128": (BLOCK, BLOCK)}
    down, along = (*_shape(problem), 1, 1)[:2]
    return (down, along), sides[str(problem.option["scaling"])]


def _largest(x: Array, blocks: tuple[int, int], sides: tuple[int, int]) -> Array:
    """Return the largest magnitude of each block; NaN where there is one."""
    whole = np.zeros((blocks[0] * sides[0], blocks[1] * sides[1]), np.float32)
    whole[: x.shape[0], : x.shape[1]] = np.abs(x)
    return whole.reshape(blocks[0], sides[0], blocks[1], sides[1]).max(axis=(1, 3), initial=0)
