"""Arrays on the device of a kernel: NumPy's own, or copies on a GPU by PyTorch, by CuPy where that is not."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def put(array: Array, device: str) -> tuple[Any, Callable[[], None]]:
    """Return *array* on *device* (``"cuda:1"``), and how to fetch what was written there.

    On a GPU it is a view, with the same strides, of a copy of all the memory that *array* is a view of; fetching
    copies all of that back. Raises ImportError where neither PyTorch nor CuPy is installed.
    """
    if not on_gpu(device):
        return array, lambda: None
    return _torch(array, device) if importlib.util.find_spec("torch") else _cupy(array, device)


def on_gpu(device: str) -> bool:
    """Tell whether *device* (``"cuda:1"``) has a memory of its own; every other works on NumPy's arrays as they are."""
    return device.partition(":")[0] == "cuda"


def float64(arrays: Mapping[str, Array], device: str) -> dict[str, Any]:
    """Return copies of *arrays* on a GPU, in float64, as CuPy's. Raises ImportError where that is not installed."""
    import cupy

    with cupy.cuda.Device(_index(device)):
        return {name: cupy.asarray(array.astype(np.float64)) for name, array in arrays.items()}


def fetched(array: Any) -> Array:
    """Return an array of NumPy or CuPy as NumPy's."""
    found: Array = array if isinstance(array, np.ndarray) else array.get()
    return found


def _torch(array: Array, device: str) -> tuple[Any, Callable[[], None]]:
    import torch

    flat, offset = _memory(array)
    # its from_numpy knows no dtype of ml_dtypes
    bits = f"int{8 * flat.itemsize}"
    moved = torch.from_numpy(flat.view(bits)).to(device, copy=True)

    def fetch() -> None:
        flat.view(bits)[...] = moved.cpu().numpy()

    strides = [s // array.itemsize for s in array.strides]
    typed = moved.view(getattr(torch, array.dtype.name))
    return torch.as_strided(typed, array.shape, strides, offset), fetch


def _cupy(array: Array, device: str) -> tuple[Any, Callable[[], None]]:
    import cupy

    flat, offset = _memory(array)
    with cupy.cuda.Device(_index(device)):
        moved = cupy.asarray(flat)

    def fetch() -> None:
        flat[...] = moved.get()

    start = moved.data + offset * array.itemsize
    return cupy.ndarray(array.shape, array.dtype, start, array.strides), fetch


def _memory(array: Array) -> tuple[Array, int]:
    """Return the memory that *array* is a view of, as one row of its elements, and where *array* begins in it."""
    owner = array if array.base is None else array.base
    bits = owner.view(f"uint{8 * owner.itemsize}")  # as_strided knows no dtype of ml_dtypes
    flat = np.lib.stride_tricks.as_strided(bits, (owner.size,), (owner.itemsize,)).view(array.dtype)
    return flat, (array.ctypes.data - owner.ctypes.data) // array.itemsize


def _index(device: str) -> int:
    return int(device.partition(":")[2] or 0)
