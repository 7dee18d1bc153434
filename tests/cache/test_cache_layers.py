"""Layers: which are read, written to and copied from, and what a lookup makes of each."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from cache_help import MEMBERS, lookup, make_manifest, publish, serves

from tlhub import catalog, hub, stores
from tlhub.cache.chain import Hit
from tlhub.cache.copying import copy
from tlhub.cache.entry import Damaged
from tlhub.cache.store import Store
from tlhub.errors import NotPrebuilt

PROBLEM = ("gemm", (8, 8, 8), "float32")


@pytest.mark.parametrize(
    ("policy", "access"),
    [
        ("", ("read",)),
        ("?backfill", ("read", "backfill")),
        ("?write", ("read", "write")),
        ("?write&read=no&shared", ("write",)),
        ("?write&backfill&match=exact", ("read", "write", "backfill")),
    ],
)
def test_what_the_policy_of_a_folder_says(
    policy: str, access: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TLHUB_STORES", f"/opt/kernels{policy}")
    (layer,) = stores.site_layers()
    assert layer.access == access and layer.store.writable == ("write" in access)
    order = stores.layers(catalog.load())
    assert order[0].access == ("read", "write") and order[0].store is stores.user_store()
    assert order[1] is layer
    assert (layer.store in stores.chain(catalog.load()).stores) == ("read" in access)


def test_registries_come_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TLHUB_STORES", "oci://localhost:5000/kernels:tag:/opt/kernels")
    order = [(layer.store.origin, layer.access) for layer in stores.layers(catalog.load())]
    assert order[:2] == [("cache", ("read", "write")), ("site", ("read",))]
    assert order[-1] == ("remote", ("read", "backfill"))


def test_a_copy_is_the_entry(tmp_path: Path) -> None:
    entry = publish(Store("one", tmp_path / "one"))
    entry.prepare()
    other = Store("two", tmp_path / "two")
    made = copy(entry, other)
    assert made is not None and made.manifest == entry.manifest and made.store_name == "two"
    assert {name: made.read(name) for name in MEMBERS} == MEMBERS and serves(other)
    assert copy(entry, other) is not None, "what is there already is the copy"
    assert copy(entry, Store("memory", None)) is None


def test_what_is_altered_is_not_copied(tmp_path: Path) -> None:
    entry = publish(Store("one", tmp_path / "one"))
    entry.read("kernel.so")
    Path(str(entry.folder), "kernel.so").write_bytes(b"altered")
    other = Store("two", tmp_path / "two")
    with pytest.raises(Damaged):
        copy(entry, other)
    assert not lookup(other).entries


def hit_of(store: Store) -> Hit:
    (entry,) = lookup(store).entries
    return Hit(entry, "exact", store, 0, make_manifest().problem)


def test_only_where_it_says_so_a_hit_is_copied_up(
    cold_cache: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    publish(Store("build", site))
    for policy, origin in (("", "site"), ("?backfill", "cache")):
        monkeypatch.setenv("TLHUB_STORES", f"{site}{policy}")
        (layer,) = stores.site_layers()
        assert stores.use(hit_of(layer.store)).origin == origin
    assert serves(stores.user_store())


def test_copies_that_the_cache_does_not_trust_do_not_pile_up(tmp_path: Path) -> None:
    site, cache = Store("site", tmp_path / "site"), Store("cache", tmp_path / "cache", signed="require")
    entry = publish(site)
    places = {made.folder for _ in range(3) if (made := copy(entry, cache))}
    assert len(places) == len(lookup(cache).entries) == 1


def test_a_copy_that_cannot_be_made_costs_nothing(
    cold_cache: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path(cold_cache).write_text("no folder")
    publish(Store("build", tmp_path / "site"))
    monkeypatch.setenv("TLHUB_STORES", f"{tmp_path / 'site'}?backfill")
    (layer,) = stores.site_layers()
    assert stores.use(hit_of(layer.store)).store is layer.store


@pytest.fixture
def built(shared_cache: str, tmp_path: Path) -> str:
    """A folder with the kernel of PROBLEM alone."""
    hub.forget()
    folder = Path(str(hub.get(*PROBLEM).entry.folder))
    target = tmp_path / "built" / folder.relative_to(os.path.realpath(shared_cache))
    shutil.copytree(folder, target)
    return str(tmp_path / "built")


def test_a_lookup_fills_the_cache_from_a_layer_below(
    built: str, cold_cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TLHUB_COMPILE", "never")
    monkeypatch.setenv("TLHUB_STORES", f"{built}?backfill")
    assert "built (site; read, backfill)" in str(hub.explain(*PROBLEM))
    assert not os.path.exists(cold_cache), "explaining copies nothing"
    first = hub.get(*PROBLEM)
    assert first.origin in ("site", "memory") and str(first.entry.folder).startswith(os.path.realpath(cold_cache))
    hub.forget()
    monkeypatch.setenv("TLHUB_STORES", "")
    trace = hub.explain(*PROBLEM)
    assert trace.outcome == "served" and trace.hit is not None and trace.hit.origin == "cache"
    assert [layer["access"] for layer in trace.to_json()["layers"]] == [["read", "write"]]


def test_what_is_built_goes_to_the_layers_that_take_it(
    cold_cache: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    share, full = tmp_path / "share", tmp_path / "full"
    full.write_text("no folder")
    text = os.pathsep.join([f"{share}?write&read=no", f"{full}?write", f"{tmp_path / 'other'}"])
    monkeypatch.setenv("TLHUB_STORES", text)
    with pytest.warns(RuntimeWarning, match=f"what is built is not written to {full}: ") as caught:
        key = hub.get(*PROBLEM).key
    assert len(caught) == 1 and "hint: tlhub doctor" in str(caught[0].message)
    assert [item.manifest.build_digest for item in Store("share", share).entries() if item.manifest] == [key]
    assert not (tmp_path / "other").exists()
    shutil.rmtree(cold_cache)
    hub.forget()
    monkeypatch.setenv("TLHUB_COMPILE", "never")
    with pytest.raises(NotPrebuilt):
        hub.get(*PROBLEM)  # it is written to, and not read
    monkeypatch.setenv("TLHUB_STORES", str(share))
    assert hub.get(*PROBLEM).key == key
