"""The remote store: a registry that lookups read, after all else. What it serves is in the user's cache from then on.

A process asks what the tag means once in a while, and reads the fronts of the archs that it looks for; of members only
those of the entry that serves. A registry that fails is left alone for a minute: a miss is then a miss at once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, TimeoutError
from typing import NamedTuple, TypeVar

from tlhub.cache import copying, vouching
from tlhub.cache.entry import Damaged, Entry
from tlhub.cache.store import Found, Item, Skipped, Store
from tlhub.errors import CacheError, TlhubError
from tlhub.remote import reading, sync
from tlhub.remote.artifact import Layer
from tlhub.remote.layer import Marks, Row
from tlhub.remote.reading import Shelf
from tlhub.remote.reference import Reference
from tlhub.remote.registry import Registry, Unsteady, check_online

_FRESH, _SULK = 300.0, 60.0  # seconds
_SILENCE, _PAUSES = 5.0, (0.2,)
"""A lookup waits less than a command does: it can build."""

_PATIENCE, _SLOWEST = 30.0, 128 << 10  # seconds in all, and bytes a second of what is downloaded besides

T = TypeVar("T")


class RemoteStore(Store):
    """The store of *reference*; *cache* gives the store that keeps what is served."""

    def __init__(
        self, reference: Reference, cache: Callable[[], Store], match: str = "revision", signed: str | None = None
    ) -> None:
        super().__init__(str(reference), None, "remote", writable=False, match=match, signed=signed)
        self.reference, self.cache = reference, cache
        self._archs: dict[str, _Known] = {}
        self._document: tuple[float, bytes | None] = (0.0, None)
        self._failed: tuple[float, str] = (0.0, "")

    def __repr__(self) -> str:
        return f"<Store {self.name} ({self.origin})>"

    def lookup(self, arch: str, kernel: str, problem_digest: str) -> Found:
        """Return the entries of a problem, with their manifests; members come when one is prepared. Never raises."""
        try:
            known = self._known(arch)
        except TlhubError as error:
            return Found((), (Skipped(self.name, getattr(error, "reason", error.message)),))
        return Found(tuple(RemoteEntry(self, item, row) for item, row in known.rows.get(problem_digest, ())))

    def entries(self) -> Iterator[Item]:
        """Iterate over the entries that lookups have seen; asks for nothing."""
        for known in self._archs.values():
            for _, row in (pair for found in known.rows.values() for pair in found):
                files = len(row.manifest.members) + 1
                yield Item(row.manifest.folder, row.manifest, None, row.end - row.start, files, 0.0)

    def vouch(self, entry: Entry) -> None:
        if self.wants_signatures and not entry.published:
            vouching.check(entry, self.signed or vouching.policy(), self.signature)

    def signature(self, digest: str, signer: str) -> bytes | None:
        return self.signatures(digest).get(signer)

    def signatures(self, digest: str) -> Mapping[str, bytes]:
        """Return the signatures of a manifest by key, of those that lookups have seen."""
        return next((known.marks[digest] for known in self._archs.values() if digest in known.marks), {})

    def leave_alone(self, error: CacheError) -> None:
        """Ask the registry nothing for a while, for it failed."""
        self._failed = (time.monotonic(), getattr(error, "reason", error.message))

    def check_readable(self) -> None:
        """Raise CacheError if the registry has nothing under the reference, or does not answer."""
        reading.shelves(self.registry(), archs=())

    def registry(self) -> Registry:
        """Return a connection of this lookup's own: none outlives a fork, or is shared by threads."""
        return Registry(self.reference, silence=_SILENCE, pauses=_PAUSES)

    def within(self, seconds: float, work: Callable[[], T]) -> T:
        """Return what *work* does, in a thread of its own. Raises Unsteady where that takes too long.

        A byte now and then keeps any connection's time-out from coming.
        """
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        try:
            return future.result(seconds)
        except TimeoutError:
            raise Unsteady(f"{self.reference.host} is too slow: nothing whole in {seconds:.0f} s") from None

    def _known(self, arch: str) -> _Known:
        """Return what there is for *arch*. Raises CacheError."""
        check_online()
        now = time.monotonic()
        when, reason = self._failed
        if reason and now - when < _SULK:
            raise CacheError(reason)
        try:
            return self.within(_PATIENCE, lambda: self._asked(arch, now))
        except CacheError as error:
            self.leave_alone(error)
            raise

    def _asked(self, arch: str, now: float) -> _Known:
        when, document = self._document
        if document is None or now - when > _FRESH:
            found = self.registry().manifest()
            if found is None:
                raise CacheError(f"there is no {self.reference}")
            if found != document:
                self._archs = {}
            self._document = (now, document := found)
        if arch not in self._archs:
            self._archs[arch] = _Known.of(reading.open_shelves(self.registry(), document, [arch]))
        return self._archs[arch]


class _Known(NamedTuple):
    """What the layers for an arch say: by problem digest the places of its entries, and signatures."""

    rows: dict[str, list[tuple[Layer, Row]]]
    marks: Marks

    @classmethod
    def of(cls, shelves: tuple[Shelf, ...]) -> _Known:
        # of those that several layers have one: others of the same build may be signed where it is not
        found = {row.manifest.sha256: (shelf.layer, row) for shelf in shelves for row in shelf.front.rows}
        rows: dict[str, list[tuple[Layer, Row]]] = {}
        for item, row in found.values():
            rows.setdefault(row.manifest.problem_digest, []).append((item, row))
        return cls(rows, sync.merged(shelves))


class RemoteEntry(Entry):
    """An entry of a registry, until it is prepared: then it is one of the cache."""

    __slots__ = ("_layer", "_remote", "_row")

    def __init__(self, remote: RemoteStore, item: Layer, row: Row) -> None:
        super().__init__(None, row.manifest, remote.name)
        self._remote, self._layer, self._row = remote, item, row

    @property
    def afar(self) -> bool:
        return not self.published and not self._held

    def prepare(self) -> None:
        """Bring the entry into the cache, unless it is there. Raises Damaged."""
        if self.afar:
            try:
                seconds = _PATIENCE + (self._row.end - self._row.start) / _SLOWEST
                found = copying.find(self._remote.cache(), self.manifest)
                found = found or self._remote.within(seconds, self._download)
                found.prepare()
            except OSError as error:  # CacheError is one
                if isinstance(error, Unsteady):
                    self._remote.leave_alone(error)
                raise error if isinstance(error, Damaged) else Damaged(getattr(error, "message", str(error))) from error
            self.folder, self.manifest, self.used = found.folder, found.manifest, found.used
            self._held, self._policy = found._held, found._policy
        super().prepare()

    def _download(self) -> Entry:
        cache, manifest = self._remote.cache(), self.manifest
        for got in reading.download(self._remote.registry(), self._layer, [self._row], cache.stage):
            if got.wrong:
                raise Damaged(got.wrong)
            signatures = {} if got.staged.volatile else self._remote.signatures(manifest.sha256)
            with vouching.keeping(cache, manifest, signatures):
                entry = cache.publish(got.staged, manifest)
        return entry
