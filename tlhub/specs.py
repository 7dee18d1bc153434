"""The records that plugins return, and the ones that lookups pass around: frozen, typed, without behaviour.

Words: a *Kernel* is what is computed, a *Schedule* one way to compute it, a *Target* a kind of device.
A *Problem* is a kernel with its dims, dtypes and options fixed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

from tlhub.errors import PluginError

Extent: TypeAlias = "int | str"
"""The extent of a dim: an integer of at least 0, or a symbol (``"M"`` as typed, ``"?0"`` once canonical)."""

Value: TypeAlias = "bool | int | str | None"
"""A value of an option: what JSON can hold without loss."""

DTYPES: Mapping[str, tuple[int, int]] = {
    # name -> DLPack type code and bits
    "bool": (6, 8),
    "int8": (0, 8),
    "int32": (0, 32),
    "int64": (0, 64),
    "uint8": (1, 8),
    "float16": (2, 16),
    "bfloat16": (4, 16),
    "float32": (2, 32),
    "float64": (2, 64),
    "float8_e4m3fn": (10, 8),
    "float8_e5m2": (12, 8),
    "float8_e8m0fnu": (14, 8),
}

LIBRARY = "kernel.so"
"""The member of an entry that is loaded."""

ABI = "tvm-ffi 0.1"
"""The binary interface that libraries are built for: the C API of apache-tvm-ffi, by its minor version."""


# -- what plugins return ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Dim:
    """One dim of a kernel.

    ``default``: None for a required dim, else an extent, or the name of the dim that it equals unless given. A dim that
    follows from another one, and is never anything else, has ``"DIM/N"``: that extent over N, rounded up, or 1 where N
    is 0; N is a number or the name of an option of numbers, and DIM is declared, and met in the arguments, before it.
    ``elide``: arrays may leave this leading dim out where it is 1 (a batch of one matrix).
    ``when``: option values under which there is such a dim, of arguments that exist under them.
    """

    name: str
    default: Extent | None = None
    elide: bool = False
    when: Mapping[str, Value] = field(default_factory=dict)
    doc: str = ""


@dataclass(frozen=True)
class Arg:
    """An array argument: its dims in order, and its dtype.

    ``dtype``: ``"dtype"`` for the problem's own (a mapping given to ``get`` may set it for this argument
    alone), ``"option:NAME"`` for the value of an option, ``"as:NAME"`` for the dtype of an input, else a dtype's name.
    ``when``: option values under which the argument exists with these dims; an argument whose dims depend
    on an option is declared once for each of the option's values.
    """

    name: str
    dims: tuple[str, ...]
    dtype: str = "dtype"
    when: Mapping[str, Value] = field(default_factory=dict)
    doc: str = ""


@dataclass(frozen=True)
class Option:
    """A choice that is part of the key. ``default`` is a value, or a mapping of the problem's dtype to one."""

    name: str
    choices: tuple[Value, ...]
    default: Value | Mapping[str, Value] = None
    doc: str = ""


@dataclass(frozen=True)
class Scalar:
    """A number given at the call, never in the key. ``default`` is a number or ``"1/sqrt(DIM)"``."""

    name: str
    kind: str = "float"  # "float" (a C double) or "int" (int64)
    default: float | int | str = 0.0
    doc: str = ""


