"""``cache check``: a deployment is covered or not, asked on a machine that has neither its GPU nor its driver."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tlhub import hub
from tlhub.cache.chain import Host

pytestmark = pytest.mark.light

ARCH = "cuda:sm_90a"
WORKLOAD = """
[[problem]]
kernel = "gemm"
shapes = [[64, 64, 64], ["M", 64, 64]]
dtype = "float32"
schedule = "simt"
"""


@pytest.fixture
def workload(tmp_path: Path) -> Path:
    path = tmp_path / "workload.toml"
    path.write_text(WORKLOAD)
    return path


@pytest.fixture
def built(compiler, cli, workload):
    """A store with what the workload needs on an H200, as CUDA 13 compiles it."""
    compiler.least_driver, compiler.resources = 580, {"shared_memory": 120_000}
    assert cli("cache", "prewarm", "--from", workload, "--arch", ARCH).exit_code == 0
    return compiler


def check(cli, *words):
    done = cli("cache", "check", *words, "--json")
    return done.exit_code, json.loads(done.stdout), done.stderr


def test_what_is_there_is_covered_for_that_arch_and_driver(built, cli, workload):
    for where in (("--arch", ARCH), ("--device", "h200")):
        code, document, _ = check(cli, "--from", workload, *where, "--driver", "580.65.06")
        assert (code, document["covered"], document["missing"]) == (0, 2, 0), document
        assert {p["arch"] for p in document["problems"]} == {ARCH}
        assert {p["schedule"] for p in document["problems"]} == {"simt"} and all(p["key"] for p in document["problems"])


@pytest.mark.parametrize(
    ("where", "said"),
    [
        (("--arch", ARCH, "--driver", 550), "it needs driver 580, here is 550"),
        (("--arch", "cuda:sm_80", "--driver", 580), "no store has it"),
        (("--device", "a100"), "no store has it"),
    ],
)
def test_what_is_missing_and_why(built, cli, workload, where, said):
    code, document, stderr = check(cli, "--from", workload, *where)
    assert code == 1 and document["missing"] == 2 and "2 missing" in stderr
    assert all(said in " ".join(p["why"]) and not p["covered"] for p in document["problems"])
    table = cli("cache", "check", "--from", workload, *where)
    assert table.exit_code == 1 and table.stdout.count(said) == 2


def test_more_shared_memory_than_the_device_has(compiler, cli):
    compiler.resources = {"shared_memory": 150_000}
    problem = ("gemm", "64,64,64", "--dtype", "float32", "--schedule", "simt")
    assert cli("cache", "prewarm", *problem, "--arch", "cuda:sm_80").exit_code == 0
    assert check(cli, *problem, "--device", "a100")[0] == 0
    code, document, _ = check(cli, *problem, "--arch", "cuda:sm_80", "--device", "l4")
    assert code == 1 and "150000 bytes of shared memory" in document["problems"][0]["why"][0]


def test_another_store_covers_it_too(built, cli, workload, tmp_path, monkeypatch, cold_cache):
    shutil.move(cold_cache, tmp_path / "site")
    where = ("--from", workload, "--arch", ARCH, "--driver", 580)
    assert check(cli, *where)[0] == 1
    monkeypatch.setenv("TLHUB_STORES", str(tmp_path / "site"))
    code, document, _ = check(cli, *where)
    assert code == 0 and document["problems"][0]["store"] == str(tmp_path / "site")


def test_a_driver_that_was_not_told_is_not_compared_and_that_is_said(built, cli, workload):
    code, _, stderr = check(cli, "--from", workload, "--arch", ARCH)
    assert code == 0 and "needs 580 or later" in stderr


def test_nothing_is_built_or_noted_as_used(built, cli, workload, monkeypatch):
    made = list(built.made)
    check(cli, "--from", workload, "--arch", "cuda:sm_80")
    assert built.made == made


def test_one_problem_a_mistake_and_what_no_schedule_serves(compiler, cli, tmp_path):
    assert check(cli, "gemm", "8,8,8", "--dtype", "float32", "--arch", ARCH, "-o", "compute=tf32")[0] == 1
    path = tmp_path / "w.toml"
    path.write_text('[[problem]]\nkernel = "gem"\nshape = [1, 2, 3]\ndtype = "float32"')
    code, document, _ = check(cli, "--from", path, "--arch", ARCH)
    assert code == 1 and "unknown kernel 'gem'" in document["problems"][0]["why"][0]


def test_what_ranks_lower_covers_and_is_named(compiler, cli):
    catalog = hub.load()
    usual = hub.explain("gemm", (8, 8, 8), "float32", arch="cpu:x86-64-v3").resolution.candidates[0].schedule
    lower = replace(usual, name="lower", priority=usual.priority - 1)
    changed = replace(
        catalog,
        schedules={**catalog.schedules, "gemm": (usual, lower)},
        owners={**catalog.owners, ("gemm", "lower"): catalog.owner(usual)},
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hub, "load", lambda: changed)
        hub.prewarm("gemm", (8, 8, 8), "float32", arch="cpu:x86-64-v3", schedule="lower")
        (told,) = check(cli, "gemm", "8,8,8", "--dtype", "float32", "--arch", "cpu:x86-64-v3")[1]["problems"]
    assert (
        told["covered"]
        and told["schedule"] == "lower"
        and told["why"] == [f"{usual.name} ranks higher and is not there"]
    )


@pytest.mark.parametrize(
    ("platform", "missing"),
    [
        ("manylinux_2_28_x86_64", None),
        ("manylinux_2_17_x86_64", "it needs glibc 2.28, here is 2.17"),
        ("manylinux_2_28_aarch64", "it is for linux x86_64, here is linux aarch64"),
    ],
)
def test_the_platform_of_those_that_serve(compiler, cli, platform, missing):
    compiler.host = Host("linux", "x86_64", "2.28")
    problem = ("gemm", "64,64,64", "--dtype", "float32", "--schedule", "simt", "--arch", ARCH)
    assert cli("cache", "prewarm", *problem).exit_code == 0
    code, document, stderr = check(cli, *problem, "--platform", platform)
    assert code == (1 if missing else 0) and document["platform"] == platform and f"missing on {platform}" in stderr
    assert [missing in why for p in document["problems"] for why in p["why"]] == ([True] if missing else [])
    assert cli("pin", *problem, "--platform", platform).exit_code == code


def test_a_machine_without_a_name_for_wheels(compiler, cli, monkeypatch):
    monkeypatch.setattr("tlhub.cache.chain.this_host", lambda: Host("darwin", "arm64"))
    problem = ("gemm", "64,64,64", "--dtype", "float32", "--arch", "cpu:x86-64-v3")
    _, document, stderr = check(cli, *problem)
    assert document["platform"] == "darwin arm64" and "missing on darwin arm64" in stderr


@pytest.mark.parametrize("platform", ["linux", "manylinux_2_x86_64", "manylinux2014_x86_64", "", "manylinux_2_28_X/"])
def test_a_platform_that_is_none(cli, platform):
    done = cli("cache", "check", "gemm", "8,8,8", "--dtype", "float32", "--platform", platform)
    assert done.exit_code == 2 and "is no platform" in done.stderr and "hint: --platform " in done.stderr


@pytest.mark.parametrize("driver", ["new", "-1", "5x"])
def test_a_driver_that_is_none(cli, driver):
    done = cli("cache", "check", "gemm", "8,8,8", "--dtype", "float32", "--driver", driver)
    assert done.exit_code == 2 and "--driver" in done.stderr


def test_a_place_that_is_none(cli):
    done = cli("cache", "check", "gemm", "8,8,8", "--dtype", "float32", "--arch", "cuda:sm_91")
    assert done.exit_code == 2 and "sm_91" in done.stderr
