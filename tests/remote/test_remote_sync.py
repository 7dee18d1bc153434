"""Push and pull against a real registry: what arrives, what is sent twice, and what goes wrong on the way."""

from __future__ import annotations

import base64
import io
import json
import multiprocessing
import shutil
import threading
import time
from pathlib import Path

import pytest
from registry_lab import Daemon, Proxy, Redirect, closed_port
from remote_help import content, fill, pull, push, registry

from tlhub.cache import keyring, signature
from tlhub.cache.store import Store
from tlhub.errors import ArgumentError, CacheError
from tlhub.remote import reading
from tlhub.remote.artifact import EMPTY, MEDIA_TYPE
from tlhub.remote.layer import sha256
from tlhub.remote.reference import parse
from tlhub.remote.registry import Registry

HOPPER = "cuda:sm_90a"


@pytest.fixture
def target(tmp_path: Path) -> Store:
    return Store("target", tmp_path / "target")


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


@pytest.mark.parametrize("after", [0, 1, 5000, 150_000])
def test_a_connection_that_breaks_is_taken_up_where_it_broke(
    proxy: Proxy, source: Store, target: Store, after: int
) -> None:
    place = proxy.place(f"broken/pull{after}")
    fill(source, 4, size=100_000)
    push(place, source)
    proxy.broken("cut", "GET", "/blobs/", times=3, after=after)
    assert pull(place, target).entries == 4
    assert content(target) == content(source)


def test_a_registry_that_dies_half_way_leaves_what_came_whole(proxy: Proxy, source: Store, target: Store) -> None:
    fill(source, 4, size=400_000)
    place = proxy.place("dies/pull")
    push(place, source)
    proxy.broken("cut", "GET", "/blobs/", after=300_000)
    with pytest.raises(CacheError, match="127.0.0.1:[0-9]+ (ended|does not answer)"):
        pull(place, target)
    came = content(target)
    assert 0 < len(came) < len(content(source)) and came.items() <= content(source).items()
    assert not list(Path(str(target.root), "v1/.staging").iterdir())
    proxy.fault.kind = ""
    assert pull(place, target).refused == []
    assert content(target) == content(source)


def test_a_pull_that_is_killed_at_any_moment(daemon: Daemon, source: Store, target: Store) -> None:
    """What it leaves is whole, and the next run ends it without repair by hand."""
    place = daemon.place("killed/pull")
    fill(source, 40, size=20_000)
    push(place, source)
    wanted, fork = content(source), multiprocessing.get_context("fork")
    began = time.monotonic()
    pull(place, target)
    whole = time.monotonic() - began
    for number in range(12):
        shutil.rmtree(str(target.root), ignore_errors=True)
        child = fork.Process(target=pull, args=(place, target))
        child.start()
        time.sleep(whole * number / 12)
        child.kill()
        child.join()
        came = content(target)
        assert came.items() <= wanted.items()
        assert all(f"{path.rpartition('/')[0]}/entry.json" in came for path in came)
    pull(place, target)
    assert content(target) == wanted


@pytest.mark.parametrize(("method", "part"), [("PUT", "/uploads/"), ("POST", "/uploads/"), ("PUT", "/manifests/")])
@pytest.mark.parametrize("kind", ["cut", "status", "dead"])
def test_a_push_that_breaks_is_tried_again(proxy: Proxy, source: Store, method: str, part: str, kind: str) -> None:
    place = proxy.place(f"broken/push-{method.lower()}-{part.strip('/')}-{kind}")
    fill(source, 2)
    proxy.broken(kind, method, part, times=2, code=503)
    assert push(place, source).entries == 2
    proxy.fault.kind = ""
    assert len(reading.shelves(registry(place))[1][0].front.rows) == 2


def test_a_push_that_cannot_end_leaves_the_tag_alone(proxy: Proxy, source: Store, target: Store) -> None:
    place = proxy.place("dies/push")
    fill(source, 1)
    before = push(place, source).digest
    fill(source, 3, first=5)
    proxy.broken("dead", "PUT", "/uploads/")
    with pytest.raises(CacheError, match="does not answer"):
        push(place, source)
    proxy.fault.kind = ""
    assert reading.shelves(registry(place))[0] == before
    assert pull(place, target).entries == 1
    assert push(place, source).entries == 3


def test_bytes_that_are_altered_on_the_way_are_asked_for_again(proxy: Proxy, source: Store, target: Store) -> None:
    place = proxy.place("altered/way")
    fill(source, 2)
    push(place, source)
    proxy.broken("flip", "GET", "/blobs/", times=1, after=700)  # of the front
    assert pull(place, target).entries == 2
    assert content(target) == content(source)


