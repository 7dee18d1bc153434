"""Placing: one rename puts a staged entry where readers find it; who comes second takes the first one's."""

from __future__ import annotations

import errno
import os
import time
from typing import TYPE_CHECKING

from tlhub.cache import staging, trust
from tlhub.cache.entry import LIBRARY, Damaged, Entry, Manifest

if TYPE_CHECKING:
    from tlhub.cache.store import Store

_TRIES = 8
_PRUNED = (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST)  # the parent while it was empty, or what was in the way


def place(store: Store, path: str, manifest: Manifest, data: dict[str, bytes]) -> Entry | None:
    """Seal the staged folder *path* and rename it to its place in *store*, or beside what is damaged there.

    *data*: the bytes of its members. Returns None if damaged entries hold every place. Raises OSError.
    """
    staging.seal(path, manifest, store.mode())
    taken = 0
    for attempt in range(_TRIES):
        final = f"{store.root}/{manifest.folder}" + (f".{taken}" if taken else "")
        try:
            rule, refused = store.make(manifest.parent)
        except FileNotFoundError:  # a folder of these was empty, and is pruned
            if attempt + 1 == _TRIES:
                raise
            continue
        if refused:
            raise Damaged(refused)
        try:
            os.rename(path, final)
        except OSError as error:
            found = winner(store, final, rule, manifest)
            if found is not None:
                return found
            if os.path.lexists(final):
                taken += 1  # damaged, and not a writer's to delete: beside it
            elif error.errno not in _PRUNED or attempt + 1 == _TRIES:
                raise
            continue
        staging.sync(os.path.dirname(final))
        held = {LIBRARY: data[LIBRARY]}
        return Entry(final, manifest, store.name, policy=rule, held=held, used=time.time())
    return None


def winner(store: Store, folder: str, rule: trust.Policy, manifest: Manifest) -> Entry | None:
    """Return the entry that another writer put there, if it is whole, of the same build, and vouched for."""
    try:
        found = Entry.open(folder, store.name, rule)
        if found.manifest.sha256 != manifest.sha256:  # else it is the same to the last byte
            store.vouch(found)
        found.verify()
        found.prepare()
    except Damaged:
        return None
    return found if found.manifest.build_digest == manifest.build_digest else None
