"""``tlhub trust``, from a new key to a kernel that serves because it is signed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

PROBLEM = ("gemm", "8,8,8", "--dtype", "float32")


@pytest.fixture
def people(tmp_path, monkeypatch):
    """Become another user of this machine, with a configuration of one's own: ``people("alice")``."""
    from tlhub.cache import vouching

    def become(name):
        monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / name / "config"))
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / name / "state"))
        monkeypatch.setattr(vouching, "_unkept", set())

    become("alice")
    return become


@pytest.fixture
def built(tlhub, shared_cache, tmp_path, monkeypatch, people):
    """A cache of one entry, which nobody signed."""
    from tlhub import hub

    done = tlhub("cache", "prewarm", *PROBLEM, "--json")
    (entry,) = (Path(problem["entry"]) for problem in done.json["problems"])
    folder = tmp_path / "cache"
    shutil.copytree(entry, folder / entry.relative_to(os.path.realpath(shared_cache)))
    folder.chmod(0o700)
    monkeypatch.setenv("TLHUB_CACHE_DIR", str(folder))
    hub.forget()
    return folder


def test_from_a_key_to_a_kernel_that_serves(tlhub, built, people, monkeypatch):
    from tlhub import hub

    public = tlhub("trust", "keygen", "release").stdout.strip()
    assert public.endswith("release.pub") and oct(os.stat(public[:-4] + ".key").st_mode)[-3:] == "600"
    people("bob")
    monkeypatch.setenv("TLHUB_SIGNED", "require")
    monkeypatch.setenv("TLHUB_COMPILE", "never")
    hub.forget()
    assert tlhub("trust", "check").code == 1
    assert tlhub("get", *PROBLEM).code == 1
    assert "nobody whom you trust signed it (you trust no key)" in tlhub("explain", *PROBLEM).stdout
    people("alice")
    done = tlhub("trust", "sign", "--key", "release", "--json").json
    assert done["signed"] == 1 and done["damaged"] == []
    people("bob")
    assert tlhub("get", *PROBLEM).code == 1
    assert tlhub("trust", "add", "alice", public).code == 0
    listed = tlhub("trust", "ls", "--json").json
    assert [k["name"] for k in listed["keys"]] == ["alice"] and listed["policy"] == "require"
    assert tlhub("get", *PROBLEM, "--json").json["origin"] == "cache"
    checked = tlhub("trust", "check", "--json")
    assert checked.code == 0 and [e["vouched_for_by"] for e in checked.json["entries"]] == ["alice"]
    assert tlhub("trust", "rm", "alice").code == 0
    hub.forget()
    assert tlhub("get", *PROBLEM).code == 1


def test_what_one_builds_under_require_serves_again(tlhub, cold_cache, people, monkeypatch):
    from tlhub import hub

    monkeypatch.setenv("TLHUB_SIGNED", "require")
    made = tlhub("get", *PROBLEM, "--json").json  # its origin is memory where another test had the same build
    assert made["entry"].startswith(os.path.realpath(cold_cache))
    hub.forget()
    again = tlhub("cache", "prewarm", *PROBLEM, "--json").json
    assert again["present"] == 1
    assert tlhub("trust", "check", "--json").json["entries"][0]["vouched_for_by"] == "here"


@pytest.fixture
def signed(tlhub, built, people):
    """The cache of alice, who signed its one entry, and the file of her public key."""
    from tlhub import hub

    public = tlhub("trust", "keygen", "release").stdout.strip()
    assert tlhub("trust", "sign", "--key", "release").code == 0
    people("bob")
    hub.forget()
    return public


def be_elsewhere(tmp_path, monkeypatch):
    """Have an empty cache, and serve only what somebody trusted signed."""
    from tlhub import hub

    for name, value in (("CACHE_DIR", str(tmp_path / "elsewhere")), ("SIGNED", "require"), ("COMPILE", "never")):
        monkeypatch.setenv(f"TLHUB_{name}", value)
    hub.forget()


def break_signature(folder):
    (file,) = Path(folder, "v1", ".signatures").iterdir()
    file.write_text("A" * 86 + "==\n")


def test_signatures_go_with_an_archive(tlhub, built, signed, tmp_path, monkeypatch):
    file = str(tmp_path / "kernels.tar.zst")
    assert tlhub("cache", "export", file, "--json").json["left_out"] == []
    be_elsewhere(tmp_path, monkeypatch)
    refused = tlhub("cache", "import", file)
    assert refused.code == 1 and "refused: v1/" in refused.stderr and "nobody whom you trust" in refused.stderr
    tlhub("trust", "add", "alice", signed)
    assert tlhub("cache", "import", file, "--json").json["refused"] == []
    assert tlhub("trust", "check", "--json").json["entries"][0]["vouched_for_by"] == "alice"
    assert tlhub("get", *PROBLEM, "--json").json["origin"] == "cache"


def test_a_broken_signature_is_told_and_left_behind(tlhub, built, signed, tmp_path, monkeypatch):
    break_signature(built)
    file, problem = str(tmp_path / "kernels.tar.zst"), tmp_path / "workload.toml"
    assert tlhub("cache", "export", file).code == 0  # bob does not know alice yet
    tlhub("trust", "add", "alice", signed)
    done = tlhub("cache", "export", str(tmp_path / "again"), "--json")
    assert done.code == 1 and len(done.json["entries"]) == 1
    assert "left out: v1/" in done.stderr and "its signature by alice" in done.json["left_out"][0]["reason"]
    problem.write_text('[[problem]]\nkernel = "gemm"\nshape = [8, 8, 8]\ndtype = "float32"\n')
    done = tlhub("package", "build", "--from", str(problem), "--into", str(tmp_path))
    assert done.code == 1 and "cannot be packed with its signature by alice" in done.stderr
    monkeypatch.setenv("TLHUB_CACHE_DIR", str(tmp_path / "elsewhere"))
    done = tlhub("cache", "import", file, "--json")
    assert done.code == 1 and len(done.json["added"]) == 1 and "its signature" in done.json["refused"][0]["reason"]
    assert not (tmp_path / "elsewhere" / "v1" / ".signatures").exists()


