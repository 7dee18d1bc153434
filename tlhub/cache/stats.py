"""Statistics that outlive a process: what look-ups came to, kept in the store beside its entries.

A process counts in memory, and appends a line to a file of its own when it has built something and when it ends: no
look-up waits for a lock or a disk. ``v1/.stats`` holds those files, and ``total.json``, which takes in those of the
dead. A process that is killed loses what it counted since its last build.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from tlhub import files
from tlhub.cache import locks
from tlhub.cache.entry import Folder, Manifest
from tlhub.cache.listing import VERSION
from tlhub.cache.store import Store
from tlhub.errors import BuildError, CacheError, NotPrebuilt, TlhubError

STATS = f"{VERSION}/.stats"
TOTAL = "total.json"

_MANY = 64  # files; then whoever makes another one folds those of the dead
_DAY = 86400.0
_LARGEST = 16 << 20  # bytes of a file
_NO_COUNTS = (ValueError, TypeError, KeyError, AttributeError, RecursionError)


class Stats(NamedTuple):
    """``counts``: ``hits.TIER``, ``misses``, ``builds``, ``build_seconds``, ``saved_seconds``, ``errors.CLASS``.

    ``since``: POSIX time from which on they were counted, None if nothing was.
    """

    counts: Counter[str]
    since: float | None


_noted: list[tuple[Store, str, float]] = []  # appending is atomic: threads need no lock
_files: dict[str, locks.Hold] = {}
"""Root of a store to this process's file in it."""

_since = time.time()
_last: Store | None = None  # the store that something was last noted in
_again: Callable[[], int] = int
_before = 0  # what _again said at the last flush
_at_exit = False  # whether multiprocessing knows of us: it ends its forked children without atexit


def found(store: Store, tier: str, manifest: Manifest) -> None:
    """Note in *store* what answered a look-up: the entry was ``built`` for it, or *tier* had it and saved the build."""
    told = manifest.provenance.get("seconds")
    seconds = told if isinstance(told, (int, float)) else 0.0
    if tier != "built":
        note(store, {f"hits.{tier}": 1, "saved_seconds": seconds})
        return
    note(store, {"misses": 1, "builds": 1, "build_seconds": seconds})
    flush()  # beside a build that takes no time


@contextlib.contextmanager
def failures(store: Store) -> Iterator[None]:
    """Note in *store* the error of tlhub's that a look-up ends in, for ``with``."""
    try:
        yield
    except TlhubError as error:
        missed = isinstance(error, (BuildError, NotPrebuilt))
        note(store, {f"errors.{type(error).__name__}": 1, **({"misses": 1} if missed else {})})
        raise


def note(store: Store, amounts: Mapping[str, float]) -> None:
    """Note *amounts* by name in *store*, in memory."""
    global _last, _at_exit
    _last = store
    _noted.extend((store, name, amount) for name, amount in amounts.items())
    if not _at_exit and "multiprocessing.util" in sys.modules:
        sys.modules["multiprocessing.util"].Finalize(None, flush, exitpriority=0)
        _at_exit = True


def counts_again(again: Callable[[], int]) -> None:
    """Have ``again()`` tell how many look-ups this process answered from its own table: none of them is noted."""
    global _again
    _again = again


@atexit.register
def flush() -> None:
    """Write what was noted; what cannot be written is forgotten."""
    global _since, _before
    noted, since, _since = _noted[:], _since, time.time()
    del _noted[: len(noted)]
    again = _again()
    if again < _before:  # hub.forget() begins anew
        _before = 0
    if _last is not None and again > _before:
        noted.append((_last, "hits.memory", again - _before))
        _before = again
    for store in {id(store): store for store, _, _ in noted}.values():
        counts: dict[str, float] = {}
        for where, name, amount in noted:
            if where is store:
                counts[name] = counts.get(name, 0) + amount
        with contextlib.suppress(OSError):
            _append(store, {"since": since, "counts": counts})


def read(store: Store) -> Stats:
    """Return what all processes have written."""
    folder = f"{store.root}/{STATS}"
    total, folded = _total(folder)
    return _sum([total, *(_lines(folder, name) for name in _names(folder) if name not in folded)])


