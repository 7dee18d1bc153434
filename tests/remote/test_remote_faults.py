"""What goes wrong on the way to a registry and back: breaks, lies, silence, passwords, TLS, kills."""

from __future__ import annotations

import base64
import json
import multiprocessing
import shutil
import time
from pathlib import Path

import pytest
from registry_lab import Daemon, Proxy, Redirect, closed_port
from remote_help import content, fill, pull, push, registry

from tlhub.cache.store import Store
from tlhub.errors import CacheError
from tlhub.remote import reading
from tlhub.remote.reference import parse
from tlhub.remote.registry import Registry


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
