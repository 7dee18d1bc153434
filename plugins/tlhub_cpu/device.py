"""The one device of the target: this machine's processor, as this process may use it."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace

from tlhub.specs import DeviceFacts
from tlhub_cpu import arch

MODELS: Mapping[str, DeviceFacts] = {
    name: DeviceFacts(arch=f"cpu:{name}", model=name, cores=8, l2=1 << 20, vectors=found.vectors)
    for name, found in arch.ARCHS.items()
}
"""Facts of typical devices by model name."""


def devices() -> Sequence[DeviceFacts]:
    """Return the processor, or nothing where its architecture is not known."""
    name = arch.canonical("native")
    if name is None:
        return ()
    return (replace(typical(name), model=arch.model(), index=0, cores=cores(), l2=_cache(2)),)


def ready(name: str) -> None:
    """Raise BuildError where there is no C compiler for the arch *name*, ``cpu:x86-64-v3``."""
    from tlhub.build import compiler

    compiler.find(arch.spec(name).machine)


def typical(name: str) -> DeviceFacts:
    """Return the facts of a typical device of an arch, ``cpu:x86-64-v3``."""
    return MODELS[name.removeprefix("cpu:")]


def cores() -> int:
    """Return how many cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@functools.cache
def _cache(level: int) -> int:
    """Return the size in bytes of the first core's cache of that level, or 0 if the system does not tell."""
    for index in range(8):
        folder = f"/sys/devices/system/cpu/cpu0/cache/index{index}"
        try:
            with open(f"{folder}/level") as file:
                found = int(file.read())
            with open(f"{folder}/size") as file:
                size = file.read().strip()
        except (OSError, ValueError):
            return 0
        if found == level and size[:-1].isdigit():
            return int(size[:-1]) * {"K": 1 << 10, "M": 1 << 20}.get(size[-1], 1)
    return 0
