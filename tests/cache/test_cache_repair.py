"""Repair: what is damaged is moved away, once, and nothing that is whole or in use with it."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from cache_help import GENERAL, MEMBERS, files_below, lookup, make_manifest, publish, serves

from tlhub.cache import prune
from tlhub.cache.repair import DAMAGED, repair, verify
from tlhub.cache.store import Store
from tlhub.errors import CacheError

pytestmark = pytest.mark.light


def damage(folder: Path, how: str, elsewhere: Path) -> None:
    if how == "altered":
        (folder / "kernel.so").write_bytes(b"\0" * len(MEMBERS["kernel.so"]))
    elif how == "no manifest":
        (folder / "entry.json").unlink()
    else:
        folder.rename(elsewhere / "moved")
        if how == "file":
            folder.write_text("x")
        else:
            folder.symlink_to(elsewhere / "moved")


@pytest.mark.parametrize("how", ["altered", "no manifest", "file", "link"])
def test_a_damaged_entry_is_moved_and_its_place_is_free(store: Store, how: str, tmp_path: Path) -> None:
    folder = Path(str(publish(store).folder))
    whole = publish(store, make_manifest(GENERAL)).folder
    damage(folder, how, tmp_path)
    before = files_below(tmp_path / "moved")
    done = repair(store, verify(store).damaged)
    ((item, path),) = done.moved
    assert f"{store.root}/{item.folder}" == str(folder) and done.spared == ()
    assert path.startswith(f"{store.root}/{DAMAGED}/cpu-x86-64-v3-gemm-") and os.path.lexists(path)
    assert not os.path.lexists(folder) and os.path.isdir(str(whole))
    assert files_below(tmp_path / "moved") == before
    assert publish(store).folder == str(folder) and serves(store)
    assert verify(store).damaged == ()


def test_what_was_rebuilt_meanwhile_stays(store: Store) -> None:
    """Two repairs of one damaged entry, and a rebuild in its place between them."""
    folder = Path(str(publish(store).folder))
    damage(folder, "altered", folder)
    found = verify(store).damaged
    assert len(repair(store, found).moved) == 1
    publish(store)
    done = repair(store, found)
    assert done.moved == () and "whole by now" in done.spared[0][1]
    assert serves(store)
    prune.clear(store)
    assert "No such file" in repair(store, found).spared[0][1]


def test_what_is_in_use_stays(store: Store) -> None:
    entry = publish(store)
    damage(Path(str(entry.folder)), "altered", Path())
    done = repair(store, verify(store).damaged)
    assert done.moved == () and done.spared[0][1] == "it is in use"


def test_what_a_chmod_mends_stays(store: Store) -> None:
    os.chmod(str(publish(store).folder), 0o777)
    done = repair(store, verify(store).damaged)
    assert done.moved == () and "chmod" in done.spared[0][1]


def test_one_repair_at_a_time(store: Store) -> None:
    damage(Path(str(publish(store).folder)), "altered", Path())
    found = verify(store).damaged
    with (
        store.lock("repair"),
        pytest.raises(CacheError, match="is being repaired by process"),
        pytest.MonkeyPatch.context() as patch,
    ):
        lock = store.lock
        patch.setattr(store, "lock", lambda name, timeout: lock(name, timeout=0))
        repair(store, found)
    assert not lookup(store).skipped and len(repair(store, found).moved) == 1


def test_nothing_is_moved_through_a_link(store: Store, tmp_path: Path) -> None:
    folder = Path(str(publish(store).folder))
    damage(folder, "altered", folder)
    found = verify(store).damaged
    (Path(str(store.root)) / DAMAGED).symlink_to(tmp_path)
    with pytest.raises(CacheError, match="cannot be made"):
        repair(store, found)
    (Path(str(store.root)) / DAMAGED).unlink()
    folder.parent.rename(tmp_path / "problem")
    folder.parent.symlink_to(tmp_path / "problem")
    assert repair(store, found).moved == () and (tmp_path / "problem" / folder.name).is_dir()


def test_what_was_moved_a_month_ago_is_forgotten_by_prune(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(str(publish(store).folder))
    damage(folder, "altered", folder)
    ((_, path),) = repair(store, verify(store).damaged).moved
    prune.remove(store, prune.Plan((), ()))
    assert os.path.isdir(path)
    later = time.time() + 31 * 86400
    monkeypatch.setattr(time, "time", lambda: later)
    prune.remove(store, prune.Plan((), ()))
    assert not os.path.exists(path)
