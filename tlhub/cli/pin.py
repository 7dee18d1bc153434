"""``pin``: write down which builds a job uses, for all of its ranks."""

from __future__ import annotations

import os
import shlex
import sys
from typing import TYPE_CHECKING, Any

import click

from tlhub.cli import output
from tlhub.cli.check import hint, look, machine_options
from tlhub.cli.command import FOUND_PROBLEMS, Command
from tlhub.cli.problems import problems_arguments, requests_of
from tlhub.errors import ArgumentError, CacheError
from tlhub.workload import Mistake

if TYPE_CHECKING:
    from tlhub.cache.chain import Host


@click.command(cls=Command)
@problems_arguments
@machine_options
@click.option("--to", "path", metavar="FILE", help="Write FILE instead of stdout.")
def pin(workload: str | None, host: Host, driver: int, path: str | None, **typed: Any) -> None:
    """Choose a build for each problem, and write the choices down for TLHUB_PINS.

    Exits with 1, and writes nothing, if the stores here lack one.
    """
    import json

    from tlhub import files, pins

    if path is not None:
        _check_place(path)
    found, missing = [], []
    for asked in requests_of("pin", workload, typed):
        told, answer = look(asked, host, driver, pinned=False)
        served = told and told.served
        if isinstance(asked, Mistake) or told is None or served is None or served.hit is None:
            missing.append(answer)
            output.note(f"missing: {answer.problem}: {'; '.join(answer.why)}")
            continue
        manifest = served.hit.entry.manifest
        choice = (asked["schedule"], manifest.build_digest, manifest.schedule)
        found.append(pins.Pin(told.problem, told.place.arch, *choice))
    if missing:
        output.note(f"nothing is pinned: {len(missing)} missing")
        hint(missing, workload, typed)
        sys.exit(FOUND_PROBLEMS)
    document = pins.show(found)
    if path is None:
        output.write_json(document)
        return
    try:
        files.write_whole(os.path.realpath(path), json.dumps(document, indent=2) + "\n")
    except OSError as error:
        text = f"{path!r} cannot be written: {error.strerror or error}"
        raise CacheError(text, hint=f"df -h {shlex.quote(os.path.dirname(path) or '.')}") from error
    output.note(f"{len(found)} pinned in {path}")


def _check_place(path: str) -> None:
    """Refuse what is typed wrong before anything is looked up. Raises ArgumentError."""
    folder = os.path.dirname(path) or "."
    if not path or (os.path.exists(path) and not os.path.isfile(path)):
        why, hint = "it is a folder" if os.path.isdir(path) else "it is no file", "--to pins.json"
    elif not os.path.isdir(folder):
        why, hint = f"there is no folder {folder!r}", f"mkdir -p {shlex.quote(folder)}"
    else:
        return
    raise ArgumentError(f"{path!r} cannot be written: {why}", argument="to", hint=hint)
