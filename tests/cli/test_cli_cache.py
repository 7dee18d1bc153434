"""The cache commands on a cache that holds real entries."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys

import pytest
from cache_commands import KINDS, entries, libraries


def test_path_and_an_empty_cache(tlhub, cold_cache):
    assert tlhub("cache", "path").stdout == f"{os.path.realpath(cold_cache)}\n"
    assert tlhub("cache", "ls", "--json").json["count"] == 0
    assert tlhub("cache", "verify").code == 0
    assert not os.path.exists(cold_cache)  # looking makes nothing


def test_ls(tlhub, store):
    document = tlhub("cache", "ls", "--json").json
    assert document["count"] == 2 and document["path"] == str(store)
    assert {e["dtype"] for e in document["entries"]} == set(KINDS)
    on_disk = sum(f.stat().st_size for f in store.glob("v1/*/*/*/*/*"))
    assert document["size"] == sum(e["size"] for e in document["entries"]) == on_disk
    table = tlhub("cache", "ls")
    assert len(table.stdout.splitlines()) == 3 and "2 entries" in table.stderr
    assert tlhub("cache", "ls", "--kernel", "attention", "--json").json["count"] == 0
    assert tlhub("cache", "ls", "--arch", document["entries"][0]["arch"], "--json").json["count"] == 2


def test_info_by_prefix_or_folder(tlhub, store):
    entry = entries(tlhub)[0]
    text = tlhub("cache", "info", entry["key"][:12])
    assert text.code == 0 and entry["key"] in text.stdout and "kernel.so" in text.stdout
    document = tlhub("cache", "info", str(store / entry["entry"]), "--json").json
    assert document["key"] == entry["key"]
    assert document["manifest"]["kernel"] == "gemm" and document["manifest"]["build_digest"] == entry["key"]


def test_info_that_is_ambiguous_or_unknown(tlhub, store, wrong):
    first, second = entries(tlhub)
    shutil.copytree(store / first["entry"], store / (first["entry"] + "0"))
    text = wrong("cache", "info", first["key"])
    assert "is ambiguous: 2 begin so" in text
    missing = next(d for d in "0123456789abcdef" if not any(e["key"].startswith(d) for e in (first, second)))
    assert f"no entry '{missing * 8}'" in wrong("cache", "info", missing * 8)


def test_a_damaged_entry_and_its_rebuild_are_told_apart(tlhub, store):
    whole = entries(tlhub)[0]
    name = os.path.basename(whole["entry"])
    shutil.copytree(store / whole["entry"], store / (whole["entry"] + ".1"))
    library = store / whole["entry"] / "kernel.so"
    library.chmod(0o644)
    library.write_bytes(library.read_bytes()[:-1] + b"?")
    rows = {line.split()[0]: line for line in tlhub("cache", "ls").stdout.splitlines()}
    assert "not served" in rows[name] and "not served" not in rows[f"{name}.1"]
    for prefix in (name[:10], whole["key"], f"{name}.1", str(store / whole["entry"]) + ".1"):
        assert tlhub("cache", "info", prefix, "--json").json["entry"] == whole["entry"] + ".1"
    damaged = tlhub("cache", "info", name)
    assert damaged.code == 0 and "not served" in damaged.stdout
    plan = tlhub("cache", "prune", "--kernel", "gemm", "--dry-run").stdout
    assert f"{name}.1 " in plan


def test_ls_shows_chosen_options_and_fixed_dims(tlhub, store, monkeypatch):
    from dataclasses import replace

    from tlhub import catalog

    folder = next(store.glob("v1/*/*/*/*/entry.json")).parent
    known = catalog.load()
    gemm = known.kernels["gemm"]
    options = tuple(replace(o, default=True) if o.name == "trans_b" else o for o in gemm.options)
    for kernels, said in (
        ({}, "trans_b=false"),  # not installed: all of them
        ({"gemm": replace(gemm, options=options)}, " trans_b=false "),
        ({"gemm": gemm}, " defaults "),
    ):
        monkeypatch.setattr(catalog, "load", lambda kernels=kernels: replace(known, kernels=kernels))
        line = next(row for row in tlhub("cache", "ls").stdout.splitlines() if row.startswith(folder.name))
        assert said in line and ("trans_a=false" in line) == (not kernels)
        assert "=?" not in line


def test_a_narrow_terminal_breaks_no_key(monkeypatch):
    from tlhub.cli import output

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr(output, "_documents", stream := Terminal())
    output.table(["entry", "options", "arch"], [("0123456789abcdef.1", "word " * 12, "x" * 30)], whole=["entry"])
    assert "0123456789abcdef.1" in stream.getvalue()


def test_one_entry_has_one_size_everywhere(tlhub, store):
    """A56: list, info and prune agree, and JSON has bytes."""
    entry = entries(tlhub)[0]
    shown = next(line for line in tlhub("cache", "ls").stdout.splitlines() if line.startswith(entry["key"][:16]))
    size = " ".join(shown.split()[-4:-2])
    assert size.endswith(("KiB", "MiB"))
    assert f"{size} in " in tlhub("cache", "info", entry["key"]).stdout
    pruned = tlhub("cache", "prune", "--kernel", "gemm", "--dry-run")
    assert size in next(line for line in pruned.stdout.splitlines() if line.startswith(entry["key"][:16]))
    chosen = tlhub("cache", "prune", "--kernel", "gemm", "--dry-run", "--json").json["chosen"]
    assert {c["key"]: c["size"] for c in chosen}[entry["key"]] == entry["size"]


def test_verify_finds_one_flipped_byte(tlhub, store):
    assert tlhub("cache", "verify").code == 0
    library = libraries(store)[0]
    data = bytearray(library.read_bytes())
    data[len(data) // 2] ^= 1
    os.chmod(library, 0o644)
    library.write_bytes(data)
    outcome = tlhub("cache", "verify")
    assert outcome.code == 1 and library.parent.name in outcome.stdout and "1 damaged" in outcome.stderr
    document = tlhub("cache", "verify", "--json")
    assert document.code == 1 and document.json["whole"] == 1
    assert [d["entry"] for d in document.json["damaged"]] == [str(library.parent.relative_to(store))]
    plan = tlhub("cache", "prune", "--stale", "--dry-run", "--json").json["chosen"]
    damaged = [c for c in plan if c["reason"].startswith("damaged")]
    assert [c["entry"] for c in damaged] == [str(library.parent.relative_to(store))]
    # what verify's hint promises
    assert "tlhub cache verify --repair" in outcome.stderr
    repaired = tlhub("cache", "verify", "--repair", "--json")
    assert repaired.code == 0 and repaired.json["spared"] == [] and "1 entry moved to" in repaired.stderr
    (moved,) = repaired.json["moved"]
    assert moved["entry"] == damaged[0]["entry"] and os.path.isfile(f"{moved['to']}/kernel.so")
    assert tlhub("cache", "verify").code == 0 and tlhub("cache", "verify", "--repair").code == 0
    assert tlhub("cache", "ls", "--json").json["count"] == 1
    orphan = store / "v1" / ".signatures" / f"{'0' * 64}.{'0' * 16}.sig"
    orphan.parent.mkdir()
    orphan.write_text("")
    os.utime(orphan, (1, 1))
    swept = tlhub("cache", "verify", "--repair", "--json")
    assert swept.json["orphans"] == 1 and "1 signature of no entry removed" in swept.stderr and not orphan.exists()


def test_a_folder_that_is_a_file(tlhub, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("mine")
    monkeypatch.setenv("TLHUB_CACHE_DIR", str(tmp_path / "file"))
    for command in (("ls",), ("verify",), ("clear", "--yes"), ("prune", "--max-size", "0")):
        outcome = tlhub("cache", *command)
        assert outcome.code == 1 and str(tmp_path / "file") in outcome.stderr and "hint: " in outcome.stderr
    assert (tmp_path / "file").read_text() == "mine"


# -- prewarm ---------------------------------------------------------------------------------------

WORKLOAD = """
[[problem]]
kernel = "gemm"
shape = [8, 8, 8]
dtype = "float32"

