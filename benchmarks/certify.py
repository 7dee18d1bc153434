"""Certificates of the schedules that tlhub ships for GPUs: what proves their numbers and times on a device.

    python benchmarks/certify.py plan                                 # the problems of each schedule
    python benchmarks/certify.py prebuild --store DIR --device h200   # builds them; needs compilers, and no GPU
    python benchmarks/certify.py run --store DIR [--out DIR]          # measures them here; compiles nothing

The problems are the workloads ``certify/*.toml`` of tlhub_registry, or those of ``--workload FILE``; names of
schedules leave the others out. Each problem is held against the float64 reference on fresh random data with poisoned
outputs, on views with gaps that keep and that break alignment, and with NaN and infinities, called several times for
the same bits, and timed in turn with the platform's library. A symbolic dim is tried at several extents, by the one
binary. A schedule that fails at one problem gets no certificate, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import tlhub_registry
from tlhub import bench, catalog, devices, hub, sources, testing, workload
from tlhub.bench.child import Runner
from tlhub.errors import DeviceError, describe
from tlhub.problem import signature
from tlhub.specs import Problem, Schedule
from tlhub.testing.numbers import bind
from tlhub.workload import Item, Mistake

REGISTRY = Path(tlhub_registry.__file__).parent

CALLS = 3
"""Calls that must give the same bits."""

ROUNDS, SECONDS = 3, 0.02
"""Rounds of a measurement, and seconds of one side of a round."""

CHECKED = 1 << 24
"""Elements of all arrays up to which every case is tried; of larger problems random data alone, made on the device."""

EXTENTS = (1, 9, 17, 33, 65, 1000, 2560, 4104)
"""What symbolic dims are in turn, all at once; the last is timed."""

PATIENCE = 180.0
"""Seconds for one problem, the start of a process included."""

Array = np.ndarray[Any, Any]
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
        if name == "prebuild":
            command.add_argument("--jobs", "-j", type=int, default=1, metavar="N", help="builds at a time")
            command.add_argument("--device", metavar="D", help="what will run them: its size may decide a config")
        if name == "run":
            command.add_argument("--out", type=Path, default=REGISTRY / "certificates", metavar="DIR")
    child = commands.add_parser("child")
    child.add_argument("pipe", type=int)
    options = parser.parse_args()
    if options.command == "child":
        return answer(options.pipe)
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
        for item, row in zip(problems, measured(problems), strict=True):
            rows.append(row)
            print(f"  {title(item)}: {verdict(row)}", flush=True)
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


def measured(items: Sequence[Item]) -> Iterator[Row]:
    """Yield a row for each of *items*, or its ``fault``. What fails ends its process, and costs no other problem."""
    done = 0
    while done < len(items):
        for row in _of_one_process(items[done:]):
            done += 1
            yield row


def _of_one_process(items: Sequence[Item]) -> Iterator[Row]:
    """Yield rows, up to the first fault: a fault of a GPU stays with the process that made it."""
    read, write = os.pipe()
    command = [sys.executable, __file__, "child", str(write)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=(write,), text=True)
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


def answer(pipe: int) -> None:
    """Measure the problems on stdin and write a line for each to *pipe*, up to the first that fails."""
    with os.fdopen(pipe, "w", encoding="utf-8", buffering=1) as answers:
        for item in json.load(sys.stdin):
            try:
                row = examine(Item(**{**item, "shape": shape_of(item["shape"])}))
            except Exception as error:
                row = {"fault": describe(error).partition("\nhint:")[0]}
            answers.write(json.dumps(row) + "\n")
            if "fault" in row:
                return


def shape_of(shape: Any) -> Any:
    return shape if isinstance(shape, dict) else tuple(shape)


def examine(item: Item) -> Row:
    """Return what a certificate says of one problem. Raises AssertionError for a number that is wrong."""
    place = devices.locate(catalog.load(), arch=item.arch)
    if place.device is None:
        raise DeviceError(f"no device here runs {place.arch}")
    kernel = hub.get(**item.request())
    known = catalog.load().schedules[item.kernel]
    schedule = next(s for s in known if s.name == item.schedule)
    if kernel.entry.manifest.source_digest != sources.digest(schedule):
        raise AssertionError("the binary in the store is of other sources; prebuild it again")
    seed = int.from_bytes(os.urandom(4), "little")
    error, tried = 0.0, concrete(kernel.problem)
    for problem in tried:
        found = signature(kernel.kernel, problem)
        small = sum(math.prod(t.extents) for t in (*found.inputs, *found.outputs)) <= CHECKED
        # the measurement has random data of the last
        for case in CASES if small else (CASES[:1] if problem is not tried[-1] else ()):
            arrays = case.spoil(testing.inputs(kernel.kernel, problem, seed), np.random.default_rng(seed))
            how = {"device": place.device, "times": CALLS, "gap": case.gap}
            error = max(error, testing.check(kernel, dims=problem.dim, arrays=arrays, **how))
    asked = {**item.request(), "shape": tried[-1].dim}
    report = bench.bench(**asked, rounds=ROUNDS, seconds=SECONDS, worker=Here())
    if report.fault or report.ours is None or report.worst is None:
        raise AssertionError(report.fault)
    if report.key != kernel.key:
        raise AssertionError(f"the store has a binary for {tried[-1].dim} alone, and that was timed; use another store")
    timed = report.to_json()
    peer, against = next(((n, p) for n, p in timed["peers"].items() if "ratio" in p), (None, {}))
    return {
        "arch": kernel.arch,
        "dims": kernel.problem.dim,
        "dtypes": dict(kernel.problem.dtypes),
        "options": item.options,
        "entry": kernel.key,
        "error": rounded(max(error, report.worst)),
        "seconds": rounded(report.ours.seconds),
        "peer": peer,
        "ratio": rounded(against.get("ratio")),
        "device_ratio": rounded(against.get("device_ratio")),
    }


def concrete(problem: Problem) -> list[Problem]:
    """Return *problem*, or where dims are symbolic what it is at each of EXTENTS."""
    symbolic = [name for name, extent in problem.dims if isinstance(extent, str)]
    return [bind(problem, dict.fromkeys(symbolic, n)) for n in EXTENTS] if symbolic else [problem]


def rounded(number: float | None) -> float | None:
    return None if number is None else float(f"{number:.4g}")


class Here:
    """Stands for the process of a measurement: this one has the libraries loaded already."""

    def ask(self, what: str, **arguments: Any) -> Any:
        return getattr(Runner(), what)(**arguments)


# -- data ------------------------------------------------------------------------------------------


def plain(arrays: dict[str, Array], rng: np.random.Generator) -> dict[str, Array]:
    return arrays


def odd(count: int) -> int:
    """Return a gap after which rows of *count* elements do not stay aligned."""
    return 3 + count % 2


def even(count: int) -> int:
    """Return a gap after which rows of *count* elements begin at multiples of 16."""
    return 16 + -count % 16


def with_gaps(
    arrays: dict[str, Array], rng: np.random.Generator, gap: Callable[[int], int], offset: int = 0
) -> dict[str, Array]:
    """Return *arrays* as views that begin *offset* elements into rows that are longer by a *gap*, with NaN (or ones) in
    what is not theirs."""

    def apart(array: Array) -> Array:
        count = array.shape[-1]
        whole = np.full((*array.shape[:-1], count + gap(count)), np.nan if inexact(array) else 1, array.dtype)
        view = whole[..., offset : offset + count]
        view[...] = array
        return view

    return {name: apart(array) for name, array in arrays.items()}


def with_specials(arrays: dict[str, Array], rng: np.random.Generator) -> dict[str, Array]:
    """Return *arrays* with a NaN and two infinities each, at random places."""
    for array in arrays.values():
        if inexact(array) and array.size:
            for value in (np.nan, np.inf, -np.inf):
                array[tuple(rng.integers(array.shape))] = value
    return arrays


def inexact(array: Array) -> bool:
    return "float" in array.dtype.name


class Case(NamedTuple):
    """What is done to the inputs, and the ``gap`` between the rows of outputs."""

    spoil: Callable[[dict[str, Array], np.random.Generator], dict[str, Array]]
    gap: Callable[[int], int] = lambda count: 0


CASES = (
    Case(plain),
    Case(functools.partial(with_gaps, gap=even), even),
    Case(functools.partial(with_gaps, gap=odd, offset=1), odd),
    Case(with_specials),
)

if __name__ == "__main__":
    main()
