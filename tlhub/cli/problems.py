"""Problems as commands take them: one that is typed, or those of a workload."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import click

from tlhub.cli.command import problem_arguments, request, show
from tlhub.errors import ArgumentError
from tlhub.workload import Mistake

Asked: TypeAlias = "dict[str, Any] | Mistake"
"""The keyword arguments of ``tlhub.get``, or why there are none."""

F = TypeVar("F", bound=Callable[..., Any])


def problems_arguments(function: F) -> F:
    """Give a command a problem's arguments, or ``--from`` in their place."""
    option = click.option("--from", "workload", metavar="FILE", help="A workload.toml in place of one problem.")
    return problem_arguments(required=False)(option(function))


def requests_of(command: str, workload: str | None, typed: dict[str, Any]) -> list[Asked]:
    """Return what was typed after *command*, each problem of a workload once.

    What is typed of arch, device and schedule holds for all of it. Raises ArgumentError, UnknownName, DeviceError.
    """
    from tlhub import catalog
    from tlhub.devices import locate
    from tlhub.workload import read

    everywhere = {name: typed[name] for name in ("arch", "device")} if typed["arch"] or typed["device"] else {}
    if everywhere:  # what is typed holds for all, and is wrong for all or none
        locate(catalog.load(), typed["device"], typed["arch"])
    if workload is None:
        if not typed["kernel"] or not typed["dims"]:
            raise ArgumentError(
                f"{command.split()[-1]} needs a problem or a workload",
                argument="kernel",
                hint=f"tlhub {command} --from workload.toml",
            )
        return [request(**typed)]
    shown = {"kernel": "KERNEL", "dims": "DIMS", "dtype": "--dtype", "options": "--option"}
    given = next((name for name in shown if typed[name]), None)
    if given:
        value = typed[given] if isinstance(typed[given], str) else " ".join(typed[given])
        raise ArgumentError(
            f"--from names the problems; {shown[given]} {value!r} is given too",
            argument=given,
            hint=f"tlhub {command} --from {shlex.quote(workload)}",
        )
    if typed["schedule"]:
        everywhere["schedule"] = typed["schedule"]
    found: dict[str, Asked] = {}
    for item in read(workload, catalog.load()):
        asked = item if isinstance(item, Mistake) else {**item.request(), **everywhere}
        found[name_of(asked)] = asked
    return list(found.values())


def name_of(asked: Asked) -> str:
    """Return what tells one problem of a workload from another."""
    return str(asked) if isinstance(asked, Mistake) else repr(sorted(asked.items()))


def title_of(asked: dict[str, Any]) -> str:
    """Return the problem as it is typed, for people to tell one line from another."""
    shape, dtype = asked["shape"], asked["dtype"]
    dims = ",".join(f"{n}={e}" for n, e in shape.items()) if isinstance(shape, dict) else ",".join(map(str, shape))
    types = ",".join(f"{n}={d}" for n, d in dtype.items()) if isinstance(dtype, dict) else dtype
    known = ("kernel", "shape", "dtype", "arch", "device", "schedule")
    options = [f"--option {name}={show(value)}" for name, value in asked.items() if name not in known]
    arch = [f"--arch {asked['arch']}"] if asked.get("arch") else []
    return " ".join([asked["kernel"], dims, "--dtype", types, *options, *arch])
