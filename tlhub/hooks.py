"""What a plugin may implement: four hooks, no arguments, frozen records back.

A plugin is a module (or package) named by an entry point of the group ``tlhub``. It marks its functions
with ``hookimpl``; the order in which plugins are found never matters. A module may set ``TLHUB_API`` to
the number of the interface it was written for.
"""

from __future__ import annotations

from collections.abc import Iterable

import pluggy

from tlhub.specs import Kernel, PrebuiltStore, Schedule, Target

API = 1
"""The interface that this host speaks. A plugin that names another is skipped."""

hookspec = pluggy.HookspecMarker("tlhub")
hookimpl = pluggy.HookimplMarker("tlhub")


class Hooks:
    """The hook specifications."""

    @hookspec
    def tlhub_kernels(self) -> Iterable[Kernel]:
        """Contracts: what can be computed."""

    @hookspec
    def tlhub_schedules(self) -> Iterable[Schedule]:
        """Implementations of kernels, one's own or somebody else's."""

    @hookspec
    def tlhub_targets(self) -> Iterable[Target]:
        """Kinds of device."""

    @hookspec
    def tlhub_stores(self) -> Iterable[PrebuiltStore]:
        """Read-only folders of entries that the plugin ships."""
