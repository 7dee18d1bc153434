"""Pins: what was chosen once is what every rank gets, or an error; never something else that would serve."""

from __future__ import annotations

import errno
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

import tlhub
from tlhub import hub
from tlhub.cli import doctor
from tlhub.errors import ArgumentError, NotPrebuilt

pytestmark = pytest.mark.light

ARCH = "cuda:sm_90a"
PROBLEM = ("gemm", "64,64,64", "--dtype", "float32", "--arch", ARCH)


def get(**more):
    return tlhub.get("gemm", (64, 64, 64), "float32", arch=ARCH, **more)


@pytest.fixture
def two(monkeypatch, compiler):
    """Two schedules that serve, of which the second is built first."""
    known = hub.load()
    simt = next(s for s in known.schedules["gemm"] if s.name == "simt")
    schedules = tuple(replace(simt, name=n, priority=p, experimental=False) for n, p in (("best", 9), ("second", 8)))
    owner = replace(known.owner(simt), distribution="somebody", editable=False)
    owners = {**known.owners, **{("gemm", s.name): owner for s in schedules}}
    changed = replace(known, schedules={**known.schedules, "gemm": schedules}, owners=owners)
    monkeypatch.setattr(hub, "load", lambda: changed)
    hub.prewarm("gemm", (64, 64, 64), "float32", arch=ARCH, schedule="second")
    return compiler


@pytest.fixture
def pins(two, cli, tmp_path, monkeypatch) -> Path:
    path = tmp_path / "pins.json"
    done = cli("pin", *PROBLEM, "--to", path)
    assert done.exit_code == 0, done.stderr
    monkeypatch.setenv("TLHUB_PINS", str(path))
    hub.forget()
    return path


def test_a_better_build_that_comes_later_is_not_taken(pins):
    (chosen,) = json.loads(pins.read_text())["pins"]
    assert chosen["schedule"] == "second" and chosen["kernel"] == "gemm" and chosen["arch"] == ARCH
    hub.prewarm("gemm", (64, 64, 64), "float32", arch=ARCH)  # which pins do not keep from building
    kernel = get()
    assert (kernel.schedule, kernel.key) == ("second", chosen["key"])
    assert get(schedule="best").schedule == "best"  # another lookup
    told = tlhub.explain("gemm", (64, 64, 64), "float32", arch=ARCH)
    assert told.hit.entry.key == told.pin == chosen["key"] and f"for the build {told.pin}" in str(told)


def test_one_that_is_missing_is_an_error_and_builds_nothing(pins, two, cold_cache):
    shutil.rmtree(cold_cache)
    hub.prewarm("gemm", (64, 64, 64), "float32", arch=ARCH)
    made = len(two.made)
    with pytest.raises(NotPrebuilt, match="is pinned to [0-9a-f]{16}, and no store has it") as caught:
        get()
    assert caught.value.hint.startswith("tlhub explain gemm") and len(two.made) == made
    assert tlhub.explain("gemm", (64, 64, 64), "float32", arch=ARCH).outcome == "not prebuilt"


def test_one_that_is_damaged_is_named(pins, cold_cache):
    (library,) = Path(cold_cache).glob("v1/*/*/*/*/kernel.so")
    library.chmod(0o644)
    library.write_bytes(library.read_bytes()[::-1])
    with pytest.raises(NotPrebuilt, match="no store serves it: [0-9a-f]{16}: kernel.so is altered"):
        get()


def test_what_is_not_pinned_is_free(pins, two):
    assert tlhub.get("gemm", (32, 32, 32), "float64", arch=ARCH).schedule == "best"


def test_pinning_again_chooses_again(pins, cli):
    hub.prewarm("gemm", (64, 64, 64), "float32", arch=ARCH)
    done = cli("pin", *PROBLEM)
    assert json.loads(done.stdout)["pins"][0]["schedule"] == "best"
    assert json.loads(cli("cache", "check", *PROBLEM, "--json").stdout)["problems"][0]["schedule"] == "second"


def test_nothing_is_written_where_something_is_missing(two, cli, tmp_path):
    workload = tmp_path / "w.toml"
    table = '[[problem]]\nkernel = "gemm"\nshapes = [[64, 64, 64]]\ndtypes = ["float32", "float64"]\n'
    workload.write_text(f'{table}arch = "{ARCH}"')
    done = cli("pin", "--from", workload, "--to", tmp_path / "pins.json")
    assert done.exit_code == 1 and "float64" in done.stderr and "no store has it" in done.stderr
    assert not (tmp_path / "pins.json").exists() and done.stdout == ""


def test_what_the_driver_there_does_not_run_is_not_pinned(two, cli):
    two.least_driver = 580
    hub.prewarm("gemm", (64, 64, 64), "float32", arch=ARCH)
    chosen = [json.loads(cli("pin", *PROBLEM, "--driver", d).stdout)["pins"][0]["schedule"] for d in (550, 580)]
    assert chosen == ["second", "best"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot be read: No such file"),
        ("{", "holds no pins: Expecting"),
        ("[]", "holds no pins"),
        ('{"format": 2, "pins": []}', "format 2"),
        ('{"format": 1, "pins": [{}]}', "holds no pins"),
        ("[" * 100_000, "holds no pins"),
    ],
)
def test_a_file_that_is_none(two, tmp_path, monkeypatch, text, said):
    path = tmp_path / "pins.json"
    if text is not None:
        path.write_text(text)
    monkeypatch.setenv("TLHUB_PINS", str(path))
    with pytest.raises(ArgumentError, match=said) as caught:
        get()
    assert caught.value.argument == "TLHUB_PINS" and "tlhub pin" in caught.value.hint
    assert any(said.split(":")[0] in check.detail for check in doctor._environment())


def test_no_hint_writes_over_what_is_no_file_of_pins(two, tmp_path, monkeypatch):
    (tmp_path / "workload.toml").write_text("[[problem]]")
    monkeypatch.setenv("TLHUB_PINS", str(tmp_path / "workload.toml"))
    with pytest.raises(ArgumentError, match="holds no pins") as caught:
        get()
    assert caught.value.hint == "tlhub pin --from workload.toml --to pins.json"


@pytest.mark.parametrize(
    ("path", "said"), [("none/pins.json", "there is no folder"), (".", "it is a folder"), ("", "it is no file")]
)
def test_a_place_that_is_typed_wrong_costs_no_lookup(two, cli, tmp_path, monkeypatch, path, said):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hub, "check", None)
    done = cli("pin", *PROBLEM, "--to", path)
    assert done.exit_code == 2 and f"cannot be written: {said}" in done.stderr


def test_a_full_disk_is_no_mistake_of_the_user(two, cli, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "chosen" / "pins.json"
    path.parent.mkdir()
    path.write_text("those of yesterday")
    monkeypatch.setattr(os, "replace", full)
    done = cli("pin", *PROBLEM, "--to", path)
    assert done.exit_code == 1 and "cannot be written: No space left" in done.stderr
    assert done.stderr.splitlines()[-1] == f"hint: df -h {path.parent}"
    assert os.listdir(path.parent) == ["pins.json"] and path.read_text() == "those of yesterday"
