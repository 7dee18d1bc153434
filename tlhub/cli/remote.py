"""``remote``: entries to a registry and back."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import click

from tlhub.cli import output
from tlhub.cli.command import FOUND_PROBLEMS, Command, Group, json_option
from tlhub.cli.entries import check_kernel, count_entries, full_arch, items_of, sound, user_store
from tlhub.errors import CacheError
from tlhub.quantity import size

if TYPE_CHECKING:
    from tlhub.cache.manifest import Manifest
    from tlhub.remote.registry import Registry
    from tlhub.remote.sync import Done

F = TypeVar("F", bound=Callable[..., Any])


@click.group(cls=Group)
def remote() -> None:
    """Bring entries to an OCI registry, and from there.

    A place is oci://HOST[:PORT]/REPOSITORY[:TAG][@sha256:DIGEST].
    """


class Chosen(NamedTuple):
    """Which entries a command means. ``archs``: None for any."""

    archs: tuple[str, ...] | None
    kernel: str | None
    wanted: Callable[[Manifest], bool]


def _place(function: F) -> F:
    """Give a command ``PLACE [--plain-http]``: it gets the registry."""

    @functools.wraps(function)
    def located(place: str, plain_http: bool, **more: Any) -> Any:
        from tlhub.remote.reference import parse
        from tlhub.remote.registry import Registry

        return function(Registry(parse(place, plain=plain_http)), **more)

    plain = click.option("--plain-http", is_flag=True, help="HTTP without TLS; localhost needs no such word.")
    return cast(F, click.argument("place")(plain(located)))


def _filters(function: F) -> F:
    """Give a command ``[--arch A].. [--kernel K] [--from FILE]``: it gets what they choose."""

    @functools.wraps(function)
    def filtered(*args: Any, archs: Sequence[str], kernel: str | None, workload: str | None, **more: Any) -> Any:
        return function(*args, chosen=_chosen(archs, kernel, workload), **more)

    decorated: Any = filtered
    for decorator in (
        click.option("--from", "workload", metavar="FILE", help="Only what the problems of a workload.toml may need."),
        click.option("--kernel", metavar="K", help="Only entries of this kernel."),
        click.option("--arch", "archs", multiple=True, metavar="A", help="Only entries for this arch, or these."),
    ):
        decorated = decorator(decorated)
    return cast(F, decorated)


@remote.command(cls=Command)
@_place
@_filters
@click.option("--replace", is_flag=True, help="The tag means these entries alone, instead of these besides others.")
@json_option
def push(registry: Registry, chosen: Chosen, replace: bool, as_json: bool) -> None:
    """Add the entries of the cache, with their signatures, to what PLACE has; exits with 1 where one is damaged."""
    from tlhub.remote import sync

    store = user_store()
    items = items_of(store)
    check_kernel(chosen.kernel, items)
    entries, damaged = sound(store, (item for item in items if item.manifest is None or chosen.wanted(item.manifest)))
    done = sync.push(registry, store, entries, replace=replace)
    done.refused += damaged
    _report(done, registry, "pushed", as_json)


@remote.command(cls=Command)
@_place
@_filters
@json_option
def pull(registry: Registry, chosen: Chosen, as_json: bool) -> None:
    """Bring entries from PLACE into the cache, verified; exits with 1 where one, or a signature, was refused."""
    from tlhub.remote import sync

    store = user_store()
    store.check()
    done = sync.pull(registry, store, archs=chosen.archs, wanted=chosen.wanted)
    if not (done.entries or done.present or done.refused):
        where = registry.reference
        raise CacheError(f"nothing to pull: no entry of {where} is meant", hint=f"tlhub remote ls {where}")
    _report(done, registry, "pulled", as_json)


@remote.command(cls=Command)
@_place
@_filters
@json_option
def ls(registry: Registry, chosen: Chosen, as_json: bool) -> None:
    """List the entries that PLACE has, without reading them."""
    from tlhub.remote import reading, sync

    digest, shelves = reading.shelves(registry, chosen.archs)
    marks = sync.merged(shelves)
    found = [(row, shelf) for shelf in shelves for row in shelf.front.rows if chosen.wanted(row.manifest)]
    total = sum(row.end - row.start for row, _ in found)
    if as_json:
        entries = [
            {
                "key": row.manifest.build_digest,
                "kernel": row.manifest.kernel,
                "dims": dict(row.manifest.dims),
                "dtype": row.manifest.problem.dtype,
                "arch": row.manifest.arch,
                "schedule": row.manifest.schedule,
                "size": row.end - row.start,
                "layer": shelf.layer.digest,
                "signed_by": list(marks.get(row.manifest.sha256, ())),
            }
            for row, shelf in found
        ]
        output.write_json({"place": str(registry.reference), "digest": digest, "size": total, "entries": entries})
        return
    rows = []
    for row, _ in found:
        m = row.manifest
        signers = " ".join(marks.get(m.sha256, ()))
        what = (m.build_digest[:16], m.kernel, output.dims(m.dims), m.problem.dtype, m.arch, m.schedule)
        rows.append((*what, size(row.end - row.start), signers))
    columns = ["entry", "kernel", "dims", "dtype", "arch", "schedule", "size", "signed by"]
    output.table(columns, rows, right=["size"], whole=["entry"])
    output.note(f"{count_entries(len(found))}, {size(total)} in {registry.reference}, which is {digest}")


@remote.command(cls=Command)
@_place
@json_option
def verify(registry: Registry, as_json: bool) -> None:
    """Read and hash everything that PLACE has; exits with 1 where something is altered."""
    from tlhub.remote import reading

    digest, shelves = reading.shelves(registry)
    wrong = []
    for shelf in shelves:
        for row, why in reading.verify(registry, shelf):
            wrong.append((row.manifest.folder if row else shelf.layer.digest, why))
    count = sum(len(shelf.front.rows) for shelf in shelves)
    if as_json:
        damaged = [{"entry": where, "reason": why} for where, why in wrong]
        output.write_json({"place": str(registry.reference), "digest": digest, "entries": count, "damaged": damaged})
    elif wrong:
        output.table(["entry", "damage"], wrong)
    output.note(f"{count_entries(count)}, {len(wrong)} damaged in {registry.reference}, which is {digest}")
    if wrong:
        sys.exit(FOUND_PROBLEMS)


def _chosen(archs: Sequence[str], kernel: str | None, workload: str | None) -> Chosen:
    places = tuple(arch for name in archs if (arch := full_arch(name)))
    problems = None if workload is None else _problems(workload)

    def wanted(manifest: Manifest) -> bool:
        if (places and manifest.arch not in places) or kernel not in (None, manifest.kernel):
            return False
        return problems is None or problems(manifest)

    return Chosen(places or None, kernel, wanted)


def _problems(workload: str) -> Callable[[Manifest], bool]:
    """Return the function that tells whether an entry may serve a problem of *workload*; raises what is wrong with one.

    What may serve depends on no device: the problem or a more general one, any schedule's unless the problem names one.
    """
    from tlhub import catalog
    from tlhub.cache.key import problem_digest
    from tlhub.problem import make, patterns
    from tlhub.workload import whole

    known = catalog.load()
    asked = []
    for item in whole(workload, known):
        kernel = known.kernel(item.kernel)
        problem = make(kernel, item.shape, item.dtype, item.options)
        schedules = [s for s in known.schedules.get(item.kernel, ()) if item.schedule in (None, s.name)]
        general = {pattern for s in schedules for pattern in patterns(kernel, problem, s.symbolic)}
        asked.append((item, {problem, *general}))

    def needed(manifest: Manifest) -> bool:
        return any(
            item.arch in (None, manifest.arch)
            and item.schedule in (None, manifest.schedule)
            and any(problem_digest(problem, manifest.arch) == manifest.problem_digest for problem in problems)
            for item, problems in asked
            if item.kernel == manifest.kernel
        )

    return needed


def _report(done: Done, registry: Registry, verb: str, as_json: bool) -> None:
    if as_json:
        refused = [{"entry": where, "reason": why} for where, why in done.refused]
        counts = {"entries": done.entries, "present": done.present, "size": done.size, "requests": registry.requests}
        output.write_json({"place": str(registry.reference), "digest": done.digest, **counts, "refused": refused})
    else:
        for where, why in done.refused:
            output.note(f"not {verb}: {where}: {why}")
        output.write(f"{count_entries(done.entries)} {verb}, {size(done.size)}; {done.present} there already")
        output.note(f"{registry.reference} is {done.digest}")
    if done.refused:
        sys.exit(FOUND_PROBLEMS)
