"""Vouching: whether somebody whom the user trusts stands behind an entry, and the note that it was found so.

    <state>/tlhub/vouched      lines SIGNER SHA-256: manifests whose signature by that key held

Verifying costs a new process a tenth of a second, nearly all of it for importing the library that does it. So it is
done once. The notes are as good as the list of keys: who can write the one can write the other.
"""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from tlhub import files
from tlhub.cache import home, keyring, signature, trust
from tlhub.cache.entry import Damaged, Entry, Folder
from tlhub.cache.manifest import Manifest
from tlhub.errors import ArgumentError, CacheError, did_you_mean

if TYPE_CHECKING:
    from tlhub.cache.store import Store

POLICIES = ("off", "warn", "require")
"""What a store may ask: nothing, a warning where nobody trusted signed an entry, or that it then is a miss."""

HERE = "here"
"""In place of a key's id or name: a process of this user built it."""

_NOTES = "vouched"
_MOST = 4 << 20  # bytes of notes
_unkept: set[str] = set()
"""Notes of this process, which may not be on disk."""

Read = Callable[[str, str], "bytes | None"]
"""Takes the digest of a manifest and the id of a key; returns a signature or None."""


class Sifted(NamedTuple):
    """Signatures of one entry, by the ids of their keys, that may go on with it, and in words those that may not."""

    good: dict[str, bytes]
    wrong: tuple[str, ...]


def policy() -> str:
    """Return what TLHUB_SIGNED asks of stores that do not say themselves. Raises ArgumentError."""
    return check_policy(os.environ.get("TLHUB_SIGNED") or "off", "TLHUB_SIGNED")


def check_policy(text: str, where: str) -> str:
    """Return *text* if it is one of POLICIES; else ArgumentError says *where* it stands."""
    if text in POLICIES:
        return text
    near = did_you_mean(text, POLICIES) or "require"
    hint = f"export TLHUB_SIGNED={near}" if where == "TLHUB_SIGNED" else f"signed={near}"
    raise ArgumentError(f"{where} is {text!r}; allowed are {', '.join(POLICIES)}", hint=hint)


def check(entry: Entry, asked: str, read: Read) -> None:
    """Raise Damaged, or warn, if nobody trusted vouches for the entry: as *asked*, one of POLICIES."""
    reason = None if asked == "off" else refusal(entry.manifest, read)
    if reason and asked == "require":
        raise Damaged(reason)
    if reason:
        warnings.warn(f"{entry.folder or entry.store_name}: {reason}", RuntimeWarning, stacklevel=4)


def voucher(manifest: Manifest, read: Read) -> str | None:
    """Return the name of the trusted key that signed *manifest*, HERE for what this user built, or None.

    Raises CacheError where the list of keys is not to be trusted, or signatures cannot be verified.
    """
    keys, noted, digest = keyring.trusted(), _noted(), manifest.sha256
    for signer, name in ((HERE, HERE), *((signer, key.name) for signer, key in keys.items())):
        if f"{signer} {digest}" in noted or f"{signer} {digest}" in _unkept:
            return name
    for signer, key in keys.items():
        found = read(digest, signer)
        if found is not None and signature.holds(found, key.public, manifest):
            note(signer, digest)
            return key.name
    return None


def refusal(manifest: Manifest, read: Read) -> str | None:
    """Return why nobody trusted vouches for *manifest*, or None. Never raises."""
    try:
        if voucher(manifest, read):
            return None
        names = ", ".join(key.name for key in keyring.trusted().values())
        return f"nobody whom you trust signed it (you trust {names or 'no key'})"
    except CacheError as error:
        return f"whether somebody signed it cannot be told: {error.message}"


def unwanted(store: Store, manifest: Manifest, signatures: Mapping[str, bytes]) -> str | None:
    """Return why *store* would not serve the entry, which comes with *signatures* by key, for want of one, or None."""
    if not store.wants_signatures or (store.signed or policy()) != "require":
        return None
    return refusal(manifest, lambda _, signer: signatures.get(signer))


def sift(manifest: Manifest, signatures: Mapping[str, bytes]) -> Sifted:
    """Part the *signatures* of an entry. Wrong are those by trusted keys that do not hold.

    Others cannot be verified here: they are good enough to be carried on, and count nowhere before they were verified.
    """
    names: dict[str, str] = {}
    with contextlib.suppress(CacheError):  # no list of keys, or no library: told to whoever wants a signature
        keys = keyring.trusted()
        names = {
            signer: keys[signer].name
            for signer, made in signatures.items()
            if signer in keys and not signature.holds(made, keys[signer].public, manifest)
        }
    good = {signer: made for signer, made in signatures.items() if signer not in names}
    wrong = [f"its signature by {name} ({signer}), which does not hold" for signer, name in names.items()]
    return Sifted(good, tuple(wrong))


def keep(store: Store, manifest: Manifest, signatures: Mapping[str, bytes]) -> tuple[str, ...]:
    """Put the good ones of *signatures* beside the entry in *store*, and return in words which are not.

    One that is there stays, unless it is wrong. Raises CacheError.
    """
    digest = manifest.sha256
    good, wrong = sift(manifest, signatures)
    there = {signer: found for signer in good if (found := store.signature(digest, signer)) is not None}
    there = sift(manifest, there).good
    for signer, made in good.items():
        if signer not in there:
            signature.write(store, digest, signer, made)
    return wrong


@contextlib.contextmanager
def keeping(store: Store, manifest: Manifest, signatures: Mapping[str, bytes]) -> Iterator[tuple[str, ...]]:
    """Do what ``keep`` does, for a body that publishes the entry: no reader is to find it without its signatures.

    Who removed an entry of the same bytes meanwhile took them along: they are put there again.
    """
    wrong = keep(store, manifest, signatures)
    yield wrong
    if signatures:
        keep(store, manifest, signatures)


def adopt(manifest: Manifest) -> None:
    """Note that this user built it."""
    note(HERE, manifest.sha256)


def note(signer: str, digest: str) -> None:
    """Note that *signer*, the id of a key or HERE, vouches for a manifest; for this process only if need be."""
    line = f"{signer} {digest}"
    _unkept.add(line)
    with contextlib.suppress(OSError):  # CacheError is one
        folder = home.make(os.path.dirname(home.state(_NOTES) or "") or None)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0)
        with open(os.open(f"{folder}/{_NOTES}", flags, 0o600), "ab", buffering=0) as file:
            file.write(f"{line}\n".encode())  # one write: lines of several processes do not mix
            full = file.tell() > _MOST
        if full:  # what is forgotten is verified again
            lines = _notes(f"{folder}/{_NOTES}").split("\n")
            files.write_whole(f"{folder}/{_NOTES}", "\n".join(lines[len(lines) // 2 :]), 0o600)


def _noted() -> frozenset[str]:
    path = home.state(_NOTES)
    try:
        info = os.lstat(path) if path else None
    except OSError:
        info = None
    return _lines(path, info.st_ino, info.st_size, info.st_mtime_ns) if path and info else frozenset()


@functools.lru_cache(maxsize=2)  # another process may add to them at any time
def _lines(path: str, *stamp: int) -> frozenset[str]:
    return frozenset(_notes(path).split("\n"))


def _notes(path: str) -> str:
    """Return the notes in *path*; none where others could have written them."""
    folder, name = os.path.split(path)
    try:
        with Folder(folder) as opened:
            if trust.refusal_of_folder(folder, opened.info(), trust.STRICT):
                return ""
            return opened.read(name, 2 * _MOST, trust.STRICT)[0].decode("ascii", "replace")
    except Damaged:
        return ""
