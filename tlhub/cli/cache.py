"""``cache``: what the cache holds, filling it, and keeping it small and whole."""

from __future__ import annotations

import gc
import os
import re
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import click

from tlhub.cli import output
from tlhub.cli.command import Command, Group, json_option, words
from tlhub.errors import ArgumentError, CacheError, UnknownName
from tlhub.quantity import age, size

if TYPE_CHECKING:
    from tlhub.cache.entry import Manifest
    from tlhub.cache.store import Item, Store


_COMMANDS = {
    "path": "tlhub.cli.cache:path",
    "ls": "tlhub.cli.cache:ls",
    "info": "tlhub.cli.cache:info",
    "prewarm": "tlhub.cli.prewarm:prewarm",
    "check": "tlhub.cli.check:check",
    "refusals": "tlhub.cli.refusals:refusals",
    "prune": "tlhub.cli.prune:prune",
    "clear": "tlhub.cli.prune:clear",
    "pin": "tlhub.cli.prune:pin",
    "unpin": "tlhub.cli.prune:unpin",
    "verify": "tlhub.cli.verify:verify",
    "stats": "tlhub.cli.stats:stats",
    "export": "tlhub.cli.archive:export",
    "import": "tlhub.cli.archive:import_",
}


@click.group(cls=Group, lazy=_COMMANDS)
def cache() -> None:
    """Look after the cache of compiled kernels."""


@click.command(cls=Command)
def path() -> None:
    """Print the cache's folder."""
    store = user_store()
    output.write_path(root_of(store))


@click.command(cls=Command)
@click.option("--kernel", metavar="K", help="Only entries of this kernel.")
@click.option("--arch", metavar="A", help="Only entries for this arch.")
@json_option
def ls(kernel: str | None, arch: str | None, as_json: bool) -> None:
    """List the entries: what each computes, for what, its size and when it was last used.

    Dims that are symbolic and options at their defaults are left out.
    """
    from tlhub.cache.pins import pinned
    from tlhub.cache.prune import meant

    store = user_store()
    items, pins = _judged(store), pinned(store)
    check_kernel(kernel, items)
    place = full_arch(arch)
    found = [i for i in items if meant(i, place, kernel)]
    now, total = time.time(), sum(i.size for i in found)
    if as_json:
        document = {
            "path": store.root,
            "count": len(found),
            "size": total,
            "entries": [_item_json(i, pins) for i in found],
        }
        output.write_json(document)
        return
    states = [_state(i, pins) for i in found]
    rows, plain = [], set(states) <= {"ok"}
    for item, state in zip(found, states, strict=True):
        m = item.manifest
        what = (m.kernel, _fixed_dims(m), m.problem.dtype, _chosen(m), m.arch, m.schedule) if m else ("?",) * 6
        rows.append((name_of(item), *what, *(() if plain else (state,)), size(item.size), age(now - item.used)))
    columns = ["entry", "kernel", "dims", "dtype", "options", "arch", "schedule", "size", "used"]
    if not plain:
        columns.insert(-2, "state")
    output.table(columns, rows, right=["size", "used"], whole=["entry"])
    for item in found:
        if item.reason:
            output.note(f"not served: {item.folder}: {item.reason}")
    output.note(f"{count_entries(len(found))}, {size(total)} in {store.root}")


@click.command(cls=Command)
@click.argument("entry")
@json_option
def info(entry: str, as_json: bool) -> None:
    """Show the manifest of ENTRY: its name in `cache ls`, the first digits of its key, or its folder."""
    from tlhub.cache.pins import pinned

    store = user_store()
    item = find(store, entry)
    m, pins = usable(item), pinned(store)
    if as_json:
        output.write_json({**_item_json(item, pins), "manifest": {**m.to_json()}})
        return
    pairs: list[tuple[str, Any]] = [
        ("entry", f"{store.root}/{item.folder}"),
        ("key", m.build_digest),
        ("kernel", f"{m.kernel}, revision {m.kernel_revision}"),
        ("dims", output.dims(m.dims)),
        ("dtypes", words(m.dtypes)),
        ("options", words(m.options)),
        ("arch", m.arch),
        ("schedule", f"{m.schedule}, revision {m.schedule_revision}"),
        ("config", words(m.config.items())),
        ("source", m.source_digest),
        ("toolchain", words(m.toolchain.items())),
        ("tvm-ffi abi", m.abi),
        ("platform", words(m.platform.items())),
        ("problem", m.problem_digest),
        ("resources", words(m.resources.items())),
        ("provenance", words(m.provenance.items())),
        ("size", f"{size(item.size)} in {item.files} files"),
        ("used", f"{age(time.time() - item.used)} ago"),
        ("state", _state(item, pins)),
    ]
    pairs += [(name, f"{size(member.size)}  sha256 {member.sha256}") for name, member in m.members.items()]
    if item.reason:
        pairs.append(("not served", item.reason))
    output.fields(pairs)


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


# -- the store -------------------------------------------------------------------------------------


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
    items = _judged(store)
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


def _judged(store: Store) -> list[Item]:
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


def _fixed_dims(manifest: Manifest) -> str:
    """Return the dims that are numbers, and symbols that stand for several; ``any`` if every extent is served."""
    extents = [extent for _, extent in manifest.dims]
    fixed = [(name, e) for name, e in manifest.dims if not isinstance(e, str) or extents.count(e) > 1]
    return output.dims(fixed) or "any"


def _chosen(manifest: Manifest) -> str:
    """Return the options that are not at their defaults; all of a kernel that is not here to tell them."""
    from tlhub import catalog
    from tlhub.problem import default

    kernel, dtype = catalog.load().kernels.get(manifest.kernel), manifest.problem.dtype
    if kernel is None or kernel.revision != manifest.kernel_revision or dtype not in kernel.dtypes:
        return words(manifest.options)
    usual = {option.name: default(option, dtype) for option in kernel.options}
    chosen = [(name, value) for name, value in manifest.options if value != usual.get(name)]
    return words(chosen) if chosen else "defaults"


def _state(item: Item, pins: frozenset[str]) -> str:
    return "not served" if item.reason else "pinned" if key_of(item) in pins else "ok"


def _item_json(item: Item, pins: frozenset[str]) -> dict[str, Any]:
    m = item.manifest
    return {
        "entry": item.folder,
        "key": m.build_digest if m else None,
        "kernel": m.kernel if m else None,
        "dims": dict(m.dims) if m else None,
        "dtype": m.problem.dtype if m else None,
        "options": dict(m.options) if m else None,
        "arch": m.arch if m else None,
        "schedule": m.schedule if m else None,
        "size": item.size,
        "files": item.files,
        "used": item.used,
        "pinned": key_of(item) in pins,
        "reason": item.reason,
    }


def count_entries(number: int) -> str:
    return f"{number} {'entry' if number == 1 else 'entries'}"
