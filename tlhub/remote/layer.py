"""Layers: the entries of one arch as a tar whose manifests come first, so that the rest can be read piecemeal. Pure.

    v1/<arch>/<kernel>/<problem digest>/<build digest>/entry.json     of every entry: the front
    v1/.signatures/<SHA-256 of entry.json>.<key>.sig                  what is known of signatures
    v1/<arch>/<kernel>/<problem digest>/<build digest>/kernel.so ...  the members, in the same order

It is an ordinary tar, and unpacks to a store. But there is one way only in which it can be written: the manifests say
where each member lies, and no name in it is used for anything but to be compared with the one that must stand there.
"""

from __future__ import annotations

import hashlib
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from tlhub.cache import signature
from tlhub.cache.archive import END, header, padded
from tlhub.cache.manifest import LARGEST_MANIFEST, MANIFEST, Damaged, Manifest

LARGEST_FRONT = 256 << 20
_BLOCK = tarfile.BLOCKSIZE

Marks = Mapping[str, Mapping[str, bytes]]
"""Signatures by the digest of the manifest, and of one by the id of the key."""


@dataclass(frozen=True)
class Row:
    """An entry in a layer: its manifest, and from which byte to which its members are."""

    manifest: Manifest
    start: int
    end: int

    def members(self) -> Iterator[tuple[str, int, int]]:
        """Iterate over the members: the name, the bytes of tar before it, the bytes of tar behind it."""
        for name in sorted(self.manifest.members):
            size = self.manifest.members[name].size
            yield name, _BLOCK, -size % _BLOCK


@dataclass(frozen=True)
class Front:
    """What a layer says of itself."""

    rows: tuple[Row, ...]
    signatures: Marks = field(default_factory=dict)
    size: int = 0

    @property
    def layer_size(self) -> int:
        return (self.rows[-1].end if self.rows else self.size) + len(END)


def plan(manifests: Iterable[Manifest], signatures: Marks) -> tuple[bytes, Front]:
    """Return the bytes of the front, and where the members have to be put behind it."""
    ordered = sorted(manifests, key=lambda m: m.folder)
    files = [(f"{m.folder}/{MANIFEST}", m.to_bytes()) for m in ordered]
    for digest, found in sorted(signatures.items()):
        for signer, data in sorted(found.items()):
            files.append((f"{signature.SIGNATURES}/{signature.file_name(digest, signer)}", signature.to_text(data)))
    front = b"".join(header(name, len(data)) + padded(data) for name, data in files)
    return front, Front(tuple(_placed(ordered, len(front))), dict(signatures), len(front))


def read(data: bytes, arch: str) -> Front:
    """Return what the front of a layer for *arch* says. Raises Damaged for anything that ``plan`` would not write."""
    manifests: list[Manifest] = []
    signatures: dict[str, dict[str, bytes]] = {}
    position = 0
    while position < len(data):
        name, content = _file(data, position)
        position += _BLOCK + len(padded(content))
        if name.endswith(f"/{MANIFEST}"):
            manifest = Manifest.parse(content)
            if manifest.arch != arch or name != f"{manifest.folder}/{MANIFEST}":
                raise Damaged(f"{name!r} is out of place in a layer for {arch}")
            manifests.append(manifest)
        else:
            signed, found = signature.NAME.fullmatch(name.rpartition("/")[2]), signature.from_text(content)
            if signed is None or found is None:
                raise Damaged(f"{name!r} is neither a manifest nor a signature")
            signatures.setdefault(signed[1], {})[signed[2]] = found
    folders = [m.folder for m in manifests]
    if folders != sorted(set(folders)):
        raise Damaged("its entries are not in order")
    front = Front(tuple(_placed(manifests, len(data))), signatures, len(data))
    if plan(manifests, signatures)[0] != data:
        raise Damaged("it is not written as tlhub writes it")
    return front


def member_header(row: Row, name: str) -> bytes:
    return header(f"{row.manifest.folder}/{name}", row.manifest.members[name].size)


def sha256(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def _placed(manifests: Iterable[Manifest], start: int) -> Iterator[Row]:
    for manifest in manifests:
        end = start + sum(_BLOCK + m.size + -m.size % _BLOCK for m in manifest.members.values())
        yield Row(manifest, start, end)
        start = end


def _file(data: bytes, position: int) -> tuple[str, bytes]:
    """Return the name and the content of the file at *position*."""
    try:
        info = tarfile.TarInfo.frombuf(data[position : position + _BLOCK], "ascii", "strict")
    except (tarfile.HeaderError, ValueError) as error:  # UnicodeDecodeError is one
        raise Damaged(f"it is no tar: {error}") from error
    if not 0 <= info.size <= LARGEST_MANIFEST or info.size > len(data) - position - _BLOCK:
        raise Damaged(f"{info.name!r} has {info.size} bytes, more than there are or are allowed")
    return info.name, data[position + _BLOCK : position + _BLOCK + info.size]
