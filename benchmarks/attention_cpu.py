"""Attention on the CPU against PyTorch's scaled_dot_product_attention, as a Markdown table.

    python benchmarks/attention_cpu.py [--backward] [--threads 1,2] [--rounds N] [CASE ...]

Every side has a process of its own; they run in turn, round by round. The ratio is how many times as fast as
PyTorch tlhub is, the median over rounds: above 1 tlhub is faster. ``--backward`` times the backward alone.
``--memory`` shows what a call takes beyond its arrays, by length.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from typing import Any

# name: B, S, H, D, H_kv, S_kv, D_v, dtype, options
CASES: dict[str, tuple[dict[str, int], str, dict[str, Any]]] = {
    "prefill": ({"B": 1, "S": 1024, "H": 8, "D": 64}, "float32", {}),
    "prefill, causal": ({"B": 1, "S": 1024, "H": 8, "D": 64}, "float32", {"causal": True}),
    "prefill, D=128": ({"B": 1, "S": 1024, "H": 8, "D": 128}, "float32", {}),
    "grouped heads, causal": ({"B": 1, "S": 1024, "H": 8, "D": 64, "H_kv": 2}, "float32", {"causal": True}),
    "long, causal": ({"B": 1, "S": 4096, "H": 2, "D": 64}, "float32", {"causal": True}),
    "short": ({"B": 4, "S": 128, "H": 8, "D": 64}, "float32", {}),
    "odd sizes": ({"B": 1, "S": 1021, "H": 7, "D": 61}, "float32", {}),
    "decode": ({"B": 1, "S": 1, "H": 8, "D": 64, "S_kv": 4096}, "float32", {}),
    "decode, grouped heads": ({"B": 1, "S": 1, "H": 32, "D": 128, "H_kv": 8, "S_kv": 4096}, "float32", {}),
    "bfloat16": ({"B": 1, "S": 1024, "H": 8, "D": 64}, "bfloat16", {}),
    "float16": ({"B": 1, "S": 1024, "H": 8, "D": 64}, "float16", {}),
    "float64": ({"B": 1, "S": 1024, "H": 8, "D": 64}, "float64", {}),
}

_MEMORY = """
import resource, sys, numpy as np, tlhub
length, heads, width = int(sys.argv[1]), 1, 64
kernel = tlhub.get("attention", (1, length, heads, width), "float32", device="cpu")
rng = np.random.default_rng(0)
q = rng.standard_normal((1, length, heads, width), np.float32)
out = np.ones_like(q)
small = np.ones((1, 32, heads, width), np.float32)
tlhub.get("attention", small.shape, "float32", device="cpu")(small, small, small)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
kernel(q, q, q, out=out)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"some of: {'; '.join(CASES)} (default: all)")
    parser.add_argument("--threads", default="1,2", help="numbers of threads (default: 1,2)")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--backward", action="store_true", help="measure the backward instead")
    parser.add_argument("--memory", action="store_true", help="measure memory instead of time")
    options = parser.parse_args()
    unknown = [c for c in options.cases if c not in CASES]
    if unknown:
        parser.error(f"no case {unknown[0]!r}; there are: {'; '.join(CASES)}")
    if options.memory:
        memory()
    else:
        kernel = "attention_bwd" if options.backward else "attention"
        times(kernel, options.cases or list(CASES), [int(n) for n in options.threads.split(",")], options.rounds)


def times(kernel: str, cases: list[str], threads: list[int], rounds: int) -> None:
    from tlhub.bench import bench

    print("| case | shape | threads | tlhub ms | GFLOP/s | PyTorch ms | ratio |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: |")
    for name in cases:
        dims, dtype, chosen = CASES[name]
        for count in threads:
            report = bench(kernel, dims, dtype, device="cpu", threads=count, rounds=rounds, **chosen)
            if report.fault or report.ours is None:
                raise SystemExit(f"{name}: {report.fault}")
            (peer,) = report.to_json()["peers"].values()
            theirs = "" if "missing" in peer else f"{peer['seconds'] * 1e3:.3f}"
            ratio = "" if "missing" in peer else f"{peer['ratio']:.2f}"
            shape = " ".join(f"{n}={e}" for n, e in dims.items())
            ours, speed = report.ours.seconds, report.flops / report.ours.seconds / 1e9
            print(f"| {name} | {shape} | {count} | {ours * 1e3:.3f} | {speed:.1f} | {theirs} | {ratio} |", flush=True)


def memory() -> None:
    """Each length in a process of its own, for the high-water mark of memory never falls."""
    print("| length | one head's logits would take MiB | a call takes beyond its arrays MiB |")
    print("| ---: | ---: | ---: |")
    for length in (1024, 4096, 16384):
        done = subprocess.run([sys.executable, "-c", _MEMORY, str(length)], capture_output=True, text=True, check=True)
        print(f"| {length} | {length**2 * 4 / 2**20:.0f} | {int(done.stdout) / 1024:.1f} |", flush=True)


if __name__ == "__main__":
    main()
