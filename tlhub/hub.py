"""The way of a lookup: table, problem, decision, stores, build, load."""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import tlhub
from tlhub import certificates, operands, sources
from tlhub.cache.chain import Chain, Hit, Searched, Wanted
from tlhub.cache.entry import Entry, Manifest
from tlhub.cache.key import problem_digest
from tlhub.catalog import Catalog, load
from tlhub.devices import Place, locate
from tlhub.errors import ArgumentError, BuildError, DeviceError, NoSchedule, NotPrebuilt, TlhubError
from tlhub.explanation import Explanation, command, show_problem
from tlhub.problem import generalise, make, patterns, signature
from tlhub.resolve import BY_NAME, Candidate, Resolution, config_of, resolve
from tlhub.specs import Kernel, Problem
from tlhub.stores import chain, user_store

if TYPE_CHECKING:
    from tlhub.runtime.kernel import CompiledKernel

_served: dict[Any, CompiledKernel] = {}
"""Problem, arch and schedule to the kernel that serves them."""

_toolchains: dict[tuple[str, str], Mapping[str, str]] = {}
"""Toolchain and arch to the versions that a worker of this process told; only workers know them."""

_PATIENCE = 300.0
"""Seconds to wait for another process that builds the same; then it is built here too."""

_locks: dict[Any, threading.Lock] = {}
_guard = threading.Lock()


def get(
    kernel: str,
    shape: Any,
    dtype: Any,
    *,
    device: Any = None,
    arch: str | None = None,
    schedule: str | None = None,
    **options: Any,
) -> CompiledKernel:
    """Return a callable for one problem, from memory, from a store, or built.

    *shape*: extents in the kernel's order, ``(M, N, K)`` for gemm, or a mapping of dim names; a string is a
    symbol, served for every extent. *dtype*: a name, or a mapping of inputs to names. *device*: ``"cpu"``,
    ``"cuda:1"``; *arch*: ``"cpu:x86-64-v3"``. *schedule* asks for one implementation by name.

    Raises UnknownName, ArgumentError, DeviceError, NoSchedule, NotPrebuilt, BuildError, CacheError.
    """
    if type(shape) is tuple:
        try:
            return _asked(kernel, dtype, device, arch, schedule, *shape, **options)
        except TypeError as error:
            if isinstance(error, TlhubError):
                raise
            # else something cannot be hashed, a mapping of dtypes, say: the second table answers
    return _lookup(kernel, shape, dtype, device, arch, schedule, options)


@functools.lru_cache(maxsize=None, typed=True)  # 64.0 and True hash like integers and are none
def _asked(
    kernel: str, dtype: Any, device: Any, arch: str | None, schedule: str | None, *shape: Any, **options: Any
) -> CompiledKernel:
    """Return what was asked before, to the letter and to the type of each extent and option."""
    return _lookup(kernel, shape, dtype, device, arch, schedule, options)


def get_for(
    kernel: str, *arrays: Any, device: Any = None, schedule: str | None = None, **options: Any
) -> CompiledKernel:
    """Return the kernel for *arrays*, its inputs in order: dims, dtypes and device are read off them.

    Raises what ``get`` does, and ArgumentError where the arrays' shapes do not fit together.
    """
    spec = load().kernel(kernel)
    extents, dtypes = operands.read(spec, arrays, options)
    if device is None:
        device = operands.device_of(load(), arrays[0])
    return get(kernel, extents, dtypes, device=device, schedule=schedule, **options)


def explain(
    kernel: str,
    shape: Any,
    dtype: Any,
    *,
    device: Any = None,
    arch: str | None = None,
    schedule: str | None = None,
    **options: Any,
) -> Explanation:
    """Return the trace that ``get`` with these arguments would act on; builds and loads nothing."""
    asked = _ask(kernel, shape, dtype, device, arch, schedule, options)
    resolution, stores = _resolve(asked), asked.stores()
    wanted = _wanted(asked, resolution)
    hit, searched = asked.find(stores, wanted)
    nearest = partial(stores.nearest, asked.place.arch, wanted)
    return Explanation(asked.problem, asked.place, resolution, searched, hit, nearest, compiling=may_compile())


def prewarm(
    kernel: str,
    shape: Any,
    dtype: Any,
    *,
    device: Any = None,
    arch: str | None = None,
    schedule: str | None = None,
    **options: Any,
) -> tuple[Entry, str]:
    """Make sure that the best candidate's entry is in a store, without loading it.

    Returns the entry and its origin: ``built``, or the origin of the store that has it already.
    """
    asked = _ask(kernel, shape, dtype, device, arch, schedule, options)
    resolution = _resolution(asked)
    hit, origin, _ = _obtain(asked, Resolution(resolution.candidates[:1], resolution.rejected))
    return hit.entry, origin


