"""Explanations: the trace of a lookup as text and as JSON, and problems as people write them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tlhub.devices import Place
from tlhub.errors import BuildError
from tlhub.problem import typed
from tlhub.resolve import Resolution
from tlhub.specs import Problem

if TYPE_CHECKING:
    from tlhub.cache.chain import Hit, Nearest, Searched
    from tlhub.stores import Layer


_SHOWN = 6
"""Differences of the nearest entry that a person is shown; JSON has all."""


@dataclass(frozen=True)
class Explanation:
    """What a lookup would do, and why: candidates, stores in order, what was searched, and what comes.

    ``otherwise``: the same of code that is not for the arch alone, where stores have none for exactly it.
    """

    problem: Problem
    place: Place
    resolution: Resolution
    layers: Sequence[Layer]
    searched: Sequence[Searched]
    hit: Hit | None
    find_nearest: Callable[[], Nearest | None]
    compiling: bool
    pin: str | None = None
    otherwise: Explanation | None = None
    find_obstacle: Callable[[], BuildError | None] = lambda: None

    @functools.cached_property
    def nearest(self) -> Nearest | None:
        """The entry that comes closest, where none serves: it takes a look at every manifest there is."""
        return None if self.hit else self.find_nearest()

    @functools.cached_property
    def obstacle(self) -> BuildError | None:
        """What would keep the first candidate from being built, where that is to come: it looks for the compilers."""
        return self.find_obstacle() if self.outcome == "build" else None

    @property
    def served(self) -> Explanation | None:
        """This, or ``otherwise``: the one whose hit serves; None where there is none, or a build comes first."""
        if self.hit:
            return self
        builds = self.compiling and not self.pin and self.resolution.candidates
        return None if builds or self.otherwise is None else self.otherwise.served

    @property
    def outcome(self) -> str:
        """``served``, ``build``, ``not prebuilt`` or ``no schedule``."""
        if self.served:
            return "served"
        if not self.resolution.candidates:
            return "no schedule"
        return "build" if self.compiling and not self.pin else "not prebuilt"

    def to_json(self) -> dict[str, Any]:
        return {
            **problem_json(self.problem),
            "arch": self.place.arch,
            "device": self.place.device,
            "model": self.place.facts.model,
            "candidates": [c.to_json() for c in self.resolution.candidates],
            "rejected": [r.to_json() for r in self.resolution.rejected],
            "layers": [
                {"store": a.store.name, "origin": a.store.origin, "folder": a.store.root, "access": list(a.access)}
                for a in self.layers
            ],
            "stores": [
                {
                    "store": s.store,
                    "origin": s.origin,
                    "schedule": s.schedule,
                    "dims": s.problem.dim,
                    "problem": s.problem_digest,
                    "match": s.match,
                    "reasons": list(s.reasons),
                }
                for s in self.searched
            ],
            "hit": self.hit
            and {
                "store": self.hit.store.name,
                "origin": self.hit.origin,
                "match": self.hit.match,
                "schedule": self.resolution.candidates[self.hit.index].schedule.name,
                "entry": self.hit.entry.folder,
                "key": self.hit.entry.key,
            },
            "nearest": self.nearest
            and {
                "store": self.nearest.store,
                "entry": self.nearest.folder,
                "differs": {name: {"has": a, "wanted": b} for name, (a, b) in self.nearest.differs.items()},
            },
            "pin": self.pin,
            "otherwise": self.otherwise and self.otherwise.to_json(),
            "outcome": self.outcome,
            "obstacle": self.obstacle and self.obstacle.message,
        }

    def __str__(self) -> str:
        here = f"device {self.place.device}" if self.place.device else "no device here runs it"
        lines = [f"{show_problem(self.problem)} on {self.place.arch} ({here}: {self.place.facts.model})", "schedules:"]
        for rank, c in enumerate(self.resolution.candidates, 1):
            config = ", ".join(f"{k}={v}" for k, v in c.config.items())
            lines.append(f"  {rank}. {c.schedule.name} ({c.reason})" + (f": {config}" if config else ""))
        lines += [f"  -  {r.schedule}: {r.reason}" for r in self.resolution.rejected]
        if not self.resolution.candidates and not self.resolution.rejected:
            lines.append("  none is installed for this kernel")
        lines.append("stores, in order:")
        lines += [f"  {a.store.name} ({a.store.origin}; {', '.join(a.access)})" for a in self.layers]
        lines.append(f"searched, for the build {self.pin} that TLHUB_PINS has:" if self.pin else "searched:")
        lines += self._steps()
        if self.otherwise:
            lines += [f"searched, for {self.otherwise.place.arch}, where they have nothing:", *self.otherwise._steps()]
        if self.nearest and self.nearest.differs:
            differs = [f"{name} is {a!r}, wanted {b!r}" for name, (a, b) in self.nearest.differs.items()]
            more = f"; and {len(differs) - _SHOWN} more" if len(differs) > _SHOWN else ""
            shown = "; ".join(differs[:_SHOWN])
            lines.append(f"nearest entry: {self.nearest.folder} in {self.nearest.store}: {shown}{more}")
        lines.append(f"outcome: {self._verdict()}")
        if named := self.resolution.by_name:
            lines.append(f"  {named} serves by name: tlhub get {command(self.problem, self.place, named)}")
        return "\n".join(lines)

    def _steps(self) -> list[str]:
        lines = []
        for s in self.searched:
            dims = ", ".join(f"{n}={e}" for n, e in s.problem.dims)
            lines.append(f"  {s.store} ({s.origin}), {s.schedule} for {dims}: {s.match or 'miss'}")
            lines += [f"      {reason}" for reason in s.reasons]
        return lines or ["  none is asked: no schedule serves it"]

    def _verdict(self) -> str:
        if self.served and not self.hit:
            return f"{self.served._verdict()}\n  it is code for {self.served.place.arch}"
        if self.hit:
            where = self.hit.entry.folder or ("it will be downloaded" if self.hit.entry.afar else "memory")
            served = f"served from {self.hit.store.name} ({self.hit.match} match): {where}"
            if not self.hit.index:
                return served
            better = self.resolution.candidates[0].schedule.name
            build = f"tlhub cache prewarm {command(self.problem, self.place)}"
            return f"{served}\n  {better} ranks higher and is not built: {build}"
        if self.obstacle:
            return f"BuildError: the first candidate would be built, but {self.obstacle}"
        return {
            "no schedule": "NoSchedule: no schedule serves it",
            "build": "the first candidate would be built",
            "not prebuilt": f"NotPrebuilt: {'it is pinned' if self.pin else 'compiling is off'}, and no store has it",
        }[self.outcome]


def problem_json(problem: Problem) -> dict[str, Any]:
    """Return the fields that name a problem in every document."""
    return {
        "kernel": problem.kernel,
        "dims": problem.dim,
        "dtype": problem.dtype,
        "dtypes": dict(problem.dtypes),
        "options": problem.option,
    }


def show_problem(problem: Problem) -> str:
    """Return a problem in one line: ``gemm(B=1, M=64, N=64, K=?0) float32``."""
    return f"{problem.kernel}({', '.join(f'{n}={e}' for n, e in problem.dims)}) {problem.dtype}"


def command(problem: Problem, place: Place, schedule: str | None = None) -> str:
    """Return the problem as the arguments of a ``tlhub`` command that works when pasted, without what is default."""
    from tlhub.catalog import load

    extents, types, chosen = typed(load().kernel(problem.kernel), problem)
    dims = ",".join(f"{n}={e}" for n, e in extents.items())
    dtype = types if isinstance(types, str) else ",".join(f"{n}={d}" for n, d in types.items())
    options = "".join(f" --option {n}={_word(v)}" for n, v in chosen.items())
    asked = f" --schedule {schedule}" if schedule else ""
    return f"{problem.kernel} {dims} --dtype {dtype}{options} --arch {place.arch}{asked}"


def _word(value: Any) -> str:
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)
