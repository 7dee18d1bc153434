"""Certificates of the schedules that tlhub ships for GPUs: what proves their numbers and times on a device.

    python benchmarks/certify.py plan                                 # the problems of each schedule
    python benchmarks/certify.py prebuild --store DIR --device h200   # builds them; needs compilers, and no GPU
    python benchmarks/certify.py run --store DIR [--out DIR]          # measures them here; compiles nothing

The problems are the workloads ``certify/*.toml`` of tlhub_registry, or those of ``--workload FILE``; names of
schedules leave the others out. Each problem is held against the float64 reference on fresh random data with poisoned
outputs, on views with gaps that keep and that break alignment, and with NaN and infinities, called several times for
the same bits, and timed in turn with the platform's library. A symbolic dim is tried at several extents, by the one
binary. A schedule that fails at one problem gets no certificate, and the exit code is 1. ``run --jobs N`` proves N
problems at a time, in processes of their own, and times them afterwards, each alone.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
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
    """Return the problems by schedule, ``KERNEL/NAME``: those of *names*, or all."""
    by_schedule: dict[str, list[Item]] = {}
    for item in items:
        if not names or item.schedule in names or f"{item.kernel}/{item.schedule}" in names:
            by_schedule.setdefault(f"{item.kernel}/{item.schedule}", []).append(item)
    return by_schedule


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
    for name, problems in items.items():
        print(name, flush=True)
        rows = []
        proofs, times = proved(problems, options.jobs), examined("time", problems)
        for item, proof, time_of_it in zip(problems, proofs, times, strict=True):
            rows.append(joined(proof, time_of_it))
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
    ratio = "" if row["ratio"] is None else f", {row['ratio']:.2f} of {row['peer']}"
    return f"error {row['error']:.2g} of the tolerance, {row['seconds'] * 1e6:.1f} us{ratio}"


def joined(proof: Row, times: Row) -> Row:
    """Return what a certificate says of one problem, or the first fault."""
    for row in (proof, times):
        if "fault" in row:
            return row
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


# -- one problem after the other, each without the others' faults ----------------------------------


def proved(items: Sequence[Item], jobs: int) -> Iterator[Row]:
    """Yield a row for each of *items*, in order, once all are proved by *jobs* processes. They share the processors."""
    threads = max(1, len(os.sched_getaffinity(0)) // jobs)
    with ThreadPoolExecutor(jobs) as pool:
        parts = list(pool.map(lambda start: list(examined("prove", items[start::jobs], threads)), range(jobs)))
    yield from (parts[i % jobs][i // jobs] for i in range(len(items)))


def examined(what: str, items: Sequence[Item], threads: int = 0) -> Iterator[Row]:
    """Yield a row for each of *items*, or its ``fault``. What fails ends its process, and costs no other problem.
    *threads*: of NumPy's products, 0 for as many as it likes."""
    done = 0
    while done < len(items):
        for row in _of_one_process(what, items[done:], threads):
            done += 1
            yield row


def _of_one_process(what: str, items: Sequence[Item], threads: int) -> Iterator[Row]:
    """Yield rows, up to the first fault: a fault of a GPU stays with the process that made it."""
    read, write = os.pipe()
    command = [sys.executable, str(CHILD), what, str(write)]
    env = {**os.environ, "OPENBLAS_NUM_THREADS": str(threads)} if threads else None
    process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=(write,), text=True, env=env)
    os.close(write)
    try:
        with os.fdopen(read, "rb", buffering=0) as answers:
            assert process.stdin
            process.stdin.write(json.dumps([asdict(item) for item in items]))
            process.stdin.close()
            for _ in items:
                ready, _, _ = select.select([answers], [], [], PATIENCE)
                line = answers.readline() if ready else b""
                if not line:
                    why = f"its process ended with {process.wait()}" if ready else f"no answer in {PATIENCE:.0f} s"
                    yield {"fault": why}
                    return
                row = json.loads(line)
                yield row
                if "fault" in row:
                    return
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    main()