def forget() -> None:
    """Empty the tables of this process: the next ``get`` asks the stores again."""
    _asked.cache_clear()
    _served.clear()
    _locks.clear()


def _renew_after_fork() -> None:
    """A child may have inherited a lock that another thread held."""
    global _guard
    _guard = threading.Lock()
    forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_after_fork)


# -- the steps -------------------------------------------------------------------------------------


def _lookup(
    kernel: str, shape: Any, dtype: Any, device: Any, arch: str | None, schedule: str | None, options: Mapping[str, Any]
) -> CompiledKernel:
    asked = _ask(kernel, shape, dtype, device, arch, schedule, options)
    key = (asked.problem, asked.place.arch, asked.place.device, schedule)
    if key not in _served:
        _served[key] = _compiled(asked, *_obtain(asked, _resolution(asked)))
    return _served[key]


class Asked(NamedTuple):
    """What a lookup is for, its words looked up. ``schedule``: the name of the one that must serve, or None."""

    catalog: Catalog
    kernel: Kernel
    problem: Problem
    place: Place
    schedule: str | None

    def stores(self) -> Chain:
        return chain(self.catalog, self.place.facts.driver, self.place.shared_memory)

    def find(self, stores: Chain, wanted: list[Wanted]) -> tuple[Hit | None, tuple[Searched, ...]]:
        return stores.find(self.place.arch, wanted, here=self.place.device is not None)


def _ask(
    kernel: str, shape: Any, dtype: Any, device: Any, arch: str | None, schedule: str | None, options: Mapping[str, Any]
) -> Asked:
    catalog = load()
    spec = catalog.kernel(kernel)
    return Asked(catalog, spec, make(spec, shape, dtype, options), locate(catalog, device, arch), schedule)


def _resolve(asked: Asked) -> Resolution:
    """Return who serves, and why the others do not."""
    schedules = asked.catalog.schedules.get(asked.kernel.name, ())
    unproven = certificates.unproven(asked.catalog, asked.place.target.name)
    return resolve(schedules, asked.problem, asked.place.facts, asked=asked.schedule, unproven=unproven)


def _resolution(asked: Asked) -> Resolution:
    """Return what ``_resolve`` does. Raises NoSchedule where nobody serves."""
    resolution = _resolve(asked)
    if resolution.candidates:
        return resolution
    problem, place = asked.problem, asked.place
    reasons = "".join(f"\n  {r.schedule}: {r.reason}" for r in resolution.rejected) or " (none is installed)"
    by_name = next((r.schedule for r in resolution.rejected if r.reason.endswith(BY_NAME)), None)
    raise NoSchedule(
        f"no schedule serves {show_problem(problem)} on {place.arch}:{reasons}",
        hint=f"tlhub get {command(problem, place, by_name)}" if by_name else f"tlhub schedules {problem.kernel}",
    )


def _wanted(asked: Asked, resolution: Resolution) -> list[Wanted]:
    place = asked.place
    return [
        Wanted(
            schedule=c.schedule.name,
            revision=c.schedule.revision,
            source_digest=sources.digest(c.schedule),
            config=c.config,
            problems=patterns(asked.kernel, asked.problem, c.schedule.symbolic),
            toolchain=_toolchains.get((c.schedule.toolchain, place.arch)),
            # sources that change under us must not be served by what they were
            match="compatible" if asked.catalog.owner(c.schedule).editable else "revision",
            general=partial(config_of, c.schedule, facts=place.facts),
        )
        for c in resolution.candidates
    ]


def _obtain(asked: Asked, resolution: Resolution) -> tuple[Hit, str, Candidate]:
    """Return an entry of a candidate, its origin, and the candidate: found in a store, else built."""
    problem, place = asked.problem, asked.place
    wanted, stores = _wanted(asked, resolution), asked.stores()
    hit, _ = asked.find(stores, wanted)
    if hit is None and stores.match == "exact" and may_compile() and _identify(place, resolution):
        wanted = _wanted(asked, resolution)
        hit, _ = asked.find(stores, wanted)
    if hit is None:
        if not may_compile():
            raise NotPrebuilt(
                f"no store has {show_problem(problem)} for {place.arch}, and TLHUB_COMPILE=never",
                hint=f"tlhub explain {command(problem, place, asked.schedule)}",
            )
        return _build_first(asked, resolution, wanted, stores)
    if hit.index:
        _event(
            f"{show_problem(problem)}: serving {wanted[hit.index].schedule!r}, which is built; "
            f"{wanted[0].schedule!r} ranks higher and is not: tlhub cache prewarm {command(problem, place)}"
        )
    hit.store.touch(hit.entry, time.time())
    return hit, hit.origin, resolution.candidates[hit.index]


