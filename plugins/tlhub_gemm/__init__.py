"""The kernel ``gemm`` and its schedules."""

from __future__ import annotations

from collections.abc import Iterable

from tlhub.hooks import hookimpl
from tlhub.specs import Kernel, Schedule
from tlhub_gemm.contract import GEMM
from tlhub_gemm.cpu import BLOCKED

TLHUB_API = 1


@hookimpl
def tlhub_kernels() -> Iterable[Kernel]:
    return [GEMM]


@hookimpl
def tlhub_schedules() -> Iterable[Schedule]:
    return [BLOCKED]
