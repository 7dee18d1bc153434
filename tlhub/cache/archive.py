"""Archives: entries in one file, to be carried from the machine that builds to those that serve.

A tar file under zstd, in one form only: of each entry, in the order of their folders, ``entry.json`` and then the
members by name, as regular files whose headers hold a name and a size and nothing of their writer. So the same entries
are the same bytes, and a reader takes nothing from the file but what it expects: names, sizes and hashes are those of
the manifest before, and no path of the file ever reaches the disk.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import os
import shlex
import stat
import sys
import tarfile
from collections.abc import Callable, Iterable, Iterator
from typing import Any, BinaryIO, NamedTuple

from tlhub.cache.entry import Damaged, Entry
from tlhub.cache.manifest import LARGEST_MANIFEST, MANIFEST, Manifest, Member
from tlhub.cache.store import Store
from tlhub.errors import ArgumentError, CacheError
from tlhub.files import replacing

LEVEL = 10
"""Of compression: higher ones take many times as long for a few percent."""

END = bytes(2 * tarfile.BLOCKSIZE)
"""What a tar ends with."""

_BLOCK = tarfile.BLOCKSIZE
_CHUNK = 1 << 20
_EXAMPLE = "kernels.tar.zst"

Members = Iterator[tuple[str, Iterator[bytes]]]


class Packed(NamedTuple):
    """What an archive was made of: its entries' manifests, and the bytes of the file."""

    manifests: tuple[Manifest, ...]
    size: int


class Unpacked(NamedTuple):
    """What came of an archive: the entries that were not in the store before, and those that were."""

    added: tuple[Entry, ...]
    present: tuple[Entry, ...]


class Refused(Exception):
    """The file is no archive, or not whole."""


def pack(entries: Iterable[Entry], path: str) -> Packed:
    """Write the archive of *entries*, each build once, to the file *path*, which appears whole or not at all.

    Raises Damaged for an entry that is not whole, CacheError where the file cannot be written, and without a library
    for zstd, and ArgumentError for what is no name of a file.
    """
    chosen = {entry.manifest.folder: entry for entry in entries}
    zstd = _zstd()
    _check_place(path)
    try:
        with replacing(os.path.realpath(path)) as file:
            with zstd.open(file, "wb", level=LEVEL) as stream:
                for folder in sorted(chosen):
                    for name, data in _files(chosen[folder]).items():
                        stream.write(header(f"{folder}/{name}", len(data)))
                        stream.write(padded(data))
                stream.write(END)
            file.flush()
            os.fsync(file.fileno())
        size = os.path.getsize(path)
    except OSError as error:
        if isinstance(error, Damaged):
            raise
        reason = error.strerror or error
        raise CacheError(f"the archive {path!r} cannot be written: {reason}", hint="df -h .") from error
    return Packed(tuple(chosen[folder].manifest for folder in sorted(chosen)), size)


def verify(path: str) -> tuple[Manifest, ...]:
    """Return the manifests of the archive *path*, each byte of which is read and hashed, in constant memory.

    Raises CacheError for what is no archive, or not whole, and ArgumentError for what cannot be read.
    """
    with _reading(path) as stream:
        return tuple(read(stream))


def unpack(path: str, store: Store, meant: Callable[[Manifest], bool] = lambda manifest: True) -> Unpacked:
    """Publish the entries of the archive *path* that are *meant* in *store*; what it has already stays as it is.

    Nothing is written before the whole file was verified. Raises what ``verify`` does, and CacheError where the
    store takes nothing.
    """
    chosen = {manifest.build_digest for manifest in verify(path) if meant(manifest)}
    store.check()
    added: list[Entry] = []
    present: list[Entry] = []
    with _reading(path) as stream:
        for manifest, members in _entries(stream):
            if manifest.build_digest not in chosen:
                _skipped(manifest, members)
            elif there := _whole(store, manifest):
                _skipped(manifest, members)
                present.append(there)
            else:
                added.append(_publish(store, manifest, members))
    return Unpacked(tuple(added), tuple(present))


def read(stream: BinaryIO) -> Iterator[Manifest]:
    """Iterate over the manifests of an archive without its compression, verifying each entry. Raises Refused."""
    for manifest, members in _entries(stream):
        yield _skipped(manifest, members)


# -- reading: everything is expected, nothing is believed ------------------------------------------------------


def _entries(stream: BinaryIO) -> Iterator[tuple[Manifest, Members]]:
    """Iterate over the entries; the members of one are to be read before the next is asked for. Raises Refused."""
    last = ""
    while (block := _exactly(stream, _BLOCK)) != END[:_BLOCK]:
        name, size = _named(block)
        if not name.endswith(f"/{MANIFEST}") or size > LARGEST_MANIFEST:
            raise Refused(f"{name!r} of {size} bytes stands where the {MANIFEST} of an entry should")
        data = b"".join(_content(stream, name, size))
        try:
            manifest = Manifest.parse(data)
        except Damaged as error:
            raise Refused(f"{name!r}: {error.reason}") from error
        folder = manifest.folder
        if name != f"{folder}/{MANIFEST}" or data != manifest.to_bytes():
            raise Refused(f"{name!r} is not the {MANIFEST} of its entry, which is {folder!r}")
        if folder <= last:
            raise Refused(f"{folder!r} is out of order, or there twice")
        last = folder
        yield manifest, _members(stream, folder, manifest)
    if _exactly(stream, _BLOCK) != END[:_BLOCK] or stream.read(1):
        raise Refused("something follows its end")


