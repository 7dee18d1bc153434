"""Locks: they save work and say what is in use; nothing is right or wrong because of one.

All are locks of the operating system, so that the death of a process ends its locks. What is there anyway
(an ``entry.json``, a staging folder) is locked itself; the lock of a key has a file under ``.locks``.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from typing import NamedTuple

from tlhub.files import HOST
from tlhub.specs import Finding

try:
    import fcntl
except ImportError:  # Windows: an open file keeps its folder from being renamed, which is hold enough
    fcntl = None  # type: ignore[assignment]

_OPEN = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
_BUSY = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)


class InUse(Exception):
    """Another holds what was to be claimed."""


class Hold:
    """A lock on a file or folder until it is released or collected; false where there can be no lock."""

    __slots__ = ("fd",)

    def __init__(self, fd: int = -1) -> None:
        self.fd = fd

    def __bool__(self) -> bool:
        return self.fd >= 0

    def release(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):
                os.close(fd)

    def __enter__(self) -> Hold:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __del__(self) -> None:
        if contextlib is not None:  # modules are emptied when the process ends, which releases what it holds
            self.release()


def hold(path: str) -> Hold:
    """Say that *path* is in use: a shared lock, or a false Hold where there can be none. Raises InUse if claimed."""
    try:
        return _locked(path, os.O_RDONLY, shared=True)
    except OSError:
        return Hold()


def claim(path: str) -> Hold:
    """Make sure that nobody holds *path*: an exclusive lock, or a false Hold where there can be none. Raises InUse."""
    for mode in (os.O_RDWR, os.O_RDONLY):  # NFS gives an exclusive lock only on what is open for writing
        try:
            return _locked(path, mode, shared=False)
        except OSError:
            continue
    return Hold()


def writing(path: str) -> Hold:
    """Make the file *path*, in use until it is released, and open for what is appended. Raises OSError."""
    held = Hold(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | _OPEN, 0o644))
    if fcntl is not None:
        with contextlib.suppress(OSError):  # no locks there: it is written all the same
            fcntl.flock(held.fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return held


def _locked(path: str, mode: int, *, shared: bool) -> Hold:
    held = Hold(os.open(path, mode | _OPEN))
    if fcntl is not None:
        try:
            fcntl.flock(held.fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except OSError as error:
            held.release()
            if error.errno in _BUSY:
                raise InUse(path) from error
            raise
    return held


class Lock(NamedTuple):
    """How locking a key went: false if another has it still, or if there can be no lock. ``holder``: who has it."""

    acquired: bool
    holder: str | None = None

    def __bool__(self) -> bool:
        return self.acquired


@contextlib.contextmanager
def keyed(folder: str, name: str, timeout: float, waiting: Callable[[str], None] | None, mode: int) -> Iterator[Lock]:
    """Lock *name* among all processes that share *folder*, for at most *timeout* seconds of waiting.

    ``waiting(holder)`` is called once if another has it. Whatever goes wrong, the body runs: with a false Lock.
    """
    path = os.path.join(folder, f"{name}.lock")
    lock, result = None, Lock(False)
    try:
        import filelock

        lock = filelock.FileLock(path, mode=mode)
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            if waiting is not None:
                waiting(_holder(path))
            lock.acquire(timeout=timeout)
        result = Lock(True)
        _sign(path, mode)
    except TimeoutError:  # filelock's Timeout is one
        result = Lock(False, _holder(path))
    except (OSError, RuntimeError, NotImplementedError, ImportError):
        result = Lock(False)
    try:
        yield result
    finally:
        if result and lock is not None:
            with contextlib.suppress(OSError, RuntimeError):
                os.unlink(_note(path))
            with contextlib.suppress(OSError, RuntimeError):
                lock.release()


def check(folder: str) -> Finding:
    """Say whether keys can be locked in *folder*, for ``tlhub doctor``."""
    with keyed(folder, "doctor", 0.0, None, 0o600) as lock:
        if lock or lock.holder:
            return Finding("locks", True, "two processes that want one kernel build it once")
    text = f"none can be had in {folder}: processes that want one kernel at the same time each build it"
    return Finding("locks", False, text)


def _note(path: str) -> str:
    return f"{path[: -len('.lock')]}.by"  # beside the lock: who waits for a lock may truncate its file


def _sign(path: str, mode: int) -> None:
    with contextlib.suppress(OSError):
        fd = os.open(_note(path), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | _OPEN, mode)
        try:
            os.write(fd, f"process {os.getpid()} on {HOST}".encode())
        finally:
            os.close(fd)


def _holder(path: str) -> str:
    with contextlib.suppress(OSError):
        fd = os.open(_note(path), os.O_RDONLY | _OPEN)
        try:
            return os.read(fd, 256).decode("utf-8", "replace").strip() or "another process"
        finally:
            os.close(fd)
    return "another process"
