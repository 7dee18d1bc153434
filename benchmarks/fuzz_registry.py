"""Feed what a hostile registry could send to the readers: 1e5 inputs, no crash, no file outside the store.

python benchmarks/fuzz_registry.py [--inputs 100000] [--seed 1]
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "remote"))
from hostile import ARCH, FRONT, GOOD, MANIFESTS, Shelved, body, mutated

from tlhub.cache.store import Store
from tlhub.errors import CacheError
from tlhub.remote import artifact, layer, sync


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    dice, count, started = random.Random(options.seed), Counter[str](), time.monotonic()
    rest = body(MANIFESTS)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder, "a", "b", "store")
        for number in range(options.inputs):
            what = "pull" if number % 50 == 0 else "artifact" if number % 2 else "front"
            try:
                if what == "artifact":
                    artifact.parse(mutated(GOOD, dice))
                elif what == "front":
                    layer.read(mutated(FRONT, dice), ARCH)
                else:
                    sent = (mutated(FRONT, dice), rest) if number % 100 else (FRONT, mutated(rest, dice))
                    sync.pull(Shelved(*sent), Store("cache", root))  # type: ignore[arg-type]
                count[f"{what} read"] += 1
            except CacheError:
                count[f"{what} refused"] += 1
        outside = [p for p in Path(folder).rglob("*") if p.is_file() and root not in p.parents]
        wrong = [item for item in Store("cache", root).entries() if item.reason]
    for name, times in sorted(count.items()):
        print(f"{name:<18} {times}")
    seconds = time.monotonic() - started
    print(f"{options.inputs} inputs, {len(outside)} files outside, {len(wrong)} damaged, {seconds:.0f} s")
    sys.exit(bool(outside or wrong))


if __name__ == "__main__":
    main()
