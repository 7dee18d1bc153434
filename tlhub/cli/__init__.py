"""The command line: ``tlhub COMMAND``. Each command's module is imported when it is used."""

from __future__ import annotations

import click

from tlhub.cli.command import OWN_PROCESS, Root

_COMMANDS = {
    "get": "tlhub.cli.lookup:get",
    "explain": "tlhub.cli.lookup:explain",
    "bench": "tlhub.cli.bench:bench",
    "kernels": "tlhub.cli.listings:kernels",
    "schedules": "tlhub.cli.listings:schedules",
    "targets": "tlhub.cli.listings:targets",
    "plugins": "tlhub.cli.listings:plugins",
    "cache": "tlhub.cli.cache:cache",
    "pin": "tlhub.cli.pin:pin",
    "remote": "tlhub.cli.remote:remote",
    "trust": "tlhub.cli.trust:trust",
    "doctor": "tlhub.cli.doctor:doctor",
    "plugin": "tlhub.cli.plugin:plugin",
    "package": "tlhub.cli.package:package",
}


@click.group(cls=Root, lazy=_COMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="tlhub-core", prog_name="tlhub", message="%(prog)s %(version)s")
def cli() -> None:
    """A hub for tensor kernels: plugins bring them, tlhub compiles each once and keeps the binary.

    A problem is always KERNEL DIMS --dtype D, such as: gemm 1024,1024,1024 --dtype float32
    """


def main() -> None:
    """Run the command line in this process, which is its own."""
    import warnings

    from tlhub.cli import output

    output.claim_stdout()
    warnings.showwarning = lambda message, *_: output.note(f"warning: {message}")
    cli(obj=OWN_PROCESS)
