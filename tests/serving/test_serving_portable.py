"""Code that is not for one arch alone: sought in stores, where there is none for exactly the device's arch."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

import tlhub
from tlhub import hub
from tlhub.errors import BuildError, NoSchedule, NotPrebuilt

pytestmark = pytest.mark.light

EXACT, PTX = "cuda:sm_90a", "cuda:compute_80"
PROBLEM = ("gemm", "64,64,64", "--dtype", "float32", "--schedule", "simt")


def get(arch=EXACT):
    return tlhub.get("gemm", (64, 64, 64), "float32", arch=arch, schedule="simt")


def explain(arch=EXACT):
    return tlhub.explain("gemm", (64, 64, 64), "float32", arch=arch, schedule="simt")


def prewarm(arch):
    return hub.prewarm("gemm", (64, 64, 64), "float32", arch=arch, schedule="simt")


@pytest.fixture
def ptx(compiler):
    """A store that has PTX and nothing else."""
    compiler.least_driver = 580
    return prewarm(PTX)[0]


def test_it_serves_where_compiling_is_off(ptx, cli, monkeypatch):
    monkeypatch.setenv("TLHUB_COMPILE", "never")
    kernel = get()
    assert (kernel.key, kernel.arch) == (ptx.key, PTX)
    told = explain()
    assert told.outcome == "served" and told.hit is None and told.served.hit.entry.key == ptx.key
    text, document = str(told), json.loads(json.dumps(told.to_json()))
    assert f"searched, for {PTX}, where they have nothing:" in text and f"it is code for {PTX}" in text
    assert document["hit"] is None and document["otherwise"]["hit"]["key"] == ptx.key
    shown = json.loads(cli("get", *PROBLEM, "--arch", EXACT, "--json").stdout)
    assert (shown["arch"], shown["key"]) == (PTX, ptx.key)


def test_what_is_for_the_arch_goes_first(ptx, monkeypatch):
    exact, origin = prewarm(EXACT)
    assert origin == "built"  # prewarming is for the arch that it is asked for
    monkeypatch.setenv("TLHUB_COMPILE", "never")
    assert get().key == exact.key and explain().otherwise is None


def test_a_build_for_the_arch_goes_first(ptx, compiler):
    assert explain().outcome == "build"
    kernel = get()
    assert (kernel.arch, kernel.origin) == (EXACT, "built")


def test_it_serves_where_no_candidate_can_be_built(ptx, compiler):
    compiler.broken.add("simt")
    with pytest.warns(RuntimeWarning, match=f"serving code for {PTX}, for there is none for {EXACT}: simt does not"):
        assert get().key == ptx.key


def test_it_serves_where_no_schedule_does(compiler, monkeypatch):
    known = hub.load()
    simt = next(s for s in known.schedules["gemm"] if s.name == "simt")
    only = replace(simt, supports=lambda problem, facts: None if facts.arch == PTX else f"not for {facts.arch}")
    monkeypatch.setattr(hub, "load", lambda: replace(known, schedules={**known.schedules, "gemm": (only,)}))
    with pytest.raises(NoSchedule):
        get()
    entry, _ = prewarm(PTX)
    assert get().key == entry.key and explain().outcome == "served"


@pytest.mark.parametrize("arch", ["cuda:sm_75", PTX])
def test_devices_that_do_not_run_it(compiler, monkeypatch, arch):
    if arch != PTX:
        prewarm(PTX)
    monkeypatch.setenv("TLHUB_COMPILE", "never")
    with pytest.raises(NotPrebuilt):
        get(arch)
    assert explain(arch).otherwise is None


def test_it_is_never_built_unasked(compiler):
    compiler.broken.add("simt")
    with pytest.raises(BuildError):
        get()
    assert not compiler.made


def test_a_deployment_is_covered_by_it_and_that_is_said(ptx, cli):
    done = cli("cache", "check", *PROBLEM, "--arch", EXACT, "--driver", 580, "--json")
    (told,) = json.loads(done.stdout)["problems"]
    assert done.exit_code == 0 and told["why"] == [f"it is code for {PTX}"] and told["key"] == ptx.key
    done = cli("cache", "check", *PROBLEM, "--arch", EXACT, "--driver", 550, "--json")
    (told,) = json.loads(done.stdout)["problems"]
    assert done.exit_code == 1 and "it needs driver 580, here is 550" in told["why"][0]


def test_it_can_be_pinned(ptx, cli, tmp_path, monkeypatch):
    path = tmp_path / "pins.json"
    assert cli("pin", *PROBLEM, "--arch", EXACT, "--to", path).exit_code == 0
    prewarm(EXACT)
    monkeypatch.setenv("TLHUB_PINS", str(path))
    hub.forget()
    assert get().key == ptx.key
