"""Signatures go with the last entry that they are of: whoever removes it, and whatever is wrong with it."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest
from cache_help import GENERAL, make_manifest, publish

from tlhub.cache import prune, repair, signature
from tlhub.cache.entry import Entry
from tlhub.cache.store import Store

pytestmark = pytest.mark.light

SIGNERS = ("a" * 16, "b" * 16)


def sign(store: Store, entry: Entry) -> None:
    for signer in SIGNERS:
        signature.write(store, entry.manifest.sha256, signer, bytes(signature.LENGTH))


def signed(store: Store) -> list[str]:
    """Return the beginnings of the digests of which there are signatures, each as often as there are."""
    folder = Path(str(store.root), signature.SIGNATURES)
    return sorted(path.name[:64] for path in folder.iterdir()) if folder.is_dir() else []


@pytest.fixture
def two(store: Store) -> tuple[Entry, Entry]:
    found = publish(store), publish(store, make_manifest(GENERAL))
    for entry in found:
        sign(store, entry)
        if entry._hold:
            entry._hold.release()
    return found


def test_prune_and_clear_take_them_along(store: Store, two: tuple[Entry, Entry]) -> None:
    first, second = two
    items = [item for item in store.entries() if item.manifest and item.manifest.build_digest == first.key]
    assert prune.remove(store, prune.Plan(tuple((item, "old") for item in items), ())).count == 1
    assert signed(store) == [second.manifest.sha256] * 2
    assert prune.clear(store).count == 1 and signed(store) == []


def test_what_is_spared_keeps_them(store: Store, two: tuple[Entry, Entry]) -> None:
    hold = store.open(next(iter(store.entries()))).hold()
    assert hold and prune.clear(store).count == 1 and len(signed(store)) == 2


def test_repair_takes_them_along(store: Store, two: tuple[Entry, Entry]) -> None:
    first, second = two
    Path(str(first.folder), "kernel.so").write_bytes(b"torn")
    done = repair.repair(store, repair.verify(store).damaged)
    assert len(done.moved) == 1 and signed(store) == [second.manifest.sha256] * 2


@pytest.mark.parametrize("remove", ["prune", "repair"])
def test_a_rebuild_of_the_same_bytes_keeps_them(store: Store, two: tuple[Entry, Entry], remove: str) -> None:
    first, second = two
    shutil.copytree(str(first.folder), f"{first.folder}.1")
    Path(str(first.folder), "kernel.so").write_bytes(b"torn")
    damaged = repair.verify(store).damaged
    if remove == "prune":
        assert prune.remove(store, prune.Plan(tuple((item, "damaged") for item in damaged), ())).count == 1
    else:
        assert len(repair.repair(store, damaged).moved) == 1
    assert signed(store) == sorted([first.manifest.sha256, second.manifest.sha256] * 2)
    assert prune.clear(store).count == 2 and signed(store) == []


def test_repair_finds_those_of_no_entry(store: Store, two: tuple[Entry, Entry]) -> None:
    """Of an altered manifest nobody can tell which they were; of what somebody else removed, nobody did."""
    first, second = two
    manifest = Path(str(first.folder), "entry.json")
    manifest.write_bytes(manifest.read_bytes().replace(b"gemm", b"gimm"))
    assert len(repair.repair(store, repair.verify(store).damaged).moved) == 1
    assert len(signed(store)) == 4, "they may be of an entry that is about to come"
    yesterday = time.time() - 90000
    for path in Path(str(store.root), signature.SIGNATURES).iterdir():
        os.utime(path, (yesterday, yesterday))
    assert repair.repair(store, ()).orphans == 2 and signed(store) == [second.manifest.sha256] * 2
    assert repair.repair(store, ()).orphans == 0
    shutil.rmtree(str(second.folder))
    assert repair.repair(store, ()).orphans == 2 and signed(store) == []


def test_what_cannot_be_read_may_have_them(store: Store, two: tuple[Entry, Entry]) -> None:
    yesterday = time.time() - 90000
    for path in Path(str(store.root), signature.SIGNATURES).iterdir():
        os.utime(path, (yesterday, yesterday))
    os.chmod(str(two[0].folder), 0o777)  # not trusted, and mended by a chmod
    assert repair.repair(store, repair.verify(store).damaged).orphans == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "walk", lambda top, onerror: onerror(PermissionError(top)))
        shutil.rmtree(str(two[1].folder))
        assert repair.repair(store, ()).orphans == 0 and len(signed(store)) == 4


def test_a_link_in_the_place_of_the_folder_is_not_followed(
    store: Store, two: tuple[Entry, Entry], tmp_path: Path
) -> None:
    folder = Path(str(store.root), signature.SIGNATURES)
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    assert prune.clear(store).count == 2 and len(os.listdir(tmp_path / "elsewhere")) == 4


def test_a_reader_removes_none(store: Store, two: tuple[Entry, Entry]) -> None:
    Path(str(two[0].folder), "kernel.so").write_bytes(b"torn")
    list(store.entries())
    repair.verify(store)
    assert len(signed(store)) == 4
