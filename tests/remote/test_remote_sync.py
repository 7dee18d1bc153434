"""Push and pull against a real registry: what arrives, what is sent twice, and what goes wrong on the way."""

from __future__ import annotations

import io
import json
import threading
from pathlib import Path

import pytest
from registry_lab import Daemon, Proxy
from remote_help import content, fill, pull, push, registry

from tlhub.cache import keyring, signature
from tlhub.cache.store import Store
from tlhub.errors import ArgumentError, CacheError
from tlhub.remote import reading
from tlhub.remote.artifact import EMPTY, MEDIA_TYPE
from tlhub.remote.layer import sha256

HOPPER = "cuda:sm_90a"


def test_what_is_pushed_is_pulled_byte_for_byte(daemon: Daemon, source: Store, target: Store) -> None:
    place = daemon.place("round/trip")
    fill(source, 3)
    fill(source, 2, HOPPER)
    done = push(place, source)
    assert (done.entries, done.present, done.refused) == (5, 0, [])
    digest, shelves = reading.shelves(registry(place))
    assert sorted((s.layer.arch, len(s.front.rows)) for s in shelves) == [("cpu:x86-64-v3", 3), (HOPPER, 2)]
    assert digest == done.digest
    got = pull(place, target)
    assert (got.entries, got.present, got.refused) == (5, 0, []) and got.digest == done.digest
    assert content(target) == content(source)
    again = pull(place, target)
    assert (again.entries, again.present) == (0, 5)
    assert [list(reading.verify(registry(place), shelf)) for shelf in shelves] == [[], []]


def test_the_same_entries_make_the_same_artifact(daemon: Daemon, source: Store, tmp_path: Path) -> None:
    fill(source, 3)
    other = Store("other", tmp_path / "other")
    for first in (3, 2, 1):
        fill(other, 1, first=first)
    assert push(daemon.place("same/one"), source).digest == push(daemon.place("same/two"), other).digest


def test_only_what_is_new_is_sent(daemon: Daemon, source: Store) -> None:
    place = daemon.place("new/only")
    fill(source, 2)
    first = push(place, source)
    again = push(place, source)
    assert (again.entries, again.present, again.size, again.digest) == (0, 2, 0, first.digest)
    fill(source, 1, first=7)
    third = push(place, source)
    assert (third.entries, third.present) == (1, 2)
    assert len(reading.shelves(registry(place))[1]) == 2
    whole = push(place, source, replace=True)
    assert whole.entries == 3 and len(reading.shelves(registry(place))[1]) == 1


def test_one_arch_is_read_with_few_requests_and_no_byte_of_another(proxy: Proxy, source: Store, target: Store) -> None:
    place = proxy.place("few/requests")
    fill(source, 40)
    fill(source, 3, HOPPER)
    push(place, source)
    proxy.seen.clear()
    done = pull(place, target, archs=[HOPPER])
    assert done.entries == 3 and {i.manifest.arch for i in target.entries() if i.manifest} == {HOPPER}
    assert len(proxy.seen) == 3  # the artifact, the front, the members
    assert len({path for _, path in proxy.seen if "/blobs/" in path}) == 1
    proxy.seen.clear()
    odd = pull(place, target, wanted=lambda m: m.arch != HOPPER and m.problem.dim["M"] % 2 == 1)
    assert odd.entries == 20 and len(proxy.seen) <= 4


def test_parts_far_apart_are_read_apart(proxy: Proxy, source: Store, target: Store) -> None:
    place = proxy.place("far/apart")
    fill(source, 3, size=200_000)
    push(place, source)
    _, (shelf,) = reading.shelves(registry(place))
    outer = {shelf.front.rows[0].manifest.sha256, shelf.front.rows[2].manifest.sha256}
    proxy.seen.clear()
    assert pull(place, target, wanted=lambda m: m.sha256 in outer).entries == 2
    assert len(proxy.seen) == 4


def test_signatures_travel_and_can_follow(daemon: Daemon, source: Store, target: Store) -> None:
    place = daemon.place("signed/entries")
    alice, bob = (keyring.signer(keyring.generate(name)[0]) for name in ("alice", "bob"))
    entry, _ = fill(source, 2)
    signature.write(source, entry.manifest.sha256, alice.id, alice.sign(entry.manifest))
    push(place, source)
    pull(place, target)
    assert set(signature.find(str(target.root), entry.manifest.sha256)) == {alice.id}
    signature.write(source, entry.manifest.sha256, bob.id, bob.sign(entry.manifest))
    again = push(place, source)
    assert again.entries == 0 and again.present == 2 and again.size > 0
    pull(place, target)
    assert set(signature.find(str(target.root), entry.manifest.sha256)) == {alice.id, bob.id}


