"""gemm on a GPU against cuBLAS, as a Markdown table.

    python benchmarks/gemm_cuda.py [--schedule NAME] [--rounds 7] [--json FILE]

The problems are those of `tlhub bench --suite gemm`. A call is timed as a caller sees it, 100 of them and one wait;
the GPU alone by a graph of launches. Both sides take turns in one process; a ratio above 1 means that tlhub is faster.
A machine without compilers measures what another has built, with the same sources, into a folder DIR:

    SUITE=registry/tlhub_registry/workloads/suites/gemm.toml
    TLHUB_CACHE_DIR=DIR tlhub cache prewarm --from $SUITE --device h200 --schedule hopper --jobs 2
    TLHUB_STORES=DIR TLHUB_COMPILE=never python benchmarks/gemm_cuda.py --schedule hopper
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

SUITE = "gemm"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedule", help="this schedule and no other")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", metavar="FILE", help="write everything that was found there too")
    options = parser.parse_args()
    measure(options.schedule, options.rounds, options.json)


def measure(schedule: str | None, rounds: int, file: str | None) -> None:
    from tlhub.bench.suite import run

    suite = run(SUITE, schedule=schedule, rounds=rounds, say=lambda text: print(text, file=sys.stderr))
    if file:
        Path(file).write_text(json.dumps(suite.to_json()), "utf-8")
    print("| problem | a call | ratio | GPU | ratio | schedule |\n| --- | ---: | ---: | ---: | ---: | --- |")
    for row in suite.rows:
        found = row.ratios().get("torch", {})
        if row.report is None or row.report.ours is None or "device_ratio" not in found:
            print(f"| {row.title} | {(row.fault or 'no peer').splitlines()[0]} | | | | |")
            continue
        call, alone = row.report.ours.seconds, row.to_json()["tlhub"]["device"]["seconds"]
        print(
            f"| {row.title} | {1e6 * call:.1f} us | {found['ratio']:.2f} | {1e6 * alone:.1f} us "
            f"| {found['device_ratio']:.2f} | {row.report.schedule} |"
        )
    for peer, kinds in suite.summary().items():
        for kind, values in kinds.items():
            print(f"\n{peer}, {kind}: geomean {values['geomean']:.3f}, least {values['least']:.2f}", end="")
    print()


if __name__ == "__main__":
    main()
