"""Freezing: what is not there by then is refused, whatever the environment says."""

from __future__ import annotations

import pytest

import tlhub
from tlhub import hub
from tlhub.errors import NotPrebuilt

pytestmark = pytest.mark.light

ARCH = "cuda:sm_90a"


@pytest.fixture
def frozen():
    tlhub.freeze()
    yield
    tlhub.freeze(False)


def test_a_later_miss_is_refused_and_what_is_there_serves(compiler, frozen):
    for _ in range(2):
        with pytest.raises(NotPrebuilt, match=r"tlhub.freeze\(\) was called"):
            tlhub.get("gemm", (64, 64, 64), "float32", arch=ARCH, schedule="simt")
    assert tlhub.explain("gemm", (64, 64, 64), "float32", arch=ARCH, schedule="simt").outcome == "not prebuilt"
    tlhub.freeze(False)
    hub.prewarm("gemm", (64, 64, 64), "float32", arch=ARCH, schedule="simt")
    tlhub.freeze()
    kernel = tlhub.get("gemm", (64, 64, 64), "float32", arch=ARCH, schedule="simt")
    assert kernel.origin == "cache" and len(compiler.made) == 1


def test_prewarming_is_building(compiler, frozen):
    with pytest.raises(NotPrebuilt):
        hub.prewarm("gemm", (64, 64, 64), "float32", arch=ARCH, schedule="simt")
    assert not compiler.made
