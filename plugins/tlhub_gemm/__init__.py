"""The kernel ``gemm`` and its schedules."""

from __future__ import annotations

from collections.abc import Iterable

from tlhub.hooks import hookimpl
from tlhub.specs import Kernel, Schedule
from tlhub_gemm.contract import GEMM
from tlhub_gemm.cpu import BLOCKED
from tlhub_gemm.dlight import DLIGHT
from tlhub_gemm.hopper import HOPPER
from tlhub_gemm.simt import SIMT
from tlhub_gemm.skinny import SKINNY
from tlhub_gemm.tilelang_mma import MMA

TLHUB_API = 1


@hookimpl
def tlhub_kernels() -> Iterable[Kernel]:
    return [GEMM]


@hookimpl
def tlhub_schedules() -> Iterable[Schedule]:
    return [BLOCKED, MMA, DLIGHT, SKINNY, HOPPER, SIMT]
