from __future__ import annotations

import dataclasses
import os
import stat
import time
from pathlib import Path
from typing import Any

import pytest
from cache_help import ARCH, GENERAL, MEMBERS, PROBLEM, files_below, lookup, make_manifest, publish, serves

from tlhub.cache import key
from tlhub.cache.entry import MANIFEST, Manifest
from tlhub.cache.store import Store
from tlhub.errors import CacheError

pytestmark = pytest.mark.light


def test_publish_then_lookup_by_another_store_object(store: Store) -> None:
    entry = publish(store)
    assert entry.published and entry.read("kernel.so") == MEMBERS["kernel.so"]
    found = lookup(Store("user", str(store.root)))
    assert not found.skipped
    (again,) = found.entries
    assert (again.folder, again.manifest, again.key) == (entry.folder, entry.manifest, entry.key)
    assert str(again.folder) == f"{store.root}/{key.folder(ARCH, 'gemm', again.manifest.problem_digest, again.key)}"
    assert again.read("kernel.c") == MEMBERS["kernel.c"]
    assert os.listdir(f"{store.root}/v1/.staging") == []


def test_a_lookup_writes_nothing(store: Store, tmp_path: Path) -> None:
    assert lookup(store) == ((), ())
    assert list(tmp_path.iterdir()) == []


