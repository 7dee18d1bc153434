"""Somebody who signs entries."""

from __future__ import annotations

from pathlib import Path

from tlhub.cache import keyring, signature
from tlhub.cache.entry import Entry
from tlhub.cache.store import Store


def trust_new(name: str = "alice") -> signature.Signer:
    private, public = keyring.generate(name)
    keyring.trust_key(name, public)
    return keyring.signer(private)


def sign(store: Store, entry: Entry, signer: signature.Signer) -> Path:
    signature.write(store, entry.manifest.sha256, signer.id, signer.sign(entry.manifest))
    name = signature.file_name(entry.manifest.sha256, signer.id)
    return Path(str(store.root), signature.SIGNATURES, name)
