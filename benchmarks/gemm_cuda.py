"""gemm on a GPU against cuBLAS, as a Markdown table; and what it needs, built where there is no GPU.

    python benchmarks/gemm_cuda.py prebuild --store DIR [--arch cuda:sm_90a] [--schedule NAME] [--jobs 2]
    TLHUB_STORES=DIR TLHUB_COMPILE=never python benchmarks/gemm_cuda.py [--schedule NAME] [--rounds 7] [--json FILE]

The problems are those of `tlhub bench --suite gemm`. A call is timed as a caller sees it, 100 of them and one wait;
the GPU alone by a graph of launches. Both sides take turns in one process; a ratio above 1 means that tlhub is faster.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SUITE = "gemm"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", nargs="?", choices=("measure", "prebuild"), default="measure")
    parser.add_argument("--store", metavar="DIR", help="prebuild: the folder that the entries go to")
    parser.add_argument("--arch", default="cuda:sm_90a", help="prebuild: for this arch (default: cuda:sm_90a)")
    parser.add_argument("--jobs", type=int, default=2, help="prebuild: builds at a time (default: 2)")
    parser.add_argument("--schedule", help="this schedule and no other")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", metavar="FILE", help="measure: write everything that was found there too")
    options = parser.parse_args()
    if options.action == "measure":
        measure(options.schedule, options.rounds, options.json)
    elif options.store:
        prebuild(options.store, options.arch, options.schedule, options.jobs)
    else:
        parser.error("prebuild needs --store DIR")


def prebuild(store: str, arch: str, schedule: str | None, jobs: int) -> None:
    """Build what the suite needs for *arch* into *store*; exits with 1 if something failed, all else is built."""
    os.environ["TLHUB_CACHE_DIR"] = store
    from tlhub import hub
    from tlhub.bench.suite import read
    from tlhub.build import pool
    from tlhub.errors import TlhubError
    from tlhub.workload import Item

    pool.default().size = jobs

    def one(item: Item) -> str:
        asked = item.request() | {"arch": arch, "schedule": schedule or item.schedule}
        try:
            entry, origin = hub.prewarm(**asked)
        except TlhubError as error:
            return f"failed   {item.shape}: {error}"
        return f"{origin:<8} {item.shape} {item.dtype} {item.options}: {entry.key[:16]}"

    items = [item for item in read(SUITE) if isinstance(item, Item)]
    with ThreadPoolExecutor(jobs) as threads:
        lines = list(threads.map(one, items))
    print("\n".join(lines))
    if any(line.startswith("failed") for line in lines):
        sys.exit(1)


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
