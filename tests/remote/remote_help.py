"""Entries for the tests of registries: small ones, and how a test pushes and pulls them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "cache"))
from cache_help import PROBLEM, make_manifest, publish

from tlhub.cache.entry import Entry
from tlhub.cache.store import Store
from tlhub.remote import sync
from tlhub.remote.reference import parse
from tlhub.remote.registry import Registry
from tlhub.specs import Problem

QUICK: dict[str, Any] = {"pauses": (0.01, 0.02, 0.05), "silence": 1.0}


def problem(m: int) -> Problem:
    """Return a problem of its own for each *m*."""
    return Problem(PROBLEM.kernel, 1, (("B", 1), ("M", m), ("N", 48), ("K", 32)), PROBLEM.dtypes, PROBLEM.options)


def fill(store: Store, count: int, arch: str = "cpu:x86-64-v3", first: int = 1, size: int = 300) -> list[Entry]:
    """Publish entries for the problems first, first + 1, ..., each with bytes of its own."""
    made = []
    for m in range(first, first + count):
        library = b"\x7fELF" + bytes((m * 7 + i) % 251 for i in range(size))
        made.append(publish(store, make_manifest(problem(m), arch), {"kernel.so": library, "kernel.c": b"// %d\n" % m}))
    return made


def registry(place: str, **more: Any) -> Registry:
    return Registry(parse(place), **{**QUICK, **more})


def push(place: str, store: Store, entries: Iterable[Entry] | None = None, **more: Any) -> sync.Done:
    chosen = [store.open(item) for item in store.entries()] if entries is None else entries
    return sync.push(registry(place), store, chosen, **more)


def pull(place: str, store: Store, **more: Any) -> sync.Done:
    return sync.pull(registry(place), store, **more)


def content(store: Store) -> dict[str, bytes]:
    """Return every file of the entries that *store* has, verified."""
    found = {}
    for item in store.entries():
        assert item.reason is None, item
        store.open(item).verify()
        for file in Path(str(store.root), item.folder).iterdir():
            found[f"{item.folder}/{file.name}"] = file.read_bytes()
    return found