def test_signatures_go_with_a_wheel(tlhub, built, signed, people, tmp_path, monkeypatch):
    problem = tmp_path / "workload.toml"
    problem.write_text('[[problem]]\nkernel = "gemm"\nshape = [8, 8, 8]\ndtypes = ["float32", "float64"]\n')
    wheels = []
    for name in ("one", "two"):
        done = tlhub("package", "build", "--from", str(problem), "--into", str(tmp_path / name), "--json")
        assert done.code == 0, done.stderr
        wheels.append(Path(done.json["wheel"]))
    assert wheels[0].read_bytes() == wheels[1].read_bytes()
    by_type = {entry["dtype"]: entry["signed_by"] for entry in done.json["entries"]}
    assert len(by_type["float32"]) == 1 and by_type["float64"] == []
    zipfile.ZipFile(wheels[0]).extractall(tmp_path / "site")
    be_elsewhere(tmp_path, monkeypatch)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "site"), os.environ.get("PYTHONPATH", "")]))

    def ask(dtype):
        command = [sys.executable, "-m", "tlhub", "get", "gemm", "8,8,8", "--dtype", dtype, "--json"]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    assert ask("float32").returncode == 1
    tlhub("trust", "add", "alice", signed)
    assert json.loads(ask("float32").stdout)["origin"] == "prebuilt"
    assert ask("float64").returncode == 1  # nobody signed that
    (file,) = (tmp_path / "site").glob("*/store/v1/.signatures/*.sig")
    for text in (file.read_bytes()[:40], b"A" * 86 + b"==\n", b""):
        file.write_bytes(text)
        people("carol")  # who has no notes of what was verified
        tlhub("trust", "add", "alice", signed)
        assert ask("float32").returncode == 1


def test_a_damaged_entry_is_not_signed(tlhub, built):
    tlhub("trust", "keygen", "release")
    (library,) = Path(built).glob("v1/*/*/*/*/kernel.so")
    library.chmod(0o644)
    library.write_bytes(b"evil")
    done = tlhub("trust", "sign", "--key", "release", "--json")
    assert done.code == 1 and done.json["signed"] == 0 and "torn" in done.json["damaged"][0]["reason"]


def test_what_is_typed_wrong(tlhub, wrong, cold_cache, people, tmp_path):
    assert "cannot be read" in wrong("trust", "add", "x", str(tmp_path / "nothing"))
    (tmp_path / "text").write_text("no key")
    assert "no PEM public key" in wrong("trust", "add", "x", str(tmp_path / "text"))
    assert "cannot be called" in wrong("trust", "keygen", "../x")
    assert "no trusted key 'x'" in wrong("trust", "rm", "x")
    assert "hint: tlhub trust keygen nobody" in wrong("trust", "sign", "--key", "nobody")
    assert "unknown kernel" in wrong("trust", "check", "--kernel", "gem")
    tlhub("trust", "keygen", "release")
    missing = tlhub("trust", "sign", "--key", "release", "--store", str(tmp_path / "missing"))
    assert missing.code == 1 and "missing" in missing.stderr and "Traceback" not in missing.stderr


def test_doctor_says_whose_signatures_count(tlhub, people, tmp_path, monkeypatch):
    from tlhub.cli.doctor import _environment

    monkeypatch.setenv("TLHUB_SIGNED", "require")
    (warning,) = [c for c in _environment() if c.name == "signatures"]
    assert warning.state == "warning" and warning.hint == "tlhub trust add NAME FILE"
    monkeypatch.delenv("TLHUB_SIGNED")
    (tmp_path / "site").mkdir()
    for policy, states in (("require", ["warning"]), ("warn", ["warning"]), ("off", [])):
        monkeypatch.setenv("TLHUB_STORES", f"{tmp_path}/site?signed={policy}")
        found = [c for c in _environment() if c.name == "signatures"]
        assert [c.state for c in found] == states and all(f"{tmp_path}/site asks for them" in c.detail for c in found)
    monkeypatch.setenv("TLHUB_STORES", f"{tmp_path}/site?signed=require")
    tlhub("trust", "add", "alice", tlhub("trust", "keygen", "release").stdout.strip())
    (told,) = [c for c in _environment() if c.name == "signatures"]
    assert (told.state, told.detail) == ("ok", f"{tmp_path}/site asks for them, and trusted are alice")
    monkeypatch.setenv("TLHUB_SIGNED", "maybe")
    assert any(c.state == "failed" and "TLHUB_SIGNED is 'maybe'" in c.detail for c in _environment())


@pytest.mark.light
def test_a_store_has_a_policy_of_its_own(tlhub, wrong, tmp_path, monkeypatch):
    from tlhub.stores import site_stores

    monkeypatch.setenv("TLHUB_STORES", f"{tmp_path}/a?signed=require:{tmp_path}/b")
    assert [s.signed for s in site_stores()] == ["require", None]
    monkeypatch.setenv("TLHUB_STORES", f"{tmp_path}/a?signed=yes")
    assert "allowed are off, warn, require" in wrong("explain", *PROBLEM)