@dataclass(frozen=True)
class Kernel:
    """A contract: what is computed.

    ``patterns``: sets of dims worth leaving symbolic, the narrowest first; a lookup tries each.
    ``check(problem)``: None, or why no such problem can exist (heads that do not divide, say).
    ``flops(values)``: of one call, from a mapping of dims to extents and options to values.
    ``reference``, ``tolerance``, ``prepare``, ``peers``: import paths ``package.module:function``, imported when used:
    ``reference(problem, inputs, scalars) -> outputs`` in float64, ``tolerance(problem, inputs, scalars,
    outputs) -> bounds`` element-wise and absolute, ``prepare(problem, inputs, scalars, rng) -> some inputs`` by name,
    those for which random ones would mean nothing (what in use the others determine, or lengths within an array) as
    tests take them, or without an *rng* a measurement, whose lengths are the longest; ``peer(problem, inputs,
    scalars) -> callable`` that runs the platform's library once. Inputs are a mapping of names to NumPy arrays, outputs
    a tuple; a reference that asks nothing but NumPy's protocols of its arrays is computed on a GPU, by CuPy, where it
    would take long. A peer for a GPU is named after its target and the library whose arrays it takes, ``cuda:torch``,
    and others of that library after what they are, ``cuda:torch-flash``: what such a callable names as its ``package``,
    with the release, is what a report says it runs on.
    """

    name: str
    revision: int
    dims: tuple[Dim, ...]
    inputs: tuple[Arg, ...]
    outputs: tuple[Arg, ...]
    dtypes: tuple[str, ...]
    reference: str
    tolerance: str
    flops: Callable[[Mapping[str, Any]], float]
    options: tuple[Option, ...] = ()
    scalars: tuple[Scalar, ...] = ()
    patterns: tuple[tuple[str, ...], ...] = ()
    check: Callable[[Problem], str | None] | None = None
    prepare: str = ""
    peers: Mapping[str, str] = field(default_factory=dict)
    doc: str = ""

    def __post_init__(self) -> None:
        declared = {dim.name for dim in self.dims}
        for arg in (*self.inputs, *self.outputs):
            if unknown := [dim for dim in arg.dims if dim not in declared]:
                what = f"argument {arg.name!r} has dim {unknown[0]!r}"
                raise PluginError(f"kernel {self.name!r}: {what}, which it does not declare")


Config: TypeAlias = Mapping[str, Value]
"""The values of a schedule's knobs."""


@dataclass(frozen=True)
class Schedule:
    """One implementation of one revision of a kernel, for some targets.

    ``program``: import path of the function that a worker calls as ``program(problem, config, arch)``; what
    it returns is for the toolchain (for ``tvm``: a PrimFunc or an IRModule; for ``tilelang``: a PrimFunc or a
    ``TileProgram``; for ``cuda``: a ``CudaProgram``). Heavy imports belong there.
    ``supports(problem, facts)``: None for yes, else the reason.
    ``configs(problem, facts)``: the configs worth trying, the best guess first.
    ``symbolic``: the dims that its binaries leave symbolic, whatever was asked.
    ``sources``: what makes the source digest: import names of modules, and files in packages as
    ``package/folder/file.cuh`` (default: the program's module).
    ``priority``: a higher one is preferred where nothing was measured.
    ``experimental``: it is served only when it is asked for by name.
    """

    name: str
    kernel: str
    kernel_revision: int
    revision: int
    targets: tuple[str, ...]
    toolchain: str
    program: str
    supports: Callable[[Problem, DeviceFacts], str | None] = lambda problem, facts: None
    configs: Callable[[Problem, DeviceFacts], Sequence[Config]] = lambda problem, facts: ({},)
    symbolic: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    priority: int = 0
    experimental: bool = False
    doc: str = ""

    def __post_init__(self) -> None:
        for what in ("targets", "symbolic", "sources"):
            if isinstance(given := getattr(self, what), str):
                text = f"schedule {self.name!r} of {self.kernel}: {what} is {given!r}; it is a tuple of names"
                raise PluginError(text, hint=f"{what}=({given!r},)")


@dataclass(frozen=True)
class DeviceFacts:
    """What a choice may depend on. ``index`` is None for a device that is not here.

    Sizes in bytes, ``bandwidth`` in bytes a second, ``cores`` of a GPU are its SMs; ``driver``: its major version
    (580), 0 where there is none; ``vectors``: the vector unit of a CPU of the arch (``sse``, ``avx2``, ``avx512``,
    ``neon``).
    """

    arch: str
    model: str
    index: int | None = None
    cores: int = 1
    shared_memory: int = 0
    l2: int = 0
    bandwidth: float = 0.0
    driver: int = 0
    vectors: str = ""


class Finding(NamedTuple):
    """What was found of something that is needed. ``ok``: it is of use; ``hint``: what to do where it is not."""

    name: str
    ok: bool
    detail: str
    hint: str | None = None