def test_a_registry_with_altered_bytes_gives_nothing(tmp_path: Path, source: Store, target: Store) -> None:
    """The registry itself lies, all the time: every part of the layer in turn."""
    with Daemon(tmp_path) as daemon:
        place = daemon.place("altered/blob")
        fill(source, 2)
        push(place, source)
        _, (shelf,) = reading.shelves(registry(place))
        (blob,) = [b for b in daemon.blobs() if b.stat().st_size == shelf.layer.size]
        good = blob.read_bytes()
        for position in range(shelf.front.size, len(good), 283):
            bad = bytearray(good)
            bad[position] ^= 0x40
            blob.write_bytes(bad)
            assert list(reading.verify(registry(place), shelf)), position
            done = pull(place, target)
            assert {i.reason for i in target.entries()} <= {None}
            assert content(target).items() <= content(source).items()
            assert done.entries + done.present + len(done.refused) == 2
        for position in range(0, shelf.front.size, 797):
            bad = bytearray(good)
            bad[position] ^= 0x40
            blob.write_bytes(bad)
            with pytest.raises(CacheError, match="its manifests are not those"):
                pull(place, target)


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


def test_a_registry_without_ranges_serves_all_the_same(proxy: Proxy, source: Store, target: Store) -> None:
    place = proxy.place("no/ranges")
    fill(source, 3, size=50_000)
    push(place, source)
    proxy.broken("noranges", "GET", "/blobs/")
    assert pull(place, target, wanted=lambda m: m.problem.dim["M"] == 3).entries == 1
    assert pull(place, target).entries == 2


def test_a_slow_registry_is_waited_for_and_a_silent_one_is_not(proxy: Proxy, source: Store, target: Store) -> None:
    place = proxy.place("slow/silent")
    fill(source, 1)
    push(place, source)
    proxy.broken("slow", "GET", "/blobs/", after=400)
    assert pull(place, target).entries == 1
    proxy.broken("hang", "GET", "/manifests/")
    with pytest.raises(CacheError, match="does not answer"):
        reading.shelves(registry(place, silence=0.1, pauses=(0.01,)))


def test_a_registry_that_is_not_there(target: Store) -> None:
    port = closed_port()
    with pytest.raises(CacheError, match=f"127.0.0.1:{port} does not answer: Connection refused"):
        pull(f"oci://127.0.0.1:{port}/some/thing:t", target)


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


SECRET = "alice:$2a$04$N6NLA20JkNbdz948tNq6vud5svv7uyriavCjBs1WBhl..ErOmk/Ea\n"
"""What htpasswd writes for the password "secret"."""


def test_a_registry_that_asks_for_a_login(
    tmp_path: Path, source: Store, target: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(source, 2)
    with Daemon(tmp_path, passwords=SECRET) as daemon:
        place, host = daemon.place("private/store"), f"127.0.0.1:{daemon.port}"
        for word in (None, "wrong", "secret"):
            config = tmp_path / f"docker-{word}"
            config.mkdir()
            if word:
                auth = base64.b64encode(f"alice:{word}".encode()).decode()
                (config / "config.json").write_text(json.dumps({"auths": {host: {"auth": auth}}}))
            monkeypatch.setenv("DOCKER_CONFIG", str(config))
            if word == "secret":
                assert push(place, source).entries == 2 and pull(place, target).entries == 2
            else:
                with pytest.raises(CacheError, match=rf"{host} (asks for a login|does not let you)") as caught:
                    push(place, source)
                assert caught.value.hint == f"docker login {host}"
        (config / "config.json").write_text("no JSON")
        with pytest.raises(CacheError, match="asks for a login"):
            pull(place, target)


def test_tls_is_checked_and_never_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Redirect(tmp_path, "http://127.0.0.1:1/v2/") as server:
        tls = parse(f"oci://localhost:{server.port}/a:t")._replace(plain=False)
        with pytest.raises(CacheError, match="TLS fails: .*self-signed certificate"):
            Registry(tls, pauses=()).manifest()
        monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(server.certificate))
        with pytest.raises(CacheError, match="redirects to where there is no TLS"):
            Registry(tls, pauses=()).manifest()
        with pytest.raises(CacheError, match="does not answer"):  # plain HTTP is nothing that it speaks
            Registry(tls._replace(plain=True), pauses=()).manifest()


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
