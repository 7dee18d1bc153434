"""The remote store: a registry that lookups read, after all else. What it serves is in the user's cache from then on.

A process asks what the tag means once in a while, and reads the fronts of the archs that it looks for; of members only
those of the entry that serves. A registry that fails is left alone for a minute: a miss is then a miss at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from tlhub.cache import vouching
from tlhub.cache.entry import Damaged, Entry
from tlhub.cache.store import Found, Item, Skipped, Store
from tlhub.errors import CacheError
from tlhub.remote import layer, reading, sync
from tlhub.remote.layer import Row
from tlhub.remote.reading import Shelf
from tlhub.remote.reference import Reference
from tlhub.remote.registry import Registry, check_online

_FRESH, _SULK = 300.0, 60.0  # seconds
_SILENCE, _PAUSES = 5.0, (0.2,)
"""A lookup waits less than a command does: it can build."""


class RemoteStore(Store):
    """The store of *reference*; *cache* gives the store that keeps what is served."""

    def __init__(
        self, reference: Reference, cache: Callable[[], Store], match: str = "revision", signed: str | None = None
    ) -> None:
        super().__init__(str(reference), None, "remote", writable=False, match=match, signed=signed)
        self.reference, self.cache = reference, cache
        self._shelves: dict[str, tuple[Shelf, ...]] = {}
        self._document: tuple[float, bytes | None] = (0.0, None)
        self._failed: tuple[float, str] = (0.0, "")

    def __repr__(self) -> str:
        return f"<Store {self.name} ({self.origin})>"

    def lookup(self, arch: str, kernel: str, problem_digest: str) -> Found:
        """Return the entries of a problem, with their manifests; members come when one is prepared. Never raises."""
        try:
            shelves = self._layers(arch)
        except CacheError as error:  # Damaged is one
            return Found((), (Skipped(self.name, getattr(error, "reason", error.message)),))
        rows = {
            row.manifest.build_digest: RemoteEntry(self, shelf, row)
            for shelf in shelves
            for row in shelf.front.rows
            if row.manifest.problem_digest == problem_digest
        }
        return Found(tuple(rows.values()))

    def entries(self) -> Iterator[Item]:
        """Iterate over the entries that lookups have seen; asks for nothing."""
        for shelf in (shelf for shelves in self._shelves.values() for shelf in shelves):
            for row in shelf.front.rows:
                files = len(row.manifest.members) + 1
                yield Item(layer.folder(row.manifest), row.manifest, None, row.end - row.start, files, 0.0)

    def vouch(self, entry: Entry) -> None:
        if self.wants_signatures and not entry.published:
            vouching.check(entry, self.signed or vouching.policy(), self.signature)

    def signature(self, digest: str, signer: str) -> bytes | None:
        return self.marks().get((digest, signer))

    def marks(self) -> sync.Marks:
        """Return the signatures that lookups have seen."""
        seen = (shelf for shelves in self._shelves.values() for shelf in shelves)
        return {mark: made for shelf in seen for mark, made in shelf.front.signatures.items()}

    def check_readable(self) -> None:
        """Raise CacheError if the registry has nothing under the reference, or does not answer."""
        reading.shelves(self.registry(), archs=())

    def registry(self) -> Registry:
        """Return a connection of this lookup's own: none outlives a fork, or is shared by threads."""
        return Registry(self.reference, silence=_SILENCE, pauses=_PAUSES)

    def _layers(self, arch: str) -> tuple[Shelf, ...]:
        """Return the layers for *arch*. Raises CacheError."""
        check_online()
        now = time.monotonic()
        when, reason = self._failed
        if reason and now - when < _SULK:
            raise CacheError(reason)
        try:
            return self._asked(arch, now)
        except CacheError as error:
            self._failed = (time.monotonic(), getattr(error, "reason", error.message))
            raise

    def _asked(self, arch: str, now: float) -> tuple[Shelf, ...]:
        when, document = self._document
        if document is None or now - when > _FRESH:
            found = self.registry().manifest()
            if found is None:
                raise CacheError(f"there is no {self.reference}")
            if found != document:
                self._shelves = {}
            self._document = (now, document := found)
        if arch not in self._shelves:
            self._shelves[arch] = reading.open_shelves(self.registry(), document, [arch])
        return self._shelves[arch]


class RemoteEntry(Entry):
    """An entry of a registry, until it is prepared: then it is one of the cache."""

    __slots__ = ("_remote", "_row", "_shelf")

    def __init__(self, remote: RemoteStore, shelf: Shelf, row: Row) -> None:
        super().__init__(None, row.manifest, remote.name)
        self._remote, self._shelf, self._row = remote, shelf, row

    def prepare(self) -> None:
        """Bring the entry into the cache, unless it is there. Raises Damaged."""
        if not self.published and not self._held:
            try:
                found = sync.find(self._remote.cache(), self.manifest) or self._download()
                found.prepare()
            except OSError as error:  # CacheError is one
                raise error if isinstance(error, Damaged) else Damaged(getattr(error, "message", str(error))) from error
            self.folder, self.manifest, self.used = found.folder, found.manifest, found.used
            self._held, self._policy = found._held, found._policy
        super().prepare()

    def _download(self) -> Entry:
        cache, item = self._remote.cache(), self._shelf.layer
        for got in reading.download(self._remote.registry(), item, [self._row], cache.stage):
            if got.wrong:
                raise Damaged(got.wrong)
            entry = cache.publish(got.staged, self.manifest)
            if entry.published:
                sync.keep_signatures(cache, self.manifest, self._remote.marks())
        return entry
