"""The way of a lookup: table, problem, decision, stores, build, load."""

from __future__ import annotations

import os
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import tlhub
from tlhub import operands, sources
from tlhub.cache.chain import Chain, Hit, Wanted
from tlhub.cache.entry import Entry, Manifest
from tlhub.cache.key import problem_digest
from tlhub.catalog import Catalog, load
from tlhub.devices import Place, locate
from tlhub.errors import ArgumentError, BuildError, DeviceError, NoSchedule, NotPrebuilt
from tlhub.explanation import Explanation, command, show_problem
from tlhub.problem import generalise, make, patterns, signature
from tlhub.resolve import Candidate, Resolution, resolve
from tlhub.specs import Kernel, Problem
from tlhub.stores import chain, user_store

if TYPE_CHECKING:
    from tlhub.runtime.kernel import CompiledKernel

_asked: dict[Any, CompiledKernel] = {}
"""What was asked, to the letter and to the type, to its answer."""

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
    try:
        # types are part of the key: 64.0 and True hash like integers and are none
        values = options.values()
        key = (kernel, shape, dtype, device, arch, schedule, *options, *values, *map(type, (*shape, *values)))
        return _asked[key]
    except (KeyError, TypeError):
        pass
    found = _lookup(kernel, shape, dtype, device, arch, schedule, options)
    if type(shape) is tuple:
        try:
            _asked[key] = found
        except TypeError:  # a dtype mapping, say: the second table answers
            pass
    return found


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
    catalog = load()
    spec = catalog.kernel(kernel)
    problem = make(spec, shape, dtype, options)
    place = locate(catalog, device, arch)
    resolution = resolve(catalog.schedules.get(spec.name, ()), problem, place.facts, asked=schedule)
    wanted = _wanted(catalog, spec, problem, place, resolution)
    stores = chain(catalog, place.facts.driver)
    hit, searched = stores.find(place.arch, wanted, here=place.device is not None)
    nearest = partial(stores.nearest, place.arch, wanted)
    return Explanation(problem, place, resolution, searched, hit, nearest, compiling=may_compile())


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
    catalog = load()
    spec = catalog.kernel(kernel)
    problem = make(spec, shape, dtype, options)
    place = locate(catalog, device, arch)
    resolution = _resolution(catalog, spec, problem, place, schedule)
    best = Resolution(resolution.candidates[:1], resolution.rejected)
    hit, origin, _ = _obtain(catalog, spec, problem, place, best)
    return hit.entry, origin


def forget() -> None:
    """Empty the tables of this process: the next ``get`` asks the stores again."""
    _asked.clear()
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
    catalog = load()
    spec = catalog.kernel(kernel)
    problem = make(spec, shape, dtype, options)
    place = locate(catalog, device, arch)
    key = (problem, place.arch, place.device, schedule)
    if key not in _served:
        resolution = _resolution(catalog, spec, problem, place, schedule)
        hit, origin, candidate = _obtain(catalog, spec, problem, place, resolution)
        _served[key] = _compiled(spec, problem, place, candidate, hit, origin)
    return _served[key]


def _resolution(catalog: Catalog, kernel: Kernel, problem: Problem, place: Place, schedule: str | None) -> Resolution:
    resolution = resolve(catalog.schedules.get(kernel.name, ()), problem, place.facts, asked=schedule)
    if resolution.candidates:
        return resolution
    reasons = "".join(f"\n  {r.schedule}: {r.reason}" for r in resolution.rejected) or " (none is installed)"
    raise NoSchedule(
        f"no schedule serves {show_problem(problem)} on {place.arch}:{reasons}",
        hint=f"tlhub schedules {kernel.name}",
    )


def _wanted(catalog: Catalog, kernel: Kernel, problem: Problem, place: Place, resolution: Resolution) -> list[Wanted]:
    problems = patterns(kernel, problem)
    return [
        Wanted(
            schedule=c.schedule.name,
            revision=c.schedule.revision,
            source_digest=sources.digest(c.schedule),
            config=c.config,
            problems=problems,
            toolchain=_toolchains.get((c.schedule.toolchain, place.arch)),
            # sources that change under us must not be served by what they were
            match="compatible" if catalog.owner(c.schedule).editable else "revision",
        )
        for c in resolution.candidates
    ]


