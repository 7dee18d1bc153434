"""Names to records: what all plugins together declare, with clashes of names settled."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import tlhub.plugins
from tlhub.errors import UnknownName, suggest
from tlhub.needs import misfit
from tlhub.plugins import Plugin
from tlhub.specs import Kernel, PrebuiltStore, Schedule, Target

Record = TypeVar("Record", Kernel, Schedule, Target, PrebuiltStore)


@dataclass(frozen=True)
class Catalog:
    """Everything that can be looked up.

    ``owners``: kernel and schedule to the plugin that brought the schedule. ``misfits``: the stores that may not serve,
    for the versions that are installed, and why.
    """

    kernels: dict[str, Kernel]
    schedules: dict[str, tuple[Schedule, ...]]
    targets: dict[str, Target]
    stores: tuple[PrebuiltStore, ...]
    plugins: tuple[Plugin, ...]
    owners: dict[tuple[str, str], Plugin] = field(default_factory=dict)
    misfits: dict[str, str] = field(default_factory=dict)

    def kernel(self, name: str) -> Kernel:
        """Return the kernel *name*. Raises UnknownName, which says what plugin would bring it."""
        if isinstance(name, str) and name in self.kernels:
            return self.kernels[name]
        raise _unknown(name, self)

    def target(self, name: str) -> Target:
        """Return the target *name*. Raises UnknownName."""
        if name in self.targets:
            return self.targets[name]
        import tlhub_registry

        if any(d["arch"].startswith(f"{name}:") for d in tlhub_registry.load("devices").values()):
            raise UnknownName(
                f"no installed plugin brings target {name!r}; known here: {', '.join(sorted(self.targets)) or 'none'}",
                hint="tlhub plugins",
            )
        raise UnknownName(
            f"unknown target {name!r}; known: {', '.join(sorted(self.targets)) or 'none'}",
            hint=suggest(name, self.targets, "tlhub targets"),
        )

    def owner(self, schedule: Schedule) -> Plugin:
        """Return the plugin that brought *schedule*."""
        return self.owners[schedule.kernel, schedule.name]


def assemble(plugins: Sequence[Plugin]) -> Catalog:
    """Return the catalog of *plugins*; what a clash of names refuses is noted in ``Plugin.refused``.

    One kernel name, several plugins: tlhub-core's stays and the others' are refused; between third parties
    neither has the bare name and both are served as ``distribution:name``. Targets and schedules of one
    name: tlhub-core's stays; between third parties all are refused, since no order of theirs means anything.
    """
    healthy = [p for p in plugins if p.error is None]
    kernels: dict[str, Kernel] = {}
    renamed: dict[tuple[str, str], str] = {}  # (distribution, bare name) -> name served
    for name, sides in _by_name([(p, k) for p in healthy for k in p.kernels], lambda k: k.name).items():
        winner = _core_side(sides)
        for plugin, kernel in sides:
            if len(sides) == 1 or (plugin, kernel) == winner:
                kernels[name] = kernel
            elif winner:
                plugin.refused.append(f"kernel {name!r}: {winner[0].distribution} has it already")
            else:
                served = f"{plugin.distribution}:{name}"
                if served in kernels:
                    plugin.refused.append(f"kernel {name!r}: declared twice by {plugin.distribution}")
                    continue
                kernels[served] = replace(kernel, name=served)
                renamed[plugin.distribution, name] = served
                others = ", ".join(sorted({p.distribution for p, _ in sides} - {plugin.distribution}))
                plugin.refused.append(f"kernel name {name!r}: {others} declares it too; served as {served!r}")

    def target_kernel(plugin: Plugin, schedule: Schedule) -> Schedule:
        served = renamed.get((plugin.distribution, schedule.kernel))
        return replace(schedule, kernel=served) if served else schedule

    schedules: dict[str, list[Schedule]] = {}
    owners: dict[tuple[str, str], Plugin] = {}
    declared = [(p, target_kernel(p, s)) for p in healthy for s in p.schedules]
    for plugin, schedule in _settle("schedule", declared, lambda s: f"{s.kernel}/{s.name}"):
        schedules.setdefault(schedule.kernel, []).append(schedule)
        owners[schedule.kernel, schedule.name] = plugin
    targets = {t.name: t for _, t in _settle("target", [(p, t) for p in healthy for t in p.targets], lambda t: t.name)}
    stores = _settle("store", [(p, s) for p in healthy for s in p.stores], lambda s: s.name)
    versions = {p.distribution: p.version for p in plugins}
    misfits: dict[str, str] = {}
    for plugin, store in stores:
        if reason := misfit(store, versions):
            misfits[store.name] = reason
            plugin.refused.append(f"store {store.name!r}: {reason}")
    return Catalog(
        kernels=dict(sorted(kernels.items())),
        schedules={k: tuple(sorted(s, key=lambda s: s.name)) for k, s in sorted(schedules.items())},
        targets=dict(sorted(targets.items())),
        stores=tuple(s for _, s in stores),
        plugins=tuple(plugins),
        owners=owners,
        misfits=misfits,
    )


@functools.cache
def load() -> Catalog:
    """Return the catalog of the installed plugins, made once a process."""
    return assemble(tlhub.plugins.find())


def _by_name(
    declared: Iterable[tuple[Plugin, Record]], name: Callable[[Record], str]
) -> dict[str, list[tuple[Plugin, Record]]]:
    sides: dict[str, list[tuple[Plugin, Record]]] = {}
    for plugin, record in declared:
        sides.setdefault(name(record), []).append((plugin, record))
    return sides


def _core_side(sides: Sequence[tuple[Plugin, Record]]) -> tuple[Plugin, Record] | None:
    return next(((p, r) for p, r in sides if p.core), None)


def _settle(
    kind: str, declared: Sequence[tuple[Plugin, Record]], name: Callable[[Record], str]
) -> list[tuple[Plugin, Record]]:
    """Return the records that keep their name."""
    kept = []
    for key, claims in _by_name(declared, name).items():
        winner = claims[0] if len(claims) == 1 else _core_side(claims)
        for plugin, record in claims:
            if winner and record is winner[1]:
                kept.append((plugin, record))
                continue
            others = ", ".join(sorted({p.distribution for p, r in claims if r is not record}))
            plugin.refused.append(f"{kind} {key!r}: {others} declares it too")
    return kept


def _unknown(name: Any, catalog: Catalog) -> UnknownName:
    import tlhub_registry

    known = ", ".join(catalog.kernels) or "none"
    if not isinstance(name, str):
        return UnknownName(f"a kernel is named by a string, not {name!r}; known: {known}", hint="tlhub kernels")
    ambiguous = [k for k in catalog.kernels if k.endswith(f":{name}")]
    if ambiguous:
        return UnknownName(
            f"kernel {name!r} is declared by several plugins: {', '.join(ambiguous)}", hint=f"ask for {ambiguous[0]!r}"
        )
    for plugin in tlhub_registry.load("plugins"):
        if name in plugin["kernels"]:
            return UnknownName(
                f"unknown kernel {name!r}: the plugin {plugin['distribution']} has it and is not installed; "
                f"known here: {known}",
                hint=plugin["install"],
            )
    broken = [p for p in catalog.plugins if p.error]
    message = f"unknown kernel {name!r}; known: {known}"
    if broken:
        message += f" ({', '.join(p.name for p in broken)} failed to load)"
    if os.environ.get("TLHUB_DISABLE_PLUGINS"):
        message += f" (TLHUB_DISABLE_PLUGINS leaves out {os.environ['TLHUB_DISABLE_PLUGINS']})"
    hint = suggest(name, catalog.kernels, "" if broken else "tlhub kernels")
    if broken:  # what was meant may be one of theirs
        hint = f"{hint} Or: tlhub plugins" if hint else "tlhub plugins"
    return UnknownName(message, hint=hint)
