"""Entries as commands find and name them, and the options that choose among them."""

from __future__ import annotations

import gc
import os
import re
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

import click

from tlhub.errors import ArgumentError, CacheError, UnknownName

if TYPE_CHECKING:
    from tlhub.cache.entry import Entry, Manifest
    from tlhub.cache.store import Item, Store

arch_option = click.option("--arch", metavar="A", help="Only entries for this arch.")
kernel_option = click.option("--kernel", metavar="K", help="Only entries of this kernel.")


def full_arch(arch: str | None) -> str | None:
    """Return the one full name of an arch; entries of an arch that no target knows any more are found by it too."""
    if arch is None:
        return None
    from tlhub import catalog
    from tlhub.devices import canonical_arch

    try:
        return canonical_arch(catalog.load(), arch)[1]
    except UnknownName:
        if any(i.manifest is not None and i.manifest.arch == arch for i in items_of(user_store())):
            return arch
        raise


def user_store() -> Store:
    from tlhub import stores

    return stores.user_store()


def root_of(store: Store) -> str:
    if store.root is None:
        raise CacheError(
            "there is no cache folder: everything is kept in memory", hint="export TLHUB_CACHE_DIR=/a/folder"
        )
    return store.root


def items_of(store: Store) -> list[Item]:
    root = root_of(store)
    if os.path.lexists(root) and not os.path.isdir(root):
        store.check()
    gc.disable()  # manifests hold no cycles, and to look for some in very many takes as long as to read them
    try:
        return list(store.entries())
    finally:
        gc.freeze()
        gc.enable()


def usable(item: Item) -> Manifest:
    """Return the manifest of *item*. Raises CacheError where it has none that can be read."""
    if item.manifest is None:
        raise CacheError(f"entry {name_of(item)} is not usable: {item.reason}", hint="tlhub cache verify")
    return item.manifest


def find(store: Store, typed: str) -> Item:
    """Return the entry that is called so, or whose key begins so; the path of its folder, as get prints it, will do.

    Of a damaged entry and its rebuild, which share a key, the whole one is meant unless the other is named in full.
    """
    prefix = os.path.basename(typed.strip().rstrip("/")).lower()
    items = judged(store)
    if not re.fullmatch(r"[0-9a-f]+(\.[0-9]+)?", prefix):
        raise ArgumentError(
            f"entry {typed.strip()!r} is no key: keys are hexadecimal digits", argument="entry", hint="tlhub cache ls"
        )
    named = [i for i in items if name_of(i) == prefix]
    found = named or [i for i in items if key_of(i).startswith(prefix) or name_of(i).startswith(prefix)]
    found = [i for i in found if i.reason is None] or found
    if not found:
        have = count_entries(len(items))
        raise UnknownName(f"no entry {typed.strip()!r} in {store.root} ({have})", hint="tlhub cache ls")
    if len(found) > 1:
        listed = ", ".join(name_of(i) for i in found[:4])
        raise ArgumentError(
            f"entry {prefix!r} is ambiguous: {len(found)} begin so: {listed}",
            argument="entry",
            hint=f"tlhub cache info {name_of(found[0])}",
        )
    return found[0]


def judged(store: Store) -> list[Item]:
    """Return all items; where several are one build, a rebuild beside what is damaged, every byte is read to tell."""
    from tlhub.cache.entry import Damaged

    items = items_of(store)
    builds = Counter(map(key_of, items))
    found = []
    for item in items:
        if item.reason is None and builds[key_of(item)] > 1:
            try:
                store.open(item).verify()
            except Damaged as error:
                item = item._replace(reason=error.reason)
        found.append(item)
    return found


def sound(store: Store, items: Iterable[Item]) -> tuple[list[Entry], list[tuple[str, str]]]:
    """Read every byte of *items*: return the entries that are whole, and folder and reason of those that are not."""
    from tlhub.cache.entry import Damaged

    found, damaged = [], []
    for item in items:
        try:
            entry = store.open(item)
            entry.verify()
            found.append(entry)
        except Damaged as error:
            damaged.append((item.folder, error.reason))
    return found, damaged


def check_kernel(kernel: str | None, items: list[Item]) -> None:
    """Raise UnknownName for a kernel that is not installed and that no entry is of."""
    from tlhub import catalog
    from tlhub.cache.prune import meant

    if kernel is not None and not any(meant(i, None, kernel) for i in items):
        catalog.load().kernel(kernel)


def key_of(item: Item) -> str:
    return item.manifest.build_digest if item.manifest else name_of(item)


def name_of(item: Item) -> str:
    return os.path.basename(item.folder)


def count_entries(number: int) -> str:
    return f"{number} {'entry' if number == 1 else 'entries'}"
