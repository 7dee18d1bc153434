"""The target cuda: names of archs, what runs where, models that are not here. No GPU, no compiler."""

from __future__ import annotations

import subprocess
import sys

import pytest

import tlhub
import tlhub_registry
from tlhub.catalog import load
from tlhub.devices import locate
from tlhub.errors import UnknownName
from tlhub.specs import DeviceFacts
from tlhub_cuda import TARGET, arch

pytestmark = pytest.mark.light

SIZE = (64, 64, 64)


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("sm_90", "sm_90a"),
        ("sm_100", "sm_100a"),
        ("sm_120", "sm_120a"),
        *((name, name) for name in arch.ARCHS),
        *(
            (name, None)
            for name in ("sm_70", "sm_87", "sm_103", "sm_121", "sm_75a", "sm_90f", "sm_9", "compute_90", "")
        ),
    ],
)
def test_a_capability_has_one_name(name, known):
    assert TARGET.canonical(name) == known


def test_what_the_issue_names_is_listed():
    assert TARGET.archs == ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a", "compute_80")
    assert TARGET.rank > load().targets["cpu"].rank and TARGET.device_type == 2


@pytest.mark.parametrize(
    ("capability", "name"),
    [((7, 5), "sm_75"), ((8, 6), "sm_86"), ((9, 0), "sm_90a"), ((10, 0), "sm_100a"), ((12, 0), "sm_120a")]
    + [((8, 7), "compute_80"), ((10, 3), "compute_80"), ((12, 1), "compute_80"), ((7, 2), None), ((7, 0), None)],
)
def test_a_device_has_the_arch_of_its_capability(capability, name):
    assert arch.of(capability) == name


@pytest.mark.parametrize(
    ("code", "here", "reason"),
    [
        ("sm_80", "sm_80", None),
        ("sm_80", "sm_86", None),
        ("sm_80", "sm_89", None),
        ("sm_86", "sm_89", None),
        ("sm_89", "sm_86", "is for compute capability 8.x from 8.9, and a device has 8.6"),
        ("sm_80", "sm_90a", "8.x from 8.0, and a device has 9.0"),
        ("sm_75", "sm_80", "7.x from 7.5, and a device has 8.0"),
        ("sm_90a", "sm_90a", None),
        ("sm_90a", "sm_100a", "9.0 alone, and a device has 10.0"),
        ("sm_100a", "sm_90a", "10.0 alone, and a device has 9.0"),
        ("sm_100a", "sm_120a", "10.0 alone, and a device has 12.0"),
        ("compute_80", "sm_75", "8.0 and later, and a device has 7.5"),
        ("compute_80", "sm_80", None),
        ("compute_80", "sm_86", None),
        ("compute_80", "sm_90a", None),
        ("compute_80", "sm_120a", None),
        ("compute_80", "compute_80", None),
        ("sm_80", "compute_80", "is cuda:compute_80, which does not run cuda:sm_80"),
        ("vax", "sm_80", "does not run cuda:vax"),
    ],
)
def test_what_runs_where(code, here, reason):
    found = TARGET.runs(f"cuda:{code}", DeviceFacts(arch=f"cuda:{here}", model="a device"))
    assert (found is None) if reason is None else (reason in found)


@pytest.mark.parametrize("name", ["cuda:sm_70", "cuda:sm_60", "sm_61", "cuda:compute_70"])
def test_what_cuda_13_dropped_is_said(name):
    with pytest.raises(UnknownName, match="a CUDA 12 toolkit is needed"):
        tlhub.explain("gemm", SIZE, "float16", arch=name)


def test_what_exists_and_has_no_exact_arch_is_told_what_runs_there():
    for name, instead in (
        ("sm_103", "compute_80"),
        ("sm_121", "compute_80"),
        ("sm_90f", "sm_90a"),
        ("sm_75a", "sm_75"),
    ):
        with pytest.raises(UnknownName, match=rf"cuda:{instead}$|cuda:{instead}\n"):
            locate(load(), arch=f"cuda:{name}")
    with pytest.raises(UnknownName, match="unknown arch 'cuda:sm_9x'; known: cuda:sm_75"):
        locate(load(), arch="cuda:sm_9x")


def test_what_a_compiler_is_told():
    assert dict(TARGET.options("cuda:sm_90a")) == {"kind": "cuda", "arch": "sm_90a"}
    assert dict(TARGET.options("cuda:compute_80")) == {"kind": "cuda", "arch": "sm_80"}


def test_each_arch_has_a_typical_device():
    for name in TARGET.archs:
        facts = TARGET.facts(f"cuda:{name}")
        assert facts.arch == f"cuda:{name}" and facts.index is None and facts.driver == 0
        assert min(facts.cores, facts.shared_memory, facts.l2, facts.bandwidth) > 0
    least = min(f.shared_memory for f in TARGET.models.values() if TARGET.runs("cuda:compute_80", f) is None)
    assert TARGET.facts("cuda:compute_80").shared_memory == least


def test_models_are_those_of_the_registry():
    assert set(TARGET.models) == set(tlhub_registry.load("devices")) and len(TARGET.models) > 10
    for facts in TARGET.models.values():
        assert facts.arch.removeprefix("cuda:") in TARGET.archs
    place = locate(load(), device="h200")
    assert (place.arch, place.device, place.facts.model) == ("cuda:sm_90a", None, "NVIDIA H200")
    assert (place.facts.cores, place.facts.l2) == (132, 60 << 20)


def test_an_arch_asked_for_a_model_must_fit_it():
    assert locate(load(), "h200", "cuda:compute_80").arch == "cuda:compute_80"
    with pytest.raises(tlhub.errors.DeviceError, match=r"does not run cuda:sm_80.*8\.x from 8\.0"):
        locate(load(), "h200", "sm_80")


def test_explain_works_for_what_is_not_here():
    for place in ({"device": "h200"}, {"arch": "cuda:sm_90"}, {"device": "l4"}, {"arch": "cuda:compute_80"}):
        told = tlhub.explain("gemm", SIZE, "float16", **place)
        assert told.place.arch.startswith("cuda:") and told.place.device is None
        assert "no device here runs it" in str(told)


_LIGHT = """
import sys
import tlhub.catalog, tlhub.devices
tlhub.devices.locate(tlhub.catalog.load(), "cpu")
heavy = "ctypes", "torch", "tvm_ffi", "numpy", "tlhub_registry", "tlhub_cuda.nvml", "tlhub_cuda.nvcc"
print([name for name in heavy if name in sys.modules])
"""


def test_who_asks_for_no_gpu_looks_for_none():
    done = subprocess.run([sys.executable, "-c", _LIGHT], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr
