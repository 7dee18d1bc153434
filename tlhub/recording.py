"""Recordings: the lookups of a real run, noted in a workload that ``prewarm`` and ``cache check`` read.

A file may be shared by many processes: each adds what is new under a lock and renames the whole into place.
In a folder each process has a file of its own, which needs no lock.
"""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
from collections.abc import Iterable

from tlhub import files
from tlhub.cache import locks
from tlhub.errors import ArgumentError
from tlhub.problem import typed
from tlhub.specs import Kernel, Problem

_PATIENCE = 5.0
"""Seconds to wait for another process that writes the same file, which takes it milliseconds."""

_HINT = 'tlhub.record("workload.toml")'

Noted = tuple[Problem, str, "str | None"]
"""A lookup: problem, arch and the schedule that was asked for."""

_noted: dict[Noted, Kernel] = {}
"""The lookups of this process, and the kernels of their problems."""

_pending: list[Noted] = []
_destination: str | None = None
"""What ``record`` was told; None: ``TLHUB_RECORD`` decides; "": nothing is written."""

_guard = threading.Lock()
"""Over the tables, and never held while a file is written."""

_writing = threading.Lock()
"""Of the thread that writes; it writes what others note meanwhile, too, and those do not wait."""


def record(path: str | os.PathLike[str] | None) -> None:
    """Note the lookups of this process, those before too, in the workload *path*; None ends that.

    *path*: a file, which many processes may share, or a folder, in which each has a file of its own; a path that ends
    with a slash is one. Each distinct lookup is noted once. Raises ArgumentError.
    """
    global _destination
    if path is not None and not (isinstance(path, (str, os.PathLike)) and os.fspath(path)):
        raise ArgumentError(f"cannot record to {path!r}: it is no path", argument="path", hint=_HINT)
    named = "" if path is None else os.path.abspath(path) + ("/" if os.fspath(path).endswith("/") else "")
    try:
        if named:
            os.makedirs(os.path.dirname(named), exist_ok=True)
    except OSError as error:
        raise _refusal(named, error, _HINT) from error
    with _guard:
        _destination = named
        _pending[:] = _noted
    _flush()


def note(kernel: Kernel, problem: Problem, arch: str, schedule: str | None) -> None:
    """Note a lookup, once, where lookups are recorded; one that cannot be written is warned of, and tried again.

    It is written before it is answered, unless another thread is writing: then by that one, soon.
    """
    key = (problem, arch, schedule)
    with _guard:
        if key in _noted:
            return
        _noted[key] = kernel
        _pending.append(key)
    _flush()


def check(path: str) -> None:
    """Raise ArgumentError where lookups could not be recorded in *path*, which TLHUB_RECORD names; writes nothing."""
    try:
        folder = path if os.path.isdir(path) else os.path.dirname(os.path.realpath(path))
        if folder != path:
            _text(path)
        while not os.path.lexists(folder):  # it will be made
            folder = os.path.dirname(folder)
        if not (os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK)):
            raise ValueError(f"{folder} is no folder that can be written to")
    except (OSError, ValueError) as error:
        raise _refusal(path, error, "export TLHUB_RECORD=workload.toml") from error


def _place() -> str:
    """Return where lookups are recorded, "" where they are not."""
    return os.environ.get("TLHUB_RECORD", "") if _destination is None else _destination


def _flush() -> None:
    """Write what is pending, unless another thread is at it, which then does."""
    while _pending and (path := _place()) and _writing.acquire(blocking=False):
        try:
            with _guard:
                pending = dict.fromkeys(_pending)
            _write(path, pending)
            with _guard:
                if path == _place():  # else all is to be written elsewhere
                    _pending[:] = [lookup for lookup in _pending if lookup not in pending]
        except (OSError, ValueError) as error:
            text = f"lookups are not recorded in {path!r}: {getattr(error, 'strerror', None) or error}"
            warnings.warn(text, RuntimeWarning, stacklevel=4)
            return
        finally:
            _writing.release()


def _write(path: str, lookups: Iterable[Noted]) -> None:
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    if os.path.isdir(path):
        _add(os.path.join(path, f"{files.HOST}-{os.getpid()}.toml"), lookups)
    else:
        folder, name = os.path.split(os.path.realpath(path))
        with locks.keyed(folder, f".{name}", _PATIENCE, None, 0o644):
            _add(os.path.join(folder, name), lookups)


def _add(path: str, lookups: Iterable[Noted]) -> None:
    """Add to the file those of *lookups* that are not in it."""
    from tlhub.workload import Item, show  # who records nothing has no use for TOML

    text = _text(path)
    known = {f"{table.strip()}\n" for table in text.split("\n\n")}
    tables = [show(Item(p.kernel, *typed(_noted[p, arch, name], p), arch, name)) for p, arch, name in lookups]
    new = [table for table in tables if table not in known]
    if not new:
        return
    files.write_whole(path, "\n".join([*([f"{text.rstrip()}\n"] if text.strip() else []), *new]))


def _text(path: str) -> str:
    """Return what the workload *path* holds, nothing of one that is not there. Raises OSError and ValueError."""
    text = ""
    with contextlib.suppress(FileNotFoundError), open(path, encoding="utf-8") as file:
        text = file.read()
    if text.strip() and "[[problem]]" not in text:  # somebody's notes, which a rename would take away
        raise ValueError("it is no workload")
    return text


def _refusal(path: str, error: Exception, hint: str) -> ArgumentError:
    text = f"cannot record to {path!r}: {getattr(error, 'strerror', None) or error}"
    return ArgumentError(text, argument="path", hint=hint)


def _renew_after_fork() -> None:
    """A child may have inherited a lock from a thread that held it; what is pending is its parent's."""
    global _guard, _writing
    _guard, _writing = threading.Lock(), threading.Lock()
    _pending.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_after_fork)
