"""Signatures: who vouches for an entry. One signs its ``entry.json``, which vouches for every member.

    <root>/v1/.signatures/<SHA-256 of entry.json>.<key>.sig      the signature in base64, one file a key

A signature is plain Ed25519 (RFC 8032) over the bytes of ``entry.json``, a key file is PEM (RFC 8410): what
``openssl pkeyutl -rawin`` and ``cosign verify-blob`` take. A key is named by the first 16 digits of the SHA-256 of
its 32 bytes. Entries never change, so signatures lie beside them and come and go by themselves.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import hashlib
import os
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from tlhub.cache import key, trust
from tlhub.cache.entry import Damaged, Entry, Folder, Manifest
from tlhub.errors import ArgumentError, CacheError
from tlhub.files import write_whole

if TYPE_CHECKING:
    from tlhub.cache.store import Store

SIGNATURES = f"v{key.FORMAT}/.signatures"
"""The folder below a store's root that holds them."""

LENGTH, TEXT_LENGTH = 64, 89
"""Bytes of a signature, and of the file that holds it."""

NAME = re.compile(r"([0-9a-f]{64})\.([0-9a-f]{16})\.sig")
"""A signature's file: the digest of the manifest, the id of the key."""

_LARGEST = 1024
_SPKI = bytes.fromhex("302a300506032b6570032100")  # what stands before the 32 bytes of an Ed25519 key in its DER
_PEM = re.compile(rb"\s*-----BEGIN PUBLIC KEY-----\s([A-Za-z0-9+/=\s]+)-----END PUBLIC KEY-----\s*")


def key_id(public: bytes) -> str:
    """Return the name by which files call a public key of 32 bytes."""
    return hashlib.sha256(public).hexdigest()[:16]


def file_name(manifest_digest: str, signer: str) -> str:
    return f"{manifest_digest}.{signer}.sig"


# -- the two forms of keys and signatures ----------------------------------------------------------


def public_from_pem(pem: bytes) -> bytes:
    """Return the 32 bytes of the Ed25519 key that *pem* holds. Raises ValueError."""
    found = _PEM.fullmatch(pem)
    if found is None:
        raise ValueError("it holds no PEM public key")
    try:
        der = base64.b64decode(b"".join(found[1].split()), validate=True)
    except binascii.Error as error:
        raise ValueError(f"its base64 is wrong: {error}") from error
    if not der.startswith(_SPKI) or len(der) != len(_SPKI) + 32:
        raise ValueError("it is no Ed25519 key")
    return der[len(_SPKI) :]


def public_to_pem(public: bytes) -> bytes:
    text = base64.b64encode(_SPKI + public).decode()
    return f"-----BEGIN PUBLIC KEY-----\n{text}\n-----END PUBLIC KEY-----\n".encode()


def from_text(text: bytes) -> bytes | None:
    """Return the signature that a file of base64 holds, None if it holds none."""
    try:
        data = base64.b64decode(text.strip(), validate=True)
    except binascii.Error:
        return None
    return data if len(data) == LENGTH else None


def to_text(signature: bytes) -> bytes:
    return base64.b64encode(signature) + b"\n"


# -- signing and verifying -------------------------------------------------------------------------


def create() -> tuple[bytes, bytes]:
    """Return a new private key (PEM, PKCS #8, not encrypted) and its public one (32 bytes)."""
    private = _ed25519().Ed25519PrivateKey.generate()
    from cryptography.hazmat.primitives import serialization as s

    pem = private.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, s.NoEncryption())
    return pem, private.public_key().public_bytes_raw()


class Signer:
    """A private key that signs manifests. Raises ArgumentError if *pem* holds no Ed25519 key; *path*: its file."""

    def __init__(self, pem: bytes, path: str) -> None:
        module = _ed25519()
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        try:
            private = load_pem_private_key(pem, None)
        except (ValueError, TypeError) as error:  # TypeError: it is encrypted
            raise ArgumentError(f"key {path!r} cannot be read: {error}", argument="key", hint=_KEYGEN) from error
        if not isinstance(private, module.Ed25519PrivateKey):
            raise ArgumentError(f"key {path!r} is no Ed25519 key", argument="key", hint=_KEYGEN)
        self._private = private
        self.public: bytes = private.public_key().public_bytes_raw()

    @property
    def id(self) -> str:
        return key_id(self.public)

    def sign(self, manifest: Manifest) -> bytes:
        signature: bytes = self._private.sign(manifest.to_bytes())
        return signature


_KEYGEN = "tlhub trust keygen NAME"


def holds(signature: bytes, public: bytes, manifest: Manifest) -> bool:
    """Tell whether *signature* is that key's for the manifest. Raises CacheError without the library for it."""
    module = _ed25519()
    from cryptography.exceptions import InvalidSignature

    try:
        module.Ed25519PublicKey.from_public_bytes(public).verify(signature, manifest.to_bytes())
    except (InvalidSignature, ValueError):
        return False
    return True


def _ed25519() -> Any:
    try:
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        raise CacheError(
            "signatures need the package 'cryptography', which is not installed", hint="pip install 'tlhub-core[trust]'"
        ) from error
    return ed25519


# -- beside a store's entries ----------------------------------------------------------------------


def read(root: str, manifest_digest: str, signer: str) -> bytes | None:
    """Return a signature that lies in the store *root*, None if there is none. Who wrote it does not matter."""
    try:
        with Folder(f"{root}/{SIGNATURES}") as folder:
            return from_text(folder.read(file_name(manifest_digest, signer), _LARGEST, None)[0])
    except Damaged:
        return None


Listed = Mapping[str, "list[str]"]
"""The ids of the keys that signed, by the digests of the manifests."""


def listed(root: str) -> Listed:
    """Return who signed what in the store *root*; of very many signatures that takes a while."""
    found: dict[str, list[str]] = {}
    with contextlib.suppress(OSError):
        for name in os.listdir(f"{root}/{SIGNATURES}"):
            if match := NAME.fullmatch(name):
                found.setdefault(match[1], []).append(match[2])
    return found


def find(root: str, manifest_digest: str, lists: Callable[[str], Listed] = listed) -> dict[str, bytes]:
    """Return every signature of a manifest in the store *root*, by the id of its key: not verified.

    *lists*: does what ``listed`` does; ``functools.cache`` of it for many manifests.
    """
    signers = sorted(lists(root).get(manifest_digest, ()))
    return {s: data for s in signers if (data := read(root, manifest_digest, s)) is not None}


def beside(entry: Entry, lists: Callable[[str], Listed] = listed) -> dict[str, bytes]:
    """Return what ``find`` does of *entry* in the store that it lies in."""
    return {} if entry.folder is None else find(entry.folder.rsplit("/", 5)[0], entry.manifest.sha256, lists)


def write(store: Store, manifest_digest: str, signer: str, signature: bytes) -> None:
    """Put a signature into the store, whole or not at all. Raises CacheError."""
    try:
        refused = store.make(SIGNATURES)[1]
        if refused is None:
            write_whole(f"{store.root}/{SIGNATURES}/{file_name(manifest_digest, signer)}", to_text(signature), 0o644)
            return
    except OSError as error:
        refused = f"{store.root}: {error.strerror or error}"
    text, hint = trust.remedy(refused)
    raise CacheError(f"no signature can be kept there: {text}", hint=hint or "tlhub doctor")
