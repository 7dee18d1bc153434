"""Random inputs and poisoned outputs, as NumPy arrays of a contract's dtypes."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tlhub.errors import ArgumentError
from tlhub.problem import root_of, signature
from tlhub.specs import Kernel, Problem, Tensor

Array = np.ndarray[Any, Any]

_POISON = 0x55
_GUARD = 64  # elements before and after a poisoned output


def function(path: str) -> Callable[..., Any]:
    """Return what an import path ``package.module:function`` names."""
    module, _, name = path.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return NumPy's dtype of that name; ml_dtypes has those that NumPy lacks."""
    try:
        return np.dtype(name)
    except TypeError:
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, name))


def inputs(
    kernel: Kernel,
    problem: Problem,
    seed: int = 0,
    scale: float = 1.0,
    scalars: Mapping[str, float] | None = None,
    whole: bool = False,
) -> dict[str, Array]:
    """Return random arrays for the inputs of *problem* by name, at full rank, from *seed*.

    Floats are standard normal values times *scale*, rounded to the contract's dtype (fp8 saturates);
    integers cover the whole range of their dtype. Inputs that the kernel prepares are what they are for a call with
    *scalars*; *whole*: as a measurement has them. Raises ArgumentError where a dim is symbolic.
    """
    rng = np.random.default_rng(seed)
    arrays = {t.name: _random(rng, t, scale) for t in _concrete(kernel, problem).inputs}
    if kernel.prepare:
        values = default_scalars(kernel, problem, scalars)
        found = function(kernel.prepare)(problem, arrays, values, None if whole else rng)
        arrays |= {name: x.astype(arrays[name].dtype) for name, x in found.items()}
    return arrays


def poisoned(kernel: Kernel, problem: Problem, gap: Callable[[int], int] = lambda count: 0) -> tuple[Array, ...]:
    """Return arrays for the outputs of *problem*, filled so that an element left unwritten shows.

    Floats hold NaN, integers 0x55 in every byte. Each lies inside a larger buffer (its ``.base``) whose
    elements around it are poisoned too, and so are the ``gap(count)`` elements after each row of *count*: ``spilled``
    tells whether one of those was written.
    """
    return tuple(_poisoned(t, gap) for t in _concrete(kernel, problem).outputs)


def spilled(output: Array) -> bool:
    """Tell whether something was written around *output*, an array that ``poisoned`` made."""
    assert output.base is not None
    bits = f"uint{8 * output.itemsize}"  # as_strided knows no dtype of ml_dtypes
    whole, clean = output.base.view(bits).copy(), _fill(output.dtype, output.base.size).view(bits)
    own = np.lib.stride_tricks.as_strided(whole[_GUARD:], output.shape, output.strides)
    own[...] = clean[0]
    return bool((whole != clean).any())


def default_scalars(kernel: Kernel, problem: Problem, given: Mapping[str, float] | None = None) -> dict[str, float]:
    """Return a value for every scalar of *kernel*: that of *given*, else the contract's default.

    Raises ArgumentError for a name that the kernel does not have.
    """
    values = dict(given or {})
    names = [s.name for s in kernel.scalars]
    for name in values:
        if name not in names:
            known = ", ".join(names) or "none"
            raise ArgumentError(f"{kernel.name}: no scalar {name!r}; it has {known}", argument=name)
    return {s.name: values.get(s.name, _default(s.default, problem)) for s in kernel.scalars}


def _default(default: float | int | str, problem: Problem) -> float:
    if not isinstance(default, str):
        return default
    extent = problem.dim[root_of(default)]
    return 1 / math.sqrt(extent) if extent else 0.0  # type: ignore[arg-type]


def _concrete(kernel: Kernel, problem: Problem) -> Any:
    symbols = [name for name, extent in problem.dims if isinstance(extent, str)]
    if symbols:
        raise ArgumentError(f"{kernel.name}: dim {symbols[0]} is symbolic; data needs a number", argument=symbols[0])
    return signature(kernel, problem)


def _random(rng: np.random.Generator, tensor: Tensor, scale: float) -> Array:
    dtype, shape = numpy_dtype(tensor.dtype), tuple(int(e) for e in tensor.extents)
    if dtype.kind == "b":
        return rng.integers(0, 2, shape).astype(dtype)
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return rng.integers(limits.min, limits.max, shape, dtype=dtype, endpoint=True)
    values = rng.standard_normal(shape) * scale
    if dtype.itemsize == 1:
        import ml_dtypes

        largest = float(ml_dtypes.finfo(dtype).max)
        values = np.clip(values, -largest, largest)
    return values.astype(dtype)


def _poisoned(tensor: Tensor, gap: Callable[[int], int]) -> Array:
    dtype = numpy_dtype(tensor.dtype)
    shape = tuple(int(e) for e in tensor.extents)
    count = shape[-1] if shape else 1
    rows = (*shape[:-1], count + gap(count))
    whole = _fill(dtype, math.prod(rows) + 2 * _GUARD)
    return whole[_GUARD : len(whole) - _GUARD].reshape(rows)[..., :count].reshape(shape)


def _fill(dtype: np.dtype[Any], count: int) -> Array:
    whole = np.empty(count, dtype)
    if dtype.kind in "biu":
        whole.view(np.uint8)[...] = _POISON
    else:
        whole[...] = np.nan
    return whole
