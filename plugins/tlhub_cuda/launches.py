"""Whether launches can work: held against the contract, against what an arch can do, and against the device code. Pure.

What is wrong here would be a C compiler's riddle, a driver's bare error, or wrong numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from math import prod

from tlhub.build.program import Branch, DeviceProgram, Expression, Launch, Parameter, TensorMap
from tlhub.errors import BuildError, did_you_mean
from tlhub.specs import Problem, Signature
from tlhub_cuda.arch import parse
from tlhub_cuda.nvcc import Usage

CTYPES: Mapping[str, int] = {
    **dict.fromkeys(("bool", "char", "int8_t", "uint8_t"), 1),
    **dict.fromkeys(("int16_t", "uint16_t"), 2),
    **dict.fromkeys(("int", "unsigned", "unsigned int", "int32_t", "uint32_t", "float"), 4),
    **dict.fromkeys(("int64_t", "uint64_t", "long long", "unsigned long long", "size_t", "double"), 8),
}
"""Bytes of what a parameter may be, besides a pointer and a tensor map."""

MAP_TYPES: Mapping[str, tuple[int, int]] = {
    **dict.fromkeys(("bool", "int8", "uint8", "float8_e4m3fn", "float8_e5m2"), (0, 1)),
    "uint16": (1, 2),
    "float16": (6, 2),
    "bfloat16": (9, 2),
    "uint32": (2, 4),
    "int32": (3, 4),
    "float32": (7, 4),
    "tfloat32": (11, 4),
    "uint64": (4, 8),
    "int64": (5, 8),
    "float64": (8, 8),
}
"""Dtypes of a tensor map: the driver's number, and bytes."""

SWIZZLES: Mapping[int, int] = {0: 0, 32: 1, 64: 2, 128: 3}
PROMOTIONS: Mapping[int, int] = {0: 0, 64: 1, 128: 2, 256: 3}
"""Bytes, and the driver's numbers of them."""

_MAP_BYTES = 128
_REGISTERS = 65536  # of a multiprocessor
_SHARED = {(7, 5): 64, (8, 0): 163, (8, 6): 99, (8, 9): 99, (9, 0): 227, (10, 0): 227, (12, 0): 99}
"""KiB of shared memory that a block may have, by compute capability."""

_WORDS = frozenset(
    "SMS WORKSPACE CEIL_DIV ALIGNED MAX void const char bool int unsigned long float double size_t intptr_t uintptr_t "
    "int8_t uint8_t int16_t uint16_t int32_t uint32_t int64_t uint64_t".split()
)
_MACROS = ("DATA", "STRIDE", "EXTENT")
_ARRAY = re.compile(rf"\b({'|'.join(_MACROS)})\(\s*(\w*)\s*(?:,\s*(\w+)\s*)?\)")
_NUMBER = re.compile(r"\b(?:0[xX][\da-fA-F]+|\d+(?:\.\d*)?(?:[eE][+-]?\d+)?)[uUlLfF]*\b")


def check(program: DeviceProgram, problem: Problem, signature: Signature, arch: str) -> None:
    """Raise BuildError that says what of *program* is wrong, before anything is compiled. *arch*: ``sm_90a``."""
    names = _Known(problem, signature)
    for where, reason in (*_value_faults(program.values, names), *_faults(program.branches, names, arch)):
        raise BuildError(f"{problem.kernel}: {where}{reason}")


def check_code(
    program: DeviceProgram, kernel: str, sizes: Mapping[str, tuple[int, ...]], usage: Mapping[str, Usage], arch: str
) -> None:
    """Raise BuildError where the device code is not what the launches of *kernel* take it for.

    *sizes*: bytes of each device function's parameters, *usage*: what it uses.
    """
    for branch in program.branches:
        for launch in branch.launches:
            for reason in _misfits(launch, sizes, usage, arch):
                raise BuildError(f"{kernel}: {reason}")


