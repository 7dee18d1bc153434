"""Cover: the problems of a workload for the archs that were asked, and the entries that serve them."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from tlhub import catalog, hub, sources, workload
from tlhub.cache.entry import Damaged, Entry
from tlhub.devices import canonical_arch
from tlhub.errors import CacheError, NotPrebuilt
from tlhub.explanation import command
from tlhub.specs import Schedule

_SHOWN = 5


def requests(path: str, archs: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Return the problems of the workload *path* as keyword arguments of ``tlhub.get``, each once.

    *archs*: for these, whatever the workload says. Raises ArgumentError, and what is wrong with the first problem
    that is wrong: what is carried away must be whole.
    """
    known = catalog.load()
    everywhere: list[str | None] = [canonical_arch(known, arch)[1] for arch in archs]
    found: dict[str, dict[str, Any]] = {}
    for item in workload.whole(path, known):
        for arch in everywhere or [item.arch]:
            asked = {**item.request(), "arch": arch}
            found[repr(sorted(asked.items()))] = asked
    return list(found.values())


class Served(NamedTuple):
    """An entry, and the schedule as it is installed that it serves for."""

    entry: Entry
    schedule: Schedule

    @property
    def current(self) -> bool:
        """Whether the entry was built of the sources that are installed."""
        return self.entry.manifest.source_digest == sources.digest(self.schedule)


def serve(asked: Iterable[dict[str, Any]], path: str, archs: Sequence[str] = ()) -> list[Served]:
    """Return the entries that serve *asked*, each once: nothing is built, and what a registry has is in the cache then.

    Raises NotPrebuilt, which names what of the workload *path* (for *archs*, where given) no store has, and CacheError
    for what a registry has and cannot be brought.
    """
    found: dict[str, Served] = {}
    missing = []
    for request in asked:
        trace = hub.explain(**request)
        serving = trace.served
        if serving and serving.hit:
            hit = serving.hit
            try:
                hit.entry.prepare()
            except Damaged as error:  # of what is here it was found before
                text = f"entry {hit.entry.key[:16]} cannot be brought from {hit.store.name}: {error.reason}"
                raise CacheError(text, hint=f"tlhub remote verify {hit.store.name}") from error
            hit.entry.hold()
            found[hit.entry.key] = Served(hit.entry, serving.resolution.candidates[hit.index].schedule)
        else:
            missing.append(command(trace.problem, trace.place, request["schedule"]))
    if missing:
        more = [f"and {len(missing) - _SHOWN} more"] if len(missing) > _SHOWN else []
        shown = "".join(f"\n  {line}" for line in (*missing[:_SHOWN], *more))
        raise NotPrebuilt(
            f"no store has {len(missing)} of the problems of {path!r}:{shown}",
            hint=" ".join(["tlhub cache prewarm --from", shlex.quote(path), *(f"--arch {arch}" for arch in archs)]),
        )
    return list(found.values())
