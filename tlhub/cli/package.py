"""``package build``: what a workload needs, as a wheel that pip installs."""

from __future__ import annotations

import os
import shlex
import sys

import click

from tlhub.cli import output
from tlhub.cli.command import FOUND_PROBLEMS, Command, Group, json_option
from tlhub.cli.entries import count_entries
from tlhub.errors import ArgumentError
from tlhub.quantity import size


@click.group(cls=Group)
def package() -> None:
    """Make packages of prebuilt kernels."""


@package.command(cls=Command)
@click.option("--from", "workload", required=True, metavar="FILE", help="A workload.toml: the problems.")
@click.option("--arch", "archs", multiple=True, metavar="A", help="For this arch, several times for several.")
@click.option("--name", metavar="N", help="What comes before the arch in the package's name.")
@click.option("--version", metavar="V", help="Of the package; default: tlhub-core's own.")
@click.option("--into", default=".", metavar="FOLDER", help="Where the wheel goes; default: here.")
@click.option("--jobs", "-j", type=click.IntRange(min=1), default=1, metavar="N", help="Builds at a time; default: 1.")
@json_option
def build(
    workload: str, archs: tuple[str, ...], name: str | None, version: str | None, into: str, jobs: int, as_json: bool
) -> None:
    """Build the wheel tlhub-prebuilt-NAME-ARCH of the kernels of a workload; what the cache has is not built again.

    Exits with 1, and makes no wheel, if one of the kernels cannot be built.
    """
    from tlhub import catalog
    from tlhub.cli import prewarm
    from tlhub.devices import locate
    from tlhub.packaging import cover, wheel

    if os.path.lexists(into) and not os.path.isdir(into):
        raise ArgumentError(f"--into {into!r} is no folder", argument="into", hint="--into wheels")
    asked = cover.requests(workload, archs)
    known = catalog.load()
    wheel.check(sorted({each["arch"] or locate(known).arch for each in asked}), name, version)
    outcomes = prewarm.run(asked, jobs, lambda outcome: output.note(f"{outcome.status:<7} {outcome.title}"))
    failed = [outcome for outcome in outcomes if outcome.status == "failed"]
    if failed:
        output.note("\n".join(f"{outcome.title}: {outcome.error}" for outcome in failed))
        output.note(f"{len(failed)} of {len(outcomes)} failed: no wheel is made")
        sys.exit(FOUND_PROBLEMS)
    served = cover.serve(asked, workload)
    planned = wheel.plan(served, known, name, version)
    path = wheel.write(planned, served, into)
    if as_json:
        output.write_json({"wheel": path, "size": os.path.getsize(path), **planned.to_json()})
    else:
        output.write(path)
        output.note(f"{count_entries(len(planned.manifests))}, {size(os.path.getsize(path))}")
        output.note(f"next:\n  pip install {shlex.quote(path)}")
