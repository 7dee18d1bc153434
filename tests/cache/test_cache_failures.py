"""Places that cannot be written or read: the caller gets the kernel, and nothing half-written is seen."""

from __future__ import annotations

import errno
import os
import stat
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cache_help import GENERAL, MEMBERS, files_below, lookup, make_manifest, publish, serves

from tlhub.cache import staging
from tlhub.cache.store import Store
from tlhub.errors import CacheError

pytestmark = pytest.mark.light

FAILURES = [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EXDEV, errno.ESTALE, errno.EBUSY, errno.EIO]


def failing(real: Callable[..., Any], code: int, under: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(arg, str) and arg.startswith(under) for arg in args) or isinstance(args[0], int):
            raise OSError(code, os.strerror(code))
        return real(*args, **kwargs)

    return call


@pytest.mark.parametrize("code", FAILURES, ids=errno.errorcode.get)
@pytest.mark.parametrize("call", ["mkdir", "fsync", "rename"])
def test_the_caller_gets_the_kernel_whatever_fails(
    store: Store, call: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, call, failing(getattr(os, call), code, str(store.root)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        entries = [publish(store), publish(store, make_manifest(GENERAL))]
    for entry in entries:
        assert entry.folder is None and not entry.published
        assert entry.read("kernel.so") == MEMBERS["kernel.so"]
    assert len(caught) == 1, "one warning a store"
    assert os.strerror(code) in str(caught[0].message) and str(store.root) in str(caught[0].message)
    assert "\nhint: export TLHUB_CACHE_DIR=" in str(caught[0].message)
    monkeypatch.undo()
    assert [f for f in files_below(str(store.root)) if "/.locks/" not in f] == []
    assert serves(store), "the process finds again what it keeps in memory"
    assert not serves(Store("user", str(store.root)))


@pytest.mark.parametrize("code", [errno.EEXIST, errno.ENOTEMPTY, errno.ENOENT], ids=errno.errorcode.get)
def test_who_loses_to_a_winner_that_cannot_be_seen_yet_keeps_its_own(
    store: Store, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network file system says for a while that what another machine renamed into place is not there."""
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", failing(os.rename, code, str(store.root)))
        with pytest.warns(RuntimeWarning, match="only in memory"):
            entry = publish(store)
    assert entry.folder is None and entry.read("kernel.so") == MEMBERS["kernel.so"]
    publish(Store("user", str(store.root)))  # the other machine's, seen at last
    assert serves(store) and serves(Store("user", str(store.root)))


def test_a_full_disk_is_no_place_to_build_in(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(store, make_manifest(GENERAL))
    real = os.statvfs(str(store.root))
    for full in ({3: 0, 4: 0}, {6: 0, 7: 0}):  # blocks free and available, inodes likewise
        values = [full.get(index, value) for index, value in enumerate(real[:10])]
        values[5] = values[5] or 1000
        monkeypatch.setattr(os, "statvfs", lambda path, values=values: os.statvfs_result(values))
        full_store = Store("user", str(store.root))
        with full_store.stage() as staged:
            assert not staged.path.startswith(str(store.root))
            assert stat.S_IMODE(os.stat(staged.path).st_mode) == 0o700
        with pytest.warns(RuntimeWarning, match="the disk is full|no inodes"):
            assert publish(full_store).folder is None
        assert serves(full_store) and lookup(full_store, make_manifest(GENERAL)).entries

    def full(parent: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(staging, "private", full)
    with pytest.raises(CacheError, match="No space left") as caught:
        Store("user", str(store.root)).check()
    assert caught.value.hint


@pytest.mark.parametrize("kind", ["file", "below a file", "dangling link", "under /proc"])
def test_a_root_that_is_no_folder(tmp_path: Path, kind: str) -> None:
    place = tmp_path / "root"
    if kind == "file":
        place.write_text("mine")
    elif kind == "below a file":
        place.write_text("mine")
        place = place / "deeper"
    elif kind == "under /proc":
        place = Path("/proc/self/tlhub")  # no one makes folders there, root neither
    else:
        place.symlink_to("/proc/self/tlhub")
    store = Store("user", place)
    with pytest.raises(CacheError, match="the cache folder cannot be used") as caught:
        store.check()
    assert caught.value.hint and str(store.root) in str(caught.value)
    with pytest.warns(RuntimeWarning, match="only in memory"):
        entry = publish(store)
    assert entry.read("kernel.so") == MEMBERS["kernel.so"]
    assert serves(store)
    if kind == "file":
        assert place.read_text() == "mine"
        assert "is not a folder" in lookup(store).skipped[0].reason
    with store.lock("x") as lock:
        assert not lock


def test_a_root_that_is_a_link_is_what_it_leads_to(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    store = Store("user", tmp_path / "link")
    assert str(publish(store).folder).startswith(str(tmp_path / "real"))
    assert serves(store)


def test_memory_only(tmp_path: Path) -> None:
    store = Store("user", None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        entry = publish(store)
    assert entry.folder is None and serves(store)
    assert list(store.entries()) == []
    with store.lock("x") as lock:
        assert not lock


def test_nowhere_to_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tempfile

    def full(*args: Any, **kwargs: Any) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tempfile, "mkdtemp", full)
    with pytest.raises(CacheError, match="no folder to build in") as caught:
        Store("user", None).stage()
    assert "TMPDIR" in str(caught.value.hint)


def test_a_read_only_store_takes_nothing(store: Store) -> None:
    publish(store)
    site = Store("site", str(store.root), origin="site", writable=False)
    assert serves(site)
    for attempt in (site.stage, site.check):
        with pytest.raises(CacheError, match="read-only"):
            attempt()


UNREADABLE = [errno.ESTALE, errno.EIO, errno.EBUSY, errno.EACCES, errno.EMFILE]


@pytest.mark.parametrize("code", UNREADABLE, ids=errno.errorcode.get)
@pytest.mark.parametrize("call", ["open", "read", "listdir", "lstat", "fstat"])
def test_what_cannot_be_read_is_a_miss_and_stays(
    store: Store, call: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(store)
    before = files_below(str(store.root))
    real = getattr(os, call)

    def fail(place: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(place, int) or str(place).startswith(str(store.root)) or "dir_fd" in kwargs:
            raise OSError(code, os.strerror(code))
        return real(place, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        found = lookup(store)
        assert not found.entries and os.strerror(code) in found.skipped[0].reason
        assert not serves(store)
    assert serves(store) and files_below(str(store.root)) == before


def test_what_was_found_outlives_its_folder(store: Store) -> None:
    """Truncated, removed or stale afterwards: the verified bytes are in memory."""
    publish(store)
    (entry,) = lookup(store).entries
    entry.prepare()
    library = Path(str(entry.folder), "kernel.so")
    os.truncate(library, 0)
    library.unlink()
    assert entry.read("kernel.so") == MEMBERS["kernel.so"]
