from __future__ import annotations

import dataclasses
import errno
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from cache_help import ARCH, BUILD, GENERAL, PROBLEM, files_below, lookup, make_manifest, publish, serves

from tlhub.cache import prune, repair
from tlhub.cache.chain import Chain, Wanted
from tlhub.cache.entry import MANIFEST, Manifest
from tlhub.cache.store import Item, Store
from tlhub.errors import CacheError

pytestmark = pytest.mark.light

DAY = 86400.0
NOW = 1_800_000_000.0


def item(name: str, age: float = 0.0, size: int = 100, **changes: Any) -> Item:
    manifest = make_manifest(dataclasses.replace(PROBLEM, kernel=changes.pop("kernel", "gemm")), **changes)
    return Item(name, manifest, None, size, 2, NOW - age * DAY)


def names(plan: prune.Plan) -> list[str]:
    return sorted(found.folder for found, _ in plan.remove)


ITEMS = [
    item("new", 1),
    item("old", 40),
    item("older", 50, kernel="attention"),
    item("v4", 20, arch="cpu:x86-64-v4"),
    item("future", -3650),
    Item("v1/cpu-x86-64-v3/gemm/0123/4567", None, "torn", 7, 1, NOW),
]
DAMAGED = ITEMS[-1].folder


@pytest.mark.parametrize(
    ("criteria", "gone"),
    [
        ({}, [DAMAGED]),
        ({"max_age": 30 * DAY}, ["old", "older", DAMAGED]),
        ({"max_age": 0.0}, ["new", "old", "older", "v4", DAMAGED]),
        ({"kernel": "attention"}, ["older"]),
        ({"arch": "cpu:x86-64-v4"}, ["v4"]),
        ({"arch": ARCH, "kernel": "gemm"}, ["future", "new", "old", DAMAGED]),
        ({"arch": ARCH, "max_age": 45 * DAY}, ["older", DAMAGED]),
        ({"max_bytes": 500}, [DAMAGED]),
        ({"max_bytes": 499}, ["older", DAMAGED]),
        ({"max_bytes": 300}, ["old", "older", DAMAGED]),
        ({"max_bytes": 0}, ["future", "new", "old", "older", "v4", DAMAGED]),
        ({"max_bytes": 250, "kernel": "gemm"}, ["old", "v4", DAMAGED]),
        ({"stale": lambda m: "gone" if m.kernel == "attention" else None}, ["older", DAMAGED]),
        ({"stale": lambda m: None}, [DAMAGED]),
    ],
)
def test_plan(criteria: dict[str, Any], gone: list[str]) -> None:
    plan = prune.plan(ITEMS, now=NOW, **criteria)
    assert names(plan) == sorted(gone)
    assert {i.folder for i in plan.keep} == {i.folder for i in ITEMS} - set(gone)
    assert plan.bytes == sum(i.size for i in ITEMS if i.folder in gone)
    assert all(reason for _, reason in plan.remove)


def test_a_date_in_the_future_is_now_and_reported() -> None:
    plan = prune.plan(ITEMS, now=NOW, max_age=30 * DAY)
    assert [i.folder for i in plan.misdated] == ["future"]
    assert prune.plan([item("x", -0.5)], now=NOW).misdated == ()


def test_what_a_chmod_mends_is_not_damaged(store: Store) -> None:
    folder = str(publish(store).folder)
    os.chmod(folder, 0o777)
    plan = prune.plan(store.entries(), now=time.time())
    assert plan.remove == () and len(plan.keep) == 1
    assert "chmod" in str(plan.keep[0].reason)


def aged(store: Store, manifest: Manifest, days: float) -> str:
    folder = str(publish(store, manifest).folder)
    stamp = time.time() - days * DAY
    os.utime(f"{folder}/{MANIFEST}", (stamp, stamp))
    return folder


