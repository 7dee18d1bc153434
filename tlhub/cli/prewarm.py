"""``cache prewarm``: build what will be asked for, one problem or a workload, several at a time."""

from __future__ import annotations

import contextlib
import hashlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import click

from tlhub.cli import output
from tlhub.cli.command import FOUND_PROBLEMS, Command, json_option, message
from tlhub.cli.problems import Asked, name_of, problems_arguments, requests_of, title_of
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
@problems_arguments
@click.option("--jobs", "-j", type=click.IntRange(min=1), default=1, metavar="N", help="Builds at a time; default: 1.")
@click.option("--rank", type=click.IntRange(min=0), metavar="I", help="Build only this process's part, from 0;")
@click.option("--world", type=click.IntRange(min=1), metavar="N", help="of N such parts, which share nothing.")
@json_option
def prewarm(workload: str | None, jobs: int, rank: int | None, world: int | None, as_json: bool, **typed: Any) -> None:
    """Build the kernels of a problem, or of a workload, before they are asked for.

    Exits with 1 if one failed, be it only that a problem of the workload is wrong; all others are built all the same.
    """
    requests = _part(requests_of("cache prewarm", workload, typed), rank, world)
    with _progress(len(requests)) as progress:
        outcomes = run(requests, jobs, progress)
    count = {status: sum(o.status == status for o in outcomes) for status in ("built", "present", "failed")}
    if as_json:
        output.write_json({**count, "problems": [o.to_json() for o in outcomes]})
    else:
        output.write(f"{count['built']} built, {count['present']} there already, {count['failed']} failed")
    if count["failed"]:
        sys.exit(FOUND_PROBLEMS)


def run(requests: Sequence[Asked], jobs: int, progress: Progress) -> list[Outcome]:
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


def _one(asked: Asked) -> Outcome:
    from tlhub import catalog, devices, hub, stores

    if isinstance(asked, Mistake):
        return Outcome(asked.where, None, "failed", 0.0, error=str(asked.error))
    started = time.monotonic()
    title, arch = title_of(asked), asked["arch"]
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


def _part(requests: list[Asked], rank: int | None, world: int | None) -> list[Asked]:
    """Return the part of *requests* that is for *rank*: those of one binary, and each mistake, are for the same one."""
    if rank is None and world is None:
        return requests
    if rank is None or world is None or rank >= world:
        said = "--rank goes with --world" if rank is None or world is None else f"there is no rank {rank} of {world}"
        raise ArgumentError(f"{said}: ranks are 0 to N - 1", argument="rank", hint="--rank 0 --world 4")
    return [asked for asked in requests if int(_digest(asked), 16) % world == rank]


def _digest(asked: Asked) -> str:
    from tlhub import hub

    if not isinstance(asked, Mistake):
        with contextlib.suppress(TlhubError):  # which is told by the rank that builds it
            return hub.binary(**asked)
    return hashlib.sha256(name_of(asked).encode()).hexdigest()


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
