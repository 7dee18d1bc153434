"""Recordings: the lookups of a real run, noted in a workload that ``prewarm`` and ``cache check`` read.

A file may be shared by many processes: each adds what is new under a lock and renames the whole into place.
In a folder each process has a file of its own, which needs no lock.
"""

from __future__ import annotations

import contextlib
import os
import threading
import warnings

from tlhub import files
from tlhub.cache import locks
from tlhub.errors import ArgumentError
from tlhub.problem import typed
from tlhub.specs import Kernel, Problem

_PATIENCE = 30.0
"""Seconds to wait for another process that writes the same file."""

_noted: dict[tuple[Problem, str, str | None], Kernel] = {}
"""The lookups of this process: problem, arch and the schedule that was asked for, and the problem's kernel."""

_pending: list[tuple[Problem, str, str | None]] = []
_destination: str | None = None
"""What ``record`` was told; None: ``TLHUB_RECORD`` decides; "": nothing is written."""

_guard = threading.Lock()


def record(path: str | os.PathLike[str] | None) -> None:
    """Note the lookups of this process, those before too, in the workload *path*; None ends that.

    *path*: a file, which many processes may share, or a folder, in which each has a file of its own; a path that ends
    with a slash is one. Each distinct lookup is noted once, before it is answered. Raises ArgumentError.
    """
    global _destination
    hint = 'tlhub.record("workload.toml")'
    if path is not None and not (isinstance(path, (str, os.PathLike)) and os.fspath(path)):
        raise ArgumentError(f"cannot record to {path!r}: it is no path", argument="path", hint=hint)
    named = "" if path is None else os.path.abspath(path) + ("/" if os.fspath(path).endswith("/") else "")
    try:
        if named:
            os.makedirs(os.path.dirname(named), exist_ok=True)
    except OSError as error:
        raise ArgumentError(f"cannot record to {named!r}: {error.strerror}", argument="path", hint=hint) from error
    with _guard:
        _destination = named
        _pending[:] = _noted
        if named:
            _flush(named)


def note(kernel: Kernel, problem: Problem, arch: str, schedule: str | None) -> None:
    """Note a lookup, once, where lookups are recorded; one that cannot be written is warned of, and tried again."""
    key = (problem, arch, schedule)
    with _guard:
        if key in _noted:
            return
        _noted[key] = kernel
        _pending.append(key)
        path = os.environ.get("TLHUB_RECORD") if _destination is None else _destination
        if path:
            _flush(path)


def _flush(path: str) -> None:
    try:
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        if os.path.isdir(path):
            _add(os.path.join(path, f"{files.HOST}-{os.getpid()}.toml"))
        else:
            path = os.path.realpath(path)
            folder, name = os.path.split(path)
            with locks.keyed(folder, f".{name}", _PATIENCE, None, 0o644):
                _add(path)
    except (OSError, ValueError) as error:
        text = f"lookups are not recorded in {path!r}: {getattr(error, 'strerror', None) or error}"
        warnings.warn(text, RuntimeWarning, stacklevel=4)
    else:
        _pending.clear()


def _add(path: str) -> None:
    """Add to the file what is pending and not in it."""
    from tlhub.workload import Item, show  # who records nothing has no use for TOML

    text = ""
    with contextlib.suppress(FileNotFoundError), open(path, encoding="utf-8") as file:
        text = file.read()
    if text.strip() and "[[problem]]" not in text:  # somebody's notes, which a rename would take away
        raise ValueError("it is no workload")
    known = {f"{table.strip()}\n" for table in text.split("\n\n")}
    tables = [show(Item(p.kernel, *typed(_noted[p, arch, name], p), arch, name)) for p, arch, name in _pending]
    new = [table for table in tables if table not in known]
    if not new:
        return
    files.write_whole(path, "\n".join([*([f"{text.rstrip()}\n"] if text.strip() else []), *new]))


def _renew_after_fork() -> None:
    """A child may have inherited the lock from a thread that held it; what is pending is its parent's."""
    global _guard
    _guard = threading.Lock()
    _pending.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_after_fork)