def _members(stream: BinaryIO, folder: str, manifest: Manifest) -> Members:
    for member, known in sorted(manifest.members.items()):
        name = f"{folder}/{member}"
        found = _named(_exactly(stream, _BLOCK))
        if found != (name, known.size):
            raise Refused(f"{found[0]!r} of {found[1]} bytes stands where {name!r} of {known.size} should")
        yield member, _content(stream, name, known.size, known)


def _content(stream: BinaryIO, name: str, size: int, known: Member | None = None) -> Iterator[bytes]:
    """Iterate over the bytes of a file in chunks; the last comes after the whole was held against *known*."""
    total, left, chunk = hashlib.sha256(), size, b""
    while left:
        yield chunk
        chunk = _exactly(stream, min(left, _CHUNK))
        total.update(chunk)
        left -= len(chunk)
    if any(_exactly(stream, -size % _BLOCK)):
        raise Refused(f"{name!r} is padded with more than zeros")
    if known is not None and total.hexdigest() != known.sha256:
        raise Refused(f"{name!r} is altered: its SHA-256 is not the manifest's")
    yield chunk


def _named(block: bytes) -> tuple[str, int]:
    """Return name and size of the one kind of header that there is: any other form of it is refused."""
    try:
        found = tarfile.TarInfo.frombuf(block, "ascii", "strict")
        if block == header(found.name, found.size):
            return found.name, found.size
    except (tarfile.TarError, ValueError, OverflowError) as error:
        raise Refused(f"it has a header that is none: {error}") from error
    what = "link" if found.islnk() or found.issym() else "device" if found.isdev() else "file of another form"
    raise Refused(f"it holds the {what} {found.name!r}")


def header(name: str, size: int) -> bytes:
    """Return what stands in a tar before a file of *size* bytes."""
    info = tarfile.TarInfo(name)
    info.size = size
    return info.tobuf(tarfile.USTAR_FORMAT, "ascii", "strict")


def padded(data: bytes) -> bytes:
    """Return *data* as it stands in a tar, up to the next header."""
    return data + bytes(-len(data) % _BLOCK)


def _exactly(stream: BinaryIO, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = stream.read(size - len(data))
        if not more:
            raise Refused("it is cut short")
        data += more
    return data


def _skipped(manifest: Manifest, members: Members) -> Manifest:
    for _, chunks in members:
        for _ in chunks:
            pass
    return manifest


# -- the ends: a file, a store --------------------------------------------------------------------------------------


def _files(entry: Entry) -> dict[str, bytes]:
    """Return the verified bytes of the files of *entry*, in order. Raises Damaged."""
    entry.hold()
    members = {name: entry.read(name) for name in sorted(entry.manifest.members)}
    return {MANIFEST: entry.manifest.to_bytes(), **members}


def _check_place(path: str) -> None:
    folder = os.path.dirname(path) or "."
    if os.path.isdir(path):
        hint = f"tlhub cache export {shlex.quote(os.path.join(path, _EXAMPLE))}"
        raise ArgumentError(f"the archive {path!r} cannot be written: it is a folder", argument="file", hint=hint)
    if not os.path.isdir(folder):
        hint = f"mkdir -p {shlex.quote(folder)}"
        text = f"the archive {path!r} cannot be written: there is no folder {folder!r}"
        raise ArgumentError(text, argument="file", hint=hint)


def _publish(store: Store, manifest: Manifest, members: Members) -> Entry:
    with store.stage() as staged:
        for name, chunks in members:
            with open(f"{staged.path}/{name}", "xb") as file:
                file.writelines(chunks)
        entry = store.publish(staged, manifest, tuple(manifest.members))
    if not entry.published:
        raise store.unkept or CacheError("the entry is kept in memory only")
    return entry


def _whole(store: Store, manifest: Manifest) -> Entry | None:
    """Return the entry of *store* that is that build, if it is whole."""
    for entry in store.lookup(manifest.arch, manifest.kernel, manifest.problem_digest).entries:
        if entry.key == manifest.build_digest:
            with contextlib.suppress(Damaged):
                entry.verify()
                return entry
    return None


@contextlib.contextmanager
def _reading(path: str) -> Iterator[BinaryIO]:
    """Open an archive. What it is not becomes a CacheError that names the file."""
    zstd = _zstd()
    try:
        if not stat.S_ISREG(mode := os.stat(path).st_mode) and not stat.S_ISDIR(mode):
            raise ValueError("it is read twice, and only a file can be")
        file = open(path, "rb")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ArgumentError(
            f"the archive {path!r} cannot be read: {reason}", argument="file", hint=f"tlhub cache export {_EXAMPLE}"
        ) from error
    with file:
        try:
            with zstd.open(file) as stream:
                yield stream
        except (Refused, zstd.ZstdError, EOFError) as error:
            raise CacheError(
                f"the archive {path!r} is refused: {error}; nothing of it was imported",
                hint=f"sha256sum {shlex.quote(path)}",
            ) from error


@functools.cache
def _zstd() -> Any:
    """Return the module of zstd. Raises CacheError where none is installed."""
    name = "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise CacheError(
            f"archives need a library for zstd: {error}", hint="pip install 'tlhub-core[archive]'"
        ) from error
