"""gemm on the CPU against NumPy's BLAS, as a Markdown table.

    python benchmarks/gemm_cpu.py [--threads 1,2] [--rounds N] [CASE ...]

Every side has a process of its own; they run in turn, round by round. The ratio is how many times as fast as
the BLAS tlhub is, the median over rounds: above 1 tlhub is faster. ``bar`` is the least ratio asked for.
"""

from __future__ import annotations

import argparse
from typing import Any

# name: M, N, K, options, the least ratio asked for
CASES: dict[str, tuple[tuple[int, int, int], dict[str, Any], float]] = {
    "512": ((512, 512, 512), {}, 1.0),
    "1024": ((1024, 1024, 1024), {}, 1.0),
    "2048": ((2048, 2048, 2048), {}, 1.0),
    "1000": ((1000, 1000, 1000), {}, 0.85),
    "1021": ((1021, 1021, 1021), {}, 0.85),
    "1x4096x4096": ((1, 4096, 4096), {}, 0.85),
    "4096x64x4096": ((4096, 64, 4096), {}, 0.85),
    "1x4096x4096 NT": ((1, 4096, 4096), {"trans_b": True}, 0.85),
    "1024 TN": ((1024, 1024, 1024), {"trans_a": True}, 0.85),
    "1024 NT": ((1024, 1024, 1024), {"trans_b": True}, 0.85),
    "1024 TT": ((1024, 1024, 1024), {"trans_a": True, "trans_b": True}, 0.85),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"some of: {', '.join(CASES)} (default: all)")
    parser.add_argument("--threads", default="1,2", help="numbers of threads (default: 1,2)")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    unknown = [c for c in options.cases if c not in CASES]
    if unknown:
        parser.error(f"no case {unknown[0]!r}; there are: {', '.join(CASES)}")
    times(options.cases or list(CASES), [int(n) for n in options.threads.split(",")], options.rounds)


def times(cases: list[str], threads: list[int], rounds: int) -> None:
    from tlhub.bench import bench

    print("| M x N x K | threads | tlhub GFLOP/s | BLAS GFLOP/s | ratio | bar |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for name in cases:
        shape, chosen, bar = CASES[name]
        for count in threads:
            report = bench("gemm", shape, "float32", device="cpu", threads=count, rounds=rounds, **chosen)
            if report.fault or report.ours is None:
                raise SystemExit(f"{name}: {report.fault}")
            (peer,) = report.to_json()["peers"].values()
            ours = report.flops / report.ours.seconds / 1e9
            print(f"| {name} | {count} | {ours:.1f} | {peer['gflops']:.1f} | {peer['ratio']:.2f} | {bar} |", flush=True)


if __name__ == "__main__":
    main()
