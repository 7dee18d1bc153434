"""The kernels of mixed precision, and their schedules."""

from __future__ import annotations

from collections.abc import Iterable

from tlhub.hooks import hookimpl
from tlhub.specs import Kernel, Schedule
from tlhub_mixed.contracts.quantize import QUANTIZE
from tlhub_mixed.contracts.scaled import SCALED
from tlhub_mixed.contracts.weights import W4A16, W8A16
from tlhub_mixed.cpu.schedules import QUANTIZE_ROWS, SCALED_BLOCKED, W4_BLOCKED, W8_BLOCKED
from tlhub_mixed.cuda.quantize import QUANTIZE_BLOCKS
from tlhub_mixed.cuda.weights import W4_MMA, W8_MMA
from tlhub_mixed.hopper.gemm import HOPPER_MIXED
from tlhub_mixed.hopper.scaled import HOPPER_SCALED
from tlhub_mixed.hopper.weights import W4_HOPPER, W8_HOPPER
from tlhub_mixed.mma.gemm import MMA_MIXED
from tlhub_mixed.mma.scaled import MMA_SCALED

TLHUB_API = 1


@hookimpl
def tlhub_kernels() -> Iterable[Kernel]:
    return [QUANTIZE, SCALED, W4A16, W8A16]


@hookimpl
def tlhub_schedules() -> Iterable[Schedule]:
    on_cpus = [QUANTIZE_ROWS, SCALED_BLOCKED, W4_BLOCKED, W8_BLOCKED]
    on_gpus = [QUANTIZE_BLOCKS, W4_MMA, W8_MMA, HOPPER_MIXED, HOPPER_SCALED, W4_HOPPER, W8_HOPPER]
    return [*on_cpus, *on_gpus, MMA_MIXED, MMA_SCALED]
