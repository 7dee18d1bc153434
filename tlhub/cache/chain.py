"""The chain: stores in order, in each the wanted candidates in order, and the best match that may serve.

``Chain.find`` returns the trace of its search with its answer; ``Chain.nearest`` says what came closest.
Facts about this machine are parameters (``Host``), so that the chain answers for any machine.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tlhub.cache import key
from tlhub.cache.entry import Damaged, Entry, Manifest
from tlhub.cache.store import Skipped, Store
from tlhub.specs import Config, Problem

LOOSENESS: Mapping[str, int] = {"exact": 0, "compatible": 1, "revision": 2}
"""The kinds of match, the strictest first."""


class Wanted(NamedTuple):
    """A candidate that would serve: a schedule's revision, its sources and config.

    ``problems``: the problem that was asked, then more general ones whose binaries serve it too; ``general(problem)``:
    the config that the schedule would have for one of those, or None.
    ``toolchain``: the identity of the compiler that would build it, where it is known: only workers know.
    ``match``: the loosest match that its plugin lets serve (``compatible`` for one that is being edited).
    """

    schedule: str
    revision: int
    source_digest: str
    config: Config
    problems: Sequence[Problem]
    toolchain: Mapping[str, str] | None = None
    match: str = "revision"
    general: Callable[[Problem], Config | None] = lambda problem: None


@dataclass(frozen=True)
class Hit:
    """An entry that serves. ``index``: which of the wanted; ``problem``: of that one's, which was found."""

    entry: Entry
    match: str
    store: Store
    index: int
    problem: Problem

    @property
    def origin(self) -> str:
        return "memory" if self.entry.folder is None and not self.entry.afar else self.store.origin


class Searched(NamedTuple):
    """One step of a search. ``match`` is None for a miss; ``reasons`` say what was there and not taken."""

    store: str
    origin: str
    schedule: str
    problem: Problem
    problem_digest: str
    match: str | None
    reasons: tuple[str, ...]


class Nearest(NamedTuple):
    """The entry that came closest to what was wanted, and the fields that differ: name to (has, wanted)."""

    store: str
    folder: str
    manifest: Manifest
    differs: Mapping[str, tuple[Any, Any]]


class Host(NamedTuple):
    """The machine that would load an entry ("here" in reasons), and of its device the driver and the bytes of shared
    memory a block.

    ``abi`` "", ``driver`` 0 and ``shared_memory`` 0 are unknown, and then not compared.
    """

    os: str
    machine: str
    glibc: str = ""
    abi: str = ""
    driver: int = 0
    shared_memory: int = 0

    @classmethod
    def named(cls, platform: str) -> Host:
        """Return the machine of a wheel's platform tag, such as ``manylinux_2_28_x86_64``. Raises ValueError."""
        found = _PLATFORM.fullmatch(platform)
        if found is None:
            raise ValueError(f"{platform!r} is no platform; it is a wheel's tag such as manylinux_2_28_x86_64")
        return cls("linux", _MACHINES.get(found[3], found[3]), f"{found[1]}.{found[2]}")

    @property
    def platform(self) -> str:
        """The wheel's platform tag of a machine with glibc, words for another."""
        if self.os == "linux" and self.glibc:
            return f"manylinux_{self.glibc.replace('.', '_')}_{self.machine}"
        return f"{self.os} {self.machine}"


_PLATFORM = re.compile(r"manylinux_([0-9]{1,3})_([0-9]{1,3})_([a-z0-9_]{1,32})")
_MACHINES = {"amd64": "x86_64", "x64": "x86_64", "arm64": "aarch64"}


@functools.cache
def this_host() -> Host:
    """Return the machine of this process: ``linux``, ``x86_64``, its glibc ("" for another libc)."""
    machine = (os.uname().machine if hasattr(os, "uname") else os.environ.get("PROCESSOR_ARCHITECTURE", "")).lower()
    glibc = ""
    with contextlib.suppress(AttributeError, ValueError, OSError):
        name, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
        glibc = version if name == "glibc" else ""
    return Host(sys.platform, _MACHINES.get(machine, machine), glibc)


