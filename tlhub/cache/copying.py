"""Copying: an entry from one store into another with its signatures, every byte verified on the way."""

from __future__ import annotations

from tlhub.cache.entry import Entry
from tlhub.cache.store import Store


def copy(entry: Entry, store: Store) -> Entry | None:
    """Publish *entry* in *store* and return what that has; None where it can keep nothing on disk.

    Raises CacheError, of which Damaged is one, and OSError.
    """
    from tlhub.cache import signature  # for what is copied, not for every process

    with store.stage() as staged:
        if staged.volatile:
            return None
        for name in entry.manifest.members:
            with open(f"{staged.path}/{name}", "xb") as file:
                file.write(entry.read(name))
        signature.carry(entry, store)
        made = store.publish(staged, entry.manifest, tuple(entry.manifest.members))
    return made if made.published else None
