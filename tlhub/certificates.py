"""Certificates: what proves a schedule's numbers, and which schedules are served unasked only with one.

They are data of tlhub_registry, written on the device by ``benchmarks/certify.py``, and hold for one revision and
one source digest: an edited program has none. The rule binds what tlhub-core itself ships for a GPU, where no test of
its own runs the code. A third party's schedules are theirs to prove: tlhub has no device on which it could.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tlhub import sources
from tlhub.catalog import Catalog
from tlhub.specs import Schedule

TARGETS = frozenset({"cuda"})
"""Targets whose code the tests compile and do not run."""


@dataclass(frozen=True)
class Certificate:
    """What was measured of a schedule's sources on one device.

    ``date``: YYYY-MM-DD. ``problems``: a mapping each of ``arch``, ``dims``, ``dtypes``, ``options`` (those not at
    their default), ``entry`` (its key), ``error`` (the worst, in units of the tolerance), ``seconds`` of a call, None
    of a small problem, which is not timed, ``peer`` and ``ratio`` (how many times as fast as the peer it is),
    ``device_ratio`` (the same on the GPU alone), all three None without a peer or a time.
    """

    kernel: str
    schedule: str
    revision: int
    source_digest: str
    device: str
    driver: int
    date: str
    problems: tuple[Mapping[str, Any], ...]

    @property
    def archs(self) -> tuple[str, ...]:
        return tuple(sorted({p["arch"] for p in self.problems}))

    @property
    def worst(self) -> float:
        """The largest error, in units of the tolerance."""
        return max(p["error"] for p in self.problems)

    @property
    def ratio(self) -> float | None:
        """The least ratio to a peer, or None if there was none."""
        return min((p["ratio"] for p in self.problems if p["ratio"] is not None), default=None)

    def to_json(self) -> dict[str, Any]:
        """Return what a listing shows of it."""
        return {
            "device": self.device,
            "driver": self.driver,
            "date": self.date,
            "archs": list(self.archs),
            "problems": len(self.problems),
            "worst": self.worst,
            "ratio": self.ratio,
        }


def needed(catalog: Catalog, schedule: Schedule) -> bool:
    """Tell whether *schedule* is one that a certificate must vouch for."""
    return catalog.owner(schedule).core and not TARGETS.isdisjoint(schedule.targets)


def find(schedule: Schedule) -> Certificate | None:
    """Return the certificate of *schedule* as its sources are now, or None. Raises PluginError if one is missing."""
    found = _read(schedule.kernel, schedule.name)
    proven = found and (found.revision, found.source_digest) == (schedule.revision, sources.digest(schedule))
    return found if proven else None


def unproven(catalog: Catalog, target: str) -> Callable[[Schedule], str | None]:
    """Return what ``resolve`` asks for a lookup on *target*: why a schedule may not serve unasked, or None."""

    def why(schedule: Schedule) -> str | None:
        if target not in TARGETS or not needed(catalog, schedule) or find(schedule):
            return None
        return f"no certificate for its source ({sources.digest(schedule)[:16]})"

    return why


@functools.cache
def _read(kernel: str, schedule: str) -> Certificate | None:
    import tlhub_registry  # for a lookup on a GPU, not for every process

    found = tlhub_registry.certificate(kernel, schedule)
    return found and Certificate(**{**found, "problems": tuple(found["problems"])})
