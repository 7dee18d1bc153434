"""``cache``: what the cache holds, filling it, and keeping it small and whole."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click

from tlhub.cli import output
from tlhub.cli.command import Command, Group, json_option, words
from tlhub.cli.entries import (
    arch_option,
    check_kernel,
    count_entries,
    find,
    full_arch,
    judged,
    kernel_option,
    key_of,
    name_of,
    root_of,
    usable,
    user_store,
)
from tlhub.quantity import age, size

if TYPE_CHECKING:
    from tlhub.cache.entry import Manifest
    from tlhub.cache.store import Item


_COMMANDS = {
    "path": "tlhub.cli.cache:path",
    "ls": "tlhub.cli.cache:ls",
    "info": "tlhub.cli.cache:info",
    "prewarm": "tlhub.cli.prewarm:prewarm",
    "check": "tlhub.cli.check:check",
    "refusals": "tlhub.cli.refusals:refusals",
    "prune": "tlhub.cli.prune:prune",
    "clear": "tlhub.cli.prune:clear",
    "keep": "tlhub.cli.prune:keep",
    "release": "tlhub.cli.prune:release",
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
@kernel_option
@arch_option
@json_option
def ls(kernel: str | None, arch: str | None, as_json: bool) -> None:
    """List the entries: what each computes, for what, its size and when it was last used.

    Dims that are symbolic and options at their defaults are left out.
    """
    from tlhub.cache.keeps import kept
    from tlhub.cache.prune import meant

    store = user_store()
    items, keeps = judged(store), kept(store)
    check_kernel(kernel, items)
    place = full_arch(arch)
    found = [i for i in items if meant(i, place, kernel)]
    now, total = time.time(), sum(i.size for i in found)
    if as_json:
        document = {
            "path": store.root,
            "count": len(found),
            "size": total,
            "entries": [_item_json(i, keeps) for i in found],
        }
        output.write_json(document)
        return
    states = [_state(i, keeps) for i in found]
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
    from tlhub.cache.keeps import kept

    store = user_store()
    item = find(store, entry)
    m, keeps = usable(item), kept(store)
    if as_json:
        output.write_json({**_item_json(item, keeps), "manifest": {**m.to_json()}})
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
        ("state", _state(item, keeps)),
    ]
    pairs += [(name, f"{size(member.size)}  sha256 {member.sha256}") for name, member in m.members.items()]
    if item.reason:
        pairs.append(("not served", item.reason))
    output.fields(pairs)


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


def _state(item: Item, keeps: frozenset[str]) -> str:
    return "not served" if item.reason else "kept" if key_of(item) in keeps else "ok"


def _item_json(item: Item, keeps: frozenset[str]) -> dict[str, Any]:
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
        "kept": key_of(item) in keeps,
        "reason": item.reason,
    }
