"""Binaries of gemm/hopper for tests."""

from __future__ import annotations

import functools

import cuda_lab

from tlhub_gemm.contract import GEMM
from tlhub_gemm.hopper import HOPPER

SCHEMES = "coop-128x256-b2 ping-128x192 coop-128x64-k2"
OTHERS = "coop-256x128 coop-128x96-k2 ping-128x128"


@functools.cache
def build(texts, dtype="float16", **options):
    """Build a binary with all dims symbolic."""
    return cuda_lab.build(
        HOPPER.program, GEMM, ("B", "M", "N", "K"), dtype=dtype, config={"plans": texts}, options=options
    )
