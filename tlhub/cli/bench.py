"""``bench``: is it right, and how fast is it beside the platform's library?"""

from __future__ import annotations

import sys
from typing import Any

import click

from tlhub.cli import output
from tlhub.cli.command import FOUND_PROBLEMS, Command, hide_torch, json_option, problem_arguments, request


@click.command(cls=Command)
@problem_arguments()
@click.option("--threads", type=click.IntRange(min=1), metavar="N", help="For every side; default: all processors.")
@click.option("--peer", "peers", multiple=True, metavar="NAME", help="Only these of the kernel's peers.")
@click.option("--repeat", type=click.IntRange(min=1), default=7, metavar="N", help="Rounds; default: 7.")
@json_option
def bench(threads: int | None, peers: tuple[str, ...], repeat: int, as_json: bool, **typed: Any) -> None:
    """Check a kernel against its float64 reference, then time it against the platform's library.

    Each side runs in a process of its own, in turn; the ratio is tlhub's rate to the library's. Exits with 1
    where the numbers are out of tolerance, and then times nothing.
    """
    asked = request(**typed)
    from tlhub.bench import bench as measure

    hide_torch()
    report = measure(**asked, threads=threads, peers=peers or None, rounds=repeat, say=output.note)
    if as_json:
        output.write_json(report.to_json())
    else:
        output.write(str(report))
    if report.fault:
        sys.exit(FOUND_PROBLEMS)
