"""Finding plugins and loading each on its own: a broken one is listed with its error, the rest works."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any, NamedTuple

import pluggy

from tlhub.errors import PluginError, debugging, describe, suggest
from tlhub.hooks import API, Hooks
from tlhub.specs import Kernel, PrebuiltStore, Schedule, Target

GROUP = "tlhub"
CORE = "tlhub-core"

_RECORDS: dict[str, type] = {
    "tlhub_kernels": Kernel,
    "tlhub_schedules": Schedule,
    "tlhub_targets": Target,
    "tlhub_stores": PrebuiltStore,
}


@dataclass
class Plugin:
    """A plugin as it was found. ``error`` says why nothing of it is served; ``refused`` which records are not."""

    name: str
    module: str
    distribution: str
    version: str
    editable: bool = False
    error: str | None = None
    refused: list[str] = field(default_factory=list)
    kernels: tuple[Kernel, ...] = ()
    schedules: tuple[Schedule, ...] = ()
    targets: tuple[Target, ...] = ()
    stores: tuple[PrebuiltStore, ...] = ()

    @property
    def core(self) -> bool:
        return self.distribution == CORE

    @property
    def status(self) -> str:
        return "failed" if self.error else "partly refused" if self.refused else "ok"

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "module": self.module,
            "distribution": self.distribution,
            "version": self.version,
            "editable": self.editable,
            "status": self.status,
            "error": self.error,
            "refused": self.refused,
            "kernels": [k.name for k in self.kernels],
            "schedules": [f"{s.kernel}/{s.name}" for s in self.schedules],
            "targets": [t.name for t in self.targets],
            "stores": [s.name for s in self.stores],
        }


def find(entry_points: Iterable[metadata.EntryPoint] | None = None) -> tuple[Plugin, ...]:
    """Load every plugin of the group ``tlhub`` and return them, tlhub-core's first, then by name.

    ``TLHUB_DISABLE_PLUGINS`` holds names of plugins or distributions to leave out, by commas;
    with ``TLHUB_DEBUG=1`` the error of a broken plugin is raised instead of listed.
    """
    left_out = disabled()
    seen: dict[tuple[str, str, str], metadata.EntryPoint] = {}
    origins: dict[int, _Origin] = {}  # of each distribution, whose metadata is parsed once
    for point in metadata.entry_points(group=GROUP) if entry_points is None else entry_points:
        if id(point.dist) not in origins:
            origins[id(point.dist)] = _origin(point.dist) if point.dist else _UNKNOWN
        origin = origins[id(point.dist)]
        # an editable install lists its own twice
        seen.setdefault((origin.distribution, point.name, point.value), point)
    manager = pluggy.PluginManager("tlhub")
    manager.add_hookspecs(Hooks)
    order = sorted(seen.items(), key=lambda item: (item[0][0] != CORE, item[0]))
    return tuple(
        _load(manager, point, origins[id(point.dist)])
        for (distribution, name, _), point in order
        if name not in left_out and distribution not in left_out
    )


def disabled() -> set[str]:
    """Return what ``TLHUB_DISABLE_PLUGINS`` names: plugins or distributions, installed or not."""
    return {n.strip() for n in os.environ.get("TLHUB_DISABLE_PLUGINS", "").split(",") if n.strip()}


def installed() -> set[tuple[str, str]]:
    """Return name and distribution of every installed plugin, the disabled ones too. Loads none."""
    return {(p.name, _origin(p.dist).distribution if p.dist else "?") for p in metadata.entry_points(group=GROUP)}


def _load(manager: pluggy.PluginManager, point: metadata.EntryPoint, origin: _Origin) -> Plugin:
    distribution = origin.distribution
    plugin = Plugin(point.name, point.value, distribution, origin.version, origin.editable)
    # what a plugin prints must not spoil a document on stdout
    with contextlib.redirect_stdout(sys.stderr):
        try:
            module = point.load()
            wanted = getattr(module, "TLHUB_API", API)
            if wanted != API:
                raise PluginError(
                    f"plugin {point.name!r} of {distribution} wants TLHUB_API {wanted!r}; this tlhub speaks {API}",
                    hint=f"pip install --upgrade {CORE} {distribution}",
                )
            records = _collect(manager, module, f"{distribution}:{point.name}")
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # whatever it raises costs the plugin itself, nothing else
            if debugging():
                raise
            plugin.error = describe(error).removeprefix("PluginError: ")
            return plugin
    plugin.kernels, plugin.schedules, plugin.targets, plugin.stores = records
    return plugin


def _collect(manager: pluggy.PluginManager, module: Any, name: str) -> tuple[Any, ...]:
    """Register *module* and return what each hook of it gives, all checked, or nothing at all."""
    try:
        manager.register(module, name)
        manager.check_pending()
        implementations = {
            hook: [i.function for i in getattr(manager.hook, hook).get_hookimpls() if i.plugin_name == name]
            for hook in _RECORDS
        }
        return tuple(_records(hook, functions, name) for hook, functions in implementations.items())
    except BaseException as error:
        # a plugin with a mistyped hook would fail check_pending() for all that follow
        if manager.has_plugin(name):
            manager.unregister(name=name)
        if isinstance(error, pluggy.PluginValidationError):
            raise _unknown_hook(manager, module, name, error) from error
        raise


def _unknown_hook(manager: pluggy.PluginManager, module: Any, name: str, error: Exception) -> PluginError:
    marked = [n for n in dir(module) if n not in _RECORDS and manager.parse_hookimpl_opts(module, n) is not None]
    if not marked:  # a hook of ours with a parameter, say
        return PluginError(f"plugin {name} does not fit its hooks: {error}")
    return PluginError(
        f"plugin {name} implements an unknown hook {marked[0]!r}; the hooks are {', '.join(_RECORDS)}",
        hint=suggest(marked[0], _RECORDS, None),
    )


def _records(hook: str, functions: Iterable[Callable[[], Any]], name: str) -> tuple[Any, ...]:
    kind = _RECORDS[hook]
    found: list[Any] = []
    for function in functions:
        given = function()
        try:
            given = list(given)
        except TypeError:
            raise PluginError(
                f"{hook} of plugin {name} returned {given!r}; it returns {kind.__name__} records"
            ) from None
        for record in given:
            if not isinstance(record, kind):
                raise PluginError(f"{hook} of plugin {name} returned {record!r}; it returns {kind.__name__} records")
        found += given
    return tuple(found)


class _Origin(NamedTuple):
    """Where a plugin is from; ``editable``: its sources may change under us."""

    distribution: str
    version: str
    editable: bool


_UNKNOWN = _Origin("?", "?", False)


def _origin(dist: metadata.Distribution) -> _Origin:
    found = dist.metadata
    name = found["Name"].lower().replace("_", "-").replace(".", "-")
    text = dist.read_text("direct_url.json")
    try:
        editable = bool(text and json.loads(text).get("dir_info", {}).get("editable", False))
    except ValueError:
        editable = False
    return _Origin(name, found["Version"], editable)
