"""``bench``: is it right, and how fast is it beside the platform's library?"""

from __future__ import annotations

import sys
from typing import Any

import click

from tlhub.cli import output
from tlhub.cli.command import FOUND_PROBLEMS, Command, hide_torch, json_option, problem_arguments, request
from tlhub.errors import ArgumentError


@click.command(cls=Command)
@problem_arguments(required=False)
@click.option("--suite", metavar="NAME", help="All problems of a suite, or of a file NAME.toml, in place of one.")
@click.option("--threads", type=click.IntRange(min=1), metavar="N", help="For every side; default: all processors.")
@click.option("--peer", "peers", multiple=True, metavar="NAME", help="Only these of the kernel's peers.")
@click.option("--repeat", type=click.IntRange(min=1), default=7, metavar="N", help="Rounds; default: 7.")
@json_option
def bench(
    suite: str | None, threads: int | None, peers: tuple[str, ...], repeat: int, as_json: bool, **typed: Any
) -> None:
    """Check a kernel against its float64 reference, then time it against the platform's library.

    The sides take turns, on a CPU each in a process of its own; the ratio is tlhub's rate to the library's. Exits with
    1 where the numbers are out of tolerance, and then times nothing, or where a problem of a suite has no figures.
    """
    how: dict[str, Any] = {"threads": threads, "peers": peers or None, "rounds": repeat, "say": output.note}
    hide_torch()
    found: Any
    if suite is None:
        found = _one(typed, how)
        failed = bool(found.fault)
    else:
        found = _several(suite, typed, how)
        failed = any(row.fault for row in found.rows)
    if as_json:
        output.write_json(found.to_json())
    else:
        output.write(str(found))
    if failed:
        sys.exit(FOUND_PROBLEMS)


def _one(typed: dict[str, Any], how: dict[str, Any]) -> Any:
    if not typed["kernel"] or not typed["dims"]:
        raise ArgumentError("bench needs a problem or a suite", argument="kernel", hint="tlhub bench --suite gemm")
    asked = request(**typed)
    from tlhub.bench import bench as measure

    return measure(**asked, **how)


def _several(suite: str, typed: dict[str, Any], how: dict[str, Any]) -> Any:
    names = {"kernel": "KERNEL", "dims": "DIMS", "dtype": "--dtype", "options": "--option"}
    given = next((name for name in names if typed[name]), None)
    if given:
        raise ArgumentError(
            f"--suite names the problems; {names[given]} is given too",
            argument=given,
            hint=f"tlhub bench --suite {suite}",
        )
    from tlhub.bench.suite import run

    return run(suite, **{name: typed[name] for name in ("device", "arch", "schedule")}, **how)
