"""What the tests of the cache share: a problem, its manifest, entries in stores."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tlhub.cache.chain import this_host
from tlhub.cache.entry import Entry, Manifest
from tlhub.cache.store import Store
from tlhub.specs import Problem

if TYPE_CHECKING:
    import pytest

ARCH = "cpu:x86-64-v3"
FOREIGN = 12345

PROBLEM = Problem(
    "gemm",
    1,
    (("B", 1), ("M", 64), ("N", 48), ("K", 32)),
    (("a", "float32"), ("b", "float32"), ("c", "float32")),
    (("trans_a", False), ("trans_b", True), ("accum", "float32"), ("splits", 1)),
)
GENERAL = dataclasses.replace(PROBLEM, dims=(("B", "?0"), ("M", "?1"), ("N", "?2"), ("K", "?3")))

BUILD: dict[str, Any] = {
    "schedule": "gemm.cpu",
    "schedule_revision": 3,
    "source_digest": "5" * 64,
    "config": {"tile": 64, "pack": True, "order": "mnk"},
    "toolchain": {"apache-tvm": "0.25.0.post1", "cc": "gcc 12.2.0"},
    "abi": "1",
    "platform": {"os": this_host().os, "machine": this_host().machine, "glibc": ""},
}
MEMBERS = {"kernel.so": b"\x7fELF" + bytes(range(200)), "kernel.c": b"int main(void) { return 0; }\n"}


def make_manifest(problem: Problem = PROBLEM, arch: str = ARCH, **changes: Any) -> Manifest:
    more = {"provenance": {"tlhub": "0.1.0", "created": "2026-11-30T00:00:00Z", "seconds": 0.25}}
    return Manifest.make(problem, arch, **{**BUILD, **more, **changes})


def publish(store: Store, manifest: Manifest | None = None, members: dict[str, bytes] | None = None) -> Entry:
    with store.stage() as staged:
        for name, data in (MEMBERS if members is None else members).items():
            Path(staged.path, name).write_bytes(data)
        return store.publish(staged, make_manifest() if manifest is None else manifest)


def lookup(store: Store, manifest: Manifest | None = None) -> Any:
    manifest = make_manifest() if manifest is None else manifest
    return store.lookup(manifest.arch, manifest.kernel, manifest.problem_digest)


def serves(store: Store) -> bool:
    """Tell whether a lookup finds an entry all of whose bytes are right."""
    from tlhub.cache.entry import Damaged

    for entry in lookup(store).entries:
        try:
            entry.prepare()
        except Damaged:
            continue
        assert {name: entry.read(name) for name in MEMBERS} == MEMBERS
        return True
    return False


def files_below(folder: str | Path) -> list[str]:
    return sorted(os.path.join(d, f)[len(str(folder)) + 1 :] for d, _, names in os.walk(folder) for f in names)


def make_foreign(path: str | Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have *path* belong to somebody else: give it away as root; as a user, be another one and own the rest."""
    if os.geteuid() == 0:
        os.chown(path, FOREIGN, -1, follow_symlinks=False)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: FOREIGN)


def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.005)
