"""Processes killed at random moments while they change a store, and what every reader finds afterwards.

    python benchmarks/kills.py [--kills 1000] [--seed 0] [--registry HOST:PORT]

Each round a child works on a store (``OPERATIONS``) until SIGKILL ends it, after a time drawn from no longer than its
work takes. Then every entry that can be seen must be whole, every entry that the child said it had published must be
there, those that prune has to keep too, and the next writer must succeed with nothing mended by hand. What is published
is a few bytes, which no compiler made, and is not forced to the disk: that is for machines that die, not processes.
With a registry that speaks plain HTTP (``docker-registry serve``, say) those who pull from it are killed too.
Exits with 1 where a round went wrong.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import tlhub
from tlhub import hub
from tlhub.build import pool
from tlhub.cache import archive, prune, repair
from tlhub.cache.chain import this_host
from tlhub.cache.entry import MANIFEST, Entry, Manifest
from tlhub.cache.store import STAGING, Store
from tlhub.remote import sync
from tlhub.remote.reference import parse
from tlhub.remote.registry import Registry
from tlhub.specs import ABI, LIBRARY, Problem

ARCH = "cpu:x86-64-v3"
HOST = this_host()
MONTH = 30 * 86400.0
MOST = 200  # entries; then the store is cleared, for all of them are hashed after each round

Tell = Callable[[str], None]


def publish(store: Store, number: int) -> Entry:
    problem = Problem("kills", 1, (("N", number),), (("a", "float32"),), ())
    manifest = Manifest.make(
        problem,
        ARCH,
        schedule="none",
        schedule_revision=1,
        source_digest="0" * 64,
        config={},
        toolchain={},
        abi=ABI,
        platform={"os": HOST.os, "machine": HOST.machine, "glibc": ""},
    )
    with store.stage() as staged:
        Path(staged.path, LIBRARY).write_bytes(b"library %d" % number * 200)
        Path(staged.path, "kernel.c").write_bytes(b"source %d" % number)
        return store.publish(staged, manifest)


# -- what is killed: put and prewarm go on until they are, the others end ----------------------------------------------


def put(store: Store, tell: Tell) -> None:
    for number in itertools.count(int.from_bytes(os.urandom(6), "big")):
        tell(str(publish(store, number).folder))


def prewarm(store: Store, tell: Tell) -> None:
    """Prewarm many problems of the built-in kernel, with a compiler that takes no time."""

    def build(
        self: Any, kernel: Any, problem: Any, schedule: Any, config: Any, arch: str, target: Any, folder: str
    ) -> Any:
        Path(folder, LIBRARY).write_bytes(repr(problem).encode())
        return pool.Built({"none": "1"}, ABI, HOST.machine, "", {}, 0, (), (LIBRARY,), 0.0)

    pool.Pool.build = build  # type: ignore[method-assign,assignment]
    for number in itertools.count(int.from_bytes(os.urandom(2), "big")):
        options = {
            "trans_a": bool(number & 1),
            "trans_b": bool(number & 2),
            "epilogue": ("none", "relu")[number >> 2 & 1],
        }
        dtype = ("float32", "float64")[number >> 3 & 1]
        entry, _ = hub.prewarm("gemm", (8, 8, 8), dtype, arch=f"cpu:x86-64-v{2 + number % 3}", **options)
        tell(str(entry.folder))


def remove(store: Store, tell: Tell) -> None:
    prune.remove(store, prune.plan(store.entries(), now=time.time(), max_age=MONTH))


def unpack(store: Store, tell: Tell) -> None:
    tell("\n".join(str(entry.folder) for entry in archive.unpack(f"{store.root}.tar.zst", store).added))


def pull(place: str, store: Store, tell: Tell) -> None:
    sync.pull(Registry(parse(place, plain=True)), store)


OPERATIONS: dict[str, Callable[[Store, Tell], None]] = {
    "put": put,
    "prewarm": prewarm,
    "prune": remove,
    "import": unpack,
}


def others(store: Store) -> Store:
    """Return a store of entries that *store* does not have."""
    source = Store("source", f"{store.root}-source")
    prune.clear(source)
    for number in range(12):
        publish(source, int.from_bytes(os.urandom(6), "big") + number)
    return source


def pack(store: Store) -> None:
    """Make the archive that ``unpack`` is killed over."""
    source = others(store)
    archive.pack(map(source.open, source.entries()), f"{store.root}.tar.zst")


def push(place: str, store: Store) -> None:
    """Put into the registry what ``pull`` is killed over."""
    source = others(store)
    sync.push(Registry(parse(place, plain=True)), source, map(source.open, source.entries()), replace=True)


# -- one round ---------------------------------------------------------------------------------------------------------


def killed(operation: Callable[[Store, Tell], None], store: Store, delay: float) -> list[str]:
    """Run *operation* in a child, kill it after *delay* seconds, and return what it told before."""
    heard, says = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(heard)
            operation(store, lambda line: os.write(says, line.encode() + b"\n"))
            os._exit(0)
        finally:
            os._exit(1)
    os.close(says)
    time.sleep(delay)
    os.kill(child, signal.SIGKILL)
    with open(heard, "rb") as lines:
        told = lines.read().decode().splitlines()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, -signal.SIGKILL), f"the child failed by itself: {status}"
    return told


def check(store: Store, expected: list[str]) -> None:
    """Raise AssertionError unless all that is seen is whole, *expected* is among it, and the next writer succeeds."""
    found = repair.verify(Store("reader", store.root))
    assert not found.damaged, found.damaged
    missing = [folder for folder in expected if not os.path.exists(f"{folder}/{MANIFEST}")]
    assert not missing, f"lost: {missing}"
    entry = publish(store, 0)
    assert entry.published and entry.read(LIBRARY) == b"library 0" * 200


def rounds(root: str, kills: int, seed: int, registry: str | None) -> Iterator[str]:
    """Kill *kills* children at work on the store *root*; yield the name of what each did. Raises AssertionError."""
    place = f"oci://{registry}/kills:latest"
    operations = {**OPERATIONS, **({"pull": functools.partial(pull, place)} if registry else {})}
    os.environ["TLHUB_CACHE_DIR"] = root
    os.fsync = lambda fd: None
    chance = random.Random(seed)
    store = Store("user", root)
    kept = [str(publish(store, number).folder) for number in range(4)]
    tlhub.explain("gemm", (8, 8, 8), "float32")  # what the children would import
    names = list(operations)
    for turn in range(kills):
        name = names[turn % len(names)]
        for number in range(100, 106) if name == "prune" else ():  # its prey
            os.utime(f"{publish(store, number).folder}/{MANIFEST}", (1e9, 1e9))
        if name == "import":
            pack(store)
        if name == "pull":
            push(place, store)
        told = killed(operations[name], store, chance.uniform(0, 0.1))
        check(store, kept + told)
        if sum(1 for _ in store.entries()) > MOST:
            prune.clear(store)
            kept = [str(publish(store, number).folder) for number in range(4)]
        yield name
    prune.clear(store)
    assert os.listdir(f"{root}/{STAGING}") == [], "the dead left something that no prune removes"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--registry", metavar="HOST:PORT")
    options = parser.parse_args()
    started, done = time.monotonic(), Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        try:
            for name in rounds(f"{folder}/store", options.kills, options.seed, options.registry):
                done[name] += 1
        except AssertionError as error:
            print(f"after {done.total()} kills: {error}", file=sys.stderr)
            return 1
    shown = ", ".join(f"{count} of {name}" for name, count in done.items())
    print(f"{done.total()} kills ({shown}) in {time.monotonic() - started:.0f} s: nothing torn, nothing lost")
    return 0


if __name__ == "__main__":
    sys.exit(main())