def test_remove_by_age(store: Store) -> None:
    old, new = aged(store, make_manifest(), 40), aged(store, make_manifest(GENERAL), 1)
    plan = prune.plan(store.entries(), now=time.time(), max_age=30 * DAY)
    size = plan.bytes
    assert os.path.exists(old), "a plan removes nothing"
    removed = prune.remove(store, plan)
    assert (removed.count, removed.bytes, removed.spared) == (1, size, ())
    assert size > 0 and not os.path.exists(old) and os.path.exists(new)
    assert not os.path.exists(os.path.dirname(old)), "no empty folder is left"
    assert os.listdir(f"{store.root}/v1/.staging") == []


def test_a_misdated_entry_ages_from_now_on(store: Store) -> None:
    folder = aged(store, make_manifest(), -3650)
    prune.remove(store, prune.plan(store.entries(), now=time.time(), max_age=30 * DAY))
    assert os.stat(f"{folder}/{MANIFEST}").st_mtime == pytest.approx(time.time(), abs=60)
    later = time.time() + 31 * DAY
    assert len(prune.plan(store.entries(), now=later, max_age=30 * DAY).remove) == 1


@pytest.mark.parametrize("how", ["clear", "prune"])
def test_links_are_removed_and_their_targets_are_whole(store: Store, tmp_path: Path, how: str) -> None:
    victim = tmp_path / "victim"
    (victim / "deep").mkdir(parents=True)
    for name in ("file", "deep/file"):
        (victim / name).write_text("precious")
    folder = Path(str(publish(store).folder))
    (folder / "link").symlink_to(victim)
    (folder / "inner").mkdir()
    (folder / "inner" / "link").symlink_to(victim / "file")
    places = [folder.parent, folder.parents[1], folder.parents[2], folder.parents[3], folder.parents[3] / ".staging"]
    for place in places:
        (place / "a-link").symlink_to(victim)
    folder.rename(folder.parent / ("0" * 16))  # damaged: in the folder of another build
    if how == "clear":
        removed = prune.clear(store)
    else:
        removed = prune.remove(store, prune.plan(store.entries(), now=time.time()))
    assert removed.spared == ()
    assert sorted(files_below(victim)) == ["deep/file", "file"]
    assert (victim / "file").read_text() == "precious"
    assert [os.path.join(d, n) for d, ds, fs in os.walk(str(store.root)) for n in (*ds, *fs) if "link" in n] == []


@pytest.mark.parametrize("depth", range(5))
def test_a_folder_that_became_a_link_after_the_plan(store: Store, tmp_path: Path, depth: int) -> None:
    """Nothing outside is removed, whichever of root, v1, arch, kernel or problem is swapped."""
    folder = Path(str(publish(store).folder))
    items = list(store.entries())
    place = folder.parents[depth]
    moved = tmp_path / "outside"
    place.rename(moved)
    place.symlink_to(moved)
    before = files_below(moved)
    removed = prune.remove(store, prune.Plan(tuple((i, "x") for i in items), ()))
    assert removed.count == 0 and len(removed.spared) == 1
    assert files_below(moved) == before and before


@pytest.mark.parametrize(
    "name", ["../victim", "v1/../../victim", "v1", "/etc", "v1//x", "v2/a/b/c/d", "v1/a/b/c/d/e", "v1/cpu-x86-64-v3"]
)
def test_a_plan_cannot_name_what_is_outside(store: Store, tmp_path: Path, name: str) -> None:
    (tmp_path / "victim").mkdir()
    publish(store)
    removed = prune.remove(store, prune.Plan(((Item(name, None, "x", 1, 1, 0.0), "x"),), ()))
    assert removed.count == 0 and removed.spared
    assert (tmp_path / "victim").is_dir() and serves(store)


