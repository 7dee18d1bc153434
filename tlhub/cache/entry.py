"""Entries: a compiled library and the manifest that vouches for each of its bytes. They never change.

Everything read from disk is bounded, opened without following links, and hashed; the bytes that were
hashed are the bytes that are handed out.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
from collections.abc import Mapping

from tlhub.cache import trust
from tlhub.cache.locks import Hold, InUse, hold
from tlhub.cache.manifest import LARGEST_MANIFEST, LIBRARY, MANIFEST, Damaged, Manifest, Member

__all__ = ["LARGEST_MANIFEST", "LIBRARY", "MANIFEST", "Damaged", "Entry", "Manifest", "Member", "Folder"]

_NOFOLLOW = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
_FILE = os.O_RDONLY | _NOFOLLOW | getattr(os, "O_NONBLOCK", 0)  # a pipe in a member's place must not hang
_FOLDER = os.O_RDONLY | _NOFOLLOW | getattr(os, "O_DIRECTORY", 0)
_BY_FD = os.open in os.supports_dir_fd
_SMALL = 64 << 10  # bytes


class Entry:
    """A manifest and where its members are: a folder of a store, or memory (``folder`` is None).

    ``published``: the entry is in a store, where others find it.
    """

    __slots__ = ("_held", "_hold", "_policy", "folder", "manifest", "store_name", "used")

    def __init__(
        self,
        folder: str | None,
        manifest: Manifest,
        store_name: str,
        *,
        policy: trust.Policy = trust.STRICT,
        held: Mapping[str, bytes] | None = None,
        used: float = 0.0,
    ) -> None:
        self.folder, self.manifest, self.store_name, self.used = folder, manifest, store_name, used
        self._policy = policy
        self._held = dict(held or {})
        self._hold: Hold | None = None

    @classmethod
    def open(cls, folder: str, store_name: str, policy: trust.Policy) -> Entry:
        """Return the entry in *folder*, its manifest verified, its members not yet. Raises Damaged."""
        with Folder(folder) as opened:
            refused = trust.refusal_of_folder(folder, opened.info(), policy)
            if refused:
                raise Damaged(refused)
            data, info = opened.read(MANIFEST, LARGEST_MANIFEST, policy)
        manifest = Manifest.parse(data)
        _check_folder(folder, manifest)
        return cls(folder, manifest, store_name, policy=policy, used=info.st_mtime)

    def __repr__(self) -> str:
        return f"<Entry {self.manifest.kernel} {self.key[:16]} in {self.store_name}: {self.folder or 'memory'}>"

    @property
    def key(self) -> str:
        return self.manifest.build_digest

    @property
    def published(self) -> bool:
        return self.folder is not None

    @property
    def afar(self) -> bool:
        """Whether the members are on another machine, from which ``prepare`` brings them."""
        return False

    def hold(self) -> Hold:
        """Say that the entry is in use for as long as this object lives: ``prune`` then spares it.

        The Hold is false where that cannot be said: in memory, on a file system without locks.
        """
        if not self._hold and self.folder is not None:
            with contextlib.suppress(InUse):  # being removed this moment: what was read of it is in memory
                self._hold = hold(f"{self.folder}/{MANIFEST}")
        return self._hold or Hold()

    def read(self, member: str) -> bytes:
        """Return the member's bytes, of the size and the SHA-256 that the manifest states. Raises Damaged.

        The library's bytes that ``prepare`` read are handed out once and then forgotten; an entry in
        memory keeps its own.
        """
        if self.folder is None:
            if member in self._held:
                return self._held[member]
        elif member in self._held:
            return self._held.pop(member)
        known = self.manifest.members.get(member)
        if known is None:
            raise Damaged(f"no member {member!r}; it has {', '.join(self.manifest.members)}")
        if self.folder is None:
            raise Damaged(f"{member} is not in memory")
        with Folder(self.folder) as opened:
            return self._read(opened, member, known)

    def verify(self) -> None:
        """Read and hash every member. Raises Damaged."""
        if self.folder is not None:
            with Folder(self.folder) as opened:
                for name, known in self.manifest.members.items():
                    self._read(opened, name, known)

    def prepare(self) -> None:
        """Make sure that the entry can be loaded, keeping the library's bytes for the next ``read``. Raises Damaged.

        The library is read and hashed; so is the rest if it is small. Of larger texts, which would take longer
        than all else in a lookup, presence and size are checked here, and their bytes when they are read.
        """
        if self.folder is None or LIBRARY in self._held:
            return
        members = self.manifest.members
        small = sum(known.size for known in members.values()) - members[LIBRARY].size <= _SMALL
        with Folder(self.folder) as opened:
            library = self._read(opened, LIBRARY, members[LIBRARY])
            for name, known in members.items():
                if name != LIBRARY and small:
                    self._read(opened, name, known)
                elif name != LIBRARY and (size := opened.size(name, self._policy)) != known.size:
                    raise Damaged(f"{name} is torn: {size} bytes, not {known.size}")
        self._held[LIBRARY] = library

    def _read(self, opened: Folder, name: str, known: Member) -> bytes:
        data, _ = opened.read(name, known.size, self._policy)
        if len(data) != known.size:
            raise Damaged(f"{name} is torn: {len(data)} bytes, not {known.size}")
        if hashlib.sha256(data).hexdigest() != known.sha256:
            raise Damaged(f"{name} is altered: its SHA-256 is not the manifest's")
        return data


class Folder:
    """An open folder: what is read through it is in that folder, whatever is renamed meanwhile."""

    __slots__ = ("fd", "path")

    def __init__(self, path: str) -> None:
        self.path, self.fd = path, -1
        try:
            if _BY_FD:
                self.fd = os.open(path, _FOLDER)
            elif os.path.islink(path):
                raise Damaged(f"{path} is a link; a store follows none")
        except OSError as error:
            raise Damaged(_why(path, error)) from error

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *_: object) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def info(self) -> os.stat_result:
        return os.fstat(self.fd) if self.fd >= 0 else os.lstat(self.path)

    def size(self, name: str, policy: trust.Policy) -> int:
        """Return the size of a regular file. Raises Damaged."""
        try:
            info = os.lstat(name, dir_fd=self.fd) if self.fd >= 0 else os.lstat(f"{self.path}/{name}")
        except OSError as error:
            raise Damaged(_why(name, error)) from error
        if not stat.S_ISREG(info.st_mode):
            raise Damaged(f"{name} is not a regular file")
        refused = trust.refusal(f"{self.path}/{name}", info, policy)
        if refused:
            raise Damaged(refused)
        return info.st_size

    def read(self, name: str, limit: int, policy: trust.Policy | None) -> tuple[bytes, os.stat_result]:
        """Return the bytes of a regular file of at most *limit* bytes, and its stat. Raises Damaged.

        No *policy*: whoever may have written it, for a folder that is private.
        """
        return _read(self.path, name, limit, policy, self.fd if self.fd >= 0 else None)


def glance(folder: str, policy: trust.Policy) -> tuple[Manifest, os.stat_result]:
    """Return the manifest in *folder* as ``Manifest.glance`` reads it, and the stat of its file. Raises Damaged.

    For listings: the folder is not opened, and so may be another one by the time that its members are read.
    """
    data, info = _read(folder, MANIFEST, LARGEST_MANIFEST, policy)
    manifest = Manifest.glance(data)
    _check_folder(folder, manifest)
    return manifest, info


def _check_folder(folder: str, manifest: Manifest) -> None:
    if not os.path.basename(folder).startswith(manifest.build_digest[:16]):
        raise Damaged("it is in the folder of another build")


def _read(
    folder: str, name: str, limit: int, policy: trust.Policy | None, at: int | None = None
) -> tuple[bytes, os.stat_result]:
    """Do what ``Folder.read`` does; *at*: the descriptor of the folder, where it is open."""
    path = f"{folder}/{name}"
    try:
        fd = os.open(path if at is None else name, _FILE, dir_fd=at)
    except OSError as error:
        raise Damaged(_why(name, error)) from error
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise Damaged(f"{name} is not a regular file")
        if info.st_size > limit:
            raise Damaged(f"{name} is {info.st_size} bytes, more than the {limit} allowed")
        refused = None if policy is None else trust.refusal(path, info, policy)
        if refused:
            raise Damaged(refused)
        data = os.read(fd, info.st_size)
        while len(data) < info.st_size and (more := os.read(fd, info.st_size - len(data))):
            data += more
        return data, info
    except OSError as error:
        raise error if isinstance(error, Damaged) else Damaged(_why(name, error)) from error
    finally:
        os.close(fd)


def _why(name: str, error: OSError) -> str:
    if error.errno == errno.ENOENT:
        return f"{name} is missing"
    if error.errno == errno.ELOOP:
        return f"{name} is a link; a store follows none"
    return f"{name} cannot be read: {os.strerror(error.errno) if error.errno else error}"
