"""Listings: what stands in a store where entries should be, whole or not. Links are named, never followed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tlhub.cache import key, trust
from tlhub.cache.entry import Damaged, Manifest, glance
from tlhub.specs import Finding

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


def items(root: str, rule: trust.Policy, refused: str | None) -> Iterator[Item]:
    """Iterate over all below *root* that is, or stands where there should be, an entry.

    *rule*: whom the store trusts; *refused*: why its root is not to be trusted. Of an entry only the
    manifest is read, which tells the members' sizes: many are listed, few are loaded.
    """
    with contextlib.suppress(OSError):
        refused = refused or trust.refusal_of_folder(f"{root}/{VERSION}", os.lstat(f"{root}/{VERSION}"), rule)
        yield from _below(root, VERSION, _DEPTH, rule, refused)


def check(listed: Sequence[Item]) -> Finding:
    """Say how many of those *listed* are not served, and why the first is not, for ``tlhub doctor``."""
    reasons = [item.reason for item in listed if item.reason]
    text = f"{len(listed)} {'entry' if len(listed) == 1 else 'entries'}"
    if not reasons:
        return Finding("entries", True, text)
    first, mend = trust.remedy(reasons[0])
    text += f", {len(reasons)} not served: {first}"
    return Finding("entries", False, text, mend or "tlhub cache verify --repair")


def _below(root: str, below: str, depth: int, rule: trust.Policy, refused: str | None) -> Iterator[Item]:
    try:
        with os.scandir(f"{root}/{below}") as found:
            children = sorted(found, key=lambda child: child.name)
    except OSError:
        return
    for child in children:
        name = f"{below}/{child.name}"
        if depth == _DEPTH and child.name.startswith("."):
            continue
        with contextlib.suppress(OSError):  # removed while it was listed
            info = child.stat(follow_symlinks=False)
            if not child.is_dir(follow_symlinks=False):
                what = "is a link; a store follows none" if child.is_symlink() else "is not a folder"
                yield Item(name, None, f"{root}/{name} {what}", info.st_size, 1, info.st_mtime)
                continue
            why = refused or trust.refusal_of_folder(child.path, info, rule)
            if depth > 1:
                yield from _below(root, name, depth - 1, rule, why)
            else:
                yield _item(root, name, rule, why)


def _item(root: str, below: str, rule: trust.Policy, refused: str | None) -> Item:
    folder = f"{root}/{below}"
    try:
        if refused:
            raise Damaged(refused)
        manifest, info = glance(folder, rule)
        if not below.startswith(manifest.parent):
            raise Damaged("it is in the folder of another problem")
    except Damaged as error:
        with os.scandir(folder) as found:
            sizes = [child.stat(follow_symlinks=False).st_size for child in found]
        return Item(below, None, error.reason, sum(sizes), len(sizes), os.lstat(folder).st_mtime)
    size = info.st_size + sum(member.size for member in manifest.members.values())
    return Item(below, manifest, None, size, len(manifest.members) + 1, info.st_mtime)