[[problem]]
kernel = "gemm"
shape = [8, 8, 8]
dtype = "float16"
options = { accum = "float16" }

[[problem]]
kernel = "gemm"
shape = { M = 8, N = "N", K = 8 }
dtype = "float64"
archs = ["cpu:x86-64-v2"]
"""


def test_prewarm_builds_all_that_can_be(tlhub, cold_cache, tmp_path):
    (tmp_path / "workload.toml").write_text(WORKLOAD)
    outcome = tlhub("cache", "prewarm", "--from", str(tmp_path / "workload.toml"), "--jobs", "2", "--json")
    assert outcome.code == 1
    assert {k: outcome.json[k] for k in ("built", "present", "failed")} == {"built": 2, "present": 0, "failed": 1}
    problems = outcome.json["problems"]
    assert [p["status"] for p in problems] == ["built", "failed", "built"]
    assert "no schedule serves" in problems[1]["error"] and problems[2]["arch"] == "cpu:x86-64-v2"
    assert problems[0]["arch"] == problems[1]["arch"] and problems[0]["arch"].startswith("cpu:")  # what it is for
    again = tlhub("cache", "prewarm", "--from", str(tmp_path / "workload.toml"))
    assert again.code == 1 and again.stdout == "0 built, 2 there already, 1 failed\n"
    assert again.stderr.count("present") == 2 and "no schedule serves" in again.stderr
    assert tlhub("cache", "ls", "--json").json["count"] == 2


def test_prewarm_builds_around_problems_that_are_wrong(tlhub, store, tmp_path, wrong):
    path = tmp_path / "workload.toml"
    good = '[[problem]]\nkernel = "gemm"\nshape = [8, 8, 8]\ndtype = "float32"\n'
    path.write_text(good.replace("gemm", "gem") + good.replace("8, 8", "8, -8") + good)
    outcome = tlhub("cache", "prewarm", "--from", str(path), "--json")
    assert outcome.code == 1 and [p["status"] for p in outcome.json["problems"]] == ["failed", "failed", "present"]
    assert "did you mean 'gemm'" in outcome.json["problems"][0]["error"] and "problem 2" in outcome.stderr
    path.write_text(good + "dtype = \n")
    assert "is not TOML" in wrong("cache", "prewarm", "--from", str(path))
    path.write_text(good)
    assert "unknown arch" in wrong("cache", "prewarm", "--from", str(path), "--arch", "cpu:pentium9")


def test_prewarm_builds_a_workload_with_the_schedule_that_is_typed(tlhub, store, tmp_path):
    path = tmp_path / "workload.toml"
    path.write_text('[[problem]]\nkernel = "gemm"\nshape = [8, 8, 8]\ndtype = "float32"\n')
    named = tlhub("cache", "prewarm", "--from", str(path), "--schedule", "cpu_blocked", "--json")
    assert named.code == 0 and named.json["present"] == 1
    other = tlhub("cache", "prewarm", "--from", str(path), "--schedule", "hopper", "--json")
    assert other.code == 1 and "hopper" in other.json["problems"][0]["error"]


def test_prewarm_into_a_store_that_keeps_nothing_fails(tlhub, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("mine")
    monkeypatch.setenv("TLHUB_CACHE_DIR", str(tmp_path / "file"))
    with pytest.warns(RuntimeWarning, match="only in memory"):
        outcome = tlhub("cache", "prewarm", "gemm", "8,8,8", "--dtype", "float32", "--json")
    assert outcome.code == 1 and outcome.json["built"] == 0 and outcome.json["failed"] == 1
    error = outcome.json["problems"][0]["error"]
    assert str(tmp_path / "file") in error and "only in memory" in error and "hint: export TLHUB_CACHE_DIR=" in error


def test_a_path_that_is_not_utf8_is_printed_as_it_is(tmp_path):
    folder = os.fsencode(tmp_path) + b"/\xffx"
    program = [sys.executable, "-c", "from tlhub.cli import main; main()", "cache", "path"]
    done = subprocess.run(program, env={**os.environb, b"TLHUB_CACHE_DIR": folder}, capture_output=True)
    assert (done.returncode, done.stdout) == (0, folder + b"\n"), done.stderr


def test_prewarm_one_problem_then_get_finds_it(tlhub, cold_cache):
    args = ("gemm", "8,8,8", "--dtype", "float32")
    made = tlhub("cache", "prewarm", *args, "--json")
    assert made.code == 0 and made.json["built"] == 1
    found = tlhub("get", *args, "--json").json
    assert found["origin"] == "cache" and found["key"] == made.json["problems"][0]["key"]


def test_prewarm_takes_a_problem_or_a_workload_not_both(wrong, tmp_path):
    (tmp_path / "w.toml").write_text(WORKLOAD)
    text = wrong("cache", "prewarm", "gemm", "8,8,8", "--from", str(tmp_path / "w.toml"))
    assert "--from names the problems; KERNEL 'gemm' is given too" in text
    assert f"hint: tlhub cache prewarm --from {tmp_path}/w.toml" in text


def test_json_of_every_entry_is_strict(tlhub, store):
    text = tlhub("cache", "ls", "--json").stdout
    assert json.loads(text, parse_constant=lambda name: 1 / 0)