class _Known:
    """The names that expressions may use: the rank of arrays, and numbers."""

    def __init__(self, problem: Problem, signature: Signature) -> None:
        tensors = (*signature.inputs, *signature.outputs)
        self.arrays = {t.name: len(t.dims) for t in tensors}
        extents = {e for t in tensors for e in t.extents}
        dims = {name for name, extent in problem.dims if isinstance(extent, int) or extent in extents}
        self.numbers = {*dims, *(s.name for s in signature.scalars)}

    def fault(self, expression: Expression, scratch: bool = False) -> str | None:
        """Return what is wrong with *expression*, or None. *scratch*: there is scratch memory that it may name."""
        text = str(expression)
        for macro, array, axis in _ARRAY.findall(text):
            if array not in self.arrays:
                return f"{macro}({array}) names no array of the contract; it has {', '.join(self.arrays)}"
            wrong = bool(axis) if macro == "DATA" else not (axis.isdigit() and int(axis) < self.arrays[array])
            if wrong:
                return f"{macro}({', '.join(filter(None, (array, axis)))}): {array!r} has {self.arrays[array]} dims"
        for word in re.findall(r"[A-Za-z_]\w*", _NUMBER.sub(" ", _ARRAY.sub(" ", text))):
            if word == "WORKSPACE" and not scratch:
                return "it names WORKSPACE where the branch has none"
            if word not in self.numbers and word not in _WORDS:
                return f"it names {word!r}; there are {', '.join(sorted(self.numbers))}"
        return None


