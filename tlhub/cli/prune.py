"""``cache prune`` and ``clear``: what goes, shown before it does; ``keep`` and ``release``: what never does."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from tlhub.cli import output
from tlhub.cli.command import FOUND_PROBLEMS, Command, json_option
from tlhub.cli.entries import (
    arch_option,
    check_kernel,
    count_entries,
    find,
    full_arch,
    items_of,
    kernel_option,
    key_of,
    name_of,
    root_of,
    usable,
    user_store,
)
from tlhub.errors import ArgumentError
from tlhub.quantity import parse_age, parse_size, size

if TYPE_CHECKING:
    from tlhub.cache.prune import Plan, Removed
    from tlhub.cache.store import Item


@click.command(cls=Command)
@click.option("--older-than", metavar="AGE", help="Not used for so long: 30d, 12h, 90min.")
@click.option("--max-size", metavar="SIZE", help="The least recently used, until the rest is of this size: 2GiB.")
@arch_option
@kernel_option
@click.option("--stale", is_flag=True, help="Entries that nothing installed asks for any more, and damaged ones.")
@click.option("--dry-run", is_flag=True, help="Remove nothing, say what would be.")
@json_option
def prune(
    older_than: str | None,
    max_size: str | None,
    arch: str | None,
    kernel: str | None,
    stale: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Remove entries by age, size, arch, kernel or staleness, and damaged ones; those in use or kept are spared.

    --arch and --kernel choose by themselves, and narrow what the others choose from.
    """
    chosen = (older_than, max_size, arch, kernel)
    if all(c is None for c in chosen) and not stale:
        raise ArgumentError("prune needs to know what to remove", hint="tlhub cache prune --older-than 30d --dry-run")
    from tlhub.cache import prune as removal
    from tlhub.cache import repair
    from tlhub.cache.keeps import kept

    store = user_store()
    items = items_of(store)
    check_kernel(kernel, items)
    if stale:  # an altered library shows only when every byte is read; what is damaged speaks for no kernel
        damaged = {item.folder: item._replace(manifest=None) for item in repair.verify(store).damaged}
        items = [damaged.get(item.folder, item) for item in items]
    plan = removal.plan(
        items,
        now=time.time(),
        max_age=None if older_than is None else parse_age(older_than),
        max_bytes=None if max_size is None else parse_size(max_size),
        arch=full_arch(arch),
        kernel=kernel,
        stale=_staleness() if stale else None,
        kept=kept(store),
    )
    removed = None if dry_run else removal.remove(store, plan)
    if as_json:
        output.write_json({"path": store.root, "dry_run": dry_run, **_plan_json(plan), **_removed_json(removed)})
    else:
        if plan.remove:
            rows = [(name_of(item), _what(item), size(item.size), why) for item, why in plan.remove]
            output.table(["entry", "kernel", "size", "why"], rows, right=["size"], whole=["entry"])
        _say(removed, str(store.root)) if removed else _say_planned(plan, str(store.root))
    if removed and removed.failed:
        sys.exit(FOUND_PROBLEMS)


@click.command(cls=Command)
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
def clear(yes: bool, as_json: bool) -> None:
    """Remove every entry, after showing what that is and asking; those in use or kept are spared."""
    from tlhub.cache import prune as removal

    store = user_store()
    root, items = root_of(store), items_of(store)
    output.note(f"{root}: {_amount(len(items), sum(i.size for i in items), sum(i.files for i in items))}")
    if not yes:
        if not sys.stdin.isatty():
            raise ArgumentError(
                "clear asks before it removes anything, and there is no terminal to ask on",
                argument="yes",
                hint="tlhub cache clear --yes",
            )
        if not click.confirm("remove them all?", err=True):
            output.note("nothing was removed")
            sys.exit(FOUND_PROBLEMS)
    removed = removal.clear(store, items)
    if as_json:
        output.write_json({"path": root, **_removed_json(removed)})
    else:
        _say(removed, root)
    if removed.failed:
        sys.exit(FOUND_PROBLEMS)


