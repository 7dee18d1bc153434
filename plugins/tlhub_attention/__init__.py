"""The kernel ``attention`` and its schedules."""

from __future__ import annotations

from collections.abc import Iterable

from tlhub.hooks import hookimpl
from tlhub.specs import Kernel, Schedule
from tlhub_attention.contract import ATTENTION
from tlhub_attention.cpu import FLASH
from tlhub_attention.hopper import HOPPER

TLHUB_API = 1


@hookimpl
def tlhub_kernels() -> Iterable[Kernel]:
    return [ATTENTION]


@hookimpl
def tlhub_schedules() -> Iterable[Schedule]:
    return [FLASH, HOPPER]
