"""Keys: their files, their names, and who may read them."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest
from cache_help import publish
from signing_help import sign, trust_new

from tlhub.cache import home, keyring, signature
from tlhub.cache.entry import MANIFEST
from tlhub.cache.store import Store
from tlhub.errors import ArgumentError, CacheError, UnknownName


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def test_files_of_keys_are_what_openssl_reads_and_makes(tmp_path: Path) -> None:
    private, public = (Path(p) for p in keyring.generate("alice"))
    assert stat.S_IMODE(private.stat().st_mode) == 0o600 and stat.S_IMODE(private.parent.stat().st_mode) == 0o700
    openssl = shutil.which("openssl")
    assert openssl is not None

    def run(*words: str | Path) -> None:
        subprocess.run([openssl, *words], check=True, capture_output=True)

    run("pkey", "-in", private, "-pubout", "-out", tmp_path / "same.pub")
    assert signature.public_from_pem((tmp_path / "same.pub").read_bytes()) == signature.public_from_pem(
        public.read_bytes()
    )
    store = Store("cache", tmp_path / "root")
    entry = publish(store)
    path = sign(store, entry, keyring.signer("alice"))
    (tmp_path / "raw").write_bytes(signature.from_text(path.read_bytes()) or b"")
    manifest = Path(str(entry.folder), MANIFEST)
    verify = ("pkeyutl", "-verify", "-pubin", "-inkey", public, "-rawin", "-in", manifest, "-sigfile", tmp_path / "raw")
    run(*verify)
    run("genpkey", "-algorithm", "ed25519", "-out", tmp_path / "openssl.pem")
    (tmp_path / "openssl.pem").chmod(0o600)
    assert len(keyring.signer(str(tmp_path / "openssl.pem")).sign(entry.manifest)) == signature.LENGTH


@pytest.mark.parametrize(
    "pem",
    [b"", b"-----BEGIN PUBLIC KEY-----\n!!\n-----END PUBLIC KEY-----\n", b"\xff" * 9000, b"-----BEGIN PUBLIC KEY-----\n"
     b"MFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAE\n-----END PUBLIC KEY-----\n"],
)  # fmt: skip
def test_what_is_no_public_key_is_refused(tmp_path: Path, pem: bytes) -> None:
    (tmp_path / "odd.pub").write_bytes(pem)
    with pytest.raises(ArgumentError, match="public key"):
        keyring.trust_key("odd", str(tmp_path / "odd.pub"))
    assert keyring.trusted() == {}


def test_names_of_keys(tmp_path: Path) -> None:
    alice = trust_new()
    public = str(home.config("keys/alice.pub"))
    keyring.trust_key("alice", public)  # again: fine
    with pytest.raises(ArgumentError, match="it is trusted as 'alice'"):
        keyring.trust_key("bob", public)
    other = keyring.generate("other")[1]
    with pytest.raises(ArgumentError, match=f"'alice' is key {alice.id} already"):
        keyring.trust_key("alice", other)
    for name in ("", "../alice", ".hidden", "a/b", "a b", "x" * 65):
        with pytest.raises(ArgumentError, match="cannot be called"):
            keyring.trust_key(name, other)
    with pytest.raises(UnknownName, match="no trusted key 'alic'; trusted: alice") as caught:
        keyring.distrust("alic")
    assert caught.value.hint == "did you mean 'alice'?"
    with pytest.raises(ArgumentError, match="is there already") as again:
        keyring.generate("alice")
    assert again.value.hint == f"tlhub trust add alice {public}"


def test_a_public_key_that_is_not_there_is_sought_where_keygen_puts_it(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="public key 'alice.pub' cannot be read") as caught:
        keyring.trust_key("alice", "alice.pub")
    assert caught.value.hint == "ls -l ."
    public = keyring.generate("alice")[1]
    with pytest.raises(ArgumentError) as caught:
        keyring.trust_key("alice", "alice.pub")
    assert caught.value.hint == f"tlhub trust add alice {public}"


def test_a_full_disk_leaves_no_half_of_a_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: str, *_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    public = keyring.generate("alice")[1]
    with monkeypatch.context() as patch:
        patch.setattr("tlhub.files.write_whole", full)
        for attempt in (lambda: keyring.generate("bob"), lambda: keyring.trust_key("alice", public)):
            with pytest.raises(CacheError, match=r"\.pub cannot be written: No space left on device") as caught:
                attempt()
            assert str(caught.value.hint).startswith("df -h /")
    assert keyring.trusted() == {} and keyring.generate("bob")


def test_a_private_key_that_others_can_read_signs_nothing() -> None:
    private, _ = keyring.generate("alice")
    os.chmod(private, 0o640)
    with pytest.raises(CacheError, match="mode 0640") as caught:
        keyring.signer("alice")
    subprocess.run(str(caught.value.hint), shell=True, check=True)
    keyring.signer("alice")
    Path(private).write_bytes(b"no key")
    with pytest.raises(ArgumentError, match="cannot be read"):
        keyring.signer("alice")
