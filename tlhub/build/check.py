"""What is published was checked: a library's bytes to facts, and facts to a refusal. Pure, no tools needed.

Follows the ELF-64 specification and the GNU version extensions (Linux Standard Base, symbol versioning).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tlhub.errors import BuildError

MACHINES = {62: "x86_64", 183: "aarch64"}

_LIBRARIES = ("libtvm_ffi.so", "libc.so", "libm.so", "libpthread.so", "libdl.so", "librt.so", "ld-linux")
_RUNTIME = ("_ITM_deregisterTMCloneTable", "_ITM_registerTMCloneTable", "__gmon_start__", "__cxa_finalize")
_SHT_SYMTAB = 2
_PT_LOAD, _PT_DYNAMIC, _PT_GNU_STACK = 1, 2, 0x6474E551
_DT_NEEDED, _DT_STRTAB, _DT_SYMTAB, _DT_STRSZ, _DT_RPATH, _DT_FLAGS, _DT_RUNPATH = 1, 5, 6, 10, 15, 30, 29
_DT_HASH, _DT_GNU_HASH, _DT_BIND_NOW, _DT_TEXTREL = 4, 0x6FFFFEF5, 24, 22
_DT_FLAGS_1, _DT_VERSYM, _DT_VERNEED, _DT_VERNEEDNUM = 0x6FFFFFFB, 0x6FFFFFF0, 0x6FFFFFFE, 0x6FFFFFFF


@dataclass(frozen=True)
class Library:
    """What a shared library says of itself. ``undefined``: name, version (empty if none) and whether it is weak."""

    machine: str
    needed: tuple[str, ...]
    exports: frozenset[str]
    undefined: tuple[tuple[str, str, bool], ...]
    bind_now: bool
    run_path: str
    executable_stack: bool
    glibc: str


def read(data: bytes) -> Library:
    """Return the facts of the ELF shared library *data*. Raises BuildError if it is none, or torn."""
    try:
        return _read(data)
    except (struct.error, IndexError, KeyError, ValueError, OverflowError) as error:
        raise BuildError(f"the library is no sound ELF file: {error}") from None


def check(data: bytes, machine: str, exports: Iterable[str]) -> Library:
    """Return the facts of *data* if it may be published, else raise a BuildError that says what is wrong.

    *machine* is ``x86_64`` or ``aarch64``; *exports* are the functions that it must define.
    """
    library = read(data)
    for reason in _reasons(library, machine, exports):
        raise BuildError(f"the library may not be published: {reason}")
    return library


def object_symbols(data: bytes) -> dict[str, bool]:
    """Return the global symbols of the ELF object file *data*, and whether it defines each."""
    try:
        if data[:4] != b"\x7fELF" or data[4:6] != b"\x02\x01":
            raise ValueError("no 64-bit little-endian ELF file")
        (start,) = struct.unpack_from("<Q", data, 40)
        size, count = struct.unpack_from("<HH", data, 58)
        found: dict[str, bool] = {}
        headers = [struct.unpack_from("<IIQQQQII", data, start + i * size) for i in range(count)]
        for _, kind, _, _, at, length, link, _ in headers:
            if kind != _SHT_SYMTAB:
                continue
            _, _, _, _, names, span, *_ = headers[link]
            strings = data[names : names + span]
            for name, info, _, section, _, _ in struct.iter_unpack("<IBBHQQ", data[at : at + length]):
                if info >> 4 in (1, 2):
                    found[strings[name : strings.index(b"\0", name)].decode()] = section != 0
        return found
    except (struct.error, IndexError, ValueError, OverflowError) as error:
        raise BuildError(f"the compiler wrote no sound object file: {error}") from None


def _reasons(library: Library, machine: str, exports: Iterable[str]) -> Iterator[str]:
    if library.machine != machine:
        yield f"it is for {library.machine}, not for {machine}"
    for name in exports:
        if name not in library.exports:
            yield f"it does not export {name}"
    for name in library.needed:
        if not name.startswith(_LIBRARIES):
            yield f"it needs {name}; allowed are libtvm_ffi, libc and libm"
    for name, version, weak in library.undefined:
        served = name.startswith("TVMFFI") or version.startswith("GLIBC_") or (weak and name in _RUNTIME)
        if not served:
            yield f"symbol {name!r} is undefined, and neither tvm-ffi, libc nor libm has it"
    if not library.bind_now:
        yield "it is not linked with -z now"
    if library.run_path:
        yield f"it has a run path, {library.run_path!r}"
    if library.executable_stack:
        yield "it asks for an executable stack"


def _read(data: bytes) -> Library:
    if data[:4] != b"\x7fELF" or data[4:6] != b"\x02\x01":
        raise BuildError("the library is no 64-bit little-endian ELF file")
    kind, machine = struct.unpack_from("<HH", data, 16)
    if kind != 3:
        raise BuildError("the ELF file is no shared library")
    _check_sections(data)
    offset, size, count = _program_headers(data)
    loads: list[tuple[int, int, int]] = []
    dynamic: dict[int, int] = {}
    needed: list[int] = []
    executable_stack = False
    for i in range(count):
        kind, flags, at, address, _, length = struct.unpack_from("<IIQQQQ", data, offset + i * size)
        if kind == _PT_LOAD:
            if at + length > len(data):
                raise BuildError("the library is cut short")
            loads.append((address, at, length))
        elif kind == _PT_GNU_STACK:
            executable_stack = bool(flags & 1)
    for i in range(count):
        kind, _, at, _, _, length = struct.unpack_from("<IIQQQQ", data, offset + i * size)
        if kind == _PT_DYNAMIC:
            for tag, value in struct.iter_unpack("<QQ", data[at : at + length]):
                if tag == 0:
                    break
                if tag == _DT_NEEDED:
                    needed.append(value)
                dynamic[tag] = value

    def place(address: int) -> int:
        for start, at, length in loads:
            if start <= address < start + length:
                return at + address - start
        raise ValueError(f"address {address:#x} is in no segment")

    strings = data[place(dynamic[_DT_STRTAB]) :][: dynamic[_DT_STRSZ]] if _DT_STRTAB in dynamic else b""

    def text(at: int) -> str:
        return strings[at : strings.index(b"\0", at)].decode()

    versions = _versions(data, place, dynamic, text)
    exports: set[str] = set()
    undefined: list[tuple[str, str, bool]] = []
    symbols = place(dynamic[_DT_SYMTAB])
    table = place(dynamic[_DT_VERSYM]) if _DT_VERSYM in dynamic else None
    for i in range(1, _symbol_count(data, place, dynamic)):
        name, info, other, section = struct.unpack_from("<IBBH", data, symbols + 24 * i)
        if section == 0:
            version = versions.get(struct.unpack_from("<H", data, table + 2 * i)[0] & 0x7FFF, "") if table else ""
            undefined.append((text(name), version, info >> 4 == 2))
        elif info >> 4 in (1, 2) and other & 3 in (0, 3):
            exports.add(text(name))
    now = _DT_BIND_NOW in dynamic or dynamic.get(_DT_FLAGS, 0) & 8 or dynamic.get(_DT_FLAGS_1, 0) & 1
    paths = [text(dynamic[tag]) for tag in (_DT_RPATH, _DT_RUNPATH) if tag in dynamic]
    return Library(
        machine=MACHINES.get(machine, f"machine {machine}"),
        needed=tuple(text(n) for n in needed),
        exports=frozenset(exports),
        undefined=tuple(undefined),
        bind_now=bool(now),
        run_path=":".join(paths),
        executable_stack=executable_stack,
        glibc=_glibc(versions.values()),
    )


def _program_headers(data: bytes) -> tuple[int, int, int]:
    (offset,) = struct.unpack_from("<Q", data, 32)
    size, count = struct.unpack_from("<HH", data, 54)
    return offset, size, count


def _check_sections(data: bytes) -> None:
    """The section headers come last: a file that has them all is whole."""
    (start,) = struct.unpack_from("<Q", data, 40)
    size, count = struct.unpack_from("<HH", data, 58)
    if start + size * count > len(data):
        raise BuildError("the library is cut short")


def _versions(data: bytes, place, dynamic, text) -> dict[int, str]:  # type: ignore[no-untyped-def]
    """Return the versions that the library needs of others, by their number in the table of symbols."""
    found: dict[int, str] = {}
    if _DT_VERNEED not in dynamic:
        return found
    at = place(dynamic[_DT_VERNEED])
    for _ in range(min(dynamic.get(_DT_VERNEEDNUM, 0), len(data) // 16)):
        _, count, _, first, following = struct.unpack_from("<HHIII", data, at)
        aux = at + first
        for _ in range(count):
            _, _, number, name, after = struct.unpack_from("<IHHII", data, aux)
            found[number & 0x7FFF] = text(name)
            aux += after
        at += following
    return found


def _symbol_count(data: bytes, place, dynamic) -> int:  # type: ignore[no-untyped-def]
    if _DT_HASH in dynamic:
        return int(struct.unpack_from("<II", data, place(dynamic[_DT_HASH]))[1])
    at = place(dynamic[_DT_GNU_HASH])
    buckets, first, words, _ = struct.unpack_from("<IIII", data, at)
    start = at + 16 + 8 * words
    last = max(struct.unpack_from(f"<{buckets}I", data, start), default=0)
    if last < first:
        return int(first)
    chain = start + 4 * buckets
    while not struct.unpack_from("<I", data, chain + 4 * (last - first))[0] & 1:
        last += 1
    return int(last) + 1


def _glibc(versions: Iterable[str]) -> str:
    """Return the least glibc that has all *versions*, or an empty string if none is needed."""
    numbers = [
        tuple(int(n) for n in v.removeprefix("GLIBC_").split("."))
        for v in versions
        if v.startswith("GLIBC_") and v.removeprefix("GLIBC_").replace(".", "").isdigit()
    ]
    return ".".join(map(str, max(numbers))) if numbers else ""
