"""The kernels of attention and their schedules."""

from __future__ import annotations

from collections.abc import Iterable

from tlhub.hooks import hookimpl
from tlhub.specs import Kernel, Schedule
from tlhub_attention.contracts.backward import ATTENTION_BWD
from tlhub_attention.contracts.decode import DECODE
from tlhub_attention.contracts.forward import ATTENTION
from tlhub_attention.contracts.varlen import VARLEN
from tlhub_attention.contracts.varlen_backward import VARLEN_BWD
from tlhub_attention.cpu.schedules import FLASH, FLASH_BWD, FLASH_DECODE, FLASH_VARLEN, FLASH_VARLEN_BWD
from tlhub_attention.hopper.backward import HOPPER_BWD
from tlhub_attention.hopper.decode import HOPPER_DECODE
from tlhub_attention.hopper.forward import HOPPER
from tlhub_attention.hopper.fp8 import HOPPER_FP8
from tlhub_attention.hopper.varlen import HOPPER_VARLEN
from tlhub_attention.hopper.varlen_backward import HOPPER_VARLEN_BWD
from tlhub_attention.mma.backward import MMA_BWD
from tlhub_attention.mma.decode import MMA_DECODE
from tlhub_attention.mma.forward import MMA, MMA_VARLEN
from tlhub_attention.mma.varlen_backward import MMA_VARLEN_BWD

TLHUB_API = 1


@hookimpl
def tlhub_kernels() -> Iterable[Kernel]:
    return [ATTENTION, ATTENTION_BWD, DECODE, VARLEN, VARLEN_BWD]


@hookimpl
def tlhub_schedules() -> Iterable[Schedule]:
    on_cpus = [FLASH, FLASH_BWD, FLASH_DECODE, FLASH_VARLEN, FLASH_VARLEN_BWD]
    on_hopper = [HOPPER, HOPPER_FP8, HOPPER_BWD, HOPPER_DECODE, HOPPER_VARLEN, HOPPER_VARLEN_BWD]
    by_mma = [MMA, MMA_BWD, MMA_DECODE, MMA_VARLEN, MMA_VARLEN_BWD]
    return [*on_cpus, *on_hopper, *by_mma]
