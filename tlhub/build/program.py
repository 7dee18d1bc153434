"""DeviceProgram: what a front end makes of a program, and what a target's back end turns into a library.

For a CPU it is object code with a function that the host shim calls. For a GPU it is device code and the launches
that make up a call, as data: the target's back end writes the host function from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from tlhub.specs import ABI, LIBRARY

__all__ = [
    "ABI",
    "ANY",
    "COMPACT",
    "LIBRARY",
    "Assembled",
    "Branch",
    "Buffer",
    "CudaProgram",
    "DeviceProgram",
    "Expression",
    "Launch",
    "Parameter",
    "TensorMap",
    "TileFunction",
    "TileProgram",
]

COMPACT = "compact"
ANY = "any"

Expression: TypeAlias = "int | str"
"""An integer, or a C expression of one, computed on the host at each call.

It may name the problem's dims (``M``, an int64_t), its scalars (``alpha``: a double, or an int64_t), ``SMS``, the
device's number of multiprocessors, and of each array argument ``a``: ``DATA(a)`` (a void *), ``STRIDE(a, 0)`` (in
elements; of a dim of extent 1 what C order would give), ``EXTENT(a, 0)``. ``WORKSPACE`` is the scratch memory
(a void *), ``CEIL_DIV(x, y)`` the quotient rounded up, ``ALIGNED(x, n)`` whether the integer or pointer x is a multiple
of n.
"""


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
class Parameter:
    """A parameter of a device function: its C type (``"int"``, ``"float"``, ``"void *"``) and its value."""

    ctype: str
    value: Expression


@dataclass(frozen=True)
class TensorMap:
    """A parameter that is a CUtensorMap: a tile of an array as the tensor memory accelerator sees it.

    Dims run from the innermost, whose stride is one element. ``strides``: of the others, in bytes, multiples of 16.
    ``box``: the tile's extents. ``swizzle``: 0, 32, 64 or 128 bytes; ``promotion``: what is fetched into L2 at
    least, 0, 64, 128 or 256 bytes. Elements out of bounds read as zero.
    """

    dtype: str
    address: str
    dims: tuple[Expression, ...]
    strides: tuple[Expression, ...]
    box: tuple[int, ...]
    swizzle: int = 128
    promotion: int = 256


@dataclass(frozen=True)
class Launch:
    """A launch of the device function ``kernel`` (its symbol in the code), on the caller's stream.

    ``shared``: dynamic shared memory of a block in bytes. ``programmatic``: it may start before what is ahead of it
    in the stream has ended, and waits for that itself (programmatic dependent launch).
    """

    kernel: str
    grid: tuple[Expression, Expression, Expression]
    block: tuple[int, int, int]
    parameters: tuple[Parameter | TensorMap, ...]
    shared: int = 0
    cluster: tuple[int, int, int] = (1, 1, 1)
    cooperative: bool = False
    programmatic: bool = False


@dataclass(frozen=True)
class Branch:
    """The launches of a call for which ``when`` (a C condition; empty for always) holds, in order.

    ``workspace``: bytes of scratch memory that they need, aligned to 256, with any content.
    """

    launches: tuple[Launch, ...]
    when: str = ""
    workspace: Expression = 0


@dataclass(frozen=True)
class CudaProgram:
    """What a program of toolchain ``cuda`` returns: CUDA C++ with ``extern "C"`` kernels, and the branches of a call.

    ``strides``: of the array arguments that take other than any stride, as ``Buffer`` has them.
    ``values``: integers (int64_t) that a call computes once, by names that the expressions of branches and of later
    values may use. ``flags``: for nvcc, besides the usual ones (``-O3``, ``-std=c++17``, the arch).
    """

    source: str
    branches: tuple[Branch, ...]
    strides: Mapping[str, str | tuple[int | None, ...]] = field(default_factory=dict)
    values: Mapping[str, Expression] = field(default_factory=dict)
    flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class TileFunction:
    """A prim_func of TileLang, taken where ``when`` (a C condition; empty for always) holds.

    Its parameters are the contract's arrays and scalars (floats as float64 or float32), and then any integers, whose
    ``values`` it gives by name: a stride that is a multiple of 8, say, is ``8 * rows`` with ``rows`` an int32 parameter
    of value ``"STRIDE(a, 0) / 8"``. A buffer's alignment (``align``) up to the widest vector, where it is more than an
    item, and strides that are no symbols are conditions of the call too. ``passes``: fields of TVM's PassContext.
    """

    function: Any
    when: str = ""
    values: Mapping[str, Expression] = field(default_factory=dict)
    passes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TileProgram:
    """What a program of toolchain ``tilelang`` may return: of ``functions`` a call takes the first that may be.

    ``flags``: for nvcc, as ``CudaProgram`` has them.
    """

    functions: tuple[TileFunction, ...]
    flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class DeviceProgram:
    """A program in machine or device code, ready to be assembled with the host shim.

    ``code``: name of its file in the staging folder: object code, which the back end removes, or device source.
    ``symbol``: the function that the shim calls, in tvm-ffi's calling convention, with normalised arrays
    (inputs, outputs) and then the scalars; of a program with branches the back end writes it.
    ``buffers``: of the array arguments, in order. ``source``: name of the readable member, for people.
    ``toolchain``: packages and compilers, with their versions. ``resources``: what the program uses.
    ``branches``: of a call the first whose condition holds is taken; a call that none serves is refused.
    ``values``: what their expressions have names for, as ``CudaProgram`` has them.
    ``flags``: for the compiler of the device code.
    """

    code: str
    symbol: str
    buffers: tuple[Buffer, ...]
    source: str
    toolchain: Mapping[str, str]
    resources: Mapping[str, int] = field(default_factory=dict)
    branches: tuple[Branch, ...] = ()
    values: Mapping[str, Expression] = field(default_factory=dict)
    flags: tuple[str, ...] = ()


class Assembled(NamedTuple):
    """What a back end adds to a build: to the toolchain's identity and to the resources, and what it left.

    ``least_driver``: the least driver that runs the library (580), 0 for any. ``members``: files besides the library
    and the source. ``warnings``: what the compilers said, one line each.
    """

    toolchain: Mapping[str, str]
    resources: Mapping[str, int] = {}
    least_driver: int = 0
    members: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
