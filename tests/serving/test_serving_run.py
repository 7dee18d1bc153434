"""The whole way: a run is recorded, built elsewhere, checked, and then served with nothing compiled."""

from __future__ import annotations

import json

import pytest

import tlhub
from tlhub import hub, recording
from tlhub.errors import NotPrebuilt

pytestmark = pytest.mark.light

ARCH = "cuda:sm_90a"
LOOKUPS = [((64, 64, 64), "float32", {}), (("M", 64, 64), "float64", {"trans_b": True})]


@pytest.fixture
def recorded(tmp_path, monkeypatch):
    """Where the lookups of a process that had none before are recorded."""
    for name, value in (("_noted", {}), ("_pending", []), ("_destination", None)):
        monkeypatch.setattr(recording, name, value)
    monkeypatch.setenv("TLHUB_RECORD", str(tmp_path / "workload.toml"))
    return tmp_path / "workload.toml"


def run():
    return [tlhub.get("gemm", s, d, arch=ARCH, schedule="simt", **options) for s, d, options in LOOKUPS]


def test_what_was_recorded_is_what_is_missing_and_then_all_there_is(recorded, compiler, cli, monkeypatch):
    monkeypatch.setenv("TLHUB_COMPILE", "never")
    for shape, dtype, options in LOOKUPS:
        with pytest.raises(NotPrebuilt):
            tlhub.get("gemm", shape, dtype, arch=ARCH, schedule="simt", **options)
    monkeypatch.delenv("TLHUB_COMPILE")
    assert cli("cache", "check", "--from", recorded).exit_code == 1
    assert json.loads(cli("cache", "prewarm", "--from", recorded, "--json").stdout)["built"] == len(LOOKUPS)
    assert cli("cache", "check", "--from", recorded).exit_code == 0
    hub.forget()
    tlhub.freeze()
    try:
        assert [kernel.origin for kernel in run()] == ["cache"] * len(LOOKUPS)
    finally:
        tlhub.freeze(False)
    assert len(compiler.made) == len(LOOKUPS)


@pytest.mark.parametrize("warm", [False, True])
def test_the_commands_lookup_is_noted_too(recorded, compiler, cli, warm):
    words = ("gemm", "64,64,64", "--dtype", "float32", "--arch", ARCH, "--schedule", "simt")
    if warm:
        assert cli("cache", "prewarm", *words).exit_code == 0 and not recorded.exists()
    assert cli("get", *words).exit_code == 0
    assert recorded.read_text().count("[[problem]]") == 1