def _value_faults(values: Mapping[str, Expression], names: _Known) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with *values*; *names* know them from then on."""
    for name, value in values.items():
        where = f"value {name!r}: "
        taken = name in names.numbers or name in names.arrays or name in _WORDS or name in _MACROS
        if taken or not re.fullmatch(r"(?!tlhub)[A-Za-z]\w*", name):
            yield where, "that is the name of something else" if taken else "that is no name of a value"
        reason = names.fault(value)
        if reason:
            yield where, f"{value!r}: {reason}"
        names.numbers.add(name)


def _faults(branches: tuple[Branch, ...], names: _Known, arch: str) -> Iterator[tuple[str, str]]:
    if not branches:
        yield "", "the program has no branch, so that no call would launch anything"
    for i, branch in enumerate(branches):
        where = f"branch {i}: "
        if not branch.launches:
            yield where, "it has no launch"
        if not branch.when and i + 1 < len(branches):
            yield where, "it has no condition, so that no call comes to those after it"
        for what, expression in (("condition", branch.when), ("workspace", branch.workspace)):
            reason = names.fault(expression)
            if reason:
                yield where, f"{what} {expression!r}: {reason}"
        for launch in branch.launches:
            for reason in _launch_faults(launch, names, arch, branch.workspace != 0):
                yield f"{where}launch of {launch.kernel!r}: ", reason


def _launch_faults(launch: Launch, names: _Known, arch: str, scratch: bool) -> Iterator[str]:
    code = parse(arch)
    hopper = code is not None and code.capability >= (9, 0)
    if not re.fullmatch(r"[A-Za-z_]\w*", launch.kernel):
        yield 'this is no name of an extern "C" function'
    for what, sizes, most in (("block", launch.block, (1024, 1024, 64)), ("cluster", launch.cluster, (16, 16, 16))):
        if len(sizes) != 3 or any(not 1 <= n <= m for n, m in zip(sizes, most, strict=False)) or prod(sizes) > most[0]:
            yield f"{what} {sizes}; it has three sizes of at least 1, at most {most}, and at most {most[0]} in all"
    if not hopper and (prod(launch.cluster) > 1 or launch.programmatic):
        yield f"clusters and programmatic launches need sm_90 or later, and this is {arch}"
    grid: tuple[Expression, ...] = launch.grid
    if len(grid) != 3:
        yield f"grid {grid}; it has three sizes"
    for expression in grid:
        reason = names.fault(expression)
        if reason:
            yield f"grid {expression!r}: {reason}"
    for i, parameter in enumerate(launch.parameters):
        for reason in _parameter_faults(parameter, names, scratch):
            yield f"parameter {i}: {reason}"
        if isinstance(parameter, TensorMap) and not hopper:
            yield f"parameter {i}: tensor maps need sm_90 or later, and this is {arch}"


def _parameter_faults(parameter: Parameter | TensorMap, names: _Known, scratch: bool) -> Iterator[str]:
    expressions: tuple[Expression, ...]
    if isinstance(parameter, TensorMap):
        yield from _map_faults(parameter)
        expressions = (parameter.address, *parameter.dims, *parameter.strides)
    else:
        if not _pointer(parameter.ctype) and parameter.ctype not in CTYPES:
            yield f"type {parameter.ctype!r}; it may be a pointer, or {', '.join(CTYPES)}"
        expressions = (parameter.value,)
    for expression in expressions:
        reason = names.fault(expression, scratch)
        if reason:
            yield f"{expression!r}: {reason}"


def _map_faults(tensor_map: TensorMap) -> Iterator[str]:
    rank = len(tensor_map.box)
    if not 1 <= rank <= 5 or len(tensor_map.dims) != rank or len(tensor_map.strides) != rank - 1:
        yield (
            f"a tensor map with {len(tensor_map.dims)} dims, {len(tensor_map.strides)} strides and a box of {rank}; "
            "of n dims, from 1 to 5, it has n - 1 strides and a box of n"
        )
    if tensor_map.dtype not in MAP_TYPES:
        yield f"a tensor map of {tensor_map.dtype!r}; it may be of {', '.join(MAP_TYPES)}"
        return
    if tensor_map.swizzle not in SWIZZLES or tensor_map.promotion not in PROMOTIONS:
        yield (
            f"a tensor map with swizzle {tensor_map.swizzle} and promotion {tensor_map.promotion}; they may be "
            f"{', '.join(map(str, SWIZZLES))}, and {', '.join(map(str, PROMOTIONS))}"
        )
    row = tensor_map.box[0] * MAP_TYPES[tensor_map.dtype][1] if rank else 0
    if any(not 1 <= n <= 256 for n in tensor_map.box) or row % 16 or tensor_map.swizzle and row > tensor_map.swizzle:
        yield (
            f"a tensor map with box {tensor_map.box} of {tensor_map.dtype}, {row} bytes a row; a box has from 1 to 256 "
            "in each dim, and rows of a multiple of 16 bytes that do not exceed the swizzle"
        )


def _misfits(
    launch: Launch, sizes: Mapping[str, tuple[int, ...]], usage: Mapping[str, Usage], arch: str
) -> Iterator[str]:
    if launch.kernel not in sizes:
        near = did_you_mean(launch.kernel, sizes)
        yield (
            f"the device code has no function {launch.kernel!r}; it has {', '.join(sizes) or 'none'}"
            + (f" (did you mean {near!r}?)" if near else "")
            + ': is it extern "C" __global__?'
        )
        return
    given = tuple(_size(p) for p in launch.parameters)
    if given != sizes[launch.kernel]:
        yield (f"{launch.kernel!r} takes parameters of {sizes[launch.kernel]} bytes, and a launch passes {given}")
    used = usage.get(launch.kernel)
    if used is None:
        return
    code = parse(arch)
    most = _SHARED.get(code.capability, 227) << 10 if code else 0
    if used.shared + launch.shared > most:
        yield (
            f"{launch.kernel!r} would have {used.shared + launch.shared} bytes of shared memory a block; {arch} has "
            f"at most {most}"
        )
    threads = prod(launch.block)
    if -(-used.registers // 8) * 8 * (-(-threads // 32) * 32) > _REGISTERS:
        yield (
            f"{launch.kernel!r} uses {used.registers} registers in each of {threads} threads; there are {_REGISTERS}: "
            f"say __launch_bounds__({threads})"
        )


def _size(parameter: Parameter | TensorMap) -> int:
    if isinstance(parameter, TensorMap):
        return _MAP_BYTES
    return 8 if _pointer(parameter.ctype) else CTYPES[parameter.ctype]


def _pointer(ctype: str) -> bool:
    return re.fullmatch(r"(const )?\w+( \w+)? ?\*", ctype) is not None
