"""The kernels of attention and their schedules."""

from __future__ import annotations

from collections.abc import Iterable

from tlhub.hooks import hookimpl
from tlhub.specs import Kernel, Schedule
from tlhub_attention.backward_contract import ATTENTION_BWD
from tlhub_attention.backward_hopper import HOPPER_BWD
from tlhub_attention.contract import ATTENTION
from tlhub_attention.cpu import FLASH, FLASH_BWD, FLASH_DECODE, FLASH_VARLEN, FLASH_VARLEN_BWD
from tlhub_attention.decode_contract import DECODE
from tlhub_attention.decode_hopper import HOPPER_DECODE
from tlhub_attention.hopper import HOPPER
from tlhub_attention.varlen_backward_contract import VARLEN_BWD
from tlhub_attention.varlen_contract import VARLEN

TLHUB_API = 1


@hookimpl
def tlhub_kernels() -> Iterable[Kernel]:
    return [ATTENTION, ATTENTION_BWD, DECODE, VARLEN, VARLEN_BWD]


@hookimpl
def tlhub_schedules() -> Iterable[Schedule]:
    return [FLASH, FLASH_BWD, FLASH_DECODE, FLASH_VARLEN, FLASH_VARLEN_BWD, HOPPER, HOPPER_BWD, HOPPER_DECODE]
