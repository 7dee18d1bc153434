from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path

import pytest
from cache_help import FOREIGN, lookup, make_foreign, publish, serves

from tlhub.cache import trust
from tlhub.cache.entry import MANIFEST
from tlhub.cache.store import Store
from tlhub.errors import CacheError

pytestmark = pytest.mark.light

ME, OTHER, NAMED = 1000, 1001, 1002


def info(mode: int, owner: int = ME) -> os.stat_result:
    return os.stat_result((mode, 0, 0, 1, owner, 0, 0, 0, 0, 0))


FOLDER, FILE = stat.S_IFDIR, stat.S_IFREG


@pytest.mark.parametrize(
    ("mode", "owner", "shared", "says"),
    [
        (FOLDER | 0o700, ME, False, None),
        (FOLDER | 0o755, ME, False, None),
        (FOLDER | 0o755, 0, False, None),
        (FOLDER | 0o755, NAMED, False, None),
        (FOLDER | 0o755, OTHER, False, "belongs to user 1001"),
        (FOLDER | 0o755, OTHER, True, "belongs to user 1001"),
        (FOLDER | 0o775, ME, False, "chmod g-w"),
        (FOLDER | 0o775, ME, True, None),
        (FOLDER | 0o2775, NAMED, True, None),
        (FOLDER | 0o777, ME, True, "chmod o-w"),
        (FOLDER | 0o777, ME, False, "chmod go-w"),
        (FOLDER | 0o757, ME, False, "chmod o-w"),
        (FOLDER | 0o1777, ME, True, None),
        (FOLDER | 0o1777, ME, False, "chmod g-w"),
        (FOLDER | 0o1757, ME, False, None),
        (FILE | 0o644, ME, False, None),
        (FILE | 0o664, ME, False, "chmod g-w"),
        (FILE | 0o664, ME, True, None),
        (FILE | 0o646, ME, True, "chmod o-w"),
        (FILE | 0o1646, ME, True, "chmod o-w"),  # the sticky bit says nothing of a file
    ],
)
def test_the_rule(mode: int, owner: int, shared: bool, says: str | None) -> None:
    reason = trust.judge("/a b/c", info(mode, owner), trust.policy(shared, [NAMED]), ME)
    if says is None:
        assert reason is None
    else:
        assert reason is not None and says in reason
        assert f"(mode {stat.S_IMODE(mode):04o})" in reason and "'/a b/c'" in reason


def test_owners_by_name_and_number() -> None:
    assert trust.policy(owners=["root", 7, "8", "no such user", "no\0name"]).owners == {0, 7, 8}


def _places(store: Store) -> dict[str, Path]:
    folder = Path(str(lookup(store).entries[0].folder))
    return {
        "root": folder.parents[4],
        "version": folder.parents[3],
        "arch": folder.parents[2],
        "kernel": folder.parents[1],
        "problem": folder.parents[0],
        "entry": folder,
        "manifest": folder / MANIFEST,
        "library": folder / "kernel.so",
    }


PLACES = ["root", "version", "arch", "kernel", "problem", "entry", "manifest", "library"]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("bits", [0o002, 0o020])
def test_what_others_can_write_does_not_serve_until_the_hint_is_run(store: Store, place: str, bits: int) -> None:
    publish(store)
    path = _places(store)[place]
    os.chmod(path, stat.S_IMODE(path.stat().st_mode) | bits)
    found = lookup(store)
    if place != "library":
        assert not found.entries
        reason = found.skipped[0].reason
        assert str(path) in reason and f"(mode {stat.S_IMODE(path.stat().st_mode):04o})" in reason
        subprocess.run(reason.partition(trust.MEND)[2], shell=True, check=True)
        assert serves(store)
    else:
        assert not serves(store)


@pytest.mark.parametrize("place", PLACES)
def test_what_belongs_to_somebody_else_does_not_serve(
    store: Store, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(store)
    path = _places(store)[place]
    owner = os.geteuid()
    make_foreign(path, monkeypatch)
    assert not serves(store)
    named = Store("user", str(store.root), owners=[FOREIGN, owner])
    assert serves(named)


def test_the_sticky_bit_makes_a_shared_root_of_all(store: Store) -> None:
    publish(store)
    os.chmod(str(store.root), 0o1757)
    assert serves(store)


def test_nothing_is_kept_in_a_root_that_others_can_write(tmp_path: Path) -> None:
    root = tmp_path / "open to all"
    root.mkdir()
    root.chmod(0o777)
    store = Store("user", root)
    with pytest.raises(CacheError, match="writable by everyone") as caught:
        store.check()
    assert caught.value.hint == f"chmod go-w '{root}'"
    assert "writable by everyone" in lookup(store).skipped[0].reason
    with pytest.warns(RuntimeWarning, match=r"mode 0777\) is writable by everyone\nhint: chmod go-w"):
        entry = publish(store)
    assert entry.folder is None and serves(store)
    assert list(root.iterdir()) == []
    subprocess.run(str(caught.value.hint), shell=True, check=True)
    store.check()


def test_a_root_is_private_and_folders_in_it_are_no_ones_to_write(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        store = Store("user", tmp_path / "new" / "root")
        entry = publish(store)
    finally:
        os.umask(old)
    assert stat.S_IMODE(os.stat(str(store.root)).st_mode) == 0o700
    for path in _places(store).values():
        assert not path.stat().st_mode & 0o022
    assert stat.S_IMODE(os.stat(str(entry.folder)).st_mode) == 0o755
    assert serves(store)


@pytest.mark.parametrize("declared", [True, False])
def test_a_group_shares_a_setgid_root(tmp_path: Path, declared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modes follow the umask there, and a second user who names the first is served."""
    root = tmp_path / "group"
    root.mkdir()
    root.chmod(0o2775)
    old = os.umask(0o002)
    try:
        store = Store("site", root, shared=declared)
        folder = Path(str(publish(store).folder))
    finally:
        os.umask(old)
    for file in folder.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o664
    assert folder.stat().st_mode & 0o7777 == 0o2775
    assert folder.parent.stat().st_mode & 0o7777 == 0o2775
    assert serves(store)
    first = os.geteuid()
    for path in (root, *root.rglob("*")):
        if first == 0:
            os.chown(path, FOREIGN, -1)
    monkeypatch.setattr(os, "geteuid", lambda: FOREIGN + 1)
    assert not serves(store)
    assert serves(Store("site", root, shared=declared, owners=[FOREIGN, first]))
