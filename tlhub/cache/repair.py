"""Repair: what is damaged is found, and moved into ``v1/.damaged``. Nothing else goes there, nothing whole moves.

Signatures of no entry that is left are removed.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from tlhub.cache import locks, orphans, trust
from tlhub.cache.entry import MANIFEST, Damaged
from tlhub.cache.paths import descend, move
from tlhub.cache.signature import Listed, listed
from tlhub.cache.store import DAMAGED, Item, Store
from tlhub.errors import CacheError


@dataclass(frozen=True)
class Verified:
    """What ``verify`` found: how many entries are whole, their bytes, and those that are not."""

    count: int
    bytes: int
    damaged: tuple[Item, ...]


class Repaired(NamedTuple):
    """What became of damaged entries: their new paths, and those that were left, with the reason.

    ``orphans``: how many signatures there were of no entry.
    """

    moved: tuple[tuple[Item, str], ...] = ()
    spared: tuple[tuple[Item, str], ...] = ()
    orphans: int = 0


def verify(store: Store) -> Verified:
    """Hash every byte of every entry again."""
    count = size = 0
    damaged: list[Item] = []
    for item in store.entries():
        reason = examine(store, item)
        if reason:
            damaged.append(item._replace(reason=reason))
        else:
            count, size = count + 1, size + item.size
    return Verified(count, size, tuple(damaged))


def examine(store: Store, item: Item) -> str | None:
    """Return why not every byte of *item* is as it was published, or None."""
    if item.reason is None:
        try:
            store.open(item).verify()
        except Damaged as error:
            return error.reason
    return item.reason


def repair(store: Store, damaged: Iterable[Item]) -> Repaired:
    """Move each of *damaged*, which ``verify`` found, away, if it still is and nobody uses it.

    One process at a time does so in a store, with an exclusive lock on each entry that it moves. What is only not
    trusted stays: a chmod mends it. Signatures of no entry go. Raises CacheError.
    """
    root, damaged = str(store.root), list(damaged)
    if not damaged:
        return Repaired(orphans=orphans.sweep(root))
    store.check()
    moved: list[tuple[Item, str]] = []
    spared: list[tuple[Item, str]] = []
    with store.lock("repair", timeout=10) as lock:
        if lock.holder is not None:
            raise CacheError(f"{root} is being repaired by {lock.holder}", hint="tlhub cache verify --repair")
        if store.own(DAMAGED) is None:
            raise CacheError(f"{root}/{DAMAGED} cannot be made, or is not to be trusted")
        signed = listed(root)
        for item in damaged:
            try:
                moved.append((item, _move_away(store, item, signed)))
            except locks.InUse:
                spared.append((item, "it is in use"))
            except OSError as error:  # CacheError is one
                spared.append((item, str(error.strerror or error)))
        return Repaired(tuple(moved), tuple(spared), orphans.sweep(root))


def _move_away(store: Store, item: Item, signed: Listed) -> str:
    """Return the new path. Raises InUse, and CacheError with the reason for leaving it."""
    root, parts = str(store.root), item.folder.split("/")
    if trust.mendable(item.reason):
        raise CacheError(f"a command mends it: {item.reason}")
    with descend(root, parts[:-1]) as (parent, at), locks.claim(f"{parent}/{parts[-1]}/{MANIFEST}"):
        info = os.lstat(parts[-1], dir_fd=at) if at is not None else os.lstat(f"{parent}/{parts[-1]}")
        # what stands there may be another's rebuild by now: only the lock makes sure what is looked at
        if stat.S_ISDIR(info.st_mode) and examine(store, item._replace(reason=None)) is None:
            raise CacheError("it is whole by now")
        away = move(root, (parent, at), parts[-1], DAMAGED, f"{'-'.join(parts[1:])}-{os.urandom(3).hex()}")
        orphans.drop(root, signed, f"{parent}/{parts[-1]}", away)
        return away
