"""The way of a lookup: table, problem, decision, stores, build, load."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from tlhub import builds, operands, pins, recording, refusals
from tlhub.cache import stats
from tlhub.cache.chain import Chain, Hit, Host
from tlhub.cache.entry import Entry
from tlhub.cache.key import problem_digest
from tlhub.catalog import load
from tlhub.devices import Place
from tlhub.errors import BuildError, CacheError, DeviceError, NoSchedule, NotPrebuilt, TlhubError
from tlhub.explanation import Explanation, command, show_problem
from tlhub.lookup import Lookup, ask, event
from tlhub.problem import generalise, signature
from tlhub.resolve import Candidate, Resolution
from tlhub.specs import Problem
from tlhub.stores import layers, use, user_store

if TYPE_CHECKING:
    from tlhub.runtime.kernel import CompiledKernel

_served: dict[Any, CompiledKernel] = {}
"""Problem, arch and schedule to the kernel that serves them."""


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
    lookup = ask(load(), kernel, shape, dtype, device=device, arch=arch, schedule=schedule, **options)
    return _explained(lookup, compiling=builds.compiling_off() is None)


def check(
    kernel: str, shape: Any, dtype: Any, *, host: Host, driver: int = 0, obey: bool = True, **how: Any
) -> Explanation:
    """Return the trace of ``get`` on *host*, which compiles nothing: this machine's stores, that one's device.

    *how*: the keywords of ``get``. *driver*: its major version there, 0 where it is not to be compared. *obey*: keep to
    what is pinned.
    """
    lookup = ask(load(), kernel, shape, dtype, **how)
    place = replace(lookup.place, facts=replace(lookup.place.facts, driver=driver or lookup.place.facts.driver))
    pin = lookup.pin if obey else None
    return _explained(lookup._replace(place=place, deployed=host, pin=pin), compiling=False)


def prewarm(kernel: str, shape: Any, dtype: Any, **how: Any) -> tuple[Entry, str]:
    """Make sure that the best candidate's entry is in a store, whatever is pinned, without loading it.

    *how*: the keywords of ``get``. Returns the entry and its origin: ``built``, or the origin of the store that has
    it already.
    """
    lookup = ask(load(), kernel, shape, dtype, **how)
    resolution = lookup.resolution()
    best = Resolution(resolution.candidates[:1], resolution.rejected)
    with stats.failures(store := user_store()):
        found = _exact(lookup._replace(pin=None), best)
    stats.found(store, found.origin, found.hit.entry.manifest)
    return found.hit.entry, found.origin


def binary(kernel: str, shape: Any, dtype: Any, **how: Any) -> str:
    """Return the problem digest of what ``prewarm`` with these arguments builds: many problems may have one binary."""
    lookup = ask(load(), kernel, shape, dtype, **how)
    best = lookup.resolution().candidates[0]
    return problem_digest(generalise(lookup.problem, best.schedule.symbolic), lookup.place.arch)


stats.counts_again(lambda: _asked.cache_info().hits)


def forget() -> None:
    """Empty the tables of this process: the next ``get`` asks the stores again."""
    _asked.cache_clear()
    _served.clear()
    builds.forget()
    pins.read.cache_clear()
    refusals.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=forget)


# -- the steps -------------------------------------------------------------------------------------


def _lookup(
    kernel: str, shape: Any, dtype: Any, device: Any, arch: str | None, schedule: str | None, options: Mapping[str, Any]
) -> CompiledKernel:
    lookup = ask(load(), kernel, shape, dtype, device=device, arch=arch, schedule=schedule, **options)
    key = (lookup.problem, lookup.place.arch, lookup.place.device, schedule)
    if key not in _served:
        recording.note(lookup.kernel, lookup.problem, lookup.place.arch, schedule)
        with stats.failures(user_store()):
            _served[key] = _serve(lookup)
    return _served[key]


def _serve(lookup: Lookup) -> CompiledKernel:
    """Return the kernel that answers the lookup, loaded."""
    found = _obtain(lookup)
    try:
        kernel = _compiled(found, partial(_instead, lookup, found))
    except CacheError as error:
        return _instead(lookup, found, error)
    stats.found(user_store(), found.origin, found.hit.entry.manifest)
    return kernel


def _instead(lookup: Lookup, found: Found, error: TlhubError) -> CompiledKernel:
    """Return what serves where the device does not take what was found. Raises *error* where nothing does.

    That it was refused is noted only if something else is taken: else it may be the machine that is at fault.
    """
    key, facts = found.hit.entry.key, found.lookup.place.facts
    refusals.note(key, facts, error.message)
    try:
        other = _serve(lookup)
    except TlhubError:
        refusals.withdraw(key, facts)
        raise error from None
    warnings.warn(
        f"{show_problem(lookup.problem)}: serving {other.schedule!r} ({other.key[:16]}) in the place of "
        f"{found.candidate.schedule.name!r} ({key[:16]}), which {facts.model} does not take: {error.message}",
        RuntimeWarning,
        stacklevel=4,
    )
    return other


def _explained(lookup: Lookup, *, compiling: bool) -> Explanation:
    resolution, stores = lookup.resolve(), lookup.stores()
    wanted = lookup.wanted(resolution)
    hit, searched = lookup.find(stores, wanted, telling=True)
    nearest = partial(stores.nearest, lookup.place.arch, wanted)
    portable = None if hit else lookup.portable()
    otherwise = portable and _explained(portable, compiling=False)
    told = (lookup.problem, lookup.place, resolution, layers(lookup.catalog), searched, hit, nearest)
    return Explanation(*told, compiling, lookup.pin, otherwise, partial(builds.obstacle, lookup, resolution))


class Found(NamedTuple):
    """What a lookup came to: an entry, its origin, and the candidate that it is of."""

    lookup: Lookup
    hit: Hit
    origin: str
    candidate: Candidate


def _obtain(lookup: Lookup) -> Found:
    """Return an entry for the exact arch, found or built; where there is none, one that is not for that arch alone."""
    try:
        return _exact(lookup, lookup.resolution())
    except (NoSchedule, NotPrebuilt, BuildError) as error:
        portable = lookup.portable()
        found = portable and _stored(portable, portable.resolve(), portable.stores())
        if not found:
            raise
        text = f"{show_problem(lookup.problem)}: serving code for {found.lookup.place.arch}, for there is none for "
        text += f"{lookup.place.arch}: {error.message}"
        if isinstance(error, BuildError):
            warnings.warn(text, RuntimeWarning, stacklevel=5)
        else:
            event(text)
        return found


def _exact(lookup: Lookup, resolution: Resolution) -> Found:
    """Return an entry of a candidate: found in a store, else built."""
    stores = lookup.stores()
    found = _stored(lookup, resolution, stores)
    if found:
        return found
    if lookup.pin:
        raise _unpinned(lookup, resolution, stores)
    off = builds.compiling_off()
    if off:
        raise NotPrebuilt(
            f"no store has {show_problem(lookup.problem)} for {lookup.place.arch}, and {off}",
            hint=f"tlhub explain {command(lookup.problem, lookup.place, lookup.schedule)}",
        )
    if stores.match == "exact" and builds.identify(lookup, resolution):
        found = _stored(lookup, resolution, stores)
    return found or Found(lookup, *builds.build_first(lookup, resolution, lookup.wanted(resolution), stores))


def _stored(lookup: Lookup, resolution: Resolution, stores: Chain) -> Found | None:
    """Return what the stores have of the candidates, noted as used, or None."""
    hit, _ = lookup.find(stores, lookup.wanted(resolution))
    if hit is None:
        return None
    if hit.index:
        names = [c.schedule.name for c in resolution.candidates]
        build = f"tlhub cache prewarm {command(lookup.problem, lookup.place)}"
        event(
            f"{show_problem(lookup.problem)}: serving {names[hit.index]!r}, which is built; "
            f"{names[0]!r} ranks higher and is not: {build}"
        )
    return Found(lookup, use(hit), hit.origin, resolution.candidates[hit.index])


def _unpinned(lookup: Lookup, resolution: Resolution, stores: Chain) -> NotPrebuilt:
    """Return the refusal of a lookup whose pinned build is not served."""
    problem, place, key = lookup.problem, lookup.place, str(lookup.pin)[:16]
    _, searched = lookup.find(stores, lookup.wanted(resolution))
    reasons = dict.fromkeys(reason for step in searched for reason in step.reasons if reason.startswith(key))
    why = f"serves it: {'; '.join(reasons)}" if reasons else "has it"
    return NotPrebuilt(
        f"{show_problem(problem)} for {place.arch} is pinned to {key}, and no store {why}",
        hint=f"tlhub explain {command(problem, place, lookup.schedule)}",
    )


def _compiled(found: Found, otherwise: Callable[[TlhubError], CompiledKernel]) -> CompiledKernel:
    from tlhub.runtime import CompiledKernel, load_entry

    lookup, hit, origin, candidate = found
    kernel, problem, place = lookup.kernel, lookup.problem, lookup.place
    scratch = None
    if place.device is None:
        function = _not_here(problem, place)
    else:
        library, already = load_entry(hit.entry)
        function, scratch = library.bind(problem), library.scratch
        origin = "memory" if already and origin != "built" else origin
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
        otherwise=otherwise,
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
