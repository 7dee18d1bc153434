"""The stores of this process, in the order in which a lookup asks them."""

from __future__ import annotations

import functools
import os

from tlhub.build.program import ABI
from tlhub.cache import place
from tlhub.cache.chain import Chain, this_host
from tlhub.cache.store import Store
from tlhub.catalog import Catalog


def user_store() -> Store:
    """Return the user's cache: the one store that tlhub writes to."""
    return _user(*map(os.environ.get, ("TLHUB_CACHE_DIR", "XDG_CACHE_HOME", "HOME")))


def chain(catalog: Catalog, driver: int = 0) -> Chain:
    """Return the user's cache, the site folders of ``TLHUB_STORES``, then what plugins ship.

    *driver*: of the device that is to run what is found, 0 if it has none. Raises ArgumentError.
    """
    stores = (user_store(), *_sites(os.environ.get("TLHUB_STORES")), *_shipped(catalog))
    return Chain(stores, host=this_host(ABI, driver), match=place.match_policy())


@functools.cache
def _user(*variables: str | None) -> Store:
    # one Store for each setting: it remembers what it could only keep in memory, and that it warned
    return place.user_store()


@functools.cache
def _sites(text: str | None) -> tuple[Store, ...]:
    return place.site_stores()


def _shipped(catalog: Catalog) -> tuple[Store, ...]:
    return tuple(_prebuilt(s.name, s.path) for s in catalog.stores)


@functools.cache
def _prebuilt(name: str, path: str) -> Store:
    return place.prebuilt_store(name, path)
