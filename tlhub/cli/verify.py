"""``cache verify``: is every byte as it was published, and if not, out of the way with it."""

from __future__ import annotations

import sys

import click

from tlhub.cli import output
from tlhub.cli.command import FOUND_PROBLEMS, Command, json_option
from tlhub.cli.entries import count_entries, items_of, user_store
from tlhub.quantity import size


@click.command(cls=Command)
@click.option("--repair", "mend", is_flag=True, help="Move what is damaged away, and remove signatures of no entry.")
@json_option
def verify(mend: bool, as_json: bool) -> None:
    """Read and hash every entry; exits with 1 where one is damaged and stays where it is."""
    from tlhub.cache import repair
    from tlhub.cache.store import DAMAGED

    store = user_store()
    items_of(store)
    found = repair.verify(store)
    done = repair.repair(store, found.damaged) if mend else repair.Repaired()
    if as_json:
        damaged = [{"entry": i.folder, "size": i.size, "reason": i.reason} for i in found.damaged]
        document = {"path": store.root, "whole": found.count, "size": found.bytes, "damaged": damaged}
        moved = [{"entry": i.folder, "to": path} for i, path in done.moved]
        spared = [{"entry": i.folder, "reason": why} for i, why in done.spared]
        mended = {"moved": moved, "spared": spared, "orphans": done.orphans}
        output.write_json({**document, **(mended if mend else {})})
    elif found.damaged:
        rows = [(i.folder, size(i.size), i.reason) for i in found.damaged]
        output.table(["entry", "size", "damage"], rows, right=["size"])
    output.note(
        f"{count_entries(found.count)} whole, {size(found.bytes)} in {store.root}; {len(found.damaged)} damaged"
    )
    if done.moved:
        output.note(f"{count_entries(len(done.moved))} moved to {store.root}/{DAMAGED}")
    if done.orphans:
        output.note(f"{done.orphans} {'signature' if done.orphans == 1 else 'signatures'} of no entry removed")
    for item, why in done.spared:
        output.note(f"not moved: {item.folder}: {why}")
    if len(done.moved) < len(found.damaged):
        if not mend:
            output.note("hint: tlhub cache verify --repair moves what is damaged away; it is never served")
        sys.exit(FOUND_PROBLEMS)
