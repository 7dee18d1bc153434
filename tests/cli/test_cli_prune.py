"""What prune and clear remove, and what is kept."""

from __future__ import annotations

import errno
import os
import pty
import subprocess
import sys
import time

import pytest
from cache_commands import entries, libraries


def test_prune_dry_run_removes_nothing(tlhub, store):
    outcome = tlhub("cache", "prune", "--max-size", "0", "--dry-run", "--json")
    assert outcome.code == 0 and len(outcome.json["chosen"]) == 2 and outcome.json["removed"] == 0
    assert len(libraries(store)) == 2


def test_files_are_counted_and_an_entry_has_few(tlhub, store):
    """A file system can run out of inodes before it runs out of room."""
    there = list(store.glob("v1/*/*/*/*/*"))
    planned = tlhub("cache", "prune", "--max-size", "0", "--dry-run", "--json").json
    assert planned["chosen_files"] == len(there) <= 3 * len(planned["chosen"]) and planned["files"] == 0
    assert f" in {len(there)} files would be removed" in tlhub("cache", "prune", "--max-size", "0", "--dry-run").stderr
    done = tlhub("cache", "prune", "--max-size", "0", "--json").json
    assert done["files"] == len(there) and not list(store.glob("v1/*/*/*/*/*"))


def test_prune_by_age_size_kernel_and_arch(tlhub, store):
    assert tlhub("cache", "prune", "--older-than", "30d", "--json").json["removed"] == 0
    assert tlhub("cache", "prune", "--kernel", "attention", "--json").json["removed"] == 0
    first, second = entries(tlhub)
    old = store / first["entry"] / "entry.json"
    os.utime(old, (1e9, 1e9))
    assert tlhub("cache", "prune", "--older-than", "30d", "--json").json["removed"] == 1
    assert [e["key"] for e in entries(tlhub)] == [second["key"]]
    assert tlhub("cache", "prune", "--max-size", "1GiB", "--json").json["removed"] == 0
    gone = tlhub("cache", "prune", "--arch", second["arch"], "--json").json
    assert gone["removed"] == 1 and gone["size"] == second["size"]
    assert libraries(store) == []


def test_prune_stale(tlhub, store, monkeypatch):
    from dataclasses import replace

    from tlhub import catalog

    assert tlhub("cache", "prune", "--stale", "--json").json["removed"] == 0
    known = catalog.load()
    newer = tuple(replace(s, revision=s.revision + 1) for s in known.schedules["gemm"])
    changed = replace(known, schedules={**known.schedules, "gemm": newer})
    monkeypatch.setattr(catalog, "load", lambda: changed)
    chosen = tlhub("cache", "prune", "--stale", "--json").json["chosen"]
    assert len(chosen) == 2 and all("schedule revision" in c["reason"] for c in chosen)
    assert libraries(store) == []


@pytest.mark.parametrize("missing", ["kernels", "schedules"])
def test_prune_stale_takes_what_was_uninstalled(tlhub, store, monkeypatch, missing):
    from dataclasses import replace

    from tlhub import catalog

    known = catalog.load()
    monkeypatch.setattr(catalog, "load", lambda: replace(known, **{missing: {}}))
    # a plugin that is only switched off, or broken, would ask for them when it is back
    monkeypatch.setenv("TLHUB_DISABLE_PLUGINS", "tlhub-core")
    assert tlhub("cache", "prune", "--stale", "--json").json["chosen"] == []
    monkeypatch.delenv("TLHUB_DISABLE_PLUGINS")
    chosen = tlhub("cache", "prune", "--stale", "--json").json["chosen"]
    assert len(chosen) == 2 and all("any more" in c["reason"] for c in chosen)
    assert libraries(store) == []


def test_prune_says_why_in_plain_words(tlhub, store):
    def reasons(*args):
        return {c["reason"] for c in tlhub("cache", "prune", *args, "--dry-run", "--json").json["chosen"]}

    arch = entries(tlhub)[0]["arch"]
    assert reasons("--max-size", "1KiB") == {"over 1 KiB"}
    assert reasons("--kernel", "gemm", "--arch", arch) == {f"of kernel gemm, for {arch}"}
    for manifest in store.glob("v1/*/*/*/*/entry.json"):
        os.utime(manifest, (time.time() - 7500,) * 2)
    assert reasons("--older-than", "1min") == {"not used for 2 h"}


def test_clear_refuses_without_a_terminal(tlhub, store):
    outcome = tlhub("cache", "clear")
    assert outcome.code == 2 and outcome.stdout == ""
    assert str(store) in outcome.stderr and outcome.stderr.endswith("hint: tlhub cache clear --yes\n")
    assert len(libraries(store)) == 2


def test_clear_with_yes(tlhub, store):
    outcome = tlhub("cache", "clear", "--yes", "--json")
    assert outcome.code == 0 and outcome.json["removed"] == 2 and libraries(store) == []


@pytest.mark.parametrize(("answer", "left", "code"), [("n", 2, 1), ("", 2, 1), ("y", 0, 0)])
def test_clear_asks_on_a_terminal(store, answer, left, code):
    """A57: path, count and size are shown, and only a yes removes."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", "from tlhub.cli import main; main()", "cache", "clear"],
        stdin=theirs,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(theirs)
    os.write(ours, f"{answer}\n".encode())
    _, shown = process.communicate(timeout=60)
    os.close(ours)
    assert str(store) in shown and "2 entries, " in shown and "KiB" in shown
    assert process.returncode == code and len(libraries(store)) == left


def test_a_kept_entry_is_spared_until_it_is_released(tlhub, store, wrong):
    first, second = entries(tlhub)
    kept = tlhub("cache", "keep", first["key"][:12], str(store / first["entry"]))
    assert kept.code == 0 and "kept" in kept.stderr and "gemm" in kept.stderr
    assert [e["kept"] for e in entries(tlhub)] == [True, False]
    assert [" kept " in row for row in tlhub("cache", "ls").stdout.splitlines()[1:]] == [True, False]
    assert "kept" in tlhub("cache", "info", first["key"]).stdout
    plan = tlhub("cache", "prune", "--max-size", "0", "--dry-run")
    assert "1 entry would be spared: kept" in plan.stderr
    gone = tlhub("cache", "clear", "--yes", "--json").json
    assert gone["removed"] == 1 and [s["reason"] for s in gone["spared"]] == ["it is kept"]
    assert [e["key"] for e in entries(tlhub)] == [first["key"]]
    assert tlhub("cache", "release", first["key"]).code == 0
    assert tlhub("cache", "prune", "--max-size", "0", "--json").json["removed"] == 1
    assert "no entry" in wrong("cache", "keep", second["key"])


def test_a_damaged_entry_cannot_be_kept(tlhub, store):
    manifest = libraries(store)[0].parent / "entry.json"
    manifest.write_text("{}")
    outcome = tlhub("cache", "keep", manifest.parent.name)
    assert outcome.code == 1 and "not usable" in outcome.stderr


def test_what_cannot_be_removed_is_a_problem(tlhub, store, monkeypatch):
    def read_only(*_):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr("tlhub.cache.prune.move", read_only)
    for command in (("prune", "--max-size", "0"), ("clear", "--yes")):
        done = tlhub("cache", *command)
        assert done.code == 1 and "2 entries spared: Read-only file system" in done.stderr
