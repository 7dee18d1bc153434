"""Whatever a registry sends: an answer or a CacheError, and no file but in the store."""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hostile import ARCH, CONTENT, DOCUMENTS, FRONT, FRONTS, GOOD, MANIFESTS, Shelved, body, mutated, spoilt
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from remote_help import content

from tlhub.cache.entry import Damaged
from tlhub.cache.store import Store
from tlhub.errors import CacheError
from tlhub.remote import artifact, layer, reading, sync


def often(times: int) -> settings:
    return settings(
        max_examples=times, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck)
    )


@often(500)
@given(DOCUMENTS)
def test_any_document(data: bytes) -> None:
    try:
        found = artifact.parse(data)
    except Damaged:
        return
    for item in found:
        assert 0 <= item.front_size < item.size and ":" in item.arch and "/" not in item.arch
    assert artifact.parse(artifact.document(found)) == tuple(sorted(set(found)))


@often(500)
@given(FRONTS)
def test_any_front(data: bytes) -> None:
    try:
        front = layer.read(data, ARCH)
    except Damaged:
        return
    assert layer.plan([row.manifest for row in front.rows], front.signatures)[0] == data
    for row in front.rows:
        assert os.path.normpath(row.manifest.folder) == row.manifest.folder
        assert row.manifest.folder.startswith("v1/") and ".." not in row.manifest.folder


@often(300)
@given(FRONTS, st.one_of(st.just(body(MANIFESTS)), spoilt(body(MANIFESTS))), st.sampled_from([None, 1 << 39]))
def test_any_layer_whose_digests_are_right(front: bytes, rest: bytes, size: int | None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder, "a", "store")
        store = Store("cache", root)
        registry = Shelved(front, rest, size)
        try:
            _, shelves = reading.shelves(registry)  # type: ignore[arg-type]
            for shelf in shelves:
                list(reading.verify(registry, shelf))  # type: ignore[arg-type]
            done = sync.pull(registry, store)  # type: ignore[arg-type]
        except CacheError:
            pass
        else:
            assert done.entries + len(done.refused) == sum(len(shelf.front.rows) for shelf in shelves)
        _only_right_bytes_within(store, Path(folder))


@often(60)
@given(spoilt(body(MANIFESTS)))
def test_members_that_are_altered_are_never_published(rest: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = Store("cache", Path(folder, "store"))
        good = body(MANIFESTS)
        try:
            sync.pull(Shelved(FRONT, rest, len(FRONT) + len(good)), store)  # type: ignore[arg-type]
        except CacheError:
            pass
        _only_right_bytes_within(store, Path(folder))


@pytest.mark.parametrize(("good", "parse"), [(GOOD, artifact.parse), (FRONT, lambda data: layer.read(data, ARCH))])
def test_five_thousand_spoilt_inputs(good: bytes, parse: Callable[[bytes], object]) -> None:
    """Mutations that are dumber than hypothesis's, and a hundred times as fast."""
    dice, refused = random.Random(1), 0
    for _ in range(5000):
        try:
            parse(mutated(good, dice))
        except Damaged:
            refused += 1
    assert refused > 4000  # the others are as good as they were


def test_what_is_whole_is_read() -> None:
    """The fuzzed tests would pass if nothing ever was."""
    assert len(artifact.parse(GOOD)) == 1
    front = layer.read(FRONT, ARCH)
    assert [row.manifest for row in front.rows] == sorted(MANIFESTS, key=lambda m: m.folder) and len(
        front.signatures
    ) == 1
    with tempfile.TemporaryDirectory() as folder:
        store = Store("cache", Path(folder, "store"))
        assert sync.pull(Shelved(FRONT, body(MANIFESTS)), store).entries == 3  # type: ignore[arg-type]


def test_an_entry_of_another_arch_is_out_of_place() -> None:
    with pytest.raises(Damaged, match="out of place in a layer for cuda:sm_90a"):
        layer.read(FRONT, "cuda:sm_90a")


def _only_right_bytes_within(store: Store, folder: Path) -> None:
    for path, data in content(store).items():
        name = path.rpartition("/")[2]
        assert data == CONTENT.get(name, data) and name in (*CONTENT, "entry.json")
    outside = [p for p in folder.rglob("*") if p.is_file() and Path(str(store.root)) not in p.parents]
    assert outside == []
    assert not Path("/tmp/escaped").exists()
