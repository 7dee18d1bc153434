"""Listings: what stands in a store where entries should be, whole or not. Links are named, never followed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import NamedTuple

from tlhub.cache import key
from tlhub.cache.entry import Damaged, Entry, Manifest

VERSION = f"v{key.FORMAT}"
_DEPTH = 4  # arch, kernel, problem, build


class Item(NamedTuple):
    """One thing in a store, as listings and ``prune`` see it.

    ``folder``: below the root, with ``/``. ``reason``: why it does not serve, or None. ``size``: bytes of
    its files. ``used``: POSIX time of its last use, to a day.
    """

    folder: str
    manifest: Manifest | None
    reason: str | None
    size: int
    files: int
    used: float


def items(root: str, opened: Callable[[Item], Entry]) -> Iterator[Item]:
    """Iterate over all below *root* that is, or stands where there should be, an entry. *opened* raises Damaged."""
    return _below(root, VERSION, _DEPTH, opened)


def _below(root: str, below: str, depth: int, opened: Callable[[Item], Entry]) -> Iterator[Item]:
    try:
        with os.scandir(f"{root}/{below}") as found:
            children = sorted(found, key=lambda child: child.name)
    except OSError:
        return
    for child in children:
        name = f"{below}/{child.name}"
        if depth == _DEPTH and child.name.startswith("."):
            continue
        if not child.is_dir(follow_symlinks=False):
            what = "is a link; a store follows none" if child.is_symlink() else "is not a folder"
            with contextlib.suppress(OSError):
                info = child.stat(follow_symlinks=False)
                yield Item(name, None, f"{root}/{name} {what}", info.st_size, 1, info.st_mtime)
        elif depth > 1:
            yield from _below(root, name, depth - 1, opened)
        else:
            with contextlib.suppress(OSError):  # removed while it was listed
                yield _item(root, name, opened)


def _item(root: str, below: str, opened: Callable[[Item], Entry]) -> Item:
    folder = f"{root}/{below}"
    size = files = 0
    with os.scandir(folder) as found:
        for child in found:
            size, files = size + child.stat(follow_symlinks=False).st_size, files + 1
    item = Item(below, None, None, size, files, os.lstat(folder).st_mtime)
    try:
        entry = opened(item)
        return item._replace(manifest=entry.manifest, used=entry.used)
    except Damaged as error:
        return item._replace(reason=error.reason)
