"""``plugin new``: a plugin's project, ready to build and test."""

from __future__ import annotations

import shlex

import click

from tlhub.cli import output
from tlhub.cli.command import Command, Group


@click.group(cls=Group)
def plugin() -> None:
    """Write plugins."""


@plugin.command(cls=Command)
@click.argument("name")
@click.option("--into", default=".", metavar="FOLDER", help="Where the project's folder goes; default: here.")
def new(name: str, into: str) -> None:
    """Write a project tlhub-plugin-NAME with a kernel, its reference, a CPU schedule and a test."""
    from tlhub import scaffold

    project = str(scaffold.write(name, into))
    output.write(project)
    folder = shlex.quote(project)
    output.note(f"next:\n  pip install -e {folder}'[test]'\n  tlhub plugins\n  pytest {folder}")
