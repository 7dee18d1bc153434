"""How a store stays within its size: generations, keeps, and the upkeep that nobody asks for."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from typing import Any

import pytest
from cache_help import GENERAL, MEMBERS, make_manifest, publish, serves

from tlhub.cache import keeps, prune, upkeep
from tlhub.cache.entry import MANIFEST
from tlhub.cache.store import Item, Store
from tlhub.errors import ArgumentError, CacheError

pytestmark = pytest.mark.light

DAY = 86400.0
NOW = 1_800_000_000.0


def item(name: str, age: float, **changes: Any) -> Item:
    return Item(name, make_manifest(config={"name": name}, **changes), None, 100, 2, NOW - age * DAY)


def gone(items: list[Item], most: int, kept: list[Item] | None = None) -> list[str]:
    digests = frozenset(i.manifest.build_digest for i in kept or () if i.manifest)
    plan = prune.plan(items, now=NOW, max_bytes=most, kept=digests)
    assert {i.folder for i in plan.spared} <= {i.folder for i in plan.keep}
    return [i.folder for i, _ in plan.remove]


# -- the order -----------------------------------------------------------------------------------------


def test_an_older_revision_goes_before_what_is_longer_unused() -> None:
    items = [
        item("used now, revision 2", 0, schedule_revision=2),
        item("unused, revision 3", 90, schedule_revision=3),
        item("used, revision 3", 1, schedule_revision=3),
        item("another schedule's only one", 60, schedule="other", schedule_revision=1),
    ]
    assert gone(items, 400) == []
    assert gone(items, 300) == ["used now, revision 2"]
    assert gone(items, 200) == ["used now, revision 2", "unused, revision 3"]
    assert gone(items, 100)[-1] == "another schedule's only one"


def test_what_cannot_be_kept_is_not(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: object, *_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    entry = publish(store)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(CacheError, match="cannot be kept: No space left on device"):
            keeps.keep(store, entry.manifest)
    assert keeps.kept(store) == frozenset()


def test_what_is_kept_is_counted_and_never_goes() -> None:
    items = [item("old", 90), item("older", 95), item("new", 1)]
    assert gone(items, 200, kept=items[1:2]) == ["old"]
    assert gone(items, 0, kept=items[1:2]) == ["old", "new"]
    plan = prune.plan(
        items, now=NOW, max_age=30 * DAY, kept={str(items[1].manifest and items[1].manifest.build_digest)}
    )
    assert [i.folder for i, _ in plan.remove] == ["old"] and [i.folder for i in plan.spared] == ["older"]


# -- keeps ---------------------------------------------------------------------------------------------


def test_a_pin_holds_against_prune_and_clear_until_it_is_taken_off(store: Store) -> None:
    one, other = publish(store), publish(store, make_manifest(GENERAL))
    keeps.keep(store, one.manifest)
    keeps.keep(store, one.manifest)
    assert keeps.kept(store) == {one.key}
    del other
    one_key, manifest = one.key, one.manifest
    del one
    removed = prune.clear(store)
    assert removed.count == 1 and [why for _, why in removed.spared] == ["it is kept"] and serves(store)
    assert [i.manifest.build_digest for i in store.entries() if i.manifest] == [one_key]
    keeps.release(store, manifest)
    keeps.release(store, manifest)
    assert prune.clear(store).count == 1 and keeps.kept(store) == frozenset()


def test_a_pin_keeps_no_damaged_entry(store: Store) -> None:
    entry = publish(store)
    keeps.keep(store, entry.manifest)
    Path(str(entry.folder), MANIFEST).write_bytes(b"{}")
    del entry
    assert prune.remove(store, prune.plan(store.entries(), now=NOW, kept=keeps.kept(store))).count == 1


def test_pins_need_a_store_that_can_be_written(store: Store, tmp_path: Path) -> None:
    entry = publish(store)
    with pytest.raises(CacheError, match="read-only"):
        keeps.keep(Store("site", str(store.root), writable=False), entry.manifest)
    (Path(str(store.root)) / "v1" / ".keeps").symlink_to(tmp_path)
    with pytest.raises(CacheError, match="is a link"):
        keeps.keep(store, entry.manifest)


# -- upkeep --------------------------------------------------------------------------------------------

SIZE = sum(map(len, MEMBERS.values()))


def fill(store: Store, count: int) -> int:
    """Publish that many entries, the first longest unused, and return the bytes of one on disk."""
    for number in range(count):
        folder = publish(store, make_manifest(config={"n": number})).folder
        stamp = time.time() - (count - number) * DAY
        os.utime(f"{folder}/{MANIFEST}", (stamp, stamp))
    return max(i.size for i in store.entries())


def configs(store: Store) -> list[Any]:
    return sorted(i.manifest.config["n"] for i in store.entries() if i.manifest)


def passed(store: Store, days: float) -> None:
    """Have the last upkeep be so long ago."""
    upkeep._published.clear()
    stamp = time.time() - days * DAY
    os.utime(f"{store.root}/{upkeep.MARK}", (stamp, stamp))


def test_a_store_over_its_size_gives_up_what_is_longest_unused(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    one = fill(store, 6)
    assert configs(store) == list(range(6))
    monkeypatch.setenv("TLHUB_CACHE_SIZE", str(5 * one))
    passed(store, 2)
    publish(store, make_manifest(config={"n": 6}))
    assert configs(store) == [3, 4, 5, 6], "a tenth of the size is free again"


def test_upkeep_is_once_a_day_or_after_much_was_published(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    tended: list[str] = []
    monkeypatch.setattr(upkeep, "tend", lambda store, most: tended.append(str(store.root)))
    upkeep._published.clear()
    publish(store)
    assert tended == [], "a new store needs none"
    passed(store, 2)
    publish(store, make_manifest(config={"n": 1}))
    publish(store, make_manifest(config={"n": 2}))
    assert len(tended) == 1
    monkeypatch.setenv("TLHUB_CACHE_SIZE", str(16 * 3 * SIZE))
    for number in range(3, 9):
        publish(store, make_manifest(config={"n": number}))
    assert len(tended) == 3


def test_a_sites_folder_is_pruned_by_its_keeper_alone(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(store, 2)
    monkeypatch.setenv("TLHUB_CACHE_SIZE", "1")
    passed(store, 2)
    publish(Store("site", str(store.root), origin="site"), make_manifest(config={"n": 2}))
    assert configs(store) == [0, 1, 2]
    publish(store, make_manifest(config={"n": 3}))
    assert configs(store) == [3]


def test_one_process_at_a_time_looks_after_a_store(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    tended: list[Store] = []
    monkeypatch.setattr(upkeep, "tend", lambda store, most: tended.append(store))
    publish(store)
    passed(store, 2)
    with store.lock("upkeep"):
        publish(store, make_manifest(config={"n": 1}))
        assert tended == []
    publish(store, make_manifest(config={"n": 2}))
    assert len(tended) == 1


def test_upkeep_spares_the_damaged_and_sweeps_after_the_dead(store: Store) -> None:
    folder = Path(str(publish(store).folder))
    (folder / MANIFEST).write_bytes(b"{}")
    (Path(str(store.root)) / "v1" / ".staging" / "1-dead").mkdir()
    assert upkeep.tend(store, 0) == prune.Removed(0, 0, (), 1)
    assert folder.exists(), "only verify --repair and prune, which somebody asks for, move what is damaged"


@pytest.mark.parametrize("text", ["much", "-1", "10 potatoes"])
def test_a_size_that_is_none_costs_no_kernel(store: Store, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TLHUB_CACHE_SIZE", text)
    with pytest.raises(ArgumentError, match="allowed is a size"):
        upkeep.limit()
    with pytest.warns(RuntimeWarning, match="TLHUB_CACHE_SIZE"):
        assert publish(store).published
    monkeypatch.setenv("TLHUB_CACHE_SIZE", "")
    assert upkeep.limit() == upkeep.USUAL
