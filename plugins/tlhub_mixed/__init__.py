"""Mixed precision: schedules of gemm for narrow types and tf32."""

from __future__ import annotations

from collections.abc import Iterable

from tlhub.hooks import hookimpl
from tlhub.specs import Schedule
from tlhub_mixed.hopper.gemm import HOPPER_MIXED

TLHUB_API = 1


@hookimpl
def tlhub_schedules() -> Iterable[Schedule]:
    return [HOPPER_MIXED]
