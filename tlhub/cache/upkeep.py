"""Upkeep: what keeps a store within its size by itself: after something was published, and at most now and then."""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from collections.abc import Iterable

from tlhub import quantity
from tlhub.cache import keeps, prune
from tlhub.cache.listing import VERSION, Item
from tlhub.cache.store import Store
from tlhub.errors import ArgumentError
from tlhub.specs import Finding

USUAL = 10 << 30
"""Bytes that a store may hold where TLHUB_CACHE_SIZE does not say."""

MARK = f"{VERSION}/.tended"
"""Its time stamp is that of the last upkeep."""

_DAY = 86400.0
_SHARE = 16  # upkeep is due, too, when this process alone has published that part of the size
_ROOM = 10  # a store that is full is emptied by that part, so that not every build finds it full

_published: dict[str, int] = {}
"""Root of a store to the bytes that this process has published there since it last looked after it."""


def limit() -> int:
    """Return how many bytes a store may hold. Raises ArgumentError."""
    text = os.environ.get("TLHUB_CACHE_SIZE")
    if not text:
        return USUAL
    try:
        return quantity.parse_size(text)
    except ArgumentError as error:
        hint = "export TLHUB_CACHE_SIZE=10GiB"
        raise ArgumentError(f"TLHUB_CACHE_SIZE is {text!r}; allowed is a size, such as 10GiB", hint=hint) from error


def published(store: Store, size: int) -> None:
    """Note that *size* bytes were published in *store*, and look after it if that is due. Never raises."""
    root = str(store.root)
    _published[root] = _published.get(root, 0) + size
    try:
        most = limit()
    except ArgumentError as error:
        most = USUAL
        warnings.warn(
            f"{error.message}: {quantity.size(USUAL)} it is\nhint: {error.hint}", RuntimeWarning, stacklevel=4
        )
    try:
        if _published[root] < most // _SHARE and not _due(f"{root}/{MARK}"):
            return
        with store.lock("upkeep", timeout=0) as lock:
            if lock.holder is None:  # else another process is at it; where there are no locks two do no harm
                _published[root] = 0
                _mark(f"{root}/{MARK}")
                tend(store, most)
    except OSError:  # what it would have removed stays for the next time
        pass


def tend(store: Store, most: int) -> prune.Removed:
    """Remove what dead writers left and, of a store of more than *most* bytes, what ``prune.plan`` gives up first."""
    items = [item for item in store.entries() if item.manifest is not None]
    plan = prune.Plan((), ())
    if sum(item.size for item in items) > most:
        room = most - most // _ROOM
        plan = prune.plan(items, now=time.time(), max_bytes=room, kept=keeps.kept(store))
    return prune.remove(store, plan)


def check(items: Iterable[Item]) -> Finding:
    """Say how full a store of *items* is, for ``tlhub doctor``."""
    most = USUAL
    with contextlib.suppress(ArgumentError):  # told where it was typed
        most = limit()
    held = sum(item.size for item in items)
    text = f"{quantity.size(held)} of at most {quantity.size(most)}"
    hint = None if held <= most else f"tlhub cache prune --max-size {most}"
    return Finding("cache size", hint is None, text if hint is None else f"{text}: builds will make room", hint)


def _due(mark: str) -> bool:
    """Tell whether the last upkeep was more than a day ago; of a store that never saw any, the first is due then."""
    try:
        return abs(time.time() - os.stat(mark).st_mtime) > _DAY
    except FileNotFoundError:
        _mark(mark)
        return False


def _mark(mark: str) -> None:
    os.close(os.open(mark, os.O_WRONLY | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o644))
    os.utime(mark)
