"""Builds: a lookup that no store answers becomes an entry, compiled once among threads and processes."""

from __future__ import annotations

import os
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import tlhub
from tlhub.cache.chain import Chain, Hit, Wanted
from tlhub.cache.entry import Entry, Manifest
from tlhub.cache.key import problem_digest
from tlhub.errors import ArgumentError, BuildError
from tlhub.explanation import show_problem
from tlhub.lookup import Lookup, event, toolchains
from tlhub.problem import generalise
from tlhub.resolve import Candidate, Resolution
from tlhub.specs import Problem
from tlhub.stores import spread, user_store

_PATIENCE = 300.0
"""Seconds to wait for another process that builds the same; then it is built here too."""

_locks: dict[Any, threading.Lock] = {}
_guard = threading.Lock()
_frozen = False


def freeze(frozen: bool = True) -> None:
    """Let this process build nothing from now on, as ``TLHUB_COMPILE=never`` does: a miss is NotPrebuilt."""
    global _frozen
    _frozen = frozen


def compiling_off() -> str | None:
    """Return what keeps kernels from being built here, or None. Raises ArgumentError for an unknown word."""
    value = os.environ.get("TLHUB_COMPILE") or "auto"
    if value not in ("auto", "never"):
        raise ArgumentError(f"TLHUB_COMPILE is {value!r}; allowed: auto, never", hint="export TLHUB_COMPILE=auto")
    return "tlhub.freeze() was called" if _frozen else "TLHUB_COMPILE=never" if value == "never" else None


def obstacle(lookup: Lookup, resolution: Resolution) -> BuildError | None:
    """Return what keeps the best candidate from being compiled here, as far as that can be seen without a worker."""
    from tlhub.build import frontends

    try:
        frontends.present(resolution.candidates[0].schedule.toolchain)
        lookup.place.target.ready(lookup.place.arch)
    except BuildError as error:
        return error
    return None


def identify(lookup: Lookup, resolution: Resolution) -> bool:
    """Ask a worker for the versions that an exact match compares; tell whether one was not known yet."""
    from tlhub.build import pool

    place = lookup.place
    unknown = {c.schedule.toolchain for c in resolution.candidates} - {t for t, a in toolchains if a == place.arch}
    for toolchain in unknown:
        told = pool.default().identity(toolchain, place.arch, place.target)
        if told is not None:
            toolchains[toolchain, place.arch] = told
    return bool(unknown)


def build_first(
    lookup: Lookup, resolution: Resolution, wanted: list[Wanted], stores: Chain
) -> tuple[Hit, str, Candidate]:
    """Build the best candidate that builds; one that fails is warned of, and the next is tried.

    Returns the entry, ``built`` or the origin of the store where another put it meanwhile, and the candidate.
    Raises the best candidate's BuildError where none builds.
    """
    problem = lookup.problem
    failures: list[BuildError] = []
    for index, candidate in enumerate(resolution.candidates):
        general = generalise(problem, candidate.schedule.symbolic)
        lock = (problem_digest(general, lookup.place.arch), candidate.schedule.name)
        with _once(lock), user_store().lock(lock[0], timeout=_PATIENCE, waiting=partial(_waiting, problem)):
            # another thread or process may have built it meanwhile
            hit, _ = lookup.find(stores, wanted)
            if hit is not None:
                return hit, hit.origin, resolution.candidates[hit.index]
            try:
                entry = _build(lookup, general, candidate, wanted[index])
                refused = lookup.veto(entry.manifest)
                if refused:
                    text = f"what {candidate.schedule.name!r} builds does not serve here: {refused}"
                    raise BuildError(text, hint="tlhub cache refusals")
            except BuildError as error:
                failures.append(error)
                continue
        for failure in failures:
            text = f"serving {candidate.schedule.name!r}, for a better schedule failed to build: {failure}"
            warnings.warn(text, RuntimeWarning, stacklevel=4)
        return Hit(entry, "exact", user_store(), index, general), "built", candidate
    raise failures[0]


def _build(lookup: Lookup, problem: Problem, candidate: Candidate, wanted: Wanted) -> Entry:
    """Compile *candidate* for *problem*, what was asked or more general, in a worker and publish it."""
    from tlhub.build import pool  # what is served from a store needs none

    place, schedule, config, store = lookup.place, candidate.schedule, candidate.config, user_store()
    owner = lookup.catalog.owner(schedule)
    with store.stage() as staged:
        built = pool.default().build(lookup.kernel, problem, schedule, config, place.arch, place.target, staged.path)
        toolchains[schedule.toolchain, place.arch] = built.toolchain
        manifest = Manifest.make(
            problem,
            place.arch,
            schedule=schedule.name,
            schedule_revision=schedule.revision,
            source_digest=wanted.source_digest,
            config=config,
            toolchain=built.toolchain,
            abi=built.abi,
            platform={"os": sys.platform, "machine": built.machine, "glibc": built.glibc},
            resources=built.resources,
            least_driver=built.least_driver,
            provenance={
                "tlhub": tlhub.__version__,
                "plugin": owner.distribution,
                "plugin_version": owner.version,
                "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                "seconds": round(built.seconds, 3),
                **({"warnings": "\n".join(built.warnings)} if built.warnings else {}),
            },
        )
        entry = store.publish(staged, manifest, built.members, own=True)
    spread(entry)
    return entry


@contextmanager
def _once(key: Any) -> Iterator[None]:
    """Hold the lock of *key*, so that threads asking for one build make one."""
    with _guard:
        lock = _locks.setdefault(key, threading.Lock())
    with lock:
        yield


def _waiting(problem: Problem, holder: str) -> None:
    event(f"{show_problem(problem)}: waiting for {holder}, which builds it")


def forget() -> None:
    """Drop the locks of this process."""
    _locks.clear()


def _renew_after_fork() -> None:
    """A child may have inherited a lock that another thread held."""
    global _guard
    _guard = threading.Lock()
    forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_after_fork)