def test_a_store_that_requires_signatures_takes_no_other_entry(daemon: Daemon, source: Store, tmp_path: Path) -> None:
    place = daemon.place("strict/pull")
    alice = keyring.signer(keyring.generate("alice")[0])
    signed, _ = fill(source, 2)
    signature.write(source, signed.manifest.sha256, alice.id, alice.sign(signed.manifest))
    push(place, source)
    strict = Store("strict", tmp_path / "strict", signed="require")
    refused = pull(place, strict)
    assert refused.entries == 0 and len(refused.refused) == 2
    keyring.trust_key("alice", str(tmp_path / "home/config/tlhub/keys/alice.pub"))
    done = pull(place, strict)
    assert done.entries == 1 and [i.manifest.sha256 for i in strict.entries() if i.manifest] == [signed.manifest.sha256]


def test_a_signature_that_does_not_hold_is_left_out_and_told(
    daemon: Daemon, source: Store, target: Store, tmp_path: Path
) -> None:
    place, (private, public) = daemon.place("signed/wrong"), keyring.generate("alice")
    entry, other = fill(source, 2)
    alice = keyring.signer(private)
    signature.write(source, entry.manifest.sha256, alice.id, alice.sign(other.manifest))
    assert push(place, source).refused == []
    keyring.trust_key("alice", public)
    told = [(entry.manifest.folder, f"its signature by alice ({alice.id}), which does not hold")]
    assert push(daemon.place("signed/told"), source).refused == told
    got = pull(place, target)
    assert got.entries == 2 and got.refused == told
    again = pull(place, target)
    assert again.present == 2 and again.refused == told
    assert signature.find(str(target.root), entry.manifest.sha256) == {}


@pytest.mark.parametrize("settle", [True])
def test_concurrent_pushes_lose_nothing(daemon: Daemon, tmp_path: Path, target: Store) -> None:
    """Eight at once to one tag, as the ranks of a sharded build do."""
    place = daemon.place("at/once")
    stores = [Store(f"s{n}", tmp_path / f"s{n}") for n in range(8)]
    for number, store in enumerate(stores):
        fill(store, 2, first=1 + 2 * number)
    failures: list[BaseException] = []

    def run(store: Store) -> None:
        try:
            push(place, store)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(store,)) for store in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert pull(place, target).entries == 16


def test_a_reference_by_digest_takes_no_other_artifact(proxy: Proxy, source: Store, target: Store) -> None:
    place = proxy.place("by/digest")
    fill(source, 1)
    first = push(place, source)
    fill(source, 1, first=9)
    push(place, source)
    assert pull(f"{place}@{first.digest}", target).entries == 1
    with pytest.raises(ArgumentError, match="push to a tag"):
        push(f"{place}@{first.digest}", source)
    proxy.broken("flip", "GET", "/manifests/", after=50)
    with pytest.raises(CacheError, match="another manifest"):
        pull(f"{place}@{first.digest}", target)


def test_what_is_not_there(daemon: Daemon, target: Store) -> None:
    with pytest.raises(CacheError, match="there is no oci://") as caught:
        pull(daemon.place("not/there"), target)
    assert str(caught.value.hint).startswith("tlhub remote push oci://")


def test_another_tools_artifact_is_no_store(daemon: Daemon, target: Store) -> None:
    place = daemon.place("other/tool")
    there = registry(place)
    there.put_blob(io.BytesIO(EMPTY), sha256(EMPTY))
    config = {"mediaType": "application/vnd.oci.empty.v1+json", "digest": sha256(EMPTY), "size": 2}
    foreign = {"schemaVersion": 2, "mediaType": MEDIA_TYPE, "config": config, "layers": []}
    there.put_manifest(json.dumps(foreign).encode())
    with pytest.raises(CacheError, match="no store of tlhub's"):
        pull(place, target)


def test_a_damaged_entry_is_not_pushed(daemon: Daemon, source: Store) -> None:
    good, bad = fill(source, 2)
    Path(str(bad.folder), "kernel.so").write_bytes(b"\x7fELF evil")
    done = push(daemon.place("damaged/entry"), source)
    assert done.entries == 1 and [where for where, _ in done.refused] == [str(bad.folder)[len(str(source.root)) + 1 :]]


def test_nothing_to_push_is_an_error(daemon: Daemon, source: Store) -> None:
    place = daemon.place("nothing/there")
    with pytest.raises(CacheError, match="nothing to push"):
        push(place, source)
    fill(source, 1)
    push(place, source)
    with pytest.raises(CacheError, match="nothing to push"):
        push(place, source, [], replace=True)
    assert len(reading.shelves(registry(place))[1]) == 1


def test_offline_no_registry_is_asked(proxy: Proxy, target: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TLHUB_OFFLINE", "1")
    with pytest.raises(CacheError, match="TLHUB_OFFLINE is set") as caught:
        pull(proxy.place("off/line"), target)
    assert caught.value.hint == "unset TLHUB_OFFLINE" and proxy.seen == []
