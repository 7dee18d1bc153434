"""Lookups: what is asked for where, who would serve it, and what the stores have of that."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

from tlhub import certificates, refusals, sources
from tlhub.cache.chain import Chain, Hit, Host, Searched, Wanted
from tlhub.cache.manifest import Manifest
from tlhub.catalog import Catalog
from tlhub.devices import Place, locate, portable
from tlhub.errors import NoSchedule
from tlhub.explanation import command, show_problem
from tlhub.pins import pinned
from tlhub.problem import make, patterns
from tlhub.resolve import Resolution, config_of, resolve
from tlhub.specs import Kernel, Problem
from tlhub.stores import chain

toolchains: dict[tuple[str, str], Mapping[str, str]] = {}
"""Toolchain and arch to the versions that a worker of this process told; only workers know them."""


class Lookup(NamedTuple):
    """What a lookup is for, its words looked up. ``schedule``: the name of the one that must serve, or None.

    ``deployed``: the machine whose device must run what is found, though that is not here. ``pin``: the digest of the
    only build that may serve, or None.
    """

    catalog: Catalog
    kernel: Kernel
    problem: Problem
    place: Place
    schedule: str | None
    deployed: Host | None = None
    pin: str | None = None

    def portable(self) -> Lookup | None:
        """Return the lookup of code that is not for the place's arch alone, or None if its target has no such code."""
        place = portable(self.place)
        return self._replace(place=place) if place else None

    def resolve(self) -> Resolution:
        """Return who serves, and why the others do not."""
        schedules = self.catalog.schedules.get(self.kernel.name, ())
        unproven = certificates.unproven(self.catalog, self.place.target.name)
        return resolve(
            schedules, self.problem, self.place.facts, asked=self.schedule, unproven=unproven, broken=sources.fault
        )

    def resolution(self) -> Resolution:
        """Return what ``resolve`` does. Raises NoSchedule where nobody serves."""
        resolution = self.resolve()
        if resolution.candidates:
            return resolution
        problem, place = self.problem, self.place
        reasons = "".join(f"\n  {r.schedule}: {r.reason}" for r in resolution.rejected) or " (none is installed)"
        by_name = resolution.by_name
        raise NoSchedule(
            f"no schedule serves {show_problem(problem)} on {place.arch}:{reasons}",
            hint=f"tlhub get {command(problem, place, by_name)}" if by_name else f"tlhub schedules {problem.kernel}",
        )

    def wanted(self, resolution: Resolution) -> list[Wanted]:
        """Return the candidates as stores are asked for them."""
        place = self.place
        return [
            Wanted(
                schedule=c.schedule.name,
                revision=c.schedule.revision,
                source_digest=sources.digest(c.schedule),
                config=c.config,
                problems=patterns(self.kernel, self.problem, c.schedule.symbolic),
                toolchain=toolchains.get((c.schedule.toolchain, place.arch)),
                # sources that change under us must not be served by what they were
                match="compatible" if self.catalog.owner(c.schedule).editable else "revision",
                general=partial(config_of, c.schedule, facts=place.facts),
            )
            for c in resolution.candidates
        ]

    def stores(self) -> Chain:
        return chain(self.catalog, self.place.facts.driver, self.place.shared_memory, self.veto, self.deployed)

    def veto(self, manifest: Manifest) -> str | None:
        """Return why the entry must not serve, or None."""
        if self.pin not in (None, manifest.build_digest):
            return f"the lookup is pinned to {str(self.pin)[:16]}"
        reason = refusals.why(manifest.build_digest, self.place.facts) if self.place.device else None
        return f"it was refused: {reason}" if reason else None

    def find(
        self, stores: Chain, wanted: list[Wanted], *, telling: bool = False
    ) -> tuple[Hit | None, tuple[Searched, ...]]:
        here = self.deployed is not None or self.place.device is not None
        return stores.find(self.place.arch, wanted, here=here, telling=telling)


def ask(
    catalog: Catalog,
    kernel: str,
    shape: Any,
    dtype: Any,
    /,
    *,
    device: Any = None,
    arch: str | None = None,
    schedule: str | None = None,
    **options: Any,
) -> Lookup:
    """Return the lookup that ``tlhub.get`` is asked for. Raises UnknownName, ArgumentError, DeviceError."""
    spec = catalog.kernel(kernel)
    problem, place = make(spec, shape, dtype, options), locate(catalog, device, arch)
    return Lookup(catalog, spec, problem, place, schedule, pin=pinned(problem, place.arch, schedule))


def event(message: str) -> None:
    """Tell what an operator may want to know and a caller need not."""
    import logging

    logging.getLogger("tlhub").info(message)
