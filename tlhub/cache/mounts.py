"""Mounts: on what file system a store is. Locks and renames of one that several machines share can be late or lost."""

from __future__ import annotations

import contextlib
import shlex

from tlhub.specs import Finding

NETWORK = frozenset(
    ("9p", "afs", "beegfs", "ceph", "cifs", "gfs2", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs", "nfs4", "ocfs2")
    + ("orangefs", "panfs", "pvfs2", "smb3", "smbfs", "sshfs", "wekafs")
)
"""Types of file systems that are on other machines, as Linux names them; ``fuse.NAME`` counts as NAME."""


def file_system(path: str, mounts: str) -> str | None:
    """Return the type of the file system that holds *path*, by the text of ``/proc/mounts``, or None. Pure."""
    best, kind = "", None
    for line in mounts.splitlines():
        _, point, type_, *_ = [*line.split(" "), "", "", ""]
        with contextlib.suppress(ValueError):
            point = point.encode().decode("unicode_escape")  # \040 is a space
        if point and (path + "/").startswith(point.rstrip("/") + "/") and len(point) >= len(best):
            best, kind = point, type_
    return kind


def is_network(kind: str | None) -> bool:
    return kind is not None and kind.removeprefix("fuse.").removeprefix("fuseblk.") in NETWORK


def check(root: str) -> Finding:
    """Say on what file system the store is, for ``tlhub doctor``."""
    kind = None
    with contextlib.suppress(OSError), open("/proc/mounts", encoding="utf-8", errors="replace") as file:
        kind = file_system(root, file.read())
    if not is_network(kind):
        return Finding("file system", True, kind or "unknown")
    text = f"{kind}, which other machines share: look-ups are slower than on a disk of this one"
    layer = shlex.quote(f"{root}?write&backfill")
    return Finding("file system", False, text, f"export TLHUB_CACHE_DIR=/a/local/folder TLHUB_STORES={layer}")
