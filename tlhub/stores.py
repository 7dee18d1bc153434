"""The stores of this process, from the environment, in the order in which a lookup asks them.

``TLHUB_STORES`` is a list of folders (separated like PATH), searched after the user's cache and not written to. A
folder may be followed by ``?`` and its policy: ``/opt/kernels?shared&owner=build&match=exact&signed=require``, and
other than read alone: ``/mnt/kernels?write&backfill``. A registry, ``oci://host:5000/kernels:tag?signed=require``,
comes last, wherever it stands in the list; what follows one begins with ``/``, ``~``, ``.`` or ``oci://``.
There is one Store for each setting: it remembers what it could only keep in memory, and that it warned.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple
from urllib.parse import parse_qsl

from tlhub.cache import home
from tlhub.cache.chain import LOOSENESS, Chain, Hit, Host, this_host
from tlhub.cache.copying import copy
from tlhub.cache.entry import Entry
from tlhub.cache.manifest import Manifest
from tlhub.cache.store import Found, Item, Skipped, Store
from tlhub.catalog import Catalog
from tlhub.errors import ArgumentError, did_you_mean
from tlhub.specs import ABI

_HINT = "export TLHUB_CACHE_DIR=/a/folder/that/you/can/write"


class Layer(NamedTuple):
    """A store, and what is done with it.

    ``read``: lookups ask it. ``write``: what is built here goes there. ``backfill``: what it serves is copied into the
    user's cache, which the next lookup asks first.
    """

    store: Store
    read: bool = True
    write: bool = False
    backfill: bool = False

    @property
    def access(self) -> tuple[str, ...]:
        """The words of what is done with it, in order."""
        return tuple(word for word in ("read", "write", "backfill") if getattr(self, word))


def layers(catalog: Catalog) -> tuple[Layer, ...]:
    """Return the layers in the order in which lookups ask them: the user's cache, the site folders of
    ``TLHUB_STORES``, what plugins ship, the registries of ``TLHUB_STORES``. Raises ArgumentError."""
    remote = (Layer(store, backfill=True) for store in remote_stores())
    return (Layer(user_store(), write=True), *site_layers(), *map(Layer, _prebuilt(catalog)), *remote)


def chain(
    catalog: Catalog,
    driver: int = 0,
    shared_memory: int = 0,
    veto: Callable[[Manifest], str | None] = lambda manifest: None,
    host: Host | None = None,
) -> Chain:
    """Return the layers that are read.

    *host*: the machine that is to run what is found, by default this one. *driver* and *shared_memory* (bytes a block):
    of its device, 0 if it has none.
    *veto*: why an entry must not serve, or None. Raises ArgumentError.
    """
    stores = [layer.store for layer in layers(catalog) if layer.read]
    host = (host or this_host())._replace(abi=ABI, driver=driver, shared_memory=shared_memory)
    return Chain(stores, host=host, match=match_policy(), veto=veto)


def user_store() -> Store:
    """Return the user's cache, where everything is built: TLHUB_CACHE_DIR (empty counts as unset), else the
    platform's cache folder.

    Without a usable home it is a private temporary folder, else memory, with one warning. Nothing is
    written but that temporary folder.
    """
    return _user(*map(os.environ.get, ("TLHUB_CACHE_DIR", "XDG_CACHE_HOME", "HOME")))


def site_layers() -> tuple[Layer, ...]:
    """Return the layers that TLHUB_STORES names. Raises ArgumentError for an unknown word of policy."""
    return _sites(os.environ.get("TLHUB_STORES", ""))


def site_stores() -> tuple[Store, ...]:
    """Return the stores that TLHUB_STORES names. Raises ArgumentError for an unknown word of policy."""
    return tuple(layer.store for layer in site_layers())


def remote_stores() -> tuple[Store, ...]:
    """Return the registries that TLHUB_STORES names; asks none. Raises ArgumentError."""
    return _remotes(os.environ.get("TLHUB_STORES", ""))


def use(hit: Hit) -> Hit:
    """Return *hit* as it serves a look-up, noted as used: of a copy in the user's cache, where its layer says so."""
    if any(layer.backfill and layer.store is hit.store for layer in site_layers()):
        hit = _backfill(hit)
    hit.store.touch(hit.entry, time.time())
    return hit


def _backfill(hit: Hit) -> Hit:
    copied = None
    with contextlib.suppress(OSError):  # CacheError is one; the layer serves as before
        copied = copy(hit.entry, user_store())
    return replace(hit, entry=copied, store=user_store()) if copied else hit


def spread(entry: Entry) -> None:
    """Write *entry*, built here, to each layer that takes what is built; warn of one that cannot."""
    for layer in site_layers():
        if layer.write:
            try:
                kept, reason = copy(entry, layer.store), "it cannot be written"
            except OSError as error:  # CacheError is one
                kept, reason = None, str(error)
            if kept is None:
                text = f"what is built is not written to {layer.store.root}: {reason}"
                warnings.warn(f"{text}\nhint: tlhub doctor", RuntimeWarning, stacklevel=2)


