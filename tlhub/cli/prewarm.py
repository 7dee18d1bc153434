"""``cache prewarm``: build what will be asked for, one problem or a workload, several at a time."""

from __future__ import annotations

import contextlib
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import click

from tlhub.cli import output
from tlhub.cli.command import (
    FOUND_PROBLEMS,
    Command,
    json_option,
    message,
    problem_arguments,
    request,
    show,
)
from tlhub.errors import ArgumentError, CacheError, TlhubError, debugging
from tlhub.workload import Mistake

Progress = Callable[["Outcome"], None]


@dataclass(frozen=True)
class Outcome:
    """What became of one problem. ``status``: ``built``, ``present`` or ``failed``; ``arch``: None if unknown."""

    title: str
    arch: str | None
    status: str
    seconds: float
    origin: str | None = None
    entry: str | None = None
    key: str | None = None
    error: str | None = None

    def to_json(self) -> dict[str, Any]:
        fields = {name: value for name, value in self.__dict__.items() if name != "title"}
        return {"problem": self.title, **fields}


@click.command(cls=Command)
@problem_arguments(required=False)
@click.option("--from", "workload", metavar="FILE", help="A workload.toml in place of one problem.")
@click.option("--jobs", "-j", type=click.IntRange(min=1), default=1, metavar="N", help="Builds at a time; default: 1.")
@json_option
def prewarm(workload: str | None, jobs: int, as_json: bool, **typed: Any) -> None:
    """Build the kernels of a problem, or of a workload, before they are asked for.

    Exits with 1 if one failed, be it only that a problem of the workload is wrong; all others are built all the same.
    """
    requests = _requests(workload, typed)
    with _progress(len(requests)) as progress:
        outcomes = run(requests, jobs, progress)
    count = {status: sum(o.status == status for o in outcomes) for status in ("built", "present", "failed")}
    if as_json:
        output.write_json({**count, "problems": [o.to_json() for o in outcomes]})
    else:
        output.write(f"{count['built']} built, {count['present']} there already, {count['failed']} failed")
    if count["failed"]:
        sys.exit(FOUND_PROBLEMS)


def run(requests: Sequence[dict[str, Any] | Mistake], jobs: int, progress: Progress) -> list[Outcome]:
    """Prewarm each of *requests*, *jobs* at a time, and return their outcomes in order."""
    from tlhub.build import pool as workers

    workers.default().size = jobs
    with ThreadPoolExecutor(max_workers=jobs) as pool:
        futures = [pool.submit(_one, asked) for asked in requests]
        try:
            pending: set[Future[Outcome]] = set(futures)
            while pending:
                done, pending = wait(pending, return_when=FIRST_COMPLETED)
                for future in done:
                    progress(future.result())
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [f.result() for f in futures]


def _one(asked: dict[str, Any] | Mistake) -> Outcome:
    from tlhub import catalog, devices, hub, stores

    if isinstance(asked, Mistake):
        return Outcome(asked.where, None, "failed", 0.0, error=str(asked.error))
    started = time.monotonic()
    title, arch = _title(asked), asked["arch"]
    try:
        arch = devices.locate(catalog.load(), asked.get("device"), arch).arch
        entry, origin = hub.prewarm(**asked)
        if not entry.published:  # it ends with this process
            raise stores.user_store().unkept or CacheError("the entry is kept in memory only")
    except Exception as error:  # whatever it is, the other problems are still to be built
        if debugging() and not isinstance(error, TlhubError):
            raise
        text = message(error).removeprefix("error: ")
        return Outcome(title, arch, "failed", time.monotonic() - started, error=text)
    status = "built" if origin == "built" else "present"
    return Outcome(title, arch, status, time.monotonic() - started, origin, entry.folder, entry.key)


def _requests(workload: str | None, typed: dict[str, Any]) -> list[dict[str, Any] | Mistake]:
    if workload is None:
        if not typed["kernel"] or not typed["dims"]:
            raise ArgumentError(
                "prewarm needs a problem or a workload",
                argument="kernel",
                hint="tlhub cache prewarm --from workload.toml",
            )
        return [request(**typed)]
    shown = {"kernel": "KERNEL", "dims": "DIMS", "dtype": "--dtype", "options": "--option"}
    given = next((name for name in shown if typed[name]), None)
    if given:
        value = typed[given] if isinstance(typed[given], str) else " ".join(typed[given])
        raise ArgumentError(
            f"--from names the problems; {shown[given]} {value!r} is given too",
            argument=given,
            hint=f"tlhub cache prewarm --from {shlex.quote(workload)}",
        )
    from tlhub import catalog
    from tlhub.devices import locate
    from tlhub.workload import read

    everywhere = {name: typed[name] for name in ("arch", "device")} if typed["arch"] or typed["device"] else {}
    if everywhere:  # what is typed holds for all, and is wrong for all or none
        locate(catalog.load(), typed["device"], typed["arch"])
    if typed["schedule"]:
        everywhere["schedule"] = typed["schedule"]
    found: dict[str, dict[str, Any] | Mistake] = {}
    for item in read(workload, catalog.load()):
        asked = item if isinstance(item, Mistake) else {**item.request(), **everywhere}
        found[str(asked) if isinstance(asked, Mistake) else repr(sorted(asked.items()))] = asked
    return list(found.values())


def _title(asked: dict[str, Any]) -> str:
    """Return the problem as it is typed, for people to tell one line from another."""
    shape, dtype = asked["shape"], asked["dtype"]
    dims = ",".join(f"{n}={e}" for n, e in shape.items()) if isinstance(shape, dict) else ",".join(map(str, shape))
    types = ",".join(f"{n}={d}" for n, d in dtype.items()) if isinstance(dtype, dict) else dtype
    known = ("kernel", "shape", "dtype", "arch", "device", "schedule")
    options = [f"--option {name}={show(value)}" for name, value in asked.items() if name not in known]
    arch = [f"--arch {asked['arch']}"] if asked.get("arch") else []
    return " ".join([asked["kernel"], dims, "--dtype", types, *options, *arch])


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Progress]:
    """Show a bar on a terminal's stderr; else, and for what failed, a line for each problem."""
    if not sys.stderr.isatty():
        yield lambda outcome: output.note(_line(outcome))
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True, markup=False, highlight=False, emoji=False)
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=console, transient=True, redirect_stdout=False, redirect_stderr=False) as bar:
        task = bar.add_task("building", total=total)

        def advance(outcome: Outcome) -> None:
            if outcome.status == "failed":
                bar.console.print(_line(outcome), soft_wrap=True)
            bar.update(task, advance=1, description=outcome.title)

        yield advance


def _line(outcome: Outcome) -> str:
    head = f"{outcome.status:<7} {outcome.seconds:6.2f} s  {outcome.title}"
    return head + ("\n        " + outcome.error.replace("\n", "\n        ") if outcome.error else "")
