"""Certificates of the schedules that tlhub ships for GPUs: what proves their numbers and times on a device.

    python benchmarks/certify.py plan                                 # the problems of each schedule
    python benchmarks/certify.py prebuild --store DIR --device h200   # builds them; needs compilers, and no GPU
    python benchmarks/certify.py run --store DIR [--out DIR]          # measures them here; compiles nothing

The problems are the workloads ``certify/*.toml`` of tlhub_registry, or those of ``--workload FILE``; names of
schedules leave the others out. Each problem is held against the float64 reference on fresh random data with poisoned
outputs, on views with gaps that keep and that break alignment, and with NaN and infinities, called several times for
the same bits; a large one on random data alone, and timed in turn with the platform's library. A symbolic dim is tried
at several extents, by the one binary. A schedule that fails at one problem gets no certificate, and the exit code is 1.
``run --jobs N`` proves N problems at a time, in processes of their own, and times them afterwards, each alone.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from queue import LifoQueue
from typing import Any

import tlhub_registry
from tlhub import catalog, devices, sources, workload
from tlhub.specs import Schedule
from tlhub.workload import Item, Mistake

REGISTRY = Path(tlhub_registry.__file__).parent
CHILD = Path(__file__).with_name("examination.py")

PATIENCE = 180.0
"""Seconds for one problem, the start of a process included."""

Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True, metavar="plan|prebuild|run")
    for name in ("plan", "prebuild", "run"):
        command = commands.add_parser(name)
        command.add_argument("schedules", nargs="*", metavar="SCHEDULE", help="KERNEL/NAME or NAME (default: all)")
        command.add_argument("--workload", type=Path, metavar="FILE", help="problems in place of the registry's")
        if name != "plan":
            command.add_argument("--store", required=True, metavar="DIR", help="where the binaries are")
            what = "builds" if name == "prebuild" else "proofs"
            command.add_argument("--jobs", "-j", type=int, default=1, metavar="N", help=f"{what} at a time")
        if name == "prebuild":
            command.add_argument("--device", metavar="D", help="what will run them: its size may decide a config")
        if name == "run":
            command.add_argument("--out", type=Path, default=REGISTRY / "certificates", metavar="DIR")
    options = parser.parse_args()
    items = chosen(read(options.workload), options.schedules)
    if not items:
        parser.error(f"no problem of {', '.join(options.schedules) or 'any schedule'}")
    if options.command != "plan":
        os.environ["TLHUB_CACHE_DIR"] = options.store
    sys.exit({"plan": plan, "prebuild": prebuild, "run": run}[options.command](items, options))


def read(path: Path | None) -> list[Item]:
    """Return the problems of *path*, or of the registry. Raises SystemExit for one that cannot be asked for."""
    paths = [path] if path else sorted((REGISTRY / "workloads" / "certify").glob("*.toml"))
    found = [item for p in paths for item in workload.read(str(p), catalog.load())]
    mistakes = [item for item in found if isinstance(item, Mistake)]
    if mistakes:
        raise SystemExit("\n".join(map(str, mistakes)))
    return [item for item in found if isinstance(item, Item)]


def chosen(items: Sequence[Item], names: Sequence[str]) -> dict[str, list[Item]]:
    """Return the problems by schedule, ``KERNEL/NAME``: those of *names* in their order, or all."""
    every: dict[str, list[Item]] = {}
    for item in items:
        every.setdefault(f"{item.kernel}/{item.schedule}", []).append(item)
    if not names:
        return every
    return {made: every[made] for name in names for made in every if name in (made, made.partition("/")[2])}


def plan(items: Mapping[str, list[Item]], options: argparse.Namespace) -> int:
    for name, problems in items.items():
        print(f"{name}: {len(problems)} problems")
        for item in problems:
            print(f"  {title(item)}")
    return 0


def prebuild(items: Mapping[str, list[Item]], options: argparse.Namespace) -> int:
    from tlhub.cli import prewarm

    def say(outcome: prewarm.Outcome) -> None:
        print(f"{outcome.status:<7} {outcome.seconds:6.1f} s  {outcome.title} {outcome.error or ''}", flush=True)

    requests = [{**item.request(), "device": options.device} for problems in items.values() for item in problems]
    return int(any(o.status == "failed" for o in prewarm.run(requests, options.jobs, say)))


def run(items: Mapping[str, list[Item]], options: argparse.Namespace) -> int:
    os.environ["TLHUB_COMPILE"] = "never"
    known = {f"{s.kernel}/{s.name}": s for group in catalog.load().schedules.values() for s in group}
    failed = False
    with Examiners(options.jobs) as examiners:
        for name, problems in items.items():
            print(name, flush=True)
            rows = []
            for item, proof in zip(problems, examiners.together("prove", problems), strict=True):
                rows.append(proof if "fault" in proof else joined(proof, examiners.ask("time", item)))
                print(f"  {title(item)}: {verdict(rows[-1])}", flush=True)
            faults = sum("fault" in row for row in rows)
            if faults:
                failed = True
                print(f"{name}: {faults} of {len(rows)} problems failed: no certificate", flush=True)
                continue
            facts = devices.locate(catalog.load(), arch=problems[0].arch).facts
            options.out.mkdir(parents=True, exist_ok=True)
            file = options.out / f"{name.replace('/', '-')}.json"
            file.write_text(document(known[name], facts.model, facts.driver, rows), "utf-8")
            print(f"{name}: {file}", flush=True)
    return int(failed)


def title(item: Item) -> str:
    dims = item.shape.values() if isinstance(item.shape, dict) else item.shape
    dtype = item.dtype if isinstance(item.dtype, str) else ",".join(f"{n}={d}" for n, d in item.dtype.items())
    options = "".join(f" {name}={value}" for name, value in item.options.items())
    return f"{'x'.join(map(str, dims))} {dtype}{options} {item.arch or ''}".rstrip()


def verdict(row: Row) -> str:
    if "fault" in row:
        return f"FAILED: {row['fault']}"
    time_of_it = "" if row["seconds"] is None else f", {row['seconds'] * 1e6:.1f} us"
    ratio = "" if row["ratio"] is None else f", {row['ratio']:.2f} of {row['peer']}"
    return f"error {row['error']:.2g} of the tolerance{time_of_it}{ratio}"


def joined(proof: Row, times: Row) -> Row:
    """Return what a certificate says of one problem, or the fault that the measurement found."""
    if "fault" in times:
        return times
    return {**proof, **times, "error": float(f"{max(proof['error'], times['error']):.4g}")}


def document(schedule: Schedule, device: str, driver: int, rows: Sequence[Row]) -> str:
    """Return the certificate as JSON, a line for each problem. ``tlhub.certificates`` has the fields."""
    head = {
        "kernel": schedule.kernel,
        "schedule": schedule.name,
        "revision": schedule.revision,
        "source_digest": sources.digest(schedule),
        "device": device,
        "driver": driver,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }
    fields = "".join(f" {json.dumps(name)}: {json.dumps(value)},\n" for name, value in head.items())
    problems = ",\n".join(f"  {json.dumps(row)}" for row in rows)
    return f'{{\n{fields} "problems": [\n{problems}\n ]\n}}\n'


# -- processes, so that a fault costs one problem --------------------------------------------------


class Examiners:
    """*count* processes that examine problems and share the processors. Each stays for the next problem until a fault
    ends it: what breaks a GPU stays with its process."""

    def __init__(self, count: int) -> None:
        threads = max(1, len(os.sched_getaffinity(0)) // count)
        self._all = [_Examiner(threads) for _ in range(count)]
        self._pool = ThreadPoolExecutor(count)
        self._free: LifoQueue[_Examiner] = LifoQueue()
        for examiner in self._all:
            self._free.put(examiner)

    def __enter__(self) -> Examiners:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        for examiner in self._all:
            examiner.stop()

    def together(self, what: str, items: Sequence[Item]) -> list[Row]:
        """Return a row for each of *items*, or its ``fault``; they are examined side by side."""
        return list(self._pool.map(lambda item: self.ask(what, item), items))

    def ask(self, what: str, item: Item) -> Row:
        """Return the row of *item*, or its ``fault``; by the process that was free last."""
        examiner = self._free.get()
        try:
            return examiner.ask(what, item)
        finally:
            self._free.put(examiner)


class _Examiner:
    """A process of examination.py, started when it is asked for the first time and after a fault."""

    def __init__(self, threads: int) -> None:
        self._environ = {**os.environ, "OPENBLAS_NUM_THREADS": str(threads)}
        self._process: subprocess.Popen[str] | None = None

    def ask(self, what: str, item: Item) -> Row:
        process = self._process = self._process or self._start()
        assert process.stdin
        with contextlib.suppress(BrokenPipeError):  # it has ended: no answer
            print(json.dumps([what, asdict(item)]), file=process.stdin, flush=True)
        ready, _, _ = select.select([self._answers], [], [], PATIENCE)
        line = self._answers.readline() if ready else b""
        if line:
            row: Row = json.loads(line)
        else:
            row = {"fault": f"its process ended with {process.wait()}" if ready else f"no answer in {PATIENCE:.0f} s"}
        if "fault" in row:
            self.stop()
        return row

    def stop(self) -> None:
        if self._process:
            self._process.kill()
            self._process.wait()
            self._answers.close()
            self._process = None

    def _start(self) -> subprocess.Popen[str]:
        read, write = os.pipe()
        self._answers = os.fdopen(read, "rb", buffering=0)
        command = [sys.executable, str(CHILD), str(write)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=(write,), text=True, env=self._environ)
        os.close(write)
        return process


if __name__ == "__main__":
    main()
