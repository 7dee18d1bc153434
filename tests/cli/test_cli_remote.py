"""``tlhub remote`` against a real registry, and what it says where there is none."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "remote"))
from registry_lab import Daemon, Fault, Proxy, closed_port, find_registry
from remote_help import content, fill, make_manifest, publish

from tlhub import catalog
from tlhub.cache.store import Store
from tlhub.problem import make


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    if find_registry() is None:
        pytest.skip("no docker-registry: apt-get install docker-registry")
    with Daemon(tmp_path_factory.mktemp("registry")) as running:
        yield running


@pytest.fixture(autouse=True)
def _user(tmp_path, monkeypatch):
    for name in ("HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME", "DOCKER_CONFIG"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Make a folder the cache: ``cache("name")``."""

    def use(name):
        monkeypatch.setenv("TLHUB_CACHE_DIR", str(tmp_path / name))
        return Store("cache", tmp_path / name)

    return use


def test_from_one_machine_to_another(tlhub, daemon, cache, tmp_path):
    place = daemon.place("cli/round")
    here = cache("builder")
    fill(here, 3)
    fill(here, 2, "cuda:sm_90a")
    pushed = tlhub("remote", "push", place, "--json")
    assert pushed.code == 0 and pushed.json["entries"] == 5, pushed.stderr
    listed = tlhub("remote", "ls", place, "--arch", "cuda:sm_90a", "--json").json
    assert [e["arch"] for e in listed["entries"]] == ["cuda:sm_90a"] * 2 and listed["digest"] == pushed.json["digest"]
    assert len(tlhub("remote", "ls", place).stdout.splitlines()) == 6
    assert tlhub("remote", "verify", place).code == 0
    there = cache("server")
    done = tlhub("remote", "pull", place, "--arch", "cuda:sm_90a", "--json").json
    assert (done["entries"], done["present"], done["requests"]) == (2, 0, 3)
    assert tlhub("remote", "pull", f"{place}@{done['digest']}").stdout.startswith("3 entries pulled")
    assert tlhub("remote", "ls", f"{place}@sha256:{'0' * 64}").stderr.endswith(f"hint: tlhub remote ls {place}\n")
    assert content(there) == content(here)


def test_only_what_a_workload_needs(tlhub, daemon, cache, tmp_path):
    place = daemon.place("cli/workload")
    here = cache("builder")
    gemm = catalog.load().kernel("gemm")
    for m in range(1, 6):
        publish(here, make_manifest(make(gemm, (m, 48, 32), "float32", {"trans_b": True})))
    tlhub("remote", "push", place)
    (tmp_path / "work.toml").write_text(
        '[[problem]]\nkernel = "gemm"\nshapes = [[2, 48, 32], [4, 48, 32]]\ndtype = "float32"\n'
        "options = { trans_b = true }\n"
    )
    there = cache("server")
    listed = tlhub("remote", "ls", place, "--from", str(tmp_path / "work.toml"), "--json").json["entries"]
    done = tlhub("remote", "pull", place, "--from", str(tmp_path / "work.toml"), "--json").json
    assert done["entries"] == len(list(there.entries())) == 2
    assert sorted(e["dims"]["M"] for e in listed) == [2, 4]
    none = tlhub("remote", "pull", place, "--kernel", "gem")
    assert none.code == 1 and f"nothing to pull: no entry of {place} is meant" in none.stderr


def test_a_kernel_is_served_from_a_registry(tlhub, daemon, cache, monkeypatch, shared_cache):
    """Built in one cache, pushed, and served to a machine that compiles nothing; then from its cache, offline."""
    from tlhub import hub

    monkeypatch.setenv("TLHUB_CACHE_DIR", shared_cache)
    problem = ("gemm", "8,8,8", "--dtype", "float32")
    assert tlhub("cache", "prewarm", *problem).code == 0
    place = daemon.place("cli/served")
    assert tlhub("remote", "push", place, "--kernel", "gemm").code == 0
    there = cache("server")
    monkeypatch.setenv("TLHUB_COMPILE", "never")
    monkeypatch.setenv("TLHUB_STORES", place)
    hub.forget()
    told = tlhub("explain", *problem)
    assert told.code == 0 and "it will be downloaded" in told.stdout
    assert tlhub("explain", *problem, "--json").json["hit"]["origin"] == "remote"
    assert tlhub("cache", "check", *problem, "--json").json["problems"][0]["store"] == place
    assert len(json.loads(tlhub("pin", *problem).stdout)["pins"]) == 1
    assert list(there.entries()) == [], "telling downloads nothing"
    first = tlhub("cache", "prewarm", *problem, "--json").json
    assert first["present"] == 1, first
    monkeypatch.setenv("TLHUB_OFFLINE", "1")
    hub.forget()
    assert tlhub("get", *problem, "--json").json["origin"] in ("cache", "memory")