@dataclass(frozen=True)
class Target:
    """A kind of device.

    ``archs`` and ``canonical`` use an arch's short name (``x86-64-v3``); all else its full one (``cpu:x86-64-v3``).
    ``rank``: of the targets that have a device, the highest is the default.
    ``archs``: names worth listing; ``canonical(name)``: the one name of an arch (``native`` resolved), or
    None if there is none. ``devices()``: the devices that are here, found without initialising them.
    ``facts(arch)``: of a typical device. ``runs(arch, facts)``: None if that device runs code for *arch*,
    else the reason. ``portable(arch)``: the arch of code that devices of *arch* run as well (PTX), sought in
    stores where there is none for exactly theirs, or None. ``models``: facts of devices by model name, for
    ``--device NAME``.
    ``device_type``: DLPack's number. ``assemble``: import path of the back end, called in a worker as
    ``assemble(program, problem, signature, folder, arch) -> tlhub.build.program.Assembled``; ``options(arch)``:
    what the front ends need to know of the arch (``kind``: TVM's name of the kind of target).
    ``unsupported(name)``: why ``canonical`` gives None, and ``absent()``: why devices that one may expect are not among
    ``devices()``; None where there is nothing more to say. ``ready(arch)`` raises BuildError where the compilers that
    the back end calls are not here. ``checks()``: what else ``tlhub doctor`` should tell.
    """

    name: str
    rank: int
    device_type: int
    archs: tuple[str, ...]
    canonical: Callable[[str], str | None]
    devices: Callable[[], Sequence[DeviceFacts]]
    facts: Callable[[str], DeviceFacts]
    runs: Callable[[str, DeviceFacts], str | None]
    assemble: str
    options: Callable[[str], Mapping[str, str]] = lambda arch: {}
    models: Mapping[str, DeviceFacts] = field(default_factory=dict)
    portable: Callable[[str], str | None] = lambda arch: None
    unsupported: Callable[[str], str | None] = lambda name: None
    absent: Callable[[], str | None] = lambda: None
    ready: Callable[[str], None] = lambda arch: None
    checks: Callable[[], Sequence[Finding]] = lambda: ()
    doc: str = ""


class Need(NamedTuple):
    """A range of versions of a distribution: from ``least`` to before ``below``."""

    distribution: str
    least: str
    below: str


@dataclass(frozen=True)
class PrebuiltStore:
    """A read-only folder of entries that a plugin ships. ``path`` is absolute.

    ``needs``: the versions that its entries are for; beside any other, it serves nothing.
    """

    name: str
    path: str
    needs: tuple[Need, ...] = ()


# -- what lookups pass around ----------------------------------------------------------------------


@dataclass(frozen=True)
class Problem:
    """A kernel with dims, dtypes and options fixed: canonical, hashable, JSON-able by ``to_json``.

    ``options`` hold every name of the kernel in its order, and ``dims`` every one that the options leave, defaults
    filled in; ``dtypes`` holds the dtype of every argument that the options leave, inputs then outputs.
    Make one with ``tlhub.problem.make``.
    """

    kernel: str
    revision: int
    dims: tuple[tuple[str, Extent], ...]
    dtypes: tuple[tuple[str, str], ...]
    options: tuple[tuple[str, Value], ...]

    @property
    def dim(self) -> dict[str, Extent]:
        return dict(self.dims)

    @property
    def option(self) -> dict[str, Value]:
        return dict(self.options)

    @property
    def dtype(self) -> str:
        """The problem's main dtype: that of its first input."""
        return self.dtypes[0][1]

    def to_json(self) -> dict[str, Any]:
        return {
            "kernel": self.kernel,
            "kernel_revision": self.revision,
            "dims": [list(d) for d in self.dims],
            "dtypes": [list(d) for d in self.dtypes],
            "options": [list(o) for o in self.options],
        }


class Tensor(NamedTuple):
    """An array argument of a problem: its dims' names and extents, and its dtype."""

    name: str
    dims: tuple[str, ...]
    extents: tuple[Extent, ...]
    dtype: str
    output: bool


class Signature(NamedTuple):
    """The arguments of a problem's binary, in order: inputs, outputs, workspace, scalars.

    ``elide``: the name of the leading dim that arrays may leave out where it is 1, or None. ``parts``: the dims that
    follow from another one, with its name and over what it is.
    """

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    scalars: tuple[Scalar, ...]
    elide: str | None
    parts: Mapping[str, tuple[str, int]] = MappingProxyType({})