def zero(store: Store) -> None:
    """Count from nothing again. Raises CacheError."""
    store.check()
    with store.lock("stats", timeout=10) as lock:
        if lock.holder is not None:
            raise CacheError(f"the statistics are being written by {lock.holder}", hint="tlhub cache stats --zero")
        try:
            folder = store.own(STATS)
            if folder is not None:
                _write_total(folder, Stats(Counter(), time.time()), names := _names(folder))
                _remove(folder, names)
        except OSError as error:
            raise CacheError(f"{store.root}/{STATS}: {error.strerror or error}") from error


# -- files -----------------------------------------------------------------------------------------


def _append(store: Store, line: Mapping[str, Any]) -> None:
    root = str(store.root)
    held = _files.get(root)
    if held is None or not os.fstat(held.fd).st_nlink:  # zeroed meanwhile
        folder = store.own(STATS)
        if folder is None:
            return
        if len(_names(folder)) >= _MANY:
            _fold(store, folder)
        held = _files[root] = locks.writing(f"{folder}/{os.getpid()}-{os.urandom(6).hex()}")
    os.write(held.fd, json.dumps(line).encode() + b"\n")  # in one piece


def _fold(store: Store, folder: str) -> None:
    """Add the files of processes that are no more to the total; it names them, and only then are they removed."""
    with store.lock("stats", timeout=0) as lock:
        if lock.holder is not None:
            return
        total, folded = _total(folder)
        names = [name for name in _names(folder) if name in folded or _dead(f"{folder}/{name}")]
        new = [_lines(folder, name) for name in names if name not in folded]
        _write_total(folder, _sum([total, *new]), names)
        _remove(folder, names)


def _dead(path: str) -> bool:
    """Tell whether the process that wrote *path* is no more, or, where there are no locks, silent for a day."""
    try:
        with locks.claim(path) as claimed:
            return bool(claimed) or time.time() - os.lstat(path).st_mtime > _DAY
    except (OSError, locks.InUse):
        return False


def _sum(parts: Sequence[Stats]) -> Stats:
    counts = Counter[str]()
    for part in parts:
        counts.update(part.counts)
    return Stats(counts, min((part.since for part in parts if part.since), default=None))


def _total(folder: str) -> tuple[Stats, frozenset[str]]:
    """Return what was folded, and the names of the files that it is of."""
    with contextlib.suppress(*_NO_COUNTS):
        found = json.loads(_text(folder, TOTAL))
        since = _number(found["since"] or 0) or None
        return Stats(Counter(_numbers(found["counts"])), since), frozenset(found["folded"])
    return Stats(Counter(), None), frozenset()


def _lines(folder: str, name: str) -> Stats:
    """Return what one file says; a line that is torn counts nothing."""
    lines = []
    for line in _text(folder, name).split("\n"):
        with contextlib.suppress(*_NO_COUNTS):
            found = json.loads(line)
            lines.append(Stats(Counter(_numbers(found["counts"])), _number(found["since"])))
    return _sum(lines)


def _text(folder: str, name: str) -> str:
    """Return what a file holds, "" for what is no file of a sensible size: a pipe would never end."""
    with contextlib.suppress(OSError), Folder(folder) as opened:
        return opened.read(name, _LARGEST, None)[0].decode("utf-8", "replace")
    return ""


def _numbers(counts: Any) -> dict[str, float]:
    return {str(name): _number(amount) for name, amount in counts.items() if type(amount) in (int, float)}


def _number(value: Any) -> Any:
    """Return *value*, a number to count with. Raises ValueError and TypeError."""
    if not 0 <= value < 1 << 53:  # NaN is not
        raise ValueError(value)
    return value


def _write_total(folder: str, total: Stats, folded: list[str]) -> None:
    files.write_whole(f"{folder}/{TOTAL}", json.dumps({**total._asdict(), "folded": folded}))


def _names(folder: str) -> list[str]:
    with contextlib.suppress(OSError):
        return [name for name in sorted(os.listdir(folder)) if name != TOTAL and not name.startswith(".")]
    return []


def _remove(folder: str, names: list[str]) -> None:
    for name in names:
        with contextlib.suppress(OSError):
            os.unlink(f"{folder}/{name}")


def _renew_after_fork() -> None:
    """A child counts for itself: what its parent noted is the parent's to write."""
    global _last, _before, _at_exit
    _noted.clear()
    _files.clear()
    _last, _before, _at_exit = None, 0, False


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_after_fork)
