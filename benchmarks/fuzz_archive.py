"""Hostile archives, as many as are asked for: a sound one with things done to it, as hypothesis chooses.

    python benchmarks/fuzz_archive.py --inputs 100000

None may crash the reader, put a file outside the store, or give an entry with another byte. The tests run 10,000.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, given, settings

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "cache"))

from archive_fuzz import DEEDS, Lab, deeds, mutations


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=100_000, metavar="N")
    inputs = parser.parse_args().inputs
    count = 0

    with tempfile.TemporaryDirectory() as folder:
        lab = Lab(Path(folder))

        @settings(
            max_examples=-(-inputs // DEEDS), deadline=None, database=None, suppress_health_check=list(HealthCheck)
        )
        @given(doings=deeds)
        def fuzz(doings: bytes) -> None:
            nonlocal count
            for data in mutations(lab.sound, doings):
                lab.read(data)
                count += 1

        fuzz()
    print(f"{count} archives: no crash, no file outside the store, no altered entry")


if __name__ == "__main__":
    main()