def test_an_export_brings_what_a_registry_has(tlhub, daemon, cache, monkeypatch, shared_cache, tmp_path):
    from tlhub import hub

    monkeypatch.setenv("TLHUB_CACHE_DIR", shared_cache)
    problem = ("gemm", "8,8,8", "--dtype", "float32")
    assert tlhub("cache", "prewarm", *problem).code == 0
    with Proxy(daemon.port, Fault()) as proxy:
        place = proxy.place("cli/export")
        assert tlhub("remote", "push", place, "--kernel", "gemm").code == 0
        there, file = cache("server"), tmp_path / "work.toml"
        file.write_text('[[problem]]\nkernel = "gemm"\nshape = [8, 8, 8]\ndtype = "float32"\n')
        monkeypatch.setenv("TLHUB_COMPILE", "never")
        monkeypatch.setenv("TLHUB_STORES", place)
        hub.forget()
        assert tlhub("explain", *problem).code == 0  # the list is known from here on, and the entry is not here
        proxy.broken("dead", "GET", "/blobs/")
        failed = tlhub("cache", "export", str(tmp_path / "x"), "--from", str(file))
        assert failed.code == 1 and f"cannot be brought from {place}" in failed.stderr and not (tmp_path / "x").exists()
        assert tlhub("get", *problem).code == 1
        proxy.fault.kind = ""
        monkeypatch.setattr("tlhub.remote.store._SULK", 0.0)
        done = tlhub("cache", "export", str(tmp_path / "x"), "--from", str(file), "--json")
        assert len(done.json["entries"]) == 1 and len(list(there.entries())) == 1, done.stderr


def test_what_is_typed_wrong(tlhub, wrong, cache, tmp_path):
    cache("empty")
    for place in ("kernels", "oci://", "oci://host", "https://host/a:t", "oci://host/A:t", "oci://host/a:t@sha256:0"):
        assert "no place in a registry" in wrong("remote", "pull", place)
    port = closed_port()
    place = f"oci://localhost:{port}/a:t"
    assert "unknown kernel" in wrong("remote", "push", place, "--kernel", "gem")
    assert "cannot be read" in wrong("remote", "pull", place, "--from", str(tmp_path / "nothing.toml"))
    assert wrong("remote", "pull", place, "--arch", "cpu:z80")


@pytest.mark.parametrize("command", ["push", "pull", "ls", "verify"])
def test_without_a_registry(tlhub, cache, command, monkeypatch):
    monkeypatch.setattr("tlhub.remote.registry.time.sleep", lambda seconds: None)
    cache("empty")
    place = f"oci://localhost:{closed_port()}/a:t"
    failed = tlhub("remote", command, place)
    assert failed.code == 1 and "does not answer: Connection refused" in failed.stderr
    assert "Traceback" not in failed.stderr and failed.stdout == ""
    monkeypatch.setenv("TLHUB_OFFLINE", "1")
    off = tlhub("remote", command, place)
    assert off.code == 1 and off.stderr.endswith("hint: unset TLHUB_OFFLINE\n")
    monkeypatch.delenv("TLHUB_OFFLINE")
    monkeypatch.setitem(sys.modules, "tlhub.remote.client", None)
    without = tlhub("remote", command, place)
    assert without.code == 1 and "hint: pip install 'tlhub-core[oci]'" in without.stderr


def test_doctor_tells_whether_a_registry_answers(daemon, cache, monkeypatch):
    from tlhub.cli.doctor import _site_stores

    fill(cache("builder"), 1)
    monkeypatch.setenv("TLHUB_STORES", f"{daemon.place('cli/nothing')}:{daemon.place('cli/doctor')}")
    monkeypatch.setattr("tlhub.remote.store._PAUSES", ())
    nothing, _ = _site_stores()
    assert nothing.state == "warning" and "there is no oci://" in nothing.detail
    assert nothing.hint == f"tlhub remote push {daemon.place('cli/nothing')}"


def test_importing_the_command_line_imports_no_client():
    program = (
        "import sys, tlhub, tlhub.stores; import tlhub.cli.remote\n"
        "print([n for n in ('oras', 'requests', 'cryptography', 'tlhub.remote.client', 'tlhub.remote.store') "
        "if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.replace("'", '"')) == []
