"""``get`` and ``explain``: one lookup, done or explained."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from tlhub.cli import output
from tlhub.cli.command import Command, hide_torch, json_option, problem_arguments, request, words

if TYPE_CHECKING:
    from tlhub.cache.entry import Entry
    from tlhub.explanation import Explanation
    from tlhub.runtime import CompiledKernel
    from tlhub.specs import Problem


@click.command(cls=Command)
@problem_arguments()
@json_option
def get(as_json: bool, **typed: Any) -> None:
    """Find or build the kernel of a problem, and say where it came from."""
    asked = request(**typed)
    from tlhub import catalog, hub, recording

    # a verified entry answers without being loaded, which would take most of the time
    explanation = hub.explain(**asked)
    found = _served(explanation)
    if found is None:
        hide_torch()
        found = _compiled(hub.get(**asked))
    else:
        kernel = catalog.load().kernel(asked["kernel"])
        recording.note(kernel, explanation.problem, explanation.place.arch, asked["schedule"])
    problem, document = found
    if as_json:
        output.write_json(document)
        return
    output.fields(
        [
            ("kernel", problem.kernel),
            ("dims", output.dims(problem.dims)),
            ("dtypes", words(document["dtypes"].items())),
            ("options", words(document["options"].items())),
            ("arch", document["arch"]),
            ("schedule", document["schedule"]),
            ("config", words(document["config"].items())),
            ("origin", f"{document['origin']} ({document['match']} match)"),
            ("entry", document["entry"] or "in memory"),
            ("key", document["key"]),
        ]
    )


@click.command(cls=Command)
@problem_arguments()
@json_option
def explain(as_json: bool, **typed: Any) -> None:
    """Say what get would do, and why: schedules, stores, and the nearest entry. Builds nothing."""
    asked = request(**typed)
    from tlhub import hub

    explanation = hub.explain(**asked)
    if as_json:
        output.write_json(explanation.to_json())
    else:
        output.write(str(explanation))


Found = tuple["Problem", dict[str, Any]]


def _served(explanation: Explanation) -> Found | None:
    """Return what the stores have for the lookup, used as ``tlhub.get`` uses it but not loaded, or None."""
    served = explanation.served
    if served is None or served.hit is None:
        return None
    from tlhub import stores
    from tlhub.cache import stats
    from tlhub.cache.manifest import Damaged

    try:
        served.hit.entry.prepare()
    except Damaged:  # what comes from another machine may be: get tells what serves in its place
        return None
    hit, origin = stores.use(served.hit), served.hit.origin
    stats.found(stores.user_store(), origin, hit.entry.manifest)
    config = dict(hit.entry.manifest.config)
    candidate = served.resolution.candidates[hit.index]
    place = {"arch": served.place.arch, "schedule": candidate.schedule.name, "config": config}
    return explanation.problem, _document(explanation.problem, hit.entry, origin, hit.match, **place)


def _compiled(kernel: CompiledKernel) -> Found:
    place = {"arch": kernel.arch, "schedule": kernel.schedule, "config": dict(kernel.config)}
    return kernel.problem, _document(kernel.problem, kernel.entry, kernel.origin, kernel.match, **place)


def _document(problem: Problem, entry: Entry, origin: str, match: str, **place: Any) -> dict[str, Any]:
    from tlhub.explanation import problem_json

    what = problem_json(problem)
    return {**what, **place, "origin": origin, "match": match, "entry": entry.folder, "key": entry.key}