def _identify(place: Place, resolution: Resolution) -> bool:
    """Ask a worker for the versions that an exact match compares; tell whether one was not known yet."""
    from tlhub.build import pool

    unknown = {c.schedule.toolchain for c in resolution.candidates} - {t for t, a in _toolchains if a == place.arch}
    for toolchain in unknown:
        told = pool.default().identity(toolchain, place.arch, place.target)
        if told is not None:
            _toolchains[toolchain, place.arch] = told
    return bool(unknown)


def _build_first(
    asked: Asked, resolution: Resolution, wanted: list[Wanted], stores: Chain
) -> tuple[Hit, str, Candidate]:
    """Build the best candidate that builds; one that fails is warned of, and the next is tried."""
    problem = asked.problem
    failures: list[BuildError] = []
    for index, candidate in enumerate(resolution.candidates):
        general = generalise(problem, candidate.schedule.symbolic)
        lock = (problem_digest(general, asked.place.arch), candidate.schedule.name)
        with _once(lock), user_store().lock(lock[0], timeout=_PATIENCE, waiting=partial(_waiting, problem)):
            # another thread or process may have built it meanwhile
            hit, _ = asked.find(stores, wanted)
            if hit is not None:
                return hit, hit.origin, resolution.candidates[hit.index]
            try:
                entry = _build(asked, general, candidate, wanted[index])
            except BuildError as error:
                failures.append(error)
                continue
        for failure in failures:
            text = f"serving {candidate.schedule.name!r}, for a better schedule failed to build: {failure}"
            warnings.warn(text, RuntimeWarning, stacklevel=4)
        return Hit(entry, "exact", user_store(), index, general), "built", candidate
    raise failures[0]


def _build(asked: Asked, problem: Problem, candidate: Candidate, wanted: Wanted) -> Entry:
    """Compile *candidate* for *problem*, what was asked or more general, in a worker and publish it."""
    from tlhub.build import pool  # what is served from a store needs none

    place, schedule, config, store = asked.place, candidate.schedule, candidate.config, user_store()
    owner = asked.catalog.owner(schedule)
    with store.stage() as staged:
        built = pool.default().build(asked.kernel, problem, schedule, config, place.arch, place.target, staged.path)
        _toolchains[schedule.toolchain, place.arch] = built.toolchain
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
        return store.publish(staged, manifest, built.members, own=True)


def _compiled(asked: Asked, hit: Hit, origin: str, candidate: Candidate) -> CompiledKernel:
    from tlhub.runtime import CompiledKernel, load_entry

    kernel, problem, place = asked.kernel, asked.problem, asked.place
    scratch = None
    if place.device is None:
        function = _not_here(problem, place)
    else:
        library, already = load_entry(hit.entry)
        function, scratch = library.bind(problem), library.scratch
        origin = "memory" if already else origin
    return CompiledKernel(
        kernel,
        problem,
        signature(kernel, problem),
        function,
        schedule=candidate.schedule.name,
        config=dict(hit.entry.manifest.config),  # a revision match may have another than the candidate
        arch=place.arch,
        origin=origin,
        match=hit.match,
        entry=hit.entry,
        scratch=scratch,
    )


def _not_here(problem: Problem, place: Place) -> Any:
    def refuse(*_: Any) -> None:
        why = place.target.absent()
        raise DeviceError(
            f"{problem.kernel} for {place.arch} cannot run: no device here runs that arch"
            + (f" ({why})" if why else ""),
            hint="tlhub targets",
        )

    return refuse


def may_compile() -> bool:
    """Tell whether ``TLHUB_COMPILE`` lets kernels be built here. Raises ArgumentError for an unknown word."""
    value = os.environ.get("TLHUB_COMPILE") or "auto"
    if value not in ("auto", "never"):
        raise ArgumentError(f"TLHUB_COMPILE is {value!r}; allowed: auto, never", hint="export TLHUB_COMPILE=auto")
    return value == "auto"


@contextmanager
def _once(key: Any) -> Iterator[None]:
    """Hold the lock of *key*, so that threads asking for one build make one."""
    with _guard:
        lock = _locks.setdefault(key, threading.Lock())
    with lock:
        yield


def _waiting(problem: Problem, holder: str) -> None:
    _event(f"{show_problem(problem)}: waiting for {holder}, which builds it")


def _event(message: str) -> None:
    import logging

    logging.getLogger("tlhub").info(message)
