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
from collections.abc import Iterable, Mapping

from tlhub.cache.listing import VERSION
from tlhub.cache.manifest import LARGEST_MANIFEST, MANIFEST
from tlhub.cache.paths import descend
from tlhub.cache.signature import NAME, SIGNATURES

_DAY = 86400.0

Files = Mapping[str, list[str]]
"""The names of signatures by the digests of their manifests."""


def listed(root: str) -> Files:
    """Return all signatures of the store *root*: once for many removals, for a folder of many takes long to list."""
    found: dict[str, list[str]] = {}
    with contextlib.suppress(OSError):
        for name in os.listdir(f"{root}/{SIGNATURES}"):
            if match := NAME.fullmatch(name):
                found.setdefault(match[1], []).append(name)
    return found


def drop(root: str, files: Files, place: str, away: str) -> None:
    """Remove those of *files* that are of the entry that was moved from *place* to *away* and of none beside it."""
    with contextlib.suppress(OSError):  # of what has no manifest there are none, or nobody knows which
        digest = _digest(away) if files else ""
        if digest in files and digest not in map(_digest, _beside(place)):
            _remove(root, files[digest])


def sweep(root: str) -> int:
    """Remove the signatures of no entry at all, and return how many there were: of one whose manifest was altered, say.

    Those of the last day stay, for they are written before their entries; all do where not everything can be read.
    """
    files = dict(listed(root))
    try:
        for folder, _, names in os.walk(f"{root}/{VERSION}", onerror=_refuse) if files else ():
            if MANIFEST in names:
                files.pop(_digest(folder), None)
    except OSError:
        return 0
    return _remove(root, (name for names in files.values() for name in names), time.time() - _DAY)


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


def _remove(root: str, names: Iterable[str], before: float = float("inf")) -> int:
    """Remove the signatures that were written *before* that, and return how many; a link on the way leads nowhere."""
    count = 0
    with contextlib.suppress(OSError), descend(root, SIGNATURES.split("/")) as (folder, at):
        for name in names:
            with contextlib.suppress(OSError):
                if os.lstat(f"{folder}/{name}").st_mtime < before:
                    os.unlink(name, dir_fd=at) if at is not None else os.unlink(f"{folder}/{name}")
                    count += 1
    return count