@functools.cache
def prebuilt_store(name: str, path: str) -> Store:
    """Return the store of a folder that an installed plugin brings.

    Its entries are trusted as the plugin's code is, whoever installed that: the folder's owner is named,
    and a group may write. What everyone may write is refused here too.
    """
    try:
        owners: tuple[int, ...] = (os.stat(path).st_uid,)
    except OSError:  # lookups will say what is wrong
        owners = ()
    return Store(name, path, origin="prebuilt", writable=False, shared=True, owners=owners)


class Misfit(Store):
    """A store that may not serve here: every lookup is told why."""

    def __init__(self, name: str, path: str, reason: str) -> None:
        super().__init__(name, path, origin="prebuilt", writable=False)
        self.reason = reason

    def lookup(self, arch: str, kernel: str, problem_digest: str) -> Found:
        return Found((), (Skipped(str(self.root), self.reason),))

    def entries(self) -> Iterator[Item]:
        return iter(())


def match_policy() -> str | None:
    """Return the loosest match that TLHUB_MATCH lets serve, or None if it does not say. Raises ArgumentError."""
    text = os.environ.get("TLHUB_MATCH")
    return _match(text, "TLHUB_MATCH") if text else None


def _prebuilt(catalog: Catalog) -> Iterator[Store]:
    for store in catalog.stores:
        reason = catalog.misfits.get(store.name)
        yield Misfit(store.name, store.path, reason) if reason else prebuilt_store(store.name, store.path)


@functools.cache
def _user(named: str | None, xdg: str | None, user: str | None) -> Store:
    if named:
        return Store("cache", os.path.abspath(os.path.expanduser(named)))
    root = home.cache(xdg or "", user or "")
    reason = "there is no home folder: HOME is not set" if root is None else home.unusable(root)
    if reason is None:
        return Store("cache", root)
    folder = home.temporary()
    where = f"in {folder}" if folder else "in memory"
    warnings.warn(f"{reason}; kernels are kept {where}\nhint: {_HINT}", RuntimeWarning, stacklevel=3)
    return Store("cache", folder)


@functools.cache
def _sites(text: str) -> tuple[Layer, ...]:
    return tuple(_site(item) for item in _items(text) if not item.startswith("oci://"))


@functools.cache
def _remotes(text: str) -> tuple[Store, ...]:
    return tuple(_remote(item) for item in _items(text) if item.startswith("oci://"))


def _items(text: str) -> list[str]:
    """Return the items of a list like PATH, in which a registry's own colons separate nothing."""
    registry = r"oci://(?:(?!:(?:[/~.]|oci://)).)*" if os.pathsep == ":" else r"oci://[^;]*"
    return re.findall(rf"{registry}|[^{os.pathsep}]+", text)


def _match(text: str, where: str) -> str:
    if text in LOOSENESS:
        return text
    near = did_you_mean(text, LOOSENESS)
    raise ArgumentError(
        f"{where} is {text!r}; allowed are {', '.join(LOOSENESS)}",
        hint=f"export TLHUB_MATCH={near or 'revision'}" if where == "TLHUB_MATCH" else f"match={near or 'revision'}",
    )


def _site(item: str) -> Layer:
    path, _, text = item.partition("?")
    shared, owners, match, signed = False, [], "revision", None
    access = {"read": True, "write": False, "backfill": False}
    for word, value in parse_qsl(text, keep_blank_values=True):
        if word == "shared" and not value:
            shared = True
        elif word == "owner" and value:
            owners.append(value)
        elif (word in ("write", "backfill") and not value) or (word, value) == ("read", "no"):
            access[word] = not value
        elif word == "match":
            match = _match(value, f"the word match of {path!r} in TLHUB_STORES")
        elif word == "signed":
            signed = _signed(value, path)
        else:
            raise ArgumentError(
                f"TLHUB_STORES says {word!r} of {path!r}; allowed are shared, owner=USER, match=KIND, signed=POLICY, "
                "write, backfill and read=no",
                hint=f"export TLHUB_STORES='{path}?shared&owner=USER'",
            )
    root = os.path.abspath(os.path.expanduser(path))
    return Layer(Store(path, root, "site", access["write"], shared, owners, match, signed), **access)


def _remote(item: str) -> Store:
    from tlhub.remote.reference import parse
    from tlhub.remote.store import RemoteStore

    place, _, text = item.partition("?")
    plain, match, signed = False, "revision", None
    for word, value in parse_qsl(text, keep_blank_values=True):
        if word == "plain-http" and not value:
            plain = True
        elif word == "match":
            match = _match(value, f"the word match of {place!r} in TLHUB_STORES")
        elif word == "signed":
            signed = _signed(value, place)
        else:
            raise ArgumentError(
                f"TLHUB_STORES says {word!r} of {place!r}; allowed are plain-http, match=KIND and signed=POLICY",
                hint=f"export TLHUB_STORES='{place}?signed=require'",
            )
    return RemoteStore(parse(place, plain=plain), user_store, match, signed)


def _signed(text: str, path: str) -> str:
    from tlhub.cache.vouching import check_policy

    return check_policy(text, f"the word signed of {path!r} in TLHUB_STORES")
