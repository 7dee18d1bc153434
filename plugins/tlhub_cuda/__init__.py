"""The target ``cuda``: NVIDIA GPUs of compute capability 7.5 and later."""

from __future__ import annotations

from collections.abc import Iterable

from tlhub.hooks import hookimpl
from tlhub.specs import Target
from tlhub_cuda import arch, device

TLHUB_API = 1

_KDL_CUDA = 2

TARGET = Target(
    name="cuda",
    rank=20,
    device_type=_KDL_CUDA,
    archs=arch.ARCHS,
    canonical=device.canonical,
    devices=device.devices,
    facts=device.typical,
    runs=arch.runs,
    assemble="tlhub_cuda.backend:assemble",
    options=arch.options,
    portable=arch.portable,
    models=device.MODELS,
    unsupported=device.unsupported,
    absent=device.absent,
    ready=device.ready,
    checks=device.checks,
    doc="NVIDIA GPUs, by compute capability",
)


@hookimpl
def tlhub_targets() -> Iterable[Target]:
    return [TARGET]
