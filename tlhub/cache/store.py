"""Stores: a folder of entries. Lookups never raise and never write; publishing never takes a kernel away.

    <root>/v1/<arch>/<kernel>/<problem digest>/<build digest>/entry.json, kernel.so, ...
    <root>/v1/.staging/   folders being written, one a writer, each locked by it
    <root>/v1/.locks/     locks of keys
    <root>/v1/.damaged/   what repair moved away
    <root>/v1/.keeps/, .stats/, .tended   see the modules keeps, stats and upkeep

An entry appears whole, by one rename. What cannot be kept on disk is kept in memory, with one warning.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from tlhub.cache import key, listing, locks, placing, staging, trust
from tlhub.cache.entry import MANIFEST, Damaged, Entry, Manifest, Member
from tlhub.cache.listing import VERSION, Item
from tlhub.cache.staging import Staged
from tlhub.errors import CacheError

__all__ = ["DAMAGED", "LOCKS", "STAGING", "VERSION", "Found", "Item", "Skipped", "Staged", "Store"]

STAGING = f"{VERSION}/.staging"
LOCKS = f"{VERSION}/.locks"
DAMAGED = f"{VERSION}/.damaged"

_DAY = 86400.0
_ELSEWHERE = "export TLHUB_CACHE_DIR=/a/folder/that/you/can/write"


class Skipped(NamedTuple):
    """A folder that a lookup did not take, and why."""

    folder: str
    reason: str


class Found(NamedTuple):
    """What a store has for one problem: entries whose manifests are whole, and what was skipped."""

    entries: tuple[Entry, ...]
    skipped: tuple[Skipped, ...] = ()


class Store:
    """A place that holds entries.

    ``root``: its folder, made when first written to; None keeps everything in memory.
    ``origin``: what a hit here is called: cache, site, prebuilt or remote. ``match``: the loosest match that
    it serves: exact, compatible or revision. ``shared``: folders may be group-writable, and new ones follow
    the umask; a root that is setgid and group-writable says so by itself. ``owners``: users (ids or names)
    whose entries are trusted besides one's own and root's. ``signed``: whether an entry wants the signature of a key
    that the user trusts: off, warn or require; None is as TLHUB_SIGNED says.
    """

    def __init__(
        self,
        name: str,
        root: str | os.PathLike[str] | None,
        origin: str = "cache",
        writable: bool = True,
        shared: bool = False,
        owners: Iterable[int | str] = (),
        match: str = "revision",
        signed: str | None = None,
    ) -> None:
        self.name, self.origin, self.writable, self.match, self.signed = name, origin, writable, match, signed
        self.root = None if root is None else os.path.realpath(os.fspath(root))
        self.policy = trust.policy(shared, owners)
        self._kept: dict[str, list[Entry]] = {}
        self._warned = False
        self.unkept: CacheError | None = None
        """Why the last entry that is kept in memory only is not in the folder, and the remedy."""

    def __repr__(self) -> str:
        return f"<Store {self.name} ({self.origin}): {self.root or 'memory'}>"

    # -- reading -----------------------------------------------------------------------------------

    def lookup(self, arch: str, kernel: str, problem_digest: str) -> Found:
        """Return the entries of a problem, their manifests verified, their members not yet. Never raises."""
        entries, skipped = list(self._kept.get(problem_digest, ())), []
        if self.root is not None:
            below = key.parent(arch, kernel, problem_digest)
            folder = f"{self.root}/{below}"
            names, rule, refused = self._names(below)
            if refused:
                skipped.append(Skipped(folder, refused))
            for name in names:
                try:
                    entry = Entry.open(f"{folder}/{name}", self.name, rule)
                    if entry.manifest.problem_digest != problem_digest:
                        raise Damaged("it is in the folder of another problem")
                    entries.append(entry)
                except OSError as error:  # Damaged is one
                    reason = error.reason if isinstance(error, Damaged) else error.strerror or str(error)
                    skipped.append(Skipped(f"{folder}/{name}", reason))
        return Found(tuple(entries), tuple(skipped))

    def entries(self) -> Iterator[Item]:
        """Iterate over everything below the root that is, or stands where there should be, an entry."""
        if self.root is None:
            return iter(())
        try:
            return listing.items(self.root, *self._walk(""))
        except OSError:  # there is no root
            return iter(())

    def open(self, item: Item) -> Entry:
        """Return the entry that *item* is. Raises Damaged."""
        below, _, _ = item.folder.rpartition("/")
        try:
            rule, refused = self._walk(below)
        except OSError as error:
            raise Damaged(f"{item.folder} cannot be read: {error.strerror}") from error
        if refused:
            raise Damaged(refused)
        entry = Entry.open(f"{self.root}/{item.folder}", self.name, rule)
        if below != entry.manifest.parent:
            raise Damaged("it is in the folder of another problem")
        return entry

    def vouch(self, entry: Entry) -> None:
        """Raise Damaged where the store wants a trusted signature of the entry and there is none, or warn of it."""
        if self.wants_signatures and entry.published:  # what was never in a folder is this process's own
            from tlhub.cache import vouching

            vouching.check(entry, self.signed or vouching.policy(), self.signature)

    @property
    def wants_signatures(self) -> bool:
        return (self.signed or os.environ.get("TLHUB_SIGNED") or "off") != "off"

    def signature(self, digest: str, signer: str) -> bytes | None:
        """Return the signature of a manifest by a key, not verified, or None. *signer*: the key's id."""
        from tlhub.cache import signature

        return None if self.root is None else signature.read(self.root, digest, signer)

    def forget(self) -> None:
        """Drop the entries that are kept in memory."""
        self._kept.clear()

    def touch(self, entry: Entry, now: float) -> None:
        """Note that the entry was used: at most once a day, in the time stamp of its manifest; errors are ignored."""
        if self.writable and entry.folder is not None and abs(now - entry.used) > _DAY:
            with contextlib.suppress(OSError):
                os.utime(f"{entry.folder}/{MANIFEST}", (now, now))

    def _names(self, below: str) -> tuple[list[str], trust.Policy, str | None]:
        """Return the names in a folder below the root, the policy in force, and why it is refused, or None."""
        names: list[str] = []
        seen = ""  # of a plain miss only the root is judged, to say why there will never be a hit
        try:
            try:
                names, seen = os.listdir(f"{self.root}/{below}"), below
            except FileNotFoundError:
                pass
            except NotADirectoryError:
                seen = below
            rule, refused = self._walk(seen)
        except FileNotFoundError:  # no root yet, or removed this moment
            return [], self.policy, None
        except OSError as error:
            return [], self.policy, f"{self.root}/{below}: {error.strerror or error}"
        return [] if refused else sorted(names), rule, refused

    def _walk(self, below: str) -> tuple[trust.Policy, str | None]:
        assert self.root is not None
        return trust.walk(self.root, below, self.policy)

    def check_readable(self) -> None:
        """Raise CacheError, with the remedy, if the folder is missing or not to be trusted: nothing in it is served."""
        try:
            reason = self._walk("")[1] if self.root is not None else None
        except OSError as error:
            reason = f"{self.root}: {error.strerror or error}"
        if reason:
            text, hint = trust.remedy(reason)
            raise CacheError(f"nothing is served from {self.name}: {text}", hint=hint)

    # -- writing -----------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise CacheError, with the remedy, if entries cannot be kept here."""
        if not self.writable:
            raise CacheError(f"the store {self.name!r} is read-only: {self.root}")
        reason = self._prepare()
        if reason is None:
            try:
                self._staged().discard()
            except OSError as error:
                reason = f"{self.root}: {error.strerror or error}"
        if reason:
            text, hint = trust.remedy(reason)
            raise CacheError(f"the cache folder cannot be used: {text}", hint=hint or _ELSEWHERE)

    def stage(self) -> Staged:
        """Return a private folder, mode 0700, to build in, on the store's file system.

        Where the store cannot take it (a file in its place, read-only, full, not to be trusted) the folder
        is a temporary one, and what is published from it lives in memory. Raises CacheError if there is
        no place for that either.
        """
        if not self.writable:
            raise CacheError(f"the store {self.name!r} is read-only: {self.root}")
        reason = self._prepare() or staging.no_room(str(self.root))
        if reason is None:
            try:
                return self._staged()
            except OSError as error:
                reason = f"{self.root}: {error.strerror or error}"
        return staging.temporary(reason)

    def _staged(self) -> Staged:
        return staging.private(f"{self.root}/{STAGING}")

    def publish(
        self, staged: Staged, manifest: Manifest, members: Sequence[str] | None = None, *, own: bool = False
    ) -> Entry:
        """Make an entry of the files in *staged* (of all, or of *members*) and return it.

        *own*: this process compiled it, so that it needs nobody's signature to be served to this user.

        Its bytes are in the Entry already. If another writer was first, the entry is that one's, if it
        verifies; a damaged one stays where it is, and the new one goes beside it. If the store takes
        nothing, the entry lives in memory, with one warning a store. Raises CacheError only for a member
        that is missing or misnamed.
        """
        data = staging.collect(staged.path, members)
        manifest = manifest.with_members({name: Member.of(content) for name, content in data.items()})
        try:
            Manifest.parse(manifest.to_bytes())  # what no reader would take is not published
        except (Damaged, TypeError, ValueError) as error:
            raise CacheError(f"nothing to publish: {getattr(error, 'reason', error)}") from error
        reason, entry = staged.volatile, None
        if reason is None:
            try:
                entry = placing.place(self, staged.path, manifest, data)
            except OSError as error:  # full, read-only, stale, another device ...
                reason = error.reason if isinstance(error, Damaged) else f"{self.root}: {error.strerror or error}"
        staged.discard()
        if own and self.wants_signatures and entry is not None and entry.manifest is manifest:
            from tlhub.cache import vouching

            vouching.adopt(manifest)
        if entry is None:
            entry = Entry(None, manifest, self.name, held=data)
            self._kept.setdefault(manifest.problem_digest, []).append(entry)
            text, hint = trust.remedy(reason or "another writer's entry is damaged")
            text = f"kernels are not kept in {self.root}, only in memory: {text}"
            self.unkept = CacheError(text, hint=hint or _ELSEWHERE)
            if self.root is not None and not self._warned:
                self._warned = True
                warnings.warn(str(self.unkept), RuntimeWarning, stacklevel=2)
        entry.hold()
        if entry.published and self.origin == "cache":  # a site's folder is for whoever keeps it to prune
            from tlhub.cache import upkeep  # it needs this module

            upkeep.published(self, sum(map(len, data.values())))
        return entry

    def lock(
        self, name: str, timeout: float = 60.0, waiting: Callable[[str], None] | None = None
    ) -> contextlib.AbstractContextManager[locks.Lock]:
        """Lock a key among all processes, for ``with``: at most *timeout* seconds of waiting, and never an error.

        The Lock is false, and names the holder, where it could not be had. ``waiting(holder)`` is called once
        when it has to wait.
        """
        if self.root is None or not self.writable or self._prepare():
            return contextlib.nullcontext(locks.Lock(False))
        mode = self.mode() & 0o666
        short = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:20]
        return locks.keyed(f"{self.root}/{LOCKS}", short, timeout, waiting, mode)

    def _prepare(self) -> str | None:
        """Make the folders that writing needs; return why that, or trusting them, is not possible, or None."""
        if self.root is None:
            return "everything is kept in memory"
        try:
            if not os.path.lexists(self.root):
                os.makedirs(os.path.dirname(self.root), exist_ok=True)
                with contextlib.suppress(FileExistsError):
                    os.mkdir(self.root, 0o700)
            return self._walk("")[1] or self.make(STAGING)[1] or self.make(LOCKS)[1]
        except OSError as error:
            return f"{self.root}: {error.strerror or error}"

    def make(self, below: str) -> tuple[trust.Policy, str | None]:
        """Make the folder and those above it, as the umask says; return what ``trust.walk`` does."""
        path = self.root
        for part in below.split("/"):
            path = f"{path}/{part}"
            with contextlib.suppress(FileExistsError):
                os.mkdir(path, self.mode())
        return self._walk(below)

    def own(self, below: str) -> str | None:
        """Return the path of a folder below the root, made where it is missing, or None where nothing can be kept."""
        if self.root is None or not self.writable or self._prepare() or self.make(below)[1]:
            return None
        return f"{self.root}/{below}"

    def mode(self) -> int:
        """Return the mode of new folders, before the umask: others write only where that is declared."""
        assert self.root is not None
        return 0o777 if self.policy.shared or trust.declares_sharing(os.lstat(self.root)) else 0o755
