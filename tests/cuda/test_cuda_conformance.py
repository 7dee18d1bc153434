"""The conformance kit on schedules for a GPU that is not here."""

from __future__ import annotations

from dataclasses import replace

import cuda_lab
import pytest

from tlhub import catalog, testing
from tlhub_mixed.cuda.quantize import QUANTIZE_BLOCKS


@pytest.fixture
def quantizing(cold_cache, monkeypatch):
    """Let the plugin of mixed precision have one schedule alone, changed, and no GPU be here."""

    def change(**fields):
        known = catalog.load()
        schedule = replace(QUANTIZE_BLOCKS, **fields)
        only = replace(next(p for p in known.plugins if p.module == "tlhub_mixed"), kernels=(), schedules=(schedule,))
        made = replace(
            known,
            plugins=(only,),
            owners={**known.owners, ("quantize", schedule.name): only},
            schedules={**known.schedules, "quantize": only.schedules},
            targets={**known.targets, "cuda": replace(known.targets["cuda"], devices=lambda: ())},
        )
        monkeypatch.setattr(catalog, "load", lambda: made)
        monkeypatch.setattr("tlhub.hub.load", lambda: made)

    return change


def test_conformance_compiles_for_an_arch_whose_device_is_not_here(quantizing):
    cuda_lab.needs_nvcc()
    quantizing()
    *_, compiled = testing.conformance("tlhub_mixed", archs=["cuda:sm_90a", "cpu:native"]).findings
    assert str(compiled) == "ok      schedule quantize/cuda_quantize on cuda, compiled for cuda:sm_90a"
    *_, skipped = testing.conformance("tlhub_mixed").findings
    assert skipped.state == "skipped" and skipped.detail.endswith("no device here; name what to compile for in archs")


def test_conformance_tells_what_does_not_build(quantizing):
    cuda_lab.needs_nvcc()
    quantizing(program="cuda_programs:broken", sources=())
    with pytest.raises(AssertionError, match="compiled for cuda:sm_80: quantize: strides of 'a', 'b', 'c'"):
        testing.conformance("tlhub_mixed", archs=["cuda:sm_80"])
