"""Archives: entries in one file, to be carried from the machine that builds to those that serve.

A tar file under zstd, in one form only: of each entry, in the order of their folders, ``entry.json``, its signatures by
key and then the members by name, as regular files whose headers hold a name and a size and nothing of their writer. So
the same entries are the same bytes, and a reader takes nothing from the file but what it expects: names, sizes and
hashes are those of the manifest before, and no path of the file ever reaches the disk.
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

from tlhub.cache import copying, signature, vouching
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
_MOST_SIGNATURES = 1000  # of one entry

Signatures = dict[str, bytes]
"""Of one entry, by the ids of their keys."""

Members = Iterator[tuple[str, Iterator[bytes]]]


class Packed(NamedTuple):
    """What an archive was made of: its entries' manifests, the bytes of the file, and folder and reason of what of
    their signatures was left out."""

    manifests: tuple[Manifest, ...]
    size: int
    refused: tuple[tuple[str, str], ...]


class Unpacked(NamedTuple):
    """What came of an archive: the entries that were not in the store before, and those that were; and folder and
    reason of entries that were refused, or signatures of theirs."""

    added: tuple[Entry, ...]
    present: tuple[Entry, ...]
    refused: tuple[tuple[str, str], ...]


class Refused(Exception):
    """The file is no archive, or not whole."""


def pack(entries: Iterable[Entry], path: str) -> Packed:
    """Write the archive of *entries*, each build once and with its signatures, to the file *path*, which appears whole
    or not at all.

    Raises Damaged for an entry that is not whole, CacheError where the file cannot be written, and without a library
    for zstd, and ArgumentError for what is no name of a file.
    """
    chosen = {entry.manifest.folder: entry for entry in entries}
    refused: list[tuple[str, str]] = []
    lists = functools.cache(signature.listed)
    zstd = _zstd()
    _check_place(path)
    try:
        with replacing(os.path.realpath(path)) as file:
            with zstd.open(file, "wb", level=LEVEL) as stream:
                for folder in sorted(chosen):
                    found = signature.beside(chosen[folder], lists)
                    signatures, wrong = vouching.sift(chosen[folder].manifest, found)
                    refused += ((folder, reason) for reason in wrong)
                    for name, data in _files(chosen[folder], signatures).items():
                        stream.write(header(name, len(data)))
                        stream.write(padded(data))
                stream.write(END)
            file.flush()
            os.fsync(file.fileno())
        size = os.path.getsize(path)
    except OSError as error:
        if isinstance(error, Damaged):
            raise
        hint = f"df -h {shlex.quote(os.path.dirname(path) or '.')}"
        raise CacheError(f"the archive {path!r} cannot be written: {error.strerror or error}", hint=hint) from error
    return Packed(tuple(chosen[folder].manifest for folder in sorted(chosen)), size, tuple(refused))


def verify(path: str) -> tuple[Manifest, ...]:
    """Return the manifests of the archive *path*, each byte of which is read and hashed, in constant memory.

    Raises CacheError for what is no archive, or not whole, and ArgumentError for what cannot be read.
    """
    with _reading(path) as stream:
        return tuple(read(stream))


def unpack(path: str, store: Store, meant: Callable[[Manifest], bool] = lambda manifest: True) -> Unpacked:
    """Publish the entries of the archive *path* that are *meant* in *store*, with their signatures; what it has already
    stays as it is.

    Nothing is written before the whole file was verified; what the store would not serve for want of a signature is
    refused. Raises what ``verify`` does, and CacheError where the store takes nothing.
    """
    chosen = {manifest.build_digest for manifest in verify(path) if meant(manifest)}
    store.check()
    added: list[Entry] = []
    present: list[Entry] = []
    refused: list[tuple[str, str]] = []
    with _reading(path) as stream:
        for manifest, signatures, members in _entries(stream):
            meant_here = manifest.build_digest in chosen
            reason = vouching.unwanted(store, manifest, signatures) if meant_here else None
            if not meant_here or reason:
                _skip(members)
                refused += [(manifest.folder, reason)] if reason else []
                continue
            wrong: tuple[str, ...] = ()
            if there := copying.find(store, manifest):
                _skip(members)
                present.append(there)
                if there.manifest.sha256 == manifest.sha256:
                    wrong = vouching.keep(store, manifest, signatures)
            else:
                with vouching.keeping(store, manifest, signatures) as wrong:
                    added.append(_publish(store, manifest, members))
            refused += ((manifest.folder, reason) for reason in wrong)
    return Unpacked(tuple(added), tuple(present), tuple(refused))


def read(stream: BinaryIO) -> Iterator[Manifest]:
    """Iterate over the manifests of an archive without its compression, verifying each entry. Raises Refused."""
    for manifest, _, members in _entries(stream):
        _skip(members)
        yield manifest


# -- reading: everything is expected, nothing is believed ------------------------------------------------------


def _entries(stream: BinaryIO) -> Iterator[tuple[Manifest, Signatures, Members]]:
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
        signatures, follows = _signatures(stream, manifest)
        yield manifest, signatures, _members(stream, manifest, follows)
    if _exactly(stream, _BLOCK) != END[:_BLOCK] or stream.read(1):
        raise Refused("something follows its end")


def _signatures(stream: BinaryIO, manifest: Manifest) -> tuple[Signatures, tuple[str, int]]:
    """Return the signatures of an entry, and name and size of the file that follows them."""
    found: Signatures = {}
    last = f"{signature.SIGNATURES}/{manifest.sha256}."
    while (follows := _named(_exactly(stream, _BLOCK)))[0].startswith(f"{signature.SIGNATURES}/"):
        name, size = follows
        signed = signature.NAME.fullmatch(name.rpartition("/")[2])
        if signed is None or signed[1] != manifest.sha256 or name <= last or len(found) == _MOST_SIGNATURES:
            raise Refused(f"{name!r} stands where a signature of {manifest.folder!r} should, or is out of order")
        data = b"".join(_content(stream, name, size)) if size == signature.TEXT_LENGTH else b""
        made = signature.from_text(data)
        if made is None or data != signature.to_text(made):
            raise Refused(f"{name!r} holds no signature")
        found[signed[2]], last = made, name
    return found, follows


def _members(stream: BinaryIO, manifest: Manifest, found: tuple[str, int]) -> Members:
    """Iterate over the members. *found*: name and size of the first, whose header was read."""
    for position, (member, known) in enumerate(sorted(manifest.members.items())):
        name = f"{manifest.folder}/{member}"
        found = _named(_exactly(stream, _BLOCK)) if position else found
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


def _skip(members: Members) -> None:
    for _, chunks in members:
        for _ in chunks:
            pass


# -- the ends: a file, a store --------------------------------------------------------------------------------------


def _files(entry: Entry, signatures: Signatures) -> dict[str, bytes]:
    """Return the files of *entry* in order, their bytes verified. Raises Damaged."""
    entry.hold()
    folder, digest = entry.manifest.folder, entry.manifest.sha256
    return {
        f"{folder}/{MANIFEST}": entry.manifest.to_bytes(),
        **{
            f"{signature.SIGNATURES}/{signature.file_name(digest, signer)}": signature.to_text(signatures[signer])
            for signer in sorted(signatures)
        },
        **{f"{folder}/{name}": entry.read(name) for name in sorted(entry.manifest.members)},
    }


def _check_place(path: str) -> None:
    folder = os.path.dirname(path) or "."
    if not path or (os.path.exists(path) and not os.path.isfile(path)):
        what, better = ("a folder", os.path.join(path, _EXAMPLE)) if os.path.isdir(path) else ("no file", _EXAMPLE)
        hint = f"tlhub cache export {shlex.quote(better)}"
        raise ArgumentError(f"the archive {path!r} cannot be written: it is {what}", argument="file", hint=hint)
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