def test_what_is_in_use_is_spared_by_another_process(store: Store) -> None:
    publish(store)
    publish(store, make_manifest(GENERAL))
    entry = lookup(store).entries[0]
    code = (
        "import sys\n"
        "from tlhub.cache import prune\n"
        "from tlhub.cache.store import Store\n"
        f"removed = prune.clear(Store('user', {str(store.root)!r}))\n"
        "print(removed.count, [reason for _, reason in removed.spared])"
    )
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}

    def clear_elsewhere() -> str:
        return subprocess.run(
            [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True
        ).stdout.strip()

    assert entry.hold()
    assert clear_elsewhere() == "1 ['it is in use']"
    assert serves(store)
    second = lookup(store).entries[0]
    assert second.hold()
    del entry
    assert clear_elsewhere() == "0 ['it is in use']"
    del second
    assert clear_elsewhere() == "1 []"
    assert not serves(store)


def test_what_was_published_or_found_is_in_use_while_it_lives(store: Store) -> None:
    entry = publish(store)
    assert [reason for _, reason in prune.clear(store).spared] == ["it is in use"]
    del entry
    wanted = Wanted(BUILD["schedule"], BUILD["schedule_revision"], BUILD["source_digest"], {}, (PROBLEM,))
    hit, _ = Chain([store]).find(ARCH, [wanted])
    assert hit is not None
    assert prune.clear(store).count == 0 and serves(store)
    del hit
    assert prune.clear(store).count == 1


def test_a_hold_of_what_is_gone_or_in_memory_is_false(store: Store) -> None:
    publish(store)
    (entry,) = lookup(store).entries
    prune.clear(store)
    assert not entry.hold()
    assert not publish(Store("user", None)).hold()


def test_clear_counts_and_leaves_the_root(store: Store) -> None:
    sizes = 0
    for number in range(3):
        publish(store, make_manifest(config={"n": number}))
    (Path(str(store.root)) / "mine.txt").write_text("not a part of the cache")
    sizes = sum(found.size for found in store.entries())
    removed = prune.clear(store)
    assert (removed.count, removed.bytes) == (3, sizes)
    assert list(store.entries()) == []
    assert (Path(str(store.root)) / "mine.txt").exists()
    assert prune.clear(store).count == 0
    assert publish(store).folder and serves(store)


def test_clear_of_memory_and_of_nothing(tmp_path: Path) -> None:
    memory = Store("user", None)
    publish(memory)
    assert prune.clear(memory).count == 0 and not serves(memory)
    missing = Store("user", tmp_path / "missing")
    assert prune.clear(missing) == prune.Removed(0, 0)
    assert not (tmp_path / "missing").exists()


def test_what_another_process_removed_is_not_counted_twice(store: Store) -> None:
    publish(store)
    plan = prune.plan(store.entries(), now=time.time(), kernel="gemm")
    assert prune.remove(store, plan).count == 1
    again = prune.remove(store, plan)
    assert (again.count, again.bytes) == (0, 0)
    assert [reason for _, reason in again.spared] == ["it is gone already"]


def test_a_read_only_store_is_not_pruned(store: Store) -> None:
    publish(store)
    site = Store("site", str(store.root), writable=False)
    with pytest.raises(CacheError, match="read-only"):
        prune.clear(site)
    assert serves(store)


def test_what_cannot_be_removed_is_named(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(store)

    def rename(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, "rename", rename)
    removed = prune.clear(store)
    assert removed.count == 0 and [reason for _, reason in removed.spared] == ["Permission denied"]
    assert serves(store)


def test_verify_lists_the_damaged(store: Store) -> None:
    publish(store, make_manifest(GENERAL))
    folder = Path(str(publish(store).folder))
    assert repair.verify(store).damaged == () and repair.verify(store).count == 2
    (folder / "kernel.c").write_bytes(b"int main(void) { return 1; }\n")
    found = repair.verify(store)
    assert found.count == 1
    assert [(i.folder, i.reason) for i in found.damaged] == [
        (str(folder)[len(str(store.root)) + 1 :], "kernel.c is altered: its SHA-256 is not the manifest's")
    ]


def test_old_locks_are_swept(store: Store) -> None:
    publish(store)
    with store.lock("old"):
        pass
    folder = Path(f"{store.root}/v1/.locks")
    (folder / "stale.lock").touch()
    (folder / "fresh.lock").touch()
    os.utime(folder / "stale.lock", (1, 1))
    prune.remove(store, prune.plan([], now=time.time()))
    assert "fresh.lock" in os.listdir(folder) and "stale.lock" not in os.listdir(folder)
