"""Signatures in archives: they come and go with their entries."""

from __future__ import annotations

from pathlib import Path

import pytest
from cache_help import GENERAL, make_manifest, publish

from tlhub.cache import archive, keyring, signature, vouching
from tlhub.cache.store import Store


@pytest.fixture
def alice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> signature.Signer:
    """A key that is trusted."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(vouching, "_unkept", set())
    private, public = keyring.generate("alice")
    keyring.trust_key("alice", public)
    return keyring.signer(private)


def test_signatures_come_in_with_their_entries(tmp_path: Path, alice: signature.Signer) -> None:
    source, target = Store("source", tmp_path / "source"), Store("target", tmp_path / "target", signed="require")
    signed, unsigned = publish(source), publish(source, make_manifest(GENERAL))
    signature.write(source, signed.manifest.sha256, alice.id, alice.sign(signed.manifest))
    packed = archive.pack([unsigned, signed], str(tmp_path / "one"))
    assert packed.refused == ()
    archive.pack([signed, unsigned], str(tmp_path / "two"))
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    done = archive.unpack(str(tmp_path / "one"), target)
    assert [entry.key for entry in done.added] == [signed.key]
    assert done.refused == ((unsigned.manifest.folder, "nobody whom you trust signed it (you trust alice)"),)
    assert vouching.voucher(signed.manifest, target.signature) == "alice"
    again = archive.unpack(str(tmp_path / "one"), target)
    assert [entry.key for entry in again.present] == [signed.key] and again.added == ()


def test_a_signature_follows_its_entry(tmp_path: Path, alice: signature.Signer) -> None:
    source, target = Store("source", tmp_path / "source"), Store("target", tmp_path / "target")
    entry = publish(source)
    archive.pack([entry], str(tmp_path / "before"))
    archive.unpack(str(tmp_path / "before"), target)
    signature.write(source, entry.manifest.sha256, alice.id, alice.sign(entry.manifest))
    archive.pack([entry], str(tmp_path / "after"))
    assert archive.unpack(str(tmp_path / "after"), target).added == ()
    assert vouching.voucher(entry.manifest, target.signature) == "alice"


def test_a_signature_that_does_not_hold_is_left_out_and_told(tmp_path: Path, alice: signature.Signer) -> None:
    """Of another entry, by another key, altered: well formed all of them, and found out where the key is trusted."""
    source, other = Store("source", tmp_path / "source"), make_manifest(GENERAL)
    entry, mallory = publish(source), keyring.signer(keyring.generate("mallory")[0])
    good = alice.sign(entry.manifest)
    told = ((entry.manifest.folder, f"its signature by alice ({alice.id}), which does not hold"),)
    altered = bytes([good[0] ^ 1]) + good[1:]
    for number, bad in enumerate((alice.sign(other), mallory.sign(entry.manifest), altered, bytes(64))):
        signature.write(source, entry.manifest.sha256, alice.id, bad)
        packed = archive.pack([entry], str(tmp_path / "checked"))  # where it is packed ...
        assert packed.refused == told
        keyring.distrust("alice")
        assert archive.pack([entry], str(tmp_path / "unchecked")).refused == ()
        keyring.trust_key("alice", str(tmp_path / "config/tlhub/keys/alice.pub"))
        target = Store("target", tmp_path / f"target{number}")
        done = archive.unpack(str(tmp_path / "unchecked"), target)  # ... or where it is unpacked
        assert len(done.added) == 1 and done.refused == told
        assert signature.find(str(target.root), entry.manifest.sha256) == {}
        strict = Store("strict", tmp_path / f"strict{number}", signed="require")
        done = archive.unpack(str(tmp_path / "unchecked"), strict)
        assert done.added == () and "nobody whom you trust" in done.refused[0][1]
        assert list(strict.entries()) == []
