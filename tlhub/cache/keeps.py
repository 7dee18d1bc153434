"""Keeps: builds that nothing removes to make room. Each is a file of ``v1/.keeps``, which the key names.

Which build a lookup may get is another matter: ``tlhub.pins``.
"""

from __future__ import annotations

import contextlib
import os

from tlhub.cache.entry import Manifest
from tlhub.cache.listing import VERSION
from tlhub.cache.store import Store
from tlhub.errors import CacheError
from tlhub.files import write_whole

KEEPS = f"{VERSION}/.keeps"


def keep(store: Store, manifest: Manifest) -> None:
    """Keep the entries of that build until it is released. Raises CacheError."""
    store.check()
    try:
        _, refused = store.make(KEEPS)
        if refused:
            raise CacheError(refused)
        text = f"{manifest.kernel} for {manifest.arch}\n"  # for whoever looks into the folder
        write_whole(f"{store.root}/{KEEPS}/{manifest.build_digest}", text, 0o644)
    except OSError as error:
        raise CacheError(f"{manifest.build_digest[:16]} cannot be kept: {error.strerror or error}") from error


def release(store: Store, manifest: Manifest) -> None:
    """Let the entries of that build go like any other. Raises CacheError."""
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{store.root}/{KEEPS}/{manifest.build_digest}")
    except OSError as error:
        raise CacheError(f"{manifest.build_digest[:16]} cannot be released: {error.strerror or error}") from error


def kept(store: Store) -> frozenset[str]:
    """Return the build digests that are kept."""
    with contextlib.suppress(OSError):
        return frozenset(os.listdir(f"{store.root}/{KEEPS}"))
    return frozenset()
