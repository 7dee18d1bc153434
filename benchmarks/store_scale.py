"""A store of many entries: looking one up, listing, statistics, pruning and clearing. Prints a Markdown table.

    python benchmarks/store_scale.py [--entries 100000]

A look-up is timed in turn with one in a store of ten entries; the commands are run as a user runs them. Processor time
is told beside: a machine with other work to do, or a slow disk, shows in the difference.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tlhub.cache.chain import this_host
from tlhub.cache.entry import LIBRARY, MANIFEST, Manifest, Member
from tlhub.cache.store import Store
from tlhub.specs import ABI, Problem

ARCH = "cpu:x86-64-v3"
HOST = this_host()
LIBRARY_BYTES = b"library" * 40
DAY = 86400.0


def manifest(number: int) -> Manifest:
    problem = Problem("scale", 1, (("M", number), ("N", 64)), (("a", "float32"), ("b", "float32")), (("causal", True),))
    made = Manifest.make(
        problem,
        ARCH,
        schedule="none",
        schedule_revision=1,
        source_digest="0" * 64,
        config={"tile": 64},
        toolchain={"none": "1.0"},
        abi=ABI,
        platform={"os": HOST.os, "machine": HOST.machine, "glibc": ""},
        provenance={"plugin": "scale", "plugin_version": "1.0", "seconds": 1.0},
    )
    return made.with_members({LIBRARY: Member.of(LIBRARY_BYTES)})


def fill(root: Path, entries: int, old: int) -> None:
    """Write *entries* entries, file by file; the first *old* of them were last used months ago."""
    root.mkdir(mode=0o700)
    for number in range(entries):
        made = manifest(number)
        folder = root / made.folder
        folder.mkdir(parents=True)
        (folder / LIBRARY).write_bytes(LIBRARY_BYTES)
        (folder / MANIFEST).write_bytes(made.to_bytes())
        if number < old:
            stamp = time.time() - 100 * DAY
            os.utime(folder / MANIFEST, (stamp, stamp))


def look_up(store: Store, number: int) -> float:
    wanted = manifest(number)
    start = time.perf_counter()
    (entry,) = store.lookup(ARCH, wanted.kernel, wanted.problem_digest).entries
    entry.prepare()
    return time.perf_counter() - start


def in_turn(small: Store, large: Store, entries: int, rounds: int) -> float:
    """Return the ratio of the medians of look-ups in *large* and in *small*, each found again and again."""
    picked = [i * (entries // 10) for i in range(10)]
    pairs = [(look_up(small, n % 10), look_up(large, picked[n % 10])) for n in range(rounds)]
    return statistics.median(b for _, b in pairs[20:]) / statistics.median(a for a, _ in pairs[20:])


def command(root: Path, *words: str) -> tuple[float, float, str]:
    """Run ``tlhub cache`` and return its seconds, those of a processor, and what it printed."""
    environ = {**os.environ, "TLHUB_CACHE_DIR": str(root)}
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", "from tlhub.cli import main; main()", "cache", *words],
        env=environ,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return seconds, after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime, done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, default=100_000)
    entries = parser.parse_args().entries
    rows: list[tuple[str, str, str, str]] = []

    def timed(bar: float, *words: str, check: Callable[[str], bool]) -> None:
        seconds, processor, said = command(root, *words)
        assert check(said), said[:500]
        rows.append((f"`tlhub cache {' '.join(words)}`", f"{seconds:.1f} s", f"{processor:.1f} s", f"{bar:g} s"))

    with tempfile.TemporaryDirectory() as folder:
        root, little = Path(folder, "large"), Path(folder, "small")
        fill(root, entries, entries // 10)
        fill(little, 10, 0)
        ratio = in_turn(Store("small", little), Store("large", root), entries, 420)
        rows.append(("a look-up over one among 10 entries", f"{ratio:.2f}", "", "1.2"))
        timed(10, "ls", check=lambda said: len(said.splitlines()) == entries + 1)
        timed(10, "ls", "--json", check=lambda said: json.loads(said)["count"] == entries)
        timed(10, "stats", "--json", check=lambda said: json.loads(said)["entries"] == entries)
        gone = entries // 10
        timed(10, "prune", "--older-than", "30d", "--json", check=lambda said: json.loads(said)["removed"] == gone)
        timed(30, "clear", "--yes", "--json", check=lambda said: json.loads(said)["removed"] == entries - gone)
    print(f"{entries} entries, {len(os.sched_getaffinity(0))} cores, {time.strftime('%Y-%m-%d', time.gmtime())}\n")
    print("| what | measured | of a processor | asked for |\n| --- | ---: | ---: | ---: |")
    print("\n".join(f"| {' | '.join(row)} |" for row in rows))


if __name__ == "__main__":
    main()
