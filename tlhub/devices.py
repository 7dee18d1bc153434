"""Where a lookup is for: a device that is here, or an arch, as a target names them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tlhub.catalog import Catalog
from tlhub.errors import DeviceError, UnknownName, suggest
from tlhub.specs import DeviceFacts, Target


@dataclass(frozen=True)
class Place:
    """A target, an exact arch, and the facts of a device that runs it; ``device`` is None where none is here.

    ``shared_memory``: bytes that a block may have on the device, where ``facts`` have no more than the arch promises.
    """

    target: Target
    arch: str
    facts: DeviceFacts
    device: str | None
    shared_memory: int = 0


def locate(catalog: Catalog, device: Any = None, arch: str | None = None) -> Place:
    """Return the place that *device* and *arch* name.

    *device*: ``"cpu"``, ``"cuda:1"``, or the model of a device that is not here. *arch* alone: that arch, on a
    device that runs it if one is here. Neither: ``TLHUB_DEVICE``, else the first device of the highest-ranked
    target that has one. Raises UnknownName, DeviceError.
    """
    if device is None and arch is None:
        device = os.environ.get("TLHUB_DEVICE") or None
    if device is None and arch is None:
        return _default(catalog)
    if device is None:
        target, name = canonical_arch(catalog, str(arch))
        here = [f for f in target.devices() if target.runs(name, f) is None]
        return _place(target, name, here[0] if here else target.facts(name))
    target, facts = _device(catalog, str(device))
    if arch is None:
        return _place(target, facts.arch, facts)
    wanted, name = canonical_arch(catalog, str(arch))
    reason = f"it is a {target.name} device" if wanted.name != target.name else target.runs(name, facts)
    if reason:
        message = f"device {device!r} ({facts.model}) does not run {name}: {reason}"
        raise DeviceError(message, hint=f"the arch without a device: --arch {name}")
    return _place(target, name, facts)


def portable(place: Place) -> Place | None:
    """Return the same device for code that is not for its arch alone, or None if its target has no such code."""
    arch = place.target.portable(place.arch)
    return _place(place.target, arch, replace(place.facts, shared_memory=place.shared_memory)) if arch else None


def canonical_arch(catalog: Catalog, arch: str) -> tuple[Target, str]:
    """Return the target of *arch* and its one full name, ``native`` resolved. Raises UnknownName."""
    prefix, colon, rest = arch.partition(":")
    targets: Sequence[Target] = [catalog.target(prefix)] if colon else tuple(catalog.targets.values())
    for target in targets:
        name = target.canonical(rest if colon else arch)
        if name:
            return target, f"{target.name}:{name}"
    for target in targets:
        why = target.unsupported(rest if colon else arch)
        if why:
            raise UnknownName(f"arch {arch!r} is not served: {why}", hint="tlhub targets")
    known = [f"{t.name}:{a}" for t in targets for a in (*t.archs, "native")]
    raise UnknownName(
        f"unknown arch {arch!r}; known: {', '.join(known) or 'none'}",
        hint="tlhub targets" if arch in catalog.targets else suggest(arch, known, "tlhub targets"),
    )


def _place(target: Target, arch: str, facts: DeviceFacts) -> Place:
    here = None if facts.index is None else f"{target.name}:{facts.index}"
    own = facts.shared_memory
    if facts.arch != arch:  # what is built depends on the arch that it is for, and fits the device besides
        typical = target.facts(arch)
        shared = min(own or typical.shared_memory, typical.shared_memory or own)
        facts = replace(facts, arch=arch, vectors=typical.vectors, shared_memory=shared)
    return Place(target, arch, facts, here, own)


def _default(catalog: Catalog) -> Place:
    for target in sorted(catalog.targets.values(), key=lambda t: (-t.rank, t.name)):
        devices = target.devices()
        if devices:
            return _place(target, devices[0].arch, devices[0])
    raise DeviceError(
        f"no device is here for any target; targets: {', '.join(catalog.targets) or 'none'}",
        hint="tlhub targets",
    )


def _device(catalog: Catalog, device: str) -> tuple[Target, DeviceFacts]:
    name, colon, index = device.partition(":")
    if name in catalog.targets:
        target = catalog.targets[name]
        devices = target.devices()
        if not colon and devices:
            return target, devices[0]
        for facts in devices:
            if index == str(facts.index):
                return target, facts
        have = ", ".join(f"{name}:{f.index} ({f.model})" for f in devices) or "none"
        why = target.absent()
        raise DeviceError(
            f"no device {device!r} is here; of target {name} there are: {have}" + (f" ({why})" if why else ""),
            hint="tlhub targets",
        )
    models = {model: target for target in catalog.targets.values() for model in target.models}
    if device in models:
        return models[device], models[device].models[device]
    from tlhub_registry import load

    elsewhere = load("devices")
    if device in elsewhere:
        catalog.target(elsewhere[device]["arch"].partition(":")[0])  # says that nobody brings it
    if any(d["arch"].startswith(f"{name}:") for d in elsewhere.values()):
        catalog.target(name)
    known = [*catalog.targets, *models]
    raise UnknownName(
        f"unknown device {device!r}; known: {', '.join(known) or 'none'}",
        hint=suggest(device, known, "tlhub targets"),
    )
