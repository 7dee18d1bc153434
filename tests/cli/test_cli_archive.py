"""``cache export`` and ``cache import``: from the machine that builds to one that only serves."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tlhub import catalog, devices

WORKLOAD = """
[[problem]]
kernel = "gemm"
shape = [8, 8, 8]
dtypes = ["float32", "float64"]
"""

SERVE = """
import sys, numpy as np, tlhub
tlhub.freeze()
a = np.eye(8, dtype=np.float32)
kernel = tlhub.get("gemm", (8, 8, 8), "float32")
assert (kernel(a, 2 * a) == 2 * a).all()
compilers = {"tvm", "tilelang", "tlhub.build.pool", "tlhub.build.process"} & set(sys.modules)
print(kernel.origin, sorted(compilers))
"""


@pytest.fixture
def workload(tmp_path):
    file = tmp_path / "workload.toml"
    file.write_text(WORKLOAD)
    return str(file)


@pytest.fixture
def filled(tlhub, workload):
    """The cache of the session, with what the workload needs."""
    done = tlhub("cache", "prewarm", "--from", workload)
    assert done.code == 0, done.stderr
    return workload


def dtypes(entries):
    return sorted(entry["dtype"] for entry in entries)


def test_what_was_built_here_serves_where_nothing_compiles(tlhub, filled, tmp_path):
    file, there = str(tmp_path / "kernels.tar.zst"), str(tmp_path / "there")
    done = tlhub("cache", "export", file, "--from", filled)
    assert done.code == 0 and "2 entries" in done.stdout, done.stderr
    environ = {**os.environ, "TLHUB_CACHE_DIR": there, "PATH": str(tmp_path)}
    command = [sys.executable, "-c", "from tlhub.cli import main; main()", "cache", "import", file]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "2 entries added" in done.stdout, done.stderr
    done = subprocess.run([sys.executable, "-c", SERVE], env=environ, capture_output=True, text=True, check=False)
    assert done.stdout == "cache []\n", done.stderr


def test_documents_and_filters(tlhub, filled, tmp_path, monkeypatch):
    file = str(tmp_path / "kernels.tar.zst")
    document = tlhub(
        "cache", "export", file, "--from", filled, "--kernel", "gemm", "--plugin", "tlhub-core", "--json"
    ).json
    assert document["file"] == file and document["size"] == os.path.getsize(file)
    assert dtypes(document["entries"]) == ["float32", "float64"]
    monkeypatch.setenv("TLHUB_CACHE_DIR", str(tmp_path / "there"))
    arch = devices.locate(catalog.load(), "cpu").arch
    for filters in (("--arch", "cpu:x86-64-v2"), ("--plugin", "other")):
        done = tlhub("cache", "import", file, *filters, "--json")
        assert done.code == 1 and "nothing to import" in done.stderr and done.stdout == ""
    document = tlhub("cache", "import", file, "--arch", arch, "--kernel", "gemm", "--json").json
    assert dtypes(document["added"]) == ["float32", "float64"] and document["present"] == []
    document = tlhub("cache", "import", file, "--json").json
    assert document["added"] == [] and dtypes(document["present"]) == ["float32", "float64"]
    again = str(tmp_path / "again")
    assert tlhub("cache", "export", again, "--arch", arch).code == 0
    with open(file, "rb") as one, open(again, "rb") as other:
        assert one.read() == other.read(), "the same entries are the same bytes, whichever store had them"


def test_nothing_to_export(tlhub, filled, tmp_path):
    file = tmp_path / "x"
    done = tlhub("cache", "export", str(file), "--plugin", "other")
    assert done.code == 1 and "nothing to export" in done.stderr and "hint: tlhub cache ls" in done.stderr
    assert "by tlhub-core" in done.stderr and not file.exists()


def test_nothing_to_import(tlhub, filled, tmp_path, monkeypatch):
    file = str(tmp_path / "x")
    assert tlhub("cache", "export", file).code == 0
    monkeypatch.setenv("TLHUB_CACHE_DIR", str(tmp_path / "cold"))
    done = tlhub("cache", "import", file, "--kernel", "gem")
    assert done.code == 1 and "nothing to import" in done.stderr
    assert re.search(r"\bgemm\b.*; by ", done.stderr, re.DOTALL), "the kernels that there are, whatever else was built"


def test_a_workload_that_is_not_built_is_not_exported(tlhub, workload, cold_cache, tmp_path):
    file = tmp_path / "x"
    done = tlhub("cache", "export", str(file), "--from", workload, "--arch", "cpu:x86-64-v2")
    assert done.code == 1 and "no store has 2 of the problems" in done.stderr
    assert f"hint: tlhub cache prewarm --from {workload} --arch cpu:x86-64-v2" in done.stderr
    assert "gemm M=8,N=8,K=8 --dtype float64 --arch cpu:x86-64-v2" in done.stderr
    assert not file.exists()


def test_mistakes(wrong, tlhub, filled, tmp_path):
    assert "cannot be read" in wrong("cache", "import", str(tmp_path / "none"))
    assert "unknown kernel" in wrong("cache", "export", str(tmp_path / "x"), "--kernel", "gem")
    assert "unknown arch" in wrong("cache", "export", str(tmp_path / "x"), "--arch", "cpu:x86-64-v9")
    (tmp_path / "bad.toml").write_text(WORKLOAD.replace('"gemm"', '"gem"'))
    said = wrong("cache", "export", str(tmp_path / "x"), "--from", str(tmp_path / "bad.toml"))
    assert "bad.toml', problem 1: unknown kernel 'gem'" in said and "did you mean 'gemm'?" in said
    (tmp_path / "bad").write_bytes(b"no archive")
    done = tlhub("cache", "import", str(tmp_path / "bad"))
    assert done.code == 1 and "is refused" in done.stderr and "hint: sha256sum" in done.stderr


def test_what_is_damaged_is_left_out(tlhub, filled, tmp_path, monkeypatch):
    file, there = str(tmp_path / "kernels.tar.zst"), tmp_path / "there"
    assert tlhub("cache", "export", file, "--from", filled).code == 0
    monkeypatch.setenv("TLHUB_CACHE_DIR", str(there))
    assert tlhub("cache", "import", file).code == 0
    first, second = sorted(there.glob("v1/*/*/*/*/kernel.so"))
    first.write_bytes(b"altered")
    done = tlhub("cache", "export", file, "--json")
    assert done.code == 1 and f"left out: {first.parent.relative_to(there)}: " in done.stderr
    assert [entry["key"][:16] for entry in done.json["entries"]] == [second.parent.name]
    done = tlhub("cache", "export", file, "--kernel", "attention")
    assert done.code == 1 and "left out" not in done.stderr and "nothing to export" in done.stderr
    second.write_bytes(b"altered")
    done = tlhub("cache", "export", file)
    assert done.code == 1 and done.stderr.count("left out") == 2 and "no entry that is meant is whole" in done.stderr
