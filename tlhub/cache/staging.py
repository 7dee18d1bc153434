"""Staging: private folders in which an entry is written, and what makes one ready to be renamed."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Sequence

from tlhub import quantity
from tlhub.cache import locks
from tlhub.cache.entry import LIBRARY, MANIFEST, Damaged, Folder, Manifest
from tlhub.cache.manifest import LARGEST_MEMBER, check_member
from tlhub.errors import CacheError

_ROOM, _INODES = 2 << 20, 16  # what a build may need while it is staged
_PROBE = ".probe"


class Staged:
    """A private folder to build in: ``path``. ``volatile``: why its entry will live in memory only, or None."""

    def __init__(self, path: str, hold: locks.Hold, volatile: str | None = None) -> None:
        self.path, self.volatile = path, volatile
        self._hold = hold

    def __enter__(self) -> Staged:
        return self

    def __exit__(self, *_: object) -> None:
        self.discard()

    def discard(self) -> None:
        """Remove the folder, unless it was published."""
        if os.path.isdir(self.path):
            import shutil

            shutil.rmtree(self.path, ignore_errors=True)
        self._hold.release()


def private(parent: str) -> Staged:
    """Return a new folder in *parent*, mode 0700, locked for as long as its writer lives. Raises OSError."""
    while True:
        path = f"{parent}/{os.getpid()}-{os.urandom(6).hex()}"
        os.mkdir(path, 0o700)
        with contextlib.suppress(locks.InUse):
            hold = locks.hold(path)
            if _same(path, hold.fd) if hold else os.path.isdir(path):
                return Staged(path, hold)
            hold.release()
        # a cleaner took it for a dead writer's before it was locked: another one


def temporary(reason: str) -> Staged:
    """Return a folder that is no part of any store. Raises CacheError."""
    import tempfile

    try:
        return Staged(tempfile.mkdtemp(prefix="tlhub-"), locks.Hold(), reason)
    except OSError as error:
        raise CacheError(
            f"there is no folder to build in: not the cache ({reason}), and no temporary one ({error})",
            hint="export TMPDIR=/a/folder/that/you/can/write",
        ) from error


def no_room(path: str) -> str | None:
    """Return why the file system has no room to build in, or None."""
    try:
        found = os.statvfs(path)
    except (OSError, AttributeError):  # the attempt will tell; Windows has no statvfs
        return None
    if found.f_bavail * found.f_frsize < _ROOM:
        return f"{path}: the disk is full: it has {found.f_bavail * found.f_frsize} bytes left"
    if found.f_files and found.f_favail < _INODES:
        return f"{path}: the disk has no inodes left"
    return None


def room(path: str) -> str:
    """Return how much room the file system has, for people to read after other facts; "" where it does not tell."""
    try:
        found = os.statvfs(path)
    except (OSError, AttributeError):
        return ""
    return f", {quantity.size(found.f_bavail * found.f_frsize)} free"


def collect(path: str, members: Sequence[str] | None) -> dict[str, bytes]:
    """Return the bytes of *members* (None: of every file) in the folder *path*. Raises CacheError."""
    names = sorted(os.listdir(path) if members is None else members)
    if LIBRARY not in names:
        raise CacheError(f"nothing to publish: no {LIBRARY!r} among {names!r}")
    data = {}
    with Folder(path) as opened:
        for name in names:
            try:
                check_member(name)
                data[name], _ = opened.read(name, LARGEST_MEMBER, None)
            except (ValueError, Damaged) as error:
                raise CacheError(f"nothing to publish: {getattr(error, 'reason', error)}") from error
    return data


def seal(path: str, manifest: Manifest, mode: int) -> None:
    """Make the folder *path* what is published: the members, ``entry.json``, modes by the umask, all on disk.

    *mode* is of new folders, before the umask. Raises OSError.
    """
    _drop_others(path, manifest)
    folder_mode = _mode_of_new(path, mode)
    fd = os.open(f"{path}/{MANIFEST}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(fd, "wb") as file:
        file.write(manifest.to_bytes())
    for name in (*manifest.members, MANIFEST):
        with contextlib.suppress(OSError):  # a file system without modes
            os.chmod(f"{path}/{name}", folder_mode & 0o666)
        sync(f"{path}/{name}")
    sync(path)
    with contextlib.suppress(OSError):
        os.chmod(path, folder_mode)


def sync(path: str) -> None:
    """Have a file or folder on disk. Raises OSError."""
    if os.name == "nt":  # no handles of folders there, and files want one for writing
        return
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _drop_others(path: str, manifest: Manifest) -> None:
    with os.scandir(path) as found:
        others = [child for child in found if child.name not in manifest.members]
    for child in others:
        if child.is_dir(follow_symlinks=False):
            import shutil

            shutil.rmtree(child.path)
        else:
            os.unlink(child.path)


def _mode_of_new(path: str, mode: int) -> int:
    """Return the mode that a new folder gets: asking the umask itself would change it for other threads."""
    os.mkdir(f"{path}/{_PROBE}", mode)
    try:
        return stat.S_IMODE(os.lstat(f"{path}/{_PROBE}").st_mode)
    finally:
        os.rmdir(f"{path}/{_PROBE}")


def _same(path: str, fd: int) -> bool:
    try:
        here, held = os.lstat(path), os.fstat(fd)
    except OSError:
        return False
    return (here.st_dev, here.st_ino) == (held.st_dev, held.st_ino)
