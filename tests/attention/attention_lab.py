"""Sizes, strides and small arrays for the tests of attention and its backward."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

Array = np.ndarray[Any, Any]
SYMBOLIC = {d: d for d in ("B", "S", "H", "D", "H_kv", "S_kv", "D_v")}
MANY = settings(
    max_examples=30,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
LENGTHS = st.one_of(st.integers(0, 9), st.sampled_from([23, 24, 25, 63, 64, 65, 95, 96, 97, 101, 191, 193, 250]))
CHANNELS = st.one_of(st.integers(0, 9), st.sampled_from([16, 31, 63, 64, 65, 80]))
SPOILT = [(name, value) for name in "qkv" for value in (np.nan, np.inf, -np.inf)] + [("qk", 1e4)]
"""What ``spoil`` takes, for the arrays of the forward."""
SCALARS = st.fixed_dictionaries(
    {
        "scale": st.sampled_from([0.3, 0.5, -0.25, 0.0]),
        "window": st.sampled_from([0, 0, 1, 2, 7, 96, 1000, 2**63 - 1]),
        "softcap": st.sampled_from([0.0, 0.0, 0.3, 30.0, -2.0]),
    }
)


@st.composite
def dims(draw: st.DrawFn) -> dict[str, int]:
    heads = draw(st.integers(1, 3))
    return {
        "B": draw(st.integers(0, 3)),
        "S": draw(LENGTHS),
        "H": heads * draw(st.sampled_from([1, 1, 2, 5])),
        "D": draw(CHANNELS),
        "H_kv": heads,
        "S_kv": draw(LENGTHS),
        "D_v": draw(CHANNELS),
    }


@st.composite
def heads(draw: st.DrawFn) -> dict[str, int]:
    shared = draw(st.integers(1, 3))
    sizes = {"H": shared * draw(st.sampled_from([1, 1, 2, 5, 8])), "H_kv": shared}
    return sizes | {"D": draw(CHANNELS), "D_v": draw(CHANNELS)}


def layout(draw: Any, array: Array) -> Array:
    """Return the values of *array* in an array of other strides, offset and surroundings (NaN)."""
    kind = draw(st.sampled_from(["plain", "plain", "heads first", "fortran", "gap", "step", "reversed", "offset"]))
    if kind == "plain":
        return array
    if kind == "heads first":
        return np.ascontiguousarray(array.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)
    if kind == "fortran":
        return np.asfortranarray(array)
    if kind == "reversed":
        return np.ascontiguousarray(array[:, ::-1, :, ::-1])[:, ::-1, :, ::-1]
    if kind == "offset":
        room = np.full(array.size + 3, np.nan, array.dtype)
        room[3:] = array.ravel()
        return room[3:].reshape(array.shape)
    b, s, h, d = array.shape
    room = np.full((b, s, h, 2 * d) if kind == "step" else (b, s + 2, h, d + 5), np.nan, array.dtype)
    view = room[..., ::2] if kind == "step" else room[:, :s, :, :d]
    view[...] = array
    return view


def numbers(draw: Any, array: Array) -> Array:
    """Return numbers in an array of another stride."""
    step = draw(st.sampled_from([1, 1, 2, -1]))
    room = np.full((*array.shape[:-1], abs(step) * array.shape[-1]), -7, array.dtype)
    view = room[..., ::step]
    view[...] = array
    return view


def spoil(arrays: dict[str, Array], name: str, value: float) -> None:
    """Put *value* into a channel of every fifth query, or key; where it is large, all of q and k make such logits."""
    if abs(value) > 1 and np.isfinite(value):
        for x in "qk":
            arrays[x] = (arrays[x] * np.sqrt(value)).astype(arrays[x].dtype)
    else:
        arrays[name][..., 2::5, :, 0] = value


def column(values: Any, dtype: Any = np.float32, width: int = 1) -> Array:
    """Return (1, len, 1, width) with *values* in channel 0."""
    made = np.zeros((1, len(values), 1, width), dtype)
    made[0, :, 0, 0] = values
    return made
