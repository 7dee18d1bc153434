"""compute-sanitizer over schedules for GPUs: the small ones of the problems that certify them, each called once.

    python benchmarks/certify.py prebuild --store DIR --device h200   # builds them; needs compilers, and no GPU
    python benchmarks/sanitize.py --store DIR attention_bwd/hopper    # compiles nothing

Names of schedules leave the others out. Each schedule runs under each tool in a process of its own, on random data held
against the float64 reference; a report of the tool, a wrong number, or a process that takes too long is a fault, and
then the exit code is 1. ``--cleared`` sets scratch memory to zeros before each call.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from certify import chosen, read, title
from examination import concrete

from tlhub import catalog, hub, testing
from tlhub.problem import make
from tlhub.runtime.kernel import CompiledKernel
from tlhub.specs import Problem
from tlhub.testing.devices import put
from tlhub.workload import Item

TOOLS = ("memcheck", "synccheck", "initcheck", "racecheck")

SHOWN = 30
"""Lines of what a tool says that are shown of a fault."""

_SUMMARY = re.compile(r"^========= (?:ERROR SUMMARY: (\d+) errors?|RACECHECK SUMMARY: (\d+) hazards?)", re.MULTILINE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("schedules", nargs="*", metavar="SCHEDULE", help="KERNEL/NAME or NAME (default: all)")
    parser.add_argument("--store", required=True, metavar="DIR", help="where the binaries are")
    parser.add_argument("--workload", type=Path, metavar="FILE", help="problems in place of the registry's")
    parser.add_argument("--tool", action="append", choices=TOOLS, help="one of the tools, or several (default: all)")
    parser.add_argument("--operations", type=float, default=5e8, metavar="N", help="what a problem takes at most")
    parser.add_argument("--seconds", type=float, default=180, metavar="N", help="what a process takes at most")
    parser.add_argument("--cleared", action="store_true", help="have zeros in scratch memory")
    parser.add_argument("--call", action="store_true", help=argparse.SUPPRESS)  # what runs under a tool
    options = parser.parse_args()
    os.environ |= {"TLHUB_CACHE_DIR": options.store, "TLHUB_COMPILE": "never"}
    items = chosen(read(options.workload), options.schedules)
    if not items:
        parser.error(f"no problem of {', '.join(options.schedules) or 'any schedule'}")
    if options.call:
        for item in (item for problems in items.values() for item in problems):
            call(item, options.operations, options.cleared)
        return
    faults = [sanitize(tool, name, options) for name in items for tool in options.tool or TOOLS]
    sys.exit(int(any(faults)))


def call(item: Item, most: float, cleared: bool) -> None:
    """Call *item* where it takes at most so many operations, and print how it compares with the reference."""
    for problem in small(item, most):
        kernel = hub.get(**item.request())
        error = testing.check(Cleared(kernel) if cleared else kernel, dims=problem.dim)
        print(f"{title(item)} at {'x'.join(str(n) for _, n in problem.dims)}: error {error:.2g}", flush=True)


class Cleared:
    """A *kernel* that has zeros in its scratch memory, where it may then read what it has not written."""

    def __init__(self, kernel: CompiledKernel) -> None:
        self._kernel = kernel

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel, name)

    def __call__(self, *inputs: Any, out: Any, **scalars: float) -> Any:
        size, device = self._kernel.workspace(*inputs, **scalars), f"{self._kernel.arch.partition(':')[0]}:0"
        room = put(np.zeros(size, "uint8"), device)[0] if size else None
        return self._kernel(*inputs, out=out, workspace=room, **scalars)


def small(item: Item, most: float) -> list[Problem]:
    """Return *item* as a problem where it takes at most so many operations; of symbolic dims the largest that does."""
    kernel = catalog.load().kernel(item.kernel)
    problems = concrete(kernel, make(kernel, item.shape, item.dtype, item.options))
    return [p for p in problems if kernel.flops({**p.dim, **p.option}) <= most][-1:]


def sanitize(tool: str, name: str, options: argparse.Namespace) -> bool:
    """Run schedule *name* under *tool*, and return whether there is a fault."""
    again = [sys.executable, __file__, "--call", name, "--store", options.store]
    again += ["--operations", str(options.operations)]
    again += ["--workload", str(options.workload)] if options.workload else []
    again += ["--cleared"] if options.cleared else []
    command = ["compute-sanitizer", "--tool", tool, "--print-limit", "10", *again]
    # memory that is kept for the next array would hide who reaches beyond one, or reads what nobody wrote
    own = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=options.seconds, env=own)
    except subprocess.TimeoutExpired:
        print(f"{name} {tool}: not done in {options.seconds:g} s", flush=True)
        return True
    said = done.stdout + done.stderr
    counts = [int(error or hazard) for error, hazard in _SUMMARY.findall(said)]
    calls = said.count(": error ")
    clean = calls > 0 and done.returncode == 0 and counts != [] and not any(counts)
    print(f"{name} {tool}: {f'clean, {calls} problems' if clean else 'FAULT'}", flush=True)
    if not clean:
        lines = [line for line in said.splitlines() if "Host Frame" not in line and "Saved host" not in line]
        print("\n".join(f"  {line}" for line in lines[:SHOWN]), flush=True)
    return not clean


if __name__ == "__main__":
    main()