def test_a_lookup_asks_the_system_no_more_of_a_larger_store(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def count() -> int:
        asked.clear()
        assert serves(store)
        return len(asked)

    publish(store)
    for call in ("open", "listdir", "scandir", "lstat", "stat", "fstat", "read"):
        real = getattr(os, call)
        monkeypatch.setattr(os, call, lambda *a, real=real, call=call, **k: (asked.append(call), real(*a, **k))[1])
    before = count()
    for extent in range(1, 41):
        problem = dataclasses.replace(PROBLEM, dims=(("B", extent), *GENERAL.dims[1:]))
        publish(store, make_manifest(problem))
    assert before == count() > 0


def test_other_problems_are_not_found(store: Store) -> None:
    publish(store)
    assert not lookup(store, make_manifest(GENERAL)).entries
    assert not lookup(store, make_manifest(arch="cpu:x86-64-v4")).entries


def test_only_the_members_named_are_published(store: Store) -> None:
    with store.stage() as staged:
        for name in ("kernel.so", "kernel.o", "note.txt"):
            Path(staged.path, name).write_bytes(b"x")
        Path(staged.path, "sub").mkdir()
        Path(staged.path, "sub", "file").touch()
        entry = store.publish(staged, make_manifest(), members=("kernel.so", "note.txt"))
    assert sorted(os.listdir(str(entry.folder))) == ["entry.json", "kernel.so", "note.txt"]
    assert serves_any(store)


def serves_any(store: Store) -> bool:
    (entry,) = lookup(store).entries
    entry.verify()
    return True


@pytest.mark.parametrize(
    ("members", "says"),
    [({}, r"no 'kernel\.so'"), ({"kernel.so": b"", "a b": b""}, "no name of a member: 'a b'")],
)
def test_nothing_to_publish(store: Store, members: dict[str, bytes], says: str) -> None:
    with pytest.raises(CacheError, match=says):
        publish(store, members=members)
    assert files_below(str(store.root)) == []
    with pytest.raises(CacheError, match="nothing to publish"), store.stage() as staged:
        Path(staged.path, "kernel.so").touch()
        store.publish(staged, make_manifest(least_driver=-1))


def test_a_link_is_not_published(store: Store, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    with pytest.raises(CacheError, match="is a link"), store.stage() as staged:
        Path(staged.path, "kernel.so").symlink_to(tmp_path / "secret")
        store.publish(staged, make_manifest())


def test_a_staging_folder_is_private_and_goes_when_the_build_fails(store: Store) -> None:
    old = os.umask(0)
    try:
        with pytest.raises(RuntimeError), store.stage() as staged:
            assert stat.S_IMODE(os.stat(staged.path).st_mode) == 0o700
            assert staged.path.startswith(f"{store.root}/v1/.staging/")
            Path(staged.path, "half").touch()
            raise RuntimeError("the compiler failed")
    finally:
        os.umask(old)
    assert files_below(str(store.root)) == [] and os.listdir(f"{store.root}/v1/.staging") == []


def test_the_loser_of_a_race_uses_the_winners(store: Store) -> None:
    first = publish(store)
    second = publish(store, members={**MEMBERS, "kernel.c": b"the same build, other bytes"})
    assert second.folder == first.folder and second.read("kernel.c") == MEMBERS["kernel.c"]
    assert len(list(store.entries())) == 1


@pytest.mark.parametrize("damage", ["torn", "file", "link", "empty"])
def test_a_damaged_entry_is_healed_beside_it_and_not_deleted(store: Store, damage: str, tmp_path: Path) -> None:
    folder = Path(str(publish(store).folder))
    if damage == "torn":
        (folder / "kernel.so").write_bytes(b"")
    else:
        folder.rename(tmp_path / "moved")
        if damage == "file":
            folder.write_text("x")
        elif damage == "link":
            folder.symlink_to(tmp_path / "moved")
        else:
            folder.mkdir()
            (folder / "stray").touch()
    assert not serves(store)
    entry = publish(store)
    assert entry.folder == f"{folder}.1" and serves(store)
    assert os.path.lexists(folder)
    assert publish(store).folder == entry.folder


def test_when_every_place_is_damaged_the_kernel_is_in_memory(store: Store) -> None:
    folder = str(publish(store).folder)
    (Path(folder) / "kernel.so").write_bytes(b"")
    for number in range(1, 8):
        Path(f"{folder}.{number}").touch()
    with pytest.warns(RuntimeWarning, match="damaged"):
        entry = publish(store)
    assert entry.folder is None and entry.read("kernel.so") == MEMBERS["kernel.so"]


@pytest.mark.parametrize("name", ["a b'c$x", "ünïcödé ✓", "new\nline", "-rf", "~", '"; touch pwned; "'])
def test_awkward_paths(tmp_path: Path, name: str) -> None:
    store = Store("user", tmp_path / name)
    publish(store)
    assert serves(store)
    with store.lock("x") as lock:
        assert lock
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("kernel", ["k" * 500, "../../../escape", "a/b", "acme-kernels:gemm", "核", "con"])
def test_awkward_kernel_names(store: Store, kernel: str) -> None:
    manifest = make_manifest(dataclasses.replace(PROBLEM, kernel=kernel))
    folder = str(publish(store, manifest).folder)
    (entry,) = lookup(store, manifest).entries
    assert entry.manifest.kernel == kernel
    assert os.path.realpath(folder).startswith(f"{store.root}/v1/")
    for file in files_below(str(store.root)):
        assert len(file) <= 120
        assert max(len(os.fsencode(part)) for part in file.split("/")) <= 255


def test_sizes_are_bytes(store: Store) -> None:
    folder = Path(str(publish(store, members={"kernel.so": b"x" * 688_844}).folder))
    (item,) = store.entries()
    assert item.size == 688_844 + (folder / MANIFEST).stat().st_size
    assert (item.files, item.reason) == (2, None)
    assert f"{store.root}/{item.folder}" == str(folder)


def test_listing_says_what_is_wrong_and_goes_on(store: Store, tmp_path: Path) -> None:
    folder = Path(str(publish(store).folder))
    publish(store, make_manifest(GENERAL))
    (folder / MANIFEST).write_bytes(b"{}")
    (folder.parent / "stray").write_text("x")
    (folder.parent / "link").symlink_to(tmp_path)
    (folder.parents[2] / "arch-link").symlink_to("/")
    items = {item.folder.rpartition("/")[2]: item for item in store.entries()}
    assert len(items) == 5
    assert "torn or altered" in str(items[folder.name].reason)
    assert "is not a folder" in str(items["stray"].reason)
    assert "is a link" in str(items["link"].reason) and "is a link" in str(items["arch-link"].reason)
    assert sum(item.manifest is not None for item in items.values()) == 1


def test_use_is_noted_once_a_day(store: Store) -> None:
    publish(store)
    path = f"{lookup(store).entries[0].folder}/{MANIFEST}"
    now = time.time()
    for stamp, noted in ((now - 3600, False), (now - 2 * 86400, True), (now + 10 * 365 * 86400, True)):
        os.utime(path, (stamp, stamp))
        store.touch(lookup(store).entries[0], now)
        assert os.stat(path).st_mtime == pytest.approx(now if noted else stamp, abs=1)
    assert serves(store), "a new time stamp is no damage"
    os.utime(path, (1, 1))
    Store("user", str(store.root), writable=False).touch(lookup(store).entries[0], now)
    assert os.stat(path).st_mtime == 1


def test_it_rebuilds_after_the_parent_was_pruned(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between making the folders and renaming into them, prune may remove the empty ones."""
    real, calls = os.rename, []

    def rename(source: str, target: str, **kwargs: Any) -> None:
        calls.append(target)
        if len(calls) == 1:
            os.rmdir(os.path.dirname(target))
        real(source, target, **kwargs)

    monkeypatch.setattr(os, "rename", rename)
    assert publish(store).folder is not None
    assert len(calls) == 2 and serves(store)


def test_the_manifest_on_disk_is_the_entrys(store: Store) -> None:
    entry = publish(store)
    assert Manifest.parse((Path(str(entry.folder)) / MANIFEST).read_bytes()) == entry.manifest
