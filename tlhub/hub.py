"""The way of a lookup: table, problem, decision, stores, build, load."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from tlhub import builds, operands
from tlhub.builds import may_compile
from tlhub.cache.chain import Hit
from tlhub.cache.entry import Entry
from tlhub.catalog import load
from tlhub.devices import Place
from tlhub.errors import DeviceError, NotPrebuilt, TlhubError
from tlhub.explanation import Explanation, command, show_problem
from tlhub.lookup import Lookup, ask, event
from tlhub.problem import signature
from tlhub.resolve import Candidate, Resolution
from tlhub.specs import Problem

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
    lookup = ask(load(), kernel, shape, dtype, device, arch, schedule, options)
    resolution, stores = lookup.resolve(), lookup.stores()
    wanted = lookup.wanted(resolution)
    hit, searched = lookup.find(stores, wanted)
    nearest = partial(stores.nearest, lookup.place.arch, wanted)
    return Explanation(lookup.problem, lookup.place, resolution, searched, hit, nearest, compiling=may_compile())


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
    lookup = ask(load(), kernel, shape, dtype, device, arch, schedule, options)
    resolution = lookup.resolution()
    hit, origin, _ = _obtain(lookup, Resolution(resolution.candidates[:1], resolution.rejected))
    return hit.entry, origin


def forget() -> None:
    """Empty the tables of this process: the next ``get`` asks the stores again."""
    _asked.cache_clear()
    _served.clear()
    builds.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=forget)


# -- the steps -------------------------------------------------------------------------------------


def _lookup(
    kernel: str, shape: Any, dtype: Any, device: Any, arch: str | None, schedule: str | None, options: Mapping[str, Any]
) -> CompiledKernel:
    lookup = ask(load(), kernel, shape, dtype, device, arch, schedule, options)
    key = (lookup.problem, lookup.place.arch, lookup.place.device, schedule)
    if key not in _served:
        _served[key] = _compiled(lookup, *_obtain(lookup, lookup.resolution()))
    return _served[key]


def _obtain(lookup: Lookup, resolution: Resolution) -> tuple[Hit, str, Candidate]:
    """Return an entry of a candidate, its origin, and the candidate: found in a store, else built."""
    problem, place = lookup.problem, lookup.place
    wanted, stores = lookup.wanted(resolution), lookup.stores()
    hit, _ = lookup.find(stores, wanted)
    if hit is None and stores.match == "exact" and may_compile() and builds.identify(lookup, resolution):
        wanted = lookup.wanted(resolution)
        hit, _ = lookup.find(stores, wanted)
    if hit is None:
        if not may_compile():
            raise NotPrebuilt(
                f"no store has {show_problem(problem)} for {place.arch}, and TLHUB_COMPILE=never",
                hint=f"tlhub explain {command(problem, place, lookup.schedule)}",
            )
        return builds.build_first(lookup, resolution, wanted, stores)
    if hit.index:
        event(
            f"{show_problem(problem)}: serving {wanted[hit.index].schedule!r}, which is built; "
            f"{wanted[0].schedule!r} ranks higher and is not: tlhub cache prewarm {command(problem, place)}"
        )
    hit.store.touch(hit.entry, time.time())
    return hit, hit.origin, resolution.candidates[hit.index]


def _compiled(lookup: Lookup, hit: Hit, origin: str, candidate: Candidate) -> CompiledKernel:
    from tlhub.runtime import CompiledKernel, load_entry

    kernel, problem, place = lookup.kernel, lookup.problem, lookup.place
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
