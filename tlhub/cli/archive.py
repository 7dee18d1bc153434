"""``cache export`` and ``cache import``: entries in one file."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import click

from tlhub.cli import output
from tlhub.cli.command import FOUND_PROBLEMS, Command, json_option
from tlhub.cli.entries import (
    arch_option,
    check_kernel,
    count_entries,
    full_arch,
    items_of,
    kernel_option,
    sound,
    user_store,
)
from tlhub.errors import CacheError
from tlhub.quantity import size

if TYPE_CHECKING:
    from tlhub.cache.entry import Entry
    from tlhub.cache.manifest import Manifest

_plugin_option = click.option("--plugin", metavar="P", help="Only entries of this plugin's schedules.")


@click.command("export", cls=Command)
@click.argument("file")
@arch_option
@kernel_option
@_plugin_option
@click.option("--from", "workload", metavar="FILE", help="Only what serves this workload, of whichever store.")
@json_option
def export(
    file: str, arch: str | None, kernel: str | None, plugin: str | None, workload: str | None, as_json: bool
) -> None:
    """Write entries, with their signatures, to the archive FILE (tar, zstd): the same entries are the same bytes.

    What is damaged is left out, and the exit code is 1.
    """
    from tlhub.cache import archive

    place = None if workload else full_arch(arch)  # a workload's entries may be for a more general arch
    meant = _meant(place, kernel, plugin)
    if workload:
        found, damaged = _serving(workload, arch), list[tuple[str, str]]()
        chosen, there = [entry for entry in found if meant(entry.manifest)], [entry.manifest for entry in found]
    else:
        chosen, damaged, there = _kept(meant, place, kernel)
    if not chosen:
        _note("left out", damaged)
        if damaged:
            raise CacheError("nothing to export: no entry that is meant is whole", hint="tlhub cache verify --repair")
        raise _nothing("export", there, "tlhub cache ls")
    packed = archive.pack(chosen, file)
    damaged += packed.refused
    if as_json:
        entries = [_json(manifest) for manifest in packed.manifests]
        output.write_json({"file": file, "size": packed.size, "entries": entries, "left_out": _reasons(damaged)})
    else:
        output.write(f"{count_entries(len(packed.manifests))} in {file}, {size(packed.size)}")
    _note("left out", damaged)
    if damaged:
        sys.exit(FOUND_PROBLEMS)


@click.command("import", cls=Command)
@click.argument("file")
@arch_option
@kernel_option
@_plugin_option
@json_option
def import_(file: str, arch: str | None, kernel: str | None, plugin: str | None, as_json: bool) -> None:
    """Add the entries of the archive FILE to the cache, with their signatures, after every byte of it was verified.

    What the cache would not serve for want of a signature is refused, and a signature that does not hold is left out;
    the exit code then is 1.
    """
    from tlhub.cache import archive

    store, meant = user_store(), _meant(full_arch(arch), kernel, plugin)
    seen: list[Manifest] = []

    def chosen(manifest: Manifest) -> bool:
        seen.append(manifest)
        return meant(manifest)

    done = archive.unpack(file, store, chosen)
    if not any(done):
        raise _nothing("import", seen, f"tlhub cache import {shlex.quote(file)}")
    if as_json:
        found = {"added": done.added, "present": done.present}
        documents = {name: [_json(entry.manifest) for entry in entries] for name, entries in found.items()}
        output.write_json({"path": store.root, **documents, "refused": _reasons(done.refused)})
    else:
        output.write(f"{count_entries(len(done.added))} added to {store.root}, {len(done.present)} there already")
    _note("refused", done.refused)
    if done.refused:
        sys.exit(FOUND_PROBLEMS)


def _reasons(found: Iterable[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"entry": folder, "reason": reason} for folder, reason in found]


def _note(what: str, found: Iterable[tuple[str, str]]) -> None:
    for folder, reason in found:
        output.note(f"{what}: {folder}: {reason}")


def _kept(
    meant: Callable[[Manifest], bool], arch: str | None, kernel: str | None
) -> tuple[list[Entry], list[tuple[str, str]], list[Manifest]]:
    """Return the whole entries of the cache that are *meant*; folder and reason of those that are not whole; and all
    manifests."""
    from tlhub.cache import prune

    store = user_store()
    items = items_of(store)
    check_kernel(kernel, items)
    # of what has no manifest to be read, its folder tells arch and kernel
    chosen = [item for item in items if (meant(item.manifest) if item.manifest else prune.meant(item, arch, kernel))]
    return *sound(store, chosen), [item.manifest for item in items if item.manifest]


def _serving(workload: str, arch: str | None) -> list[Entry]:
    from tlhub.packaging import cover

    archs = [arch] if arch else []
    return [found.entry for found in cover.serve(cover.requests(workload, archs), workload, archs)]


def _meant(arch: str | None, kernel: str | None, plugin: str | None) -> Callable[[Manifest], bool]:
    def meant(manifest: Manifest) -> bool:
        brought = manifest.provenance.get("plugin")
        return (
            (arch is None or manifest.arch == arch)
            and (kernel is None or manifest.kernel == kernel)
            and (plugin is None or brought in (plugin, f"tlhub-plugin-{plugin}"))
        )

    return meant


def _nothing(what: str, manifests: Sequence[Manifest], hint: str) -> CacheError:
    """Return the error of filters that mean none of *manifests*: it says what there is."""
    if not manifests:
        return CacheError(f"nothing to {what}: there is no entry", hint=hint)
    named = {
        "for": {m.arch for m in manifests},
        "of": {m.kernel for m in manifests},
        "by": {str(m.provenance.get("plugin")) for m in manifests},
    }
    there = "; ".join(f"{word} {', '.join(sorted(names))}" for word, names in named.items())
    return CacheError(
        f"nothing to {what}: none of {count_entries(len(manifests))} is meant; they are {there}", hint=hint
    )


def _json(manifest: Manifest) -> dict[str, Any]:
    from tlhub.explanation import problem_json

    more = {"arch": manifest.arch, "schedule": manifest.schedule, "key": manifest.build_digest}
    return {**problem_json(manifest.problem), **more}
