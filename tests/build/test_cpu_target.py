"""The target cpu: names of archs, what this machine is, what runs where."""

from __future__ import annotations

import os

import pytest

import tlhub_cpu
from tlhub.specs import DeviceFacts
from tlhub_cpu import arch, device

V2 = arch.ARCHS["x86-64-v2"].needs
V3 = arch.ARCHS["x86-64-v3"].needs
V4 = arch.ARCHS["x86-64-v4"].needs


@pytest.mark.parametrize(
    ("machine", "present", "name"),
    [
        ("x86_64", V2 - {"ssse3"}, None),
        ("x86_64", V2, "x86-64-v2"),
        ("x86_64", V3 - {"fma"}, "x86-64-v2"),
        ("x86_64", V3, "x86-64-v3"),
        ("x86_64", V4 - {"avx512vl"}, "x86-64-v3"),
        ("AMD64", V4 | {"avx512_vnni"}, "x86-64-v4"),
        ("aarch64", frozenset(), "aarch64"),
        ("arm64", frozenset(), "aarch64"),
        ("riscv64", frozenset(), None),
    ],
)
def test_native_is_a_level(machine, present, name):
    assert arch.native(machine, frozenset(present)) == name


def test_canonical_names():
    for name in tlhub_cpu.TARGET.archs:
        assert arch.canonical(name) == name
    assert arch.canonical("arm64") == "aarch64"
    assert arch.canonical("x86-64-v5") is None and arch.canonical("") is None
    assert arch.canonical("native") in (*tlhub_cpu.TARGET.archs, None)


def facts(name):
    return DeviceFacts(arch=f"cpu:{name}", model=f"a {name}")


@pytest.mark.parametrize(
    ("code", "machine", "missing"),
    [
        ("x86-64-v3", "x86-64-v4", None),
        ("x86-64-v2", "haswell", None),
        ("haswell", "x86-64-v4", "aes"),
        ("x86-64-v4", "x86-64-v3", "avx512bw, avx512cd, avx512dq, avx512f, avx512vl"),
        ("x86-64-v4", "sapphirerapids", None),
        ("x86-64-v4", "znver3", "avx512f"),
        ("sapphirerapids", "icelake-server", "amx_bf16"),
        ("x86-64-v2", "aarch64", "a aarch64 is cpu:aarch64, which does not run cpu:x86-64-v2"),
        ("aarch64", "neoverse-v1", None),
        ("neoverse-v1", "neoverse-n1", "sve"),
        ("vax", "aarch64", "does not run cpu:vax"),
        ("aarch64", "vax", "does not run cpu:aarch64"),
    ],
)
def test_what_runs_where(code, machine, missing):
    reason = arch.runs(f"cpu:{code}", facts(machine))
    assert (reason is None) if missing is None else (missing in reason)


def test_this_machine(monkeypatch):
    (found,) = device.devices()
    assert found.arch == f"cpu:{arch.canonical('native')}" and found.index == 0 and found.model
    assert found.cores == len(os.sched_getaffinity(0))
    assert arch.runs(found.arch, found) is None
    # a device that is here runs what its own features allow, beyond its level
    here = DeviceFacts(arch="cpu:x86-64-v3", model="here", index=0)
    monkeypatch.setattr(arch, "features", lambda: arch.ARCHS["haswell"].needs)
    assert arch.runs("cpu:haswell", here) is None
    assert "sse4a" in arch.runs("cpu:znver2", here)


def test_cpuinfo_of_x86_and_arm():
    text = "processor\t: 0\nmodel name\t: AMD  EPYC 7B13\nflags\t\t: fpu avx2 fma\n\nprocessor\t: 1\nflags\t\t: other\n"
    assert arch.parse_features(text) == {"fpu", "avx2", "fma"} and arch.parse_model(text) == "AMD EPYC 7B13"
    arm = "processor\t: 0\nBogoMIPS\t: 243.75\nFeatures\t: fp asimd sve\n"
    assert arch.parse_features(arm) == {"fp", "asimd", "sve"} and arch.parse_model(arm) == ""
    assert arch.parse_features("") == frozenset()


def test_what_a_compiler_is_told():
    assert dict(arch.options("cpu:x86-64-v3")) == {"mtriple": "x86_64-linux-gnu", "mcpu": "x86-64-v3"}
    assert arch.options("cpu:aarch64")["mtriple"].startswith("aarch64")
    for name in tlhub_cpu.TARGET.archs:
        assert tlhub_cpu.TARGET.facts(f"cpu:{name}").arch == f"cpu:{name}"
