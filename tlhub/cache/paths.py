"""Paths: how what is in a store is reached to be moved or removed: folder by folder, never through a link."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence

_BY_FD = os.rename in os.supports_dir_fd and os.unlink in os.supports_dir_fd
_FOLDER = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)


@contextlib.contextmanager
def descend(root: str, parts: Sequence[str]) -> Iterator[tuple[str, int | None]]:
    """Open the folder *parts* below *root*, one by one; give its path, and its descriptor if there are such.

    Raises OSError, also for a link.
    """
    path = "/".join((root, *parts))
    if not _BY_FD:
        if os.path.realpath(path) != os.path.join(os.path.realpath(root), *parts):
            raise OSError(f"a link is in the way: {path}")
        yield path, None
        return
    fd = os.open(root, _FOLDER)
    try:
        for part in parts:
            inner = os.open(part, _FOLDER, dir_fd=fd)
            os.close(fd)
            fd = inner
        yield path, fd
    finally:
        os.close(fd)


def move(root: str, folder: tuple[str, int | None], name: str, below: str, new: str) -> str:
    """Rename *name* in *folder*, as ``descend`` gave it, to *new* in *below*; return its new path. Raises OSError."""
    parent, at = folder
    away = f"{root}/{below}/{new}"
    with descend(root, below.split("/")) as (_, there):
        if at is not None:
            os.rename(name, new, src_dir_fd=at, dst_dir_fd=there)
        else:
            os.rename(f"{parent}/{name}", away)
    return away
