"""A registry in the chain: read lazily, kept in the cache, refused in silence, and off when it is off."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import threading
import time
from pathlib import Path

import pytest
from registry_lab import Daemon, Proxy, closed_port
from remote_help import content, fill, problem, push, registry

from tlhub.cache import keyring, signature, vouching
from tlhub.cache.chain import Chain, Hit, Wanted
from tlhub.cache.store import Store
from tlhub.errors import ArgumentError
from tlhub.remote import artifact
from tlhub.remote import store as module
from tlhub.remote.reference import parse
from tlhub.remote.store import RemoteStore
from tlhub.stores import remote_stores, site_stores

ARCH = "cpu:x86-64-v3"


@pytest.fixture
def cache(tmp_path: Path) -> Store:
    return Store("cache", tmp_path / "cache")


def remote(place: str, cache: Store, **more: str) -> RemoteStore:
    return RemoteStore(parse(place), lambda: cache, **more)


def find(chain: Chain, m: int = 1) -> tuple[Hit | None, str]:
    want = Wanted("gemm.cpu", 3, "5" * 64, {"tile": 64, "pack": True, "order": "mnk"}, [problem(m)])
    hit, trace = chain.find(ARCH, [want])
    return hit, "; ".join(trace[-1].reasons)


def test_a_hit_is_in_the_cache_from_then_on(proxy: Proxy, source: Store, cache: Store) -> None:
    place = proxy.place("lazy/hit")
    made = fill(source, 30)
    push(place, source)
    chain = Chain([cache, remote(place, cache)])
    proxy.seen.clear()
    hit, _ = find(chain, 7)
    assert hit is not None and hit.origin == "remote" and hit.entry.key == made[6].key
    assert hit.entry.read("kernel.so") == made[6].read("kernel.so") and hit.entry.read("kernel.c") == b"// 7\n"
    assert len(proxy.seen) == 3  # the artifact, the front, one entry
    assert len(list(cache.entries())) == 1
    again, _ = find(chain, 7)
    assert again is not None and again.origin == "cache" and len(proxy.seen) == 3
    other, _ = find(chain, 8)
    assert other is not None and other.origin == "remote" and len(proxy.seen) == 4
    assert find(chain, 99)[0] is None and len(proxy.seen) == 4  # a miss asks nothing that is known
    assert content(cache).items() <= content(source).items()


def test_what_changes_there_is_seen_later(
    proxy: Proxy, source: Store, cache: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = proxy.place("lazy/fresh")
    fill(source, 1)
    push(place, source)
    chain = Chain([cache, remote(place, cache)])
    assert find(chain, 2)[0] is None
    fill(source, 1, first=2)
    push(place, source)
    assert find(chain, 2)[0] is None
    monkeypatch.setattr(module, "_FRESH", 0.0)
    assert find(chain, 2)[0] is not None


def test_a_registry_that_fails_is_left_alone_for_a_while(
    proxy: Proxy, source: Store, cache: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = proxy.place("lazy/fails")
    fill(source, 1)
    push(place, source)
    monkeypatch.setattr(module, "_PAUSES", (0.01,))
    proxy.broken("dead", "GET", "/manifests/")
    proxy.seen.clear()
    chain = Chain([cache, remote(place, cache)])
    hit, why = find(chain)
    assert hit is None and "does not answer" in why and len(proxy.seen) == 2
    assert find(chain)[0] is None and len(proxy.seen) == 2
    proxy.fault.kind = ""
    monkeypatch.setattr(module, "_SULK", 0.0)
    assert find(chain)[0] is not None


def test_a_registry_that_dies_between_the_list_and_the_entry_is_a_miss(
    proxy: Proxy, source: Store, cache: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = proxy.place("lazy/dies")
    fill(source, 2)
    push(place, source)
    monkeypatch.setattr(module, "_PAUSES", (0.01,))
    chain = Chain([cache, remote(place, cache)])
    find(chain, 5)
    proxy.broken("cut", "GET", "/blobs/", after=700)
    proxy.seen.clear()
    hit, why = find(chain)
    assert hit is None and "does not answer" in why and len(proxy.seen) == 2
    assert find(chain, 2)[0] is None and len(proxy.seen) == 2
    assert not list(cache.entries())


def test_a_registry_that_is_not_there_is_a_reason(cache: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PAUSES", ())
    hit, why = find(Chain([cache, remote(f"oci://127.0.0.1:{closed_port()}/no/one:t", cache)]))
    assert hit is None and "Connection refused" in why


def answering(*pieces: bytes, pause: float = 0.0) -> str:
    """Return a place where whoever asks gets *pieces* one after the other, each after a while."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            connection, _ = server.accept()
            with connection, contextlib.suppress(OSError):
                for piece in pieces:
                    time.sleep(pause)
                    connection.sendall(piece)

    threading.Thread(target=serve, daemon=True).start()
    return f"oci://127.0.0.1:{server.getsockname()[1]}/no/one:t"


