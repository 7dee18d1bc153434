"""Orphans: signatures whose entry is gone. Who removes an entry removes those too; a reader never does.

Several folders may have one manifest: an entry that was damaged later, and its rebuild beside it. The signatures are of
both, and go with the last.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import time

from tlhub.cache.listing import VERSION
from tlhub.cache.manifest import LARGEST_MANIFEST, MANIFEST
from tlhub.cache.paths import descend
from tlhub.cache.signature import SIGNATURES, Listed, file_name, listed

_DAY = 86400.0


def drop(root: str, signed: Listed, place: str, away: str) -> None:
    """Remove the signatures of the entry that was moved from *place* to *away*, unless they are of one beside it too.

    *signed*: the store's, listed once for many removals.
    """
    with contextlib.suppress(OSError):  # of what has no manifest there are none, or nobody knows which
        digest = _digest(away) if signed else ""
        if digest in signed and digest not in map(_digest, _beside(place)):
            _remove(root, {digest: signed[digest]})


def sweep(root: str) -> int:
    """Remove the signatures of no entry at all, and return how many there were: of one whose manifest was altered, say.

    Those of the last day stay, for they are written before their entries; all do where not everything can be read.
    """
    left = dict(listed(root))
    try:
        for folder, _, names in os.walk(f"{root}/{VERSION}", onerror=_refuse) if left else ():
            if MANIFEST in names:
                left.pop(_digest(folder), None)
    except OSError:
        return 0
    return _remove(root, left, time.time() - _DAY)


def _digest(folder: str) -> str:
    """Return the SHA-256 of the manifest that lies there, sound or not, "" of none. Raises OSError."""
    if not stat.S_ISREG(os.lstat(f"{folder}/{MANIFEST}").st_mode):
        return ""
    with open(f"{folder}/{MANIFEST}", "rb") as file:
        return hashlib.sha256(file.read(LARGEST_MANIFEST)).hexdigest()


def _refuse(error: OSError) -> None:
    raise error


def _beside(place: str) -> list[str]:
    """Return the entries that stand beside where *place* was and are of the same build. Raises OSError."""
    parent, name = os.path.split(place)
    found = [f"{parent}/{other}" for other in os.listdir(parent) if other.startswith(name.partition(".")[0])]
    return [folder for folder in found if os.path.lexists(f"{folder}/{MANIFEST}")]


def _remove(root: str, signed: Listed, before: float = float("inf")) -> int:
    """Remove those that were written *before* that, and return how many there were; a link on the way leads nowhere."""
    count = 0
    with contextlib.suppress(OSError), descend(root, SIGNATURES.split("/")) as (folder, at):
        for name in (file_name(digest, signer) for digest, signers in signed.items() for signer in signers):
            with contextlib.suppress(OSError):
                if os.lstat(f"{folder}/{name}").st_mtime < before:
                    os.unlink(name, dir_fd=at) if at is not None else os.unlink(f"{folder}/{name}")
                    count += 1
    return count
