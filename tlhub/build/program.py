"""DeviceProgram: what a front end makes of a program, and what a target's back end turns into a library."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tlhub.specs import LIBRARY

__all__ = ["ABI", "ANY", "COMPACT", "LIBRARY", "Buffer", "DeviceProgram"]

ABI = "tvm-ffi 0.1"
"""The binary interface that libraries are built for: the C API of apache-tvm-ffi, by its minor version."""

COMPACT = "compact"
ANY = "any"


@dataclass(frozen=True)
class Buffer:
    """How the program sees an array argument.

    ``dtype``: the storage dtype, the contract's own or an unsigned integer of the same width.
    ``strides``: ``"any"``, ``"compact"`` (C order without gaps), or one value a dim: None for any stride,
    else the stride that the program takes for granted, in elements.
    """

    name: str
    dtype: str
    ndim: int
    strides: str | tuple[int | None, ...] = COMPACT


@dataclass(frozen=True)
class DeviceProgram:
    """A program in machine or device code, ready to be assembled with the host shim.

    ``object``: file name of the object code in the staging folder; the back end removes it.
    ``symbol``: the function that the shim calls, in tvm-ffi's calling convention, with normalised arrays
    (inputs, outputs) and then the scalars.
    ``buffers``: of the array arguments, in order. ``source``: name of the readable member, for people.
    ``toolchain``: packages and compilers, with their versions. ``resources``: what the program uses.
    """

    object: str
    symbol: str
    buffers: tuple[Buffer, ...]
    source: str
    toolchain: Mapping[str, str]
    resources: Mapping[str, int] = field(default_factory=dict)
