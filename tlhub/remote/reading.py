"""Reading what a registry has: fronts, then the members of single entries, each held against its digest.

Members go from the connection to files, in the order of the layer: few requests, and memory that does not grow.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from tlhub.cache.manifest import Damaged
from tlhub.cache.staging import Staged
from tlhub.errors import CacheError
from tlhub.remote import artifact, layer
from tlhub.remote.artifact import Layer
from tlhub.remote.layer import Front, Row
from tlhub.remote.registry import Registry

_GAP = 128 << 10
"""Bytes that are dropped sooner than another request is made."""


class Shelf(NamedTuple):
    """A layer of a registry, and its front."""

    layer: Layer
    front: Front


class Got(NamedTuple):
    """An entry that was downloaded: its members in a private folder, or what is ``wrong`` with them."""

    row: Row
    staged: Staged
    wrong: str | None


def shelves(registry: Registry, archs: Sequence[str] | None = None) -> tuple[str, tuple[Shelf, ...]]:
    """Return the digest of what the reference means, and its layers, or those for *archs*.

    Raises CacheError where there is nothing, and Damaged.
    """
    data = registry.manifest()
    if data is None:
        command = "ls" if registry.reference.digest else "push"  # a state cannot be pushed; the tag may mean another
        tag = registry.reference._replace(digest=None)
        raise CacheError(f"there is no {registry.reference}", hint=f"tlhub remote {command} {tag}")
    return layer.sha256(data), open_shelves(registry, data, archs)


def open_shelves(registry: Registry, document: bytes, archs: Sequence[str] | None = None) -> tuple[Shelf, ...]:
    """Return the layers that the artifact *document* lists. Raises CacheError and Damaged."""
    listed = [item for item in artifact.parse(document) if archs is None or item.arch in archs]
    return tuple(Shelf(item, _front(registry, item)) for item in listed)


def download(registry: Registry, item: Layer, rows: Sequence[Row], stage: Callable[[], Staged]) -> Iterator[Got]:
    """Iterate over *rows* of a layer, in its order, as they are downloaded; what came altered is asked for once more.

    A folder that was not published is gone when the next is asked for. Raises CacheError: what came before is whole.
    """
    for group in _groups(rows):
        position = group[0].start
        stream = Stream(registry.read(item.digest, position, group[-1].end))
        for row in group:
            stream.drop(row.start - position)
            with stage() as staged:
                wrong = _fill(staged.path, row, stream)
                if wrong:
                    wrong = _fill(staged.path, row, Stream(registry.read(item.digest, row.start, row.end)))
                position = row.end
                yield Got(row, staged, wrong)


def verify(registry: Registry, shelf: Shelf) -> Iterator[tuple[Row | None, str]]:
    """Read a layer whole, and iterate over what is wrong: which entry, or None for the layer itself, and why."""
    stream = Stream(registry.read(shelf.layer.digest, 0, shelf.layer.size))
    stream.drop(shelf.front.size)
    for row in shelf.front.rows:
        wrong = _fill(None, row, stream)
        if wrong:
            yield row, wrong
    stream.drop(len(layer.END))
    if stream.digest != shelf.layer.digest:
        yield None, "the bytes of the layer are not those that its digest names"


class Stream:
    """Chunks of bytes, taken in pieces of any size. ``digest``: of what was taken."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks, self._rest, self._hash = chunks, b"", hashlib.sha256()

    @property
    def digest(self) -> str:
        return f"sha256:{self._hash.hexdigest()}"

    def take(self, size: int) -> Iterator[bytes]:
        """Iterate over the next *size* bytes. Raises CacheError where they end before."""
        while size:
            chunk = self._rest or next(self._chunks, b"")
            if not chunk:
                raise CacheError(f"the registry ended a layer {size} bytes early")
            piece, self._rest = chunk[:size], chunk[size:]
            size -= len(piece)
            self._hash.update(piece)
            yield piece

    def drop(self, size: int) -> None:
        for _ in self.take(size):
            pass


def _fill(folder: str | None, row: Row, stream: Stream) -> str | None:
    """Read the members of an entry, into *folder* if there is one, and return what is wrong with them, or None."""
    wrong = None
    for name, before, behind in row.members():
        known, content = row.manifest.members[name], hashlib.sha256()
        stream.drop(before)
        with open(os.devnull if folder is None else f"{folder}/{name}", "wb") as file:
            for piece in stream.take(known.size):
                content.update(piece)
                file.write(piece)
        stream.drop(behind)
        if content.hexdigest() != known.sha256:
            wrong = wrong or f"{name} is altered: its SHA-256 is not the manifest's"
    return wrong


def _groups(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """Iterate over *rows* in groups that one request reads."""
    group: list[Row] = []
    for row in sorted(rows, key=lambda row: row.start):
        if group and row.start - group[-1].end > _GAP:
            yield group
            group = []
        group.append(row)
    if group:
        yield group


def _front(registry: Registry, item: Layer) -> Front:
    for _ in range(2):  # what came altered is asked for once more
        data = b"".join(registry.read(item.digest, 0, item.front_size))
        if layer.sha256(data) == item.front_digest:
            front = layer.read(data, item.arch)
            if front.layer_size != item.size:
                raise Damaged(f"layer {item.digest} has {item.size} bytes, its manifests speak of {front.layer_size}")
            return front
    raise Damaged(f"layer {item.digest}: its manifests are not those that the artifact names")