def _obtain(
    catalog: Catalog, kernel: Kernel, problem: Problem, place: Place, resolution: Resolution
) -> tuple[Hit, str, Candidate]:
    """Return an entry of a candidate, its origin, and the candidate: found in a store, else built."""
    wanted = _wanted(catalog, kernel, problem, place, resolution)
    stores = chain(catalog, place.facts.driver)
    hit, _ = stores.find(place.arch, wanted, here=place.device is not None)
    if hit is None and stores.match == "exact" and may_compile() and _identify(place, resolution):
        wanted = _wanted(catalog, kernel, problem, place, resolution)
        hit, _ = stores.find(place.arch, wanted, here=place.device is not None)
    if hit is None:
        if not may_compile():
            raise NotPrebuilt(
                f"no store has {show_problem(problem)} for {place.arch}, and TLHUB_COMPILE=never",
                hint=f"tlhub explain {command(problem, place)}",
            )
        return _build_first(catalog, kernel, problem, place, resolution, wanted, stores)
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
    catalog: Catalog,
    kernel: Kernel,
    problem: Problem,
    place: Place,
    resolution: Resolution,
    wanted: list[Wanted],
    stores: Chain,
) -> tuple[Hit, str, Candidate]:
    """Build the best candidate that builds; one that fails is warned of, and the next is tried."""
    failures: list[BuildError] = []
    for index, candidate in enumerate(resolution.candidates):
        general = generalise(problem, candidate.schedule.symbolic)
        lock = (problem_digest(general, place.arch), candidate.schedule.name)
        with _once(lock), user_store().lock(lock[0], timeout=_PATIENCE, waiting=partial(_waiting, problem)):
            # another thread or process may have built it meanwhile
            hit, _ = stores.find(place.arch, wanted, here=place.device is not None)
            if hit is not None:
                return hit, hit.origin, resolution.candidates[hit.index]
            try:
                entry = _build(catalog, kernel, general, place, candidate, wanted[index])
            except BuildError as error:
                failures.append(error)
                continue
        for failure in failures:
            text = f"serving {candidate.schedule.name!r}, for a better schedule failed to build: {failure}"
            warnings.warn(text, RuntimeWarning, stacklevel=4)
        return Hit(entry, "exact", user_store(), index, general), "built", candidate
    raise failures[0]


def _build(
    catalog: Catalog, kernel: Kernel, problem: Problem, place: Place, candidate: Candidate, wanted: Wanted
) -> Entry:
    """Compile *candidate* for *problem* in a worker and publish it."""
    from tlhub.build import pool  # what is served from a store needs none

    owner, schedule, store = catalog.owner(candidate.schedule), candidate.schedule, user_store()
    with store.stage() as staged:
        built = pool.default().build(kernel, problem, schedule, candidate.config, place.arch, place.target, staged.path)
        _toolchains[schedule.toolchain, place.arch] = built.toolchain
        manifest = Manifest.make(
            problem,
            place.arch,
            schedule=schedule.name,
            schedule_revision=schedule.revision,
            source_digest=wanted.source_digest,
            config=candidate.config,
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
        return store.publish(staged, manifest, built.members)


def _compiled(
    kernel: Kernel, problem: Problem, place: Place, candidate: Candidate, hit: Hit, origin: str
) -> CompiledKernel:
    from tlhub.runtime import CompiledKernel, load_entry

    if place.device is None:
        function = _not_here(problem, place)
    else:
        library, already = load_entry(hit.entry)
        function = library.bind(problem)
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
    )


def _not_here(problem: Problem, place: Place) -> Any:
    def refuse(*_: Any) -> None:
        raise DeviceError(
            f"{problem.kernel} for {place.arch} cannot run: no device here runs that arch", hint="tlhub targets"
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