@click.command(cls=Command)
@click.argument("entries", nargs=-1, required=True, metavar="ENTRY..")
def keep(entries: tuple[str, ...]) -> None:
    """Keep each ENTRY, whatever prune and clear are told, until it is released; it is named as for `cache info`."""
    from tlhub.cache import keeps

    store = user_store()
    found = [(item, usable(item)) for item in (find(store, entry) for entry in entries)]
    for item, manifest in found:
        keeps.keep(store, manifest)
        output.note(f"kept {name_of(item)}: {_what(item)}")


@click.command(cls=Command)
@click.argument("entries", nargs=-1, required=True, metavar="ENTRY..")
def release(entries: tuple[str, ...]) -> None:
    """Let each ENTRY go again like any other."""
    from tlhub.cache import keeps

    store = user_store()
    found = [(item, usable(item)) for item in (find(store, entry) for entry in entries)]
    for item, manifest in found:
        keeps.release(store, manifest)
        output.note(f"released {name_of(item)}: {_what(item)}")


def _staleness() -> Callable[[Any], str | None]:
    """Return the function that says why an entry is stale: nothing that is installed asks for it.

    What a plugin that is installed, but disabled or broken, would ask for is not known: its entries stay.
    """
    from tlhub import catalog, plugins, sources

    known, off = catalog.load(), plugins.disabled()
    silent = {p.distribution for p in known.plugins if p.error}
    silent |= {distribution for name, distribution in plugins.installed() if {name, distribution} & off}

    def why(manifest: Any) -> str | None:
        kernel = known.kernels.get(manifest.kernel)
        if kernel is None:
            return None if manifest.provenance.get("plugin") in silent else f"no kernel {manifest.kernel!r} any more"
        if kernel.revision != manifest.kernel_revision:
            return f"kernel revision {manifest.kernel_revision}, now {kernel.revision}"
        same = [s for s in known.schedules.get(manifest.kernel, ()) if s.name == manifest.schedule]
        if not same:
            return (
                None if manifest.provenance.get("plugin") in silent else f"no schedule {manifest.schedule!r} any more"
            )
        if same[0].revision != manifest.schedule_revision:
            return f"schedule revision {manifest.schedule_revision}, now {same[0].revision}"
        if sources.fault(same[0]):  # nobody can tell
            return None
        return "its sources have changed" if sources.digest(same[0]) != manifest.source_digest else None

    return why


def _what(item: Item) -> str:
    m = item.manifest
    return f"{m.kernel}({output.dims(m.dims)}) {m.problem.dtype}" if m else "?"


def _plan_json(plan: Plan) -> dict[str, Any]:
    chosen = [{"entry": i.folder, "key": key_of(i), "size": i.size, "reason": why} for i, why in plan.remove]
    return {"chosen": chosen, "chosen_size": plan.bytes, "chosen_files": plan.files}


def _removed_json(removed: Removed | None) -> dict[str, Any]:
    if removed is None:
        return {"removed": 0, "size": 0, "files": 0, "spared": []}
    spared = [{"entry": i.folder, "size": i.size, "reason": why} for i, why in removed.spared]
    return {"removed": removed.count, "size": removed.bytes, "files": removed.files, "spared": spared}


def _amount(entries: int, held: int, files: int) -> str:
    return f"{count_entries(entries)}, {size(held)} in {files} files"


def _say_planned(plan: Plan, root: str) -> None:
    output.note(f"{_amount(len(plan.remove), plan.bytes, plan.files)} would be removed from {root}")
    if plan.spared:
        output.note(f"{count_entries(len(plan.spared))} would be spared: kept")


def _say(removed: Removed, root: str) -> None:
    output.note(f"{_amount(removed.count, removed.bytes, removed.files)} removed from {root}")
    reasons = [why for _, why in removed.spared]
    for why in sorted(set(reasons)):
        output.note(f"{count_entries(reasons.count(why))} spared: {why.removeprefix('it is ')}")
