"""The kernels ``attention`` and ``attention_bwd``, and their schedules."""

from __future__ import annotations

from collections.abc import Iterable

from tlhub.hooks import hookimpl
from tlhub.specs import Kernel, Schedule
from tlhub_attention.backward_contract import ATTENTION_BWD
from tlhub_attention.backward_hopper import HOPPER_BWD
from tlhub_attention.contract import ATTENTION
from tlhub_attention.cpu import FLASH, FLASH_BWD
from tlhub_attention.hopper import HOPPER

TLHUB_API = 1


@hookimpl
def tlhub_kernels() -> Iterable[Kernel]:
    return [ATTENTION, ATTENTION_BWD]


@hookimpl
def tlhub_schedules() -> Iterable[Schedule]:
    return [FLASH, FLASH_BWD, HOPPER, HOPPER_BWD]