def refuse(manifest: Manifest, host: Host) -> str | None:
    """Return why the entry cannot run on *host*, or None."""
    system, machine = manifest.platform.get("os", ""), manifest.platform.get("machine", "")
    if (system, machine) != (host.os, host.machine):
        return f"it is for {system} {machine}, here is {host.os} {host.machine}"
    if host.abi and manifest.abi != host.abi:
        return f"it needs tvm-ffi ABI {manifest.abi}, here is {host.abi}"
    if manifest.glibc and not host.glibc:
        return f"it needs glibc {manifest.glibc}, here is another libc"
    if manifest.glibc and _version(manifest.glibc) > _version(host.glibc):
        return f"it needs glibc {manifest.glibc}, here is {host.glibc}"
    if host.driver and manifest.least_driver > host.driver:
        return f"it needs driver {manifest.least_driver}, here is {host.driver}"
    shared = manifest.resources.get("shared_memory", 0)
    if host.shared_memory and isinstance(shared, (int, float)) and shared > host.shared_memory:
        return f"it needs {shared} bytes of shared memory a block, the device has {host.shared_memory}"
    return None


def uncovered(manifest: Manifest, problem: Problem) -> str | None:
    """Return why the entry does not serve the extents of *problem*, or None."""
    extents = problem.dim
    for dim, limits in manifest.covers.items():
        extent = extents.get(dim)
        least, most, multiple = limits.get("min", 0), limits.get("max"), limits.get("multiple", 1)
        shown = f"{dim} from {least}" + (f" to {most}" if most is not None else "")
        shown += f", multiples of {multiple}" if multiple > 1 else ""
        if not isinstance(extent, int):
            if least > 0 or most is not None or multiple > 1:
                return f"it covers {shown}, not every {dim}"
        elif extent < least or (most is not None and extent > most) or extent % multiple:
            return f"it covers {shown}, not {extent}"
    return None


def match_of(manifest: Manifest, wanted: Wanted, config: Config | None) -> str | None:
    """Return how an entry of the right problem matches *wanted* with *config*: exact, compatible, revision, or None."""
    if (manifest.schedule, manifest.schedule_revision) != (wanted.schedule, wanted.revision):
        return None
    if manifest.source_digest != wanted.source_digest or config is None or not _equal(manifest.config, config):
        return "revision"
    # The rest of the build digest (ABI, platform) is what this host can load, or refuse() says so.
    if wanted.toolchain is not None and dict(manifest.toolchain) == dict(wanted.toolchain):
        return "exact"
    return "compatible"


class Chain:
    """Stores in the order in which they are searched.

    ``match``: the loosest match that serves, where the user said so; it takes the place of the plugins' wishes,
    and a store may be stricter. ``veto``: why an entry must not serve though it could, or None.
    """

    def __init__(
        self,
        stores: Sequence[Store],
        host: Host | None = None,
        match: str | None = None,
        veto: Callable[[Manifest], str | None] = lambda manifest: None,
    ) -> None:
        self.stores = tuple(stores)
        self.host = this_host() if host is None else host
        self.match = match
        self.veto = veto

    def find(
        self, arch: str, wanted: Sequence[Wanted], *, here: bool = True, telling: bool = False
    ) -> tuple[Hit | None, tuple[Searched, ...]]:
        """Return the first hit, its library's bytes verified and in memory, and the steps up to it.

        In each store each candidate is tried, best first, and of each the exact problem first. The hit's
        entry is held: ``prune`` spares it while it lives. Not *here*: the entry is for another machine, and
        none is refused for not running on this one. *telling*: the hit is only told of, and what is on another
        machine stays there.
        """
        host = self.host if here else None
        digests: dict[int, str] = {}
        trace: list[Searched] = []
        for store in self.stores:
            seen: dict[str, tuple[Entry, ...]] = {}
            for index, want in enumerate(wanted):
                for problem in want.problems:
                    digest = digests.get(id(problem)) or key.problem_digest(problem, arch)
                    digests[id(problem)] = digest
                    skipped: tuple[Skipped, ...] = ()
                    if digest not in seen:
                        seen[digest], skipped = store.lookup(arch, problem.kernel, digest)
                    best, reasons = self._best(store, seen[digest], want, problem, host, telling)
                    match = best[1] if best else None
                    reasons = (*(s.reason for s in skipped), *reasons)
                    trace.append(Searched(store.name, store.origin, want.schedule, problem, digest, match, reasons))
                    if best:
                        best[0].hold()
                        return Hit(best[0], best[1], store, index, problem), tuple(trace)
        return None, tuple(trace)

    def nearest(self, arch: str, wanted: Sequence[Wanted]) -> Nearest | None:
        """Return the entry of the same kernel with the fewest other fields. Reads every manifest: for explaining."""
        best: Nearest | None = None
        for store, folder, manifest in self._manifests({p.kernel for w in wanted for p in w.problems}):
            for want in wanted:
                for problem in want.problems:
                    differs = _differs(manifest, arch, want, problem)
                    if best is None or len(differs) < len(best.differs):
                        best = Nearest(store.name, folder, manifest, differs)
        return best

    def _best(
        self, store: Store, entries: tuple[Entry, ...], want: Wanted, problem: Problem, host: Host | None, telling: bool
    ) -> tuple[tuple[Entry, str] | None, tuple[str, ...]]:
        """Return the entry of *problem* that serves *want* best, and why others were passed over."""
        loosest = strictest(store.match, self.match or want.match)
        reasons: list[str] = []
        serving: list[tuple[tuple[int, bool], Entry, str]] = []
        for entry in entries:
            match, second = match_of(entry.manifest, want, want.config), False
            if match == "revision" and problem is not want.problems[0]:
                match, second = match_of(entry.manifest, want, want.general(problem)), True
            if match is None:
                reason = _not_its_schedule(entry.manifest, want)
            else:
                reason = refuse(entry.manifest, host) if host is not None else None
                reason = reason or uncovered(entry.manifest, want.problems[0]) or self.veto(entry.manifest)
                if reason is None and LOOSENESS[match] > LOOSENESS[loosest]:
                    reason = f"it is a {match} match, and only {loosest} ones serve"
            if reason is None and match is not None:
                serving.append(((LOOSENESS[match], second), entry, match))
            elif reason:
                reasons.append(f"{entry.key[:16]}: {reason}")
        # Of equal matches the newest: its toolchain is likely the better one.
        serving.sort(key=lambda item: str(item[1].manifest.provenance.get("created", "")), reverse=True)
        serving.sort(key=lambda item: item[0])
        for _, entry, match in serving:
            try:
                store.vouch(entry)
                if not (telling and entry.afar):
                    entry.prepare()
                return (entry, match), tuple(reasons)
            except Damaged as error:
                reasons.append(f"{entry.key[:16]}: {error.reason}")
        return None, tuple(reasons)

    def _manifests(self, kernels: set[str]) -> Iterator[tuple[Store, str, Manifest]]:
        for store in self.stores:
            for item in store.entries():
                if item.manifest is not None and item.reason is None and item.manifest.kernel in kernels:
                    yield store, item.folder, item.manifest


