"""The target ``cpu``: x86-64 by psABI level or by name, and aarch64."""

from __future__ import annotations

from collections.abc import Iterable

from tlhub.hooks import hookimpl
from tlhub.specs import Target
from tlhub_cpu import arch, device

TLHUB_API = 1

_KDL_CPU = 1

TARGET = Target(
    name="cpu",
    rank=10,
    device_type=_KDL_CPU,
    archs=tuple(arch.ARCHS),
    canonical=arch.canonical,
    devices=device.devices,
    facts=device.typical,
    runs=arch.runs,
    assemble="tlhub_cpu.backend:assemble",
    options=arch.options,
    models=device.MODELS,
    ready=device.ready,
    doc="the processor, by psABI level or by name",
)


@hookimpl
def tlhub_targets() -> Iterable[Target]:
    return [TARGET]
