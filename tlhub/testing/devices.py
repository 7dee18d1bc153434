"""Arrays on the device of a kernel: NumPy's own, or on a GPU those of PyTorch, of CuPy where that is not."""

from __future__ import annotations

import gc
import importlib.util
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol

import numpy as np

from tlhub.problem import signature
from tlhub.specs import Kernel, Problem, Tensor
from tlhub.testing.data import function, numpy_dtype

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


class Arrays(Protocol):
    """Arrays of one library on one GPU. ``version``: the library and its release."""

    name: str
    version: str

    def random(self, tensor: Tensor, seed: int) -> Any:
        """Return a random array made on the device: standard normal, or integers of their dtype's range."""

    def empty(self, tensor: Tensor) -> Any:
        """Return an array that holds anything."""

    def put(self, array: Array) -> tuple[Any, Callable[[], None]]:
        """Do what ``put`` of the module does, with arrays of this library."""

    def double(self, x: Any) -> Any:
        """Return *x* in float64 as an array that NumPy's functions take: CuPy's, or NumPy's where that is missing."""

    def rounded(self, x: Any, like: Any) -> Any:
        """Return *x*, NumPy's or of ``double``'s kind, as one of this library on the device, in the dtype of *like*."""

    def wait(self) -> None:
        """Return when the device has done all that it was told."""

    def free(self) -> None:
        """Give the memory back that nothing holds any more."""


def pick(device: str, preferred: Collection[str] = ()) -> Arrays:
    """Return the arrays of PyTorch on *device*, of CuPy where that is not installed or is the only one *preferred*.

    Raises ImportError where neither is installed.
    """
    kinds: tuple[Callable[[str], Arrays], ...] = (TorchArrays, CupyArrays)
    names = ("torch", "cupy")
    for kind in [kind for kind, name in zip(kinds, names, strict=True) if name in preferred] or kinds:
        try:
            return kind(device)
        except ImportError:
            continue
    raise ImportError("neither torch nor cupy is installed, and a GPU's arrays are theirs")


def drawn(kernel: Kernel, problem: Problem, scalars: Mapping[str, float], arrays: Arrays, seed: int) -> dict[str, Any]:
    """Return random inputs by name, made on the device from *seed*; those that *kernel* prepares fit the others, as a
    measurement has them."""
    given = {t.name: arrays.random(t, seed + i) for i, t in enumerate(signature(kernel, problem).inputs)}
    if not kernel.prepare:
        return given
    wide = {name: arrays.double(x) for name, x in given.items()}
    found = function(kernel.prepare)(problem, wide, scalars, None)
    return given | {name: arrays.rounded(x, given[name]) for name, x in found.items()}


class TorchArrays:
    """Arrays of PyTorch."""

    name = "torch"

    def __init__(self, device: str) -> None:
        import torch

        self._torch, self._device = torch, device
        if on_gpu(device):
            torch.cuda.set_device(device)
        self.version = f"torch {torch.__version__}"

    def random(self, tensor: Tensor, seed: int) -> Any:
        torch, dtype = self._torch, getattr(self._torch, tensor.dtype)
        generator = torch.Generator(self._device).manual_seed(seed)
        if dtype.is_floating_point:
            wide = torch.float64 if dtype == torch.float64 else torch.float32
            return torch.randn(tensor.extents, dtype=wide, device=self._device, generator=generator).to(dtype)
        low, high = (0, 2) if dtype == torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
        return torch.randint(low, high, tensor.extents, dtype=dtype, device=self._device, generator=generator)

    def empty(self, tensor: Tensor) -> Any:
        return self._torch.empty(tensor.extents, dtype=getattr(self._torch, tensor.dtype), device=self._device)

    def put(self, array: Array) -> tuple[Any, Callable[[], None]]:
        return _torch(array, self._device)

    def double(self, x: Any) -> Any:
        try:
            import cupy
        except ImportError:
            return x.double().cpu().numpy()
        return cupy.from_dlpack(x.double())

    def rounded(self, x: Any, like: Any) -> Any:
        made = self._torch.from_numpy(x) if isinstance(x, np.ndarray) else self._torch.from_dlpack(x)
        return made.to(like.device, like.dtype)

    def wait(self) -> None:
        self._torch.cuda.synchronize(self._device)

    def free(self) -> None:
        gc.collect()
        self._torch.cuda.empty_cache()
        _free_cupy()


class CupyArrays:
    """Arrays of CuPy."""

    name = "cupy"

    def __init__(self, device: str) -> None:
        import cupy

        cupy.cuda.Device(_index(device)).use()
        self._cupy, self._device = cupy, device
        self.version = f"cupy {cupy.__version__}"

    def random(self, tensor: Tensor, seed: int) -> Any:
        dtype = numpy_dtype(tensor.dtype)
        generator = self._cupy.random.default_rng(seed)
        if dtype.kind in "biu":
            low, high = (0, 2) if dtype.kind == "b" else (self._cupy.iinfo(dtype).min, self._cupy.iinfo(dtype).max)
            return generator.integers(low, high, tensor.extents).astype(dtype)
        return generator.standard_normal(tensor.extents, dtype="float32").astype(dtype)

    def empty(self, tensor: Tensor) -> Any:
        return self._cupy.empty(tensor.extents, numpy_dtype(tensor.dtype))

    def put(self, array: Array) -> tuple[Any, Callable[[], None]]:
        return _cupy(array, self._device)

    def double(self, x: Any) -> Any:
        return x.astype("float64")

    def rounded(self, x: Any, like: Any) -> Any:
        return self._cupy.asarray(x).astype(like.dtype)

    def wait(self) -> None:
        self._cupy.cuda.get_current_stream().synchronize()

    def free(self) -> None:
        gc.collect()
        _free_cupy()


def _free_cupy() -> None:
    if "cupy" in sys.modules:
        sys.modules["cupy"].get_default_memory_pool().free_all_blocks()


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
