"""``cache refusals``: what devices here did not take."""

from __future__ import annotations

import time

import click

from tlhub.cli import output
from tlhub.cli.command import Command, json_option
from tlhub.quantity import age


@click.command(cls=Command)
@click.option("--clear", is_flag=True, help="Forget them: the entries are tried again.")
@json_option
def refusals(clear: bool, as_json: bool) -> None:
    """List the entries that a device here did not take, which are passed over for a week."""
    from tlhub import refusals as noted

    found = noted.current()
    if clear:
        noted.clear()
    if as_json:
        output.write_json({"cleared": clear, "refusals": [r._asdict() for r in found]})
    elif found and not clear:
        now = time.time()
        rows = [(r.key[:16], r.device, r.driver or "-", age(r.expires - now), r.reason) for r in found]
        output.table(["entry", "device", "driver", "for", "reason"], rows, whole=["entry"])
    output.note(f"{len(found)} refused" + (", and forgotten" if clear and found else ""))