def strictest(*policies: str) -> str:
    """Return the strictest of the policies."""
    return min(policies, key=lambda policy: LOOSENESS[policy])


def _equal(one: Config, other: Config) -> bool:
    """Tell whether two configs are the same: True is not 1 here, though they are equal in Python."""
    return dict(one) == dict(other) and all(type(value) is type(other[name]) for name, value in one.items())


def _not_its_schedule(manifest: Manifest, want: Wanted) -> str | None:
    if manifest.schedule != want.schedule:
        return None  # another candidate's, searched in its turn
    return f"it is revision {manifest.schedule_revision} of {want.schedule}, wanted is {want.revision}"


def _differs(manifest: Manifest, arch: str, want: Wanted, problem: Problem) -> dict[str, tuple[Any, Any]]:
    has: dict[str, Any] = {
        "arch": manifest.arch,
        "kernel_revision": manifest.kernel_revision,
        **_named("dims", manifest.dims),
        **_named("dtypes", manifest.dtypes),
        **_named("options", manifest.options),
        "schedule": manifest.schedule,
        "schedule_revision": manifest.schedule_revision,
        "source_digest": manifest.source_digest,
        **_named("config", manifest.config.items()),
    }
    wants: dict[str, Any] = {
        "arch": arch,
        "kernel_revision": problem.revision,
        **_named("dims", problem.dims),
        **_named("dtypes", problem.dtypes),
        **_named("options", problem.options),
        "schedule": want.schedule,
        "schedule_revision": want.revision,
        "source_digest": want.source_digest,
        **_named("config", want.config.items()),
    }
    if want.toolchain is not None:
        has.update(_named("toolchain", manifest.toolchain.items()))
        wants.update(_named("toolchain", want.toolchain.items()))
    names = [*wants, *(name for name in has if name not in wants)]
    pairs = {name: (has.get(name), wants.get(name)) for name in names}
    return {name: pair for name, pair in pairs.items() if (type(pair[0]), pair[0]) != (type(pair[1]), pair[1])}


def _named(what: str, pairs: Any) -> dict[str, Any]:
    return {f"{what}.{name}": value for name, value in pairs}


def _version(text: str) -> tuple[int, ...]:
    """Return "2.17" as (2, 17); what is no number counts as 0."""
    return tuple(int(part) if part.isdecimal() else 0 for part in text.split("."))
