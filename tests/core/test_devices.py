"""Places: how device and arch, given or not, become a target, an arch and facts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from tlhub.catalog import Catalog, assemble
from tlhub.devices import locate
from tlhub.errors import DeviceError, UnknownName
from tlhub.plugins import Plugin
from tlhub.specs import DeviceFacts, Target

pytestmark = pytest.mark.light


def target(name: str, rank: int, devices: Sequence[DeviceFacts], archs: tuple[str, ...]) -> Target:
    return Target(
        name=name,
        rank=rank,
        device_type=1,
        archs=archs,
        canonical=lambda a: archs[0] if a == "native" else a if a in archs else None,
        devices=lambda: devices,
        facts=lambda a: DeviceFacts(a, f"some {a}"),
        runs=lambda a, f: None if a == f.arch else f"it is {f.arch}",
        assemble="nowhere:assemble",
        models={f"model-{name}": DeviceFacts(f"{name}:{archs[0]}", f"model-{name}")},
    )


CPU = target("cpu", 10, [DeviceFacts("cpu:v3", "processor", 0)], ("v3", "v4"))
GPU = target("gpu", 20, [DeviceFacts("gpu:a", "first", 0), DeviceFacts("gpu:b", "second", 1)], ("a", "b", "c"))
NONE = target("gpu", 20, [], ("a", "b", "c"))


def catalog(*targets: Target) -> Catalog:
    return assemble([Plugin("t", "t", "tlhub-core", "1", targets=targets)])


def test_the_highest_rank_that_has_a_device_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert locate(catalog(CPU, GPU)).device == "gpu:0"
    assert locate(catalog(CPU, NONE)).device == "cpu:0"
    monkeypatch.setenv("TLHUB_DEVICE", "gpu:1")
    assert locate(catalog(CPU, GPU)).arch == "gpu:b"
    monkeypatch.setenv("TLHUB_DEVICE", "")
    assert locate(catalog(CPU, GPU)).device == "gpu:0"


def test_an_arch_finds_the_device_that_runs_it() -> None:
    assert locate(catalog(CPU, GPU), arch="gpu:b").device == "gpu:1"
    place = locate(catalog(CPU, GPU), arch="c")
    assert (place.arch, place.device, place.facts.model) == ("gpu:c", None, "some gpu:c")
    assert locate(catalog(CPU, GPU), arch="cpu:native").arch == "cpu:v3"


def test_a_model_that_is_not_here() -> None:
    place = locate(catalog(CPU, NONE), device="model-gpu")
    assert (place.arch, place.device) == ("gpu:a", None)


def test_both_must_fit() -> None:
    assert locate(catalog(CPU, GPU), "gpu:1", "gpu:b").arch == "gpu:b"
    with pytest.raises(DeviceError, match="it is gpu:a"):
        locate(catalog(CPU, GPU), "gpu:0", "gpu:b")
    with pytest.raises(DeviceError, match="it is a cpu device"):
        locate(catalog(CPU, GPU), "cpu", "gpu:b")


def test_what_is_chosen_depends_on_the_arch_asked_for_not_on_the_device() -> None:
    here = DeviceFacts("cpu:v4", "processor", 0, cores=3, vectors="wide")
    cpu = replace(
        target("cpu", 10, [here], ("v3", "v4")),
        facts=lambda a: DeviceFacts(a, "some", cores=8, vectors="narrow"),
        runs=lambda arch, facts: None,
    )
    assert locate(catalog(cpu), arch="v3").facts == replace(here, arch="cpu:v3", vectors="narrow")
    assert locate(catalog(cpu), arch="v4").facts == here


@pytest.mark.parametrize(("typical", "own", "promised"), [(163, 227, 163), (163, 99, 99), (163, 0, 163), (0, 99, 99)])
def test_the_shared_memory_is_what_both_the_arch_and_the_device_have(typical: int, own: int, promised: int) -> None:
    gpu = replace(
        target("gpu", 20, [DeviceFacts("gpu:b", "here", 0, shared_memory=own)], ("a", "b")),
        facts=lambda a: DeviceFacts(a, "some", shared_memory=typical),
        runs=lambda arch, facts: None,
    )
    asked, native = locate(catalog(gpu), arch="a"), locate(catalog(gpu), arch="b")
    assert (asked.facts.shared_memory, asked.shared_memory) == (promised, own)
    assert native.facts.shared_memory == native.shared_memory == own


def test_what_is_not_there_is_named() -> None:
    with pytest.raises(DeviceError, match=r"gpu:0 \(first\), gpu:1 \(second\)"):
        locate(catalog(CPU, GPU), "gpu:7")
    with pytest.raises(DeviceError, match="there are: none"):
        locate(catalog(CPU, NONE), "gpu")
    with pytest.raises(UnknownName, match="did you mean 'cpu'"):
        locate(catalog(CPU), "cpuu")
    with pytest.raises(UnknownName, match="cpu:v3, cpu:v4, cpu:native"):
        locate(catalog(CPU), arch="cpu:v9")
    with pytest.raises(UnknownName, match="unknown target 'tpu'"):
        locate(catalog(CPU), arch="tpu:1")
    for device, arch in (("h200", None), ("cuda:0", None), (None, "cuda:sm_90a")):
        with pytest.raises(UnknownName, match="no installed plugin brings target 'cuda'"):
            locate(catalog(CPU), device, arch)
    with pytest.raises(DeviceError, match="no device is here"):
        locate(catalog(NONE))