@pytest.mark.parametrize("head", [b"HTTP/1.1 200 OK\r\nContent-Length: 999\r\n\r\n", b"HTTP/1.1 200 OK\r\n"])
def test_a_registry_that_sends_a_byte_now_and_then_is_not_waited_for(
    cache: Store, head: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PATIENCE", 1.0)
    began = time.monotonic()
    hit, why = find(Chain([cache, remote(answering(head, *[b"x"] * 999, pause=0.1), cache)]))
    assert hit is None and "is too slow" in why and time.monotonic() - began < 20


def test_what_a_registry_says_does_nothing_to_a_terminal(cache: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PAUSES", ())
    said = b'{"errors": [{"code": "X", "message": "\\u001b[31m\\nred"}]}'
    answer = b"HTTP/1.1 400 No\r\nContent-Length: %d\r\n\r\n%b" % (len(said), said)
    for text in (answer, b"\x1b[31m\n"):
        hit, why = find(Chain([cache, remote(answering(text), cache)]))
        assert hit is None and why and why.isprintable()


def test_altered_members_are_a_miss(proxy: Proxy, source: Store, cache: Store) -> None:
    place = proxy.place("lazy/altered")
    fill(source, 1)
    push(place, source)
    chain = Chain([cache, remote(place, cache)])
    find(chain, 5)  # the front is known
    proxy.broken("flip", "GET", "/blobs/", after=1600)
    hit, why = find(chain)
    assert hit is None and "is altered" in why and not list(cache.entries())


def test_an_unsigned_twin_does_not_hide_what_is_signed(
    daemon: Daemon, source: Store, cache: Store, tmp_path: Path
) -> None:
    """Who may push, but cannot sign, adds a layer with an entry of the same build."""
    place = daemon.place("lazy/twin")
    alice = keyring.signer(keyring.generate("alice")[0])
    keyring.trust_key("alice", f"{os.environ['XDG_CONFIG_HOME']}/tlhub/keys/alice.pub")
    (entry,) = fill(source, 1)
    signature.write(source, entry.manifest.sha256, alice.id, alice.sign(entry.manifest))
    first = push(place, source).digest
    evil = Store("evil", tmp_path / "evil")
    fill(evil, 1, size=500)
    push(daemon.place("lazy/twin", "evil"), evil)
    both = [
        layer
        for tag in ("t", "evil")
        for layer in artifact.parse(registry(daemon.place("lazy/twin", tag)).manifest() or b"")
    ]
    assert registry(place).put_manifest(artifact.document(both)) != first
    hit, _ = find(Chain([remote(place, cache, signed="require")]))
    assert hit is not None and hit.entry.manifest == entry.manifest
    assert vouching.voucher(hit.entry.manifest, cache.signature) == "alice"


def test_where_nothing_can_be_kept_it_serves_from_memory(proxy: Proxy, source: Store, tmp_path: Path) -> None:
    place = proxy.place("lazy/memory")
    fill(source, 1)
    push(place, source)
    (tmp_path / "file").write_text("in the way")
    cache = Store("cache", tmp_path / "file")
    with pytest.warns(RuntimeWarning, match="only in memory"):
        hit, _ = find(Chain([cache, remote(place, cache)]))
    assert hit is not None and hit.origin == "memory" and hit.entry.read("kernel.so").startswith(b"\x7fELF")


def test_a_policy_is_asked_before_anything_is_downloaded(
    proxy: Proxy, source: Store, cache: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = proxy.place("lazy/signed")
    (entry,) = fill(source, 1)
    alice = keyring.signer(keyring.generate("alice")[0])
    signature.write(source, entry.manifest.sha256, alice.id, alice.sign(entry.manifest))
    push(place, source)
    proxy.seen.clear()
    chain = Chain([cache, remote(place, cache, signed="require")])
    hit, why = find(chain)
    assert hit is None and "nobody whom you trust signed it" in why and len(proxy.seen) == 2
    keyring.trust_key("alice", f"{os.environ['XDG_CONFIG_HOME']}/tlhub/keys/alice.pub")
    hit, _ = find(chain)
    assert hit is not None and hit.origin == "remote"
    monkeypatch.setenv("TLHUB_SIGNED", "require")
    again, _ = find(chain)
    assert again is not None and again.origin == "cache"  # with its signature


def test_off_means_off(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """No socket is opened offline, nor where no registry is named: by any name or address."""
    import tlhub
    from tlhub import hub

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a socket")

    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setenv("TLHUB_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TLHUB_COMPILE", "never")
    hub.forget()
    ask = ("gemm", (8, 8, 8), "float32")
    with pytest.raises(LookupError):
        tlhub.get(*ask)
    monkeypatch.setenv("TLHUB_STORES", "oci://registry.example.org/kernels:t")
    monkeypatch.setenv("TLHUB_OFFLINE", "1")
    with pytest.raises(LookupError):
        tlhub.get(*ask)
    assert "TLHUB_OFFLINE is set" in str(tlhub.explain(*ask))
    monkeypatch.setenv("TLHUB_OFFLINE", "yes")  # who mistypes it does not mean that the network is wanted
    assert "TLHUB_OFFLINE is 'yes'; allowed are 0 and 1" in str(tlhub.explain(*ask))
    monkeypatch.delenv("TLHUB_OFFLINE")
    monkeypatch.setattr(module, "_PAUSES", ())
    with pytest.raises(AssertionError, match="a socket"):  # the traps work
        tlhub.get(*ask)


def test_eight_threads_of_two_processes_get_one_entry(proxy: Proxy, source: Store, cache: Store) -> None:
    place = proxy.place("lazy/threads")
    fill(source, 1)
    push(place, source)
    chain = Chain([cache, remote(place, cache)])
    find(chain, 5)
    child = multiprocessing.get_context("fork").Process(target=_hits, args=(chain,))
    child.start()
    assert _hits(chain) == 4
    child.join()
    assert child.exitcode == 0 and len(list(cache.entries())) == 1


def _hits(chain: Chain) -> int:
    found: list[Hit | None] = []
    threads = [threading.Thread(target=lambda: found.append(find(chain)[0])) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(found)
    return len(found)


@pytest.mark.light
@pytest.mark.parametrize(
    ("text", "folders", "registries"),
    [
        ("oci://host:5000/a/b:tag", [], ["oci://host:5000/a/b:tag"]),
        ("/one:oci://host:5000/a:t:/two", ["/one", "/two"], ["oci://host:5000/a:t"]),
        ("oci://h/a:oci://h/b?signed=require:/x?shared", ["/x"], ["oci://h/a:latest", "oci://h/b:latest"]),
        (f"oci://h/a@sha256:{'0' * 64}:~/x", [os.path.expanduser("~/x")], [f"oci://h/a:latest@sha256:{'0' * 64}"]),
        ("", [], []),
    ],
)
def test_registries_in_the_list_of_stores(
    text: str, folders: list[str], registries: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TLHUB_STORES", text)
    folders = [os.path.expanduser("~/x") if f.endswith("/x") and f != "/x" else f for f in folders]
    assert [str(s.root) for s in site_stores()] == folders
    assert [s.name for s in remote_stores()] == registries


@pytest.mark.light
@pytest.mark.parametrize(
    "text",
    ["oci://", "oci://host", "oci://host/UPPER:t", "oci://host/a?shared", "oci://host/a?signed=yes", "oci://h/../a"],
)
def test_a_registry_that_is_typed_wrong(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TLHUB_STORES", text)
    with pytest.raises(ArgumentError):
        remote_stores()


@pytest.mark.light
def test_which_hosts_need_no_tls() -> None:
    for host in ("localhost", "localhost:5000", "127.0.0.1:80", "127.9.9.9", "[::1]:5000"):
        assert parse(f"oci://{host}/a:t").plain
    for host in ("localhost.example.org", "127.0.0.1.example.org", "10.0.0.1", "example.org:5000"):
        assert not parse(f"oci://{host}/a:t").plain
        assert parse(f"oci://{host}/a:t", plain=True).plain
