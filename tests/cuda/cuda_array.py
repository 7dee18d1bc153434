"""Arrays of a GPU for tests, of which no memory is touched."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from tlhub.specs import DTYPES


@dataclass(frozen=True)
class Array:
    """An array that has an address and no memory. ``strides`` in elements, None for C order."""

    shape: tuple[int, ...]
    address: int = 1 << 20
    dtype: str = "float32"
    strides: tuple[int, ...] | None = None
    device: int = 0
    device_type: int = 2

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device_type, self.device

    def __dlpack__(self, **_: object) -> object:
        rank = len(self.shape)
        extents = (ctypes.c_int64 * max(rank, 1))(*self.shape)
        strides = (ctypes.c_int64 * max(rank, 1))(*self.strides) if self.strides is not None else None
        code, bits = DTYPES[self.dtype]
        managed = _Managed(
            self.address, self.device_type, self.device, rank, code, bits, 1, extents, strides, 0, None, None
        )
        _kept.append((managed, extents, strides))
        return _capsule(ctypes.addressof(managed), b"dltensor", None)


class _Managed(ctypes.Structure):
    """DLManagedTensor, flat."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    ]


_kept: list[object] = []
_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.restype, _capsule.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
