"""Copying: an entry from one store into another with its signatures, every byte verified on the way."""

from __future__ import annotations

from tlhub.cache.entry import Damaged, Entry
from tlhub.cache.manifest import Manifest
from tlhub.cache.store import Store


def copy(entry: Entry, store: Store) -> Entry | None:
    """Publish *entry* in *store* and return what that has; None where it can keep nothing on disk.

    Raises CacheError, of which Damaged is one, and OSError.
    """
    from tlhub.cache import signature, vouching  # for what is copied, not for every process

    with store.stage() as staged:
        if staged.volatile:
            return None
        for name in entry.manifest.members:
            with open(f"{staged.path}/{name}", "xb") as file:
                file.write(entry.read(name))
        with vouching.keeping(store, entry.manifest, signature.beside(entry)):
            made = store.publish(staged, entry.manifest, tuple(entry.manifest.members))
    return made if made.published else None


def find(store: Store, manifest: Manifest) -> Entry | None:
    """Return the whole entry of that build that *store* has and would serve, or None."""
    for entry in store.lookup(manifest.arch, manifest.kernel, manifest.problem_digest).entries:
        if entry.key == manifest.build_digest:
            try:
                store.vouch(entry)
                entry.verify()
                return entry
            except Damaged:
                continue
    return None
