"""``package build``: a wheel of binaries, the same bytes each time, served from where it is unpacked."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tlhub import catalog, devices, hub
from tlhub.cache.manifest import Manifest
from tlhub.errors import BuildError, CacheError
from tlhub.needs import requirement
from tlhub.packaging import cover, wheel
from tlhub.plugins import Plugin

ARCH = devices.locate(catalog.load(), "cpu").arch
WORKLOAD = """
[[problem]]
kernel = "gemm"
shape = [8, 8, 8]
dtype = "float32"
"""
SERVE = """
import numpy as np, tlhub
a = np.eye(8, dtype=np.float32)
kernel = tlhub.get("gemm", (8, 8, 8), "float32")
assert (kernel(a, 2 * a) == 2 * a).all()
print(kernel.origin)
"""


@pytest.fixture
def workload(tmp_path):
    file = tmp_path / "workload.toml"
    file.write_text(WORKLOAD)
    return str(file)


@pytest.fixture
def build(tlhub, workload, tmp_path):
    def build(name, *more):
        done = tlhub("package", "build", "--from", workload, "--into", str(tmp_path / name), "--json", *more)
        assert done.code == 0, done.stderr
        return done.json

    return build


@pytest.fixture
def served(tlhub, workload):
    assert tlhub("cache", "prewarm", "--from", workload).code == 0
    return cover.serve(cover.requests(workload), workload)


def test_the_same_bytes_whenever_and_wherever_it_is_built(build, tmp_path, monkeypatch):
    first = build("one")["wheel"]
    monkeypatch.setenv("TLHUB_CACHE_DIR", str(tmp_path / "another"))
    hub.forget()
    second = build("two")["wheel"]
    assert Path(first).name == Path(second).name
    assert Path(first).read_bytes() == Path(second).read_bytes()


def test_what_is_in_it(build):
    made = build("one", "--name", "docs", "--version", "3.1")
    short = ARCH.partition(":")[2].replace("_", "")
    assert (made["name"], made["version"], made["archs"]) == (f"tlhub-prebuilt-docs-{short}", "3.1", [ARCH])
    assert made["needs"] == ["tlhub-core>=0.1.0,<0.2"]
    (entry,) = made["entries"]
    assert (entry["kernel"], entry["dims"]["K"], entry["dtype"]) == ("gemm", "?3", "float32")
    (revision,) = made["revisions"]
    known = catalog.load()
    assert revision["kernel_revision"] == known.kernel("gemm").revision
    assert revision["schedule_revision"] == known.schedules["gemm"][0].revision and revision["entries"] == 1
    archive = zipfile.ZipFile(made["wheel"])
    module = made["name"].replace("-", "_")
    covered = json.loads(archive.read(f"{module}/coverage.json"))
    assert covered == {name: value for name, value in made.items() if name not in ("wheel", "size")}
    (name,) = [n for n in archive.namelist() if n.endswith("/entry.json")]
    manifest = Manifest.parse(archive.read(name))
    assert manifest.build_digest == entry["key"] and set(manifest.provenance) == {"tlhub", "plugin", "plugin_version"}
    (metadata,) = [archive.read(n).decode() for n in archive.namelist() if n.endswith("/METADATA")]
    assert "\nRequires-Dist: tlhub-core<0.2,>=0.1.0\n" in metadata
    assert f"| gemm, revision 2 | cpu_blocked, revision 2 | {ARCH} | 1 |" in metadata
    (tags,) = [archive.read(n).decode() for n in archive.namelist() if n.endswith("/WHEEL")]
    assert f"\nTag: {made['tag']}\n" in tags and "\nRoot-Is-Purelib: false\n" in tags


@pytest.fixture
def unpacked(build, tmp_path):
    """The wheel as pip leaves it, in a folder of its own, with the environment that serves from it alone."""
    folder = tmp_path / "site"
    zipfile.ZipFile(build("one")["wheel"]).extractall(folder)
    environ = {**os.environ, "TLHUB_COMPILE": "never", "TLHUB_CACHE_DIR": str(tmp_path / "cold"), "PATH": ""}
    environ["PYTHONPATH"] = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    environ["PYTHONDONTWRITEBYTECODE"] = "1"

    def python(*arguments):
        return subprocess.run([sys.executable, *arguments], env=environ, capture_output=True, text=True, check=False)

    return folder, python


def test_it_serves_with_no_compiler_and_is_not_written_to(unpacked, tmp_path):
    folder, python = unpacked
    before = sorted(folder.rglob("*"))
    done = python("-c", SERVE)
    assert done.stdout == "prebuilt\n", done.stderr
    assert sorted(folder.rglob("*")) == before
    assert list((tmp_path / "cold").rglob("kernel.so")) == []  # a count of hits is all that there may be


def test_beside_another_version_it_serves_nothing_and_says_why(unpacked):
    folder, python = unpacked
    (plugin,) = folder.glob("*/__init__.py")
    plugin.write_text(plugin.read_text().replace("least='0.1.0', below='0.2'", "least='0.2.0', below='0.3'"))
    reason = "it needs tlhub-core>=0.2.0,<0.3, here is 0.1.0"
    done = python("-c", SERVE)
    assert "NotPrebuilt" in done.stderr and done.stdout == ""
    problem = ("gemm", "8,8,8", "--dtype", "float32")
    assert reason in python("-m", "tlhub", "explain", *problem).stdout
    assert reason in python("-m", "tlhub", "plugins").stdout


def test_of_another_abi_it_serves_nothing_and_says_why(unpacked):
    folder, python = unpacked
    (file,) = folder.rglob("entry.json")
    old = Manifest.parse(file.read_bytes())
    made = {f.name: getattr(old, f.name) for f in dataclasses.fields(Manifest)}
    for name in ("kernel", "kernel_revision", "dims", "dtypes", "options", "problem_digest", "build_digest", "members"):
        del made[name]
    new = Manifest.make(old.problem, made.pop("arch"), **{**made, "abi": "tvm-ffi 9.9"}).with_members(old.members)
    file.write_bytes(new.to_bytes())
    file.parent.rename(file.parent.with_name(new.build_digest[:16]))
    done = python("-m", "tlhub", "explain", "gemm", "8,8,8", "--dtype", "float32")
    assert "it needs tvm-ffi ABI tvm-ffi 9.9, here is tvm-ffi 0.1" in done.stdout and "NotPrebuilt" in done.stdout


def test_a_kernel_that_cannot_be_built_makes_no_wheel(tlhub, workload, cold_cache, tmp_path, monkeypatch):
    monkeypatch.setenv("TLHUB_COMPILE", "never")
    done = tlhub("package", "build", "--from", workload, "--into", str(tmp_path / "out"))
    assert done.code == 1 and "1 of 1 failed: no wheel is made" in done.stderr
    assert not (tmp_path / "out").exists()


def test_mistakes_cost_no_build(wrong, workload, cold_cache, tmp_path):
    command = ("package", "build", "--from", workload, "--into", str(tmp_path / "out"))
    assert "hint: --name my-kernels" in wrong(*command, "--name", "My Kernels")
    assert "one package is for archs of one target" in wrong(*command, "--arch", "cpu:x86-64-v3", "--arch", "sm_90a")
    assert "unknown arch" in wrong(*command, "--arch", "cpu:x86-64-v9")
    assert "cannot be read" in wrong("package", "build", "--from", str(tmp_path / "none"))
    assert "--version" in wrong(*command, "--version", "new one")
    assert not os.path.exists(cold_cache)


@pytest.mark.parametrize(
    ("archs", "name", "called"),
    [
        (["cuda:sm_90a"], "xyz", "tlhub-prebuilt-xyz-sm90a"),
        (["cuda:sm_90a"], None, "tlhub-prebuilt-sm90a"),
        (["cpu:x86-64-v3", "cpu:x86-64-v4"], None, "tlhub-prebuilt-cpu"),
        (["cpu:x86-64-v3"], "my-own", "tlhub-prebuilt-my-own-x86-64-v3"),
    ],
)
def test_names(archs, name, called):
    assert wheel.name_of(archs, name) == called


def test_entries_of_other_sources_are_refused(served, monkeypatch):
    monkeypatch.setattr("tlhub.sources.digest", lambda schedule: "0" * 64)
    with pytest.raises(BuildError, match="was built of other sources") as caught:
        wheel.plan(served, catalog.load())
    assert str(caught.value.hint).startswith("export TLHUB_MATCH=compatible")


def test_it_needs_the_plugins_that_bring_its_kernels_and_schedules(served):
    known, plugin = catalog.load(), Plugin("xyz", "xyz", "tlhub-plugin-xyz", "1.4.2")
    owners = {**known.owners, ("gemm", served[0].schedule.name): plugin}
    planned = wheel.plan(served, dataclasses.replace(known, plugins=(*known.plugins, plugin), owners=owners))
    assert list(map(requirement, planned.needs)) == ["tlhub-core>=0.1.0,<0.2", "tlhub-plugin-xyz>=1.4.2,<2"]


def test_the_tag_is_of_the_platform_that_the_entries_need(served):
    (found,) = served

    def manifest(**platform):
        return dataclasses.replace(found.entry.manifest, platform={"os": "linux", "machine": "x86_64", **platform})

    def tag(*manifests):
        return wheel.tag_of(manifests).removeprefix("py3-none-")

    assert tag(manifest(glibc="2.34"), manifest(glibc="2.9"), manifest(glibc="")) == "manylinux_2_34_x86_64"
    assert tag(manifest(glibc="2.2.5"), manifest()) == "manylinux_2_17_x86_64"
    assert tag(manifest(glibc="2.29", machine="aarch64")) == "manylinux_2_29_aarch64"
    for other in ({"machine": "aarch64"}, {"os": "darwin"}):
        with pytest.raises(CacheError, match="a wheel is for one machine under Linux; these entries are for"):
            tag(manifest(), manifest(**other))


def test_a_file_is_no_folder_to_build_into(wrong, workload, cold_cache):
    assert f"--into {workload!r} is no folder" in wrong("package", "build", "--from", workload, "--into", workload)
    assert not os.path.exists(cold_cache)


def test_without_hatchling_the_hint_installs_it(tlhub, workload, cold_cache, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "hatchling" else found(name))
    done = tlhub("package", "build", "--from", workload)
    assert done.code == 1 and "hint: pip install 'tlhub-core[package]'" in done.stderr
    assert not os.path.exists(cold_cache)


def test_a_place_that_cannot_be_written(served, tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(CacheError, match="cannot be written"):
        wheel.write(wheel.plan(served, catalog.load()), served, str(tmp_path / "file"))
