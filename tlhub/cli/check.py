"""``cache check``: would the machines that serve find what they will ask for?"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import click

from tlhub.cli import output
from tlhub.cli.command import FOUND_PROBLEMS, Command, json_option
from tlhub.cli.problems import Asked, problems_arguments, requests_of, retyped, title_of
from tlhub.errors import ArgumentError, TlhubError
from tlhub.workload import Mistake

if TYPE_CHECKING:
    from tlhub.cache.chain import Host
    from tlhub.explanation import Explanation

F = TypeVar("F", bound=Callable[..., Any])

_NOTHING = "no store has it"


@dataclass(frozen=True)
class Answer:
    """Whether a problem is covered, by what, and why not, or not by the best; ``driver``: the least that it needs."""

    problem: str
    arch: str | None
    covered: bool
    why: tuple[str, ...] = ()
    schedule: str | None = None
    match: str | None = None
    store: str | None = None
    key: str | None = None
    driver: int = 0


def _major(_: click.Context, __: click.Parameter, text: str | None) -> int:
    """Return 580 of ``580.65.06``, 0 of nothing. Raises ArgumentError."""
    number = (text or "0").strip().partition(".")[0]
    if not number.isdecimal():
        raise ArgumentError(
            f"driver {text!r} is no version; it is a number such as 580", argument="driver", hint="--driver 580"
        )
    return int(number)


def _host(_: click.Context, __: click.Parameter, text: str | None) -> Host:
    from tlhub.cache.chain import Host, this_host

    if text is None:
        return this_host()
    try:
        return Host.named(text)
    except ValueError as error:
        raise ArgumentError(str(error), argument="platform", hint="--platform manylinux_2_28_x86_64") from error


def machine_options(function: F) -> F:
    """Give a command ``[--platform P] [--driver V]``: a host, and a driver's major version or 0."""
    driver = click.option(
        "--driver", metavar="V", callback=_major, help="The driver of the machines that serve, such as 580."
    )
    platform = click.option(
        "--platform",
        "host",
        metavar="P",
        callback=_host,
        help="That of the machines that serve, as wheels name it: manylinux_2_28_x86_64. Default: that of this one.",
    )
    decorated: F = platform(driver(function))
    return decorated


@click.command(cls=Command)
@problems_arguments
@machine_options
@json_option
def check(workload: str | None, host: Host, driver: int, as_json: bool, **typed: Any) -> None:
    """Tell whether the stores here cover a problem, or a workload, on machines that compile nothing.

    Such a machine need not be this one: --arch or --device, --platform and --driver say what it has. Exits with 1 if it
    would find nothing for one of the problems.
    """
    answers = [look(asked, host, driver)[1] for asked in requests_of("cache check", workload, typed)]
    missing = [a for a in answers if not a.covered]
    if as_json:
        counts = {"covered": len(answers) - len(missing), "missing": len(missing)}
        machine = {"platform": host.platform, "driver": driver or None}
        output.write_json({**counts, **machine, "problems": [asdict(a) for a in answers]})
    else:
        rows = [(a.problem, a.arch or "?", a.schedule or "-", a.store or "-", "; ".join(a.why)) for a in answers]
        output.table(["problem", "arch", "schedule", "store", "why"], rows)
    output.note(f"{len(answers) - len(missing)} covered, {len(missing)} missing on {host.platform}")
    least = max((a.driver for a in answers), default=0)
    if least and not driver:
        output.note(f"the driver was not compared: what was found needs {least} or later (--driver {least})")
    if missing:
        hint(missing, workload, typed)
        sys.exit(FOUND_PROBLEMS)


def hint(missing: Iterable[Answer], workload: str | None, typed: dict[str, Any]) -> None:
    """Say what builds that of *missing* which is only not there."""
    if any(answer.why == (_NOTHING,) for answer in missing):
        output.note(f"hint: {retyped('cache prewarm', workload, typed)}")


def look(asked: Asked, host: Host, driver: int, *, pinned: bool = True) -> tuple[Explanation | None, Answer]:
    """Return the trace of a lookup on *host* with that *driver*, None where there is none, and what it comes to."""
    from tlhub import hub

    if isinstance(asked, Mistake):
        return None, Answer(asked.where, None, False, (str(asked.error),))
    title = title_of(asked)
    try:
        told = hub.check(**asked, host=host, driver=driver, obey=pinned)
    except TlhubError as error:
        return None, Answer(title, asked["arch"], False, (error.message,))
    served = told.served
    if served is None or served.hit is None:
        return told, Answer(title, told.place.arch, False, _reasons(told))
    hit, manifest = served.hit, served.hit.entry.manifest
    better = [f"it is code for {manifest.arch}"] if served is not told else []
    if hit.index:
        better.append(f"{served.resolution.candidates[0].schedule.name} ranks higher and is not there")
    found = (manifest.schedule, hit.match, hit.store.name, hit.entry.key, manifest.least_driver)
    return told, Answer(title, told.place.arch, True, tuple(better), *found)


def _reasons(told: Explanation) -> tuple[str, ...]:
    """Return why nothing serves, each once: what was there and not taken, else who does not serve the problem."""
    steps = [*told.searched, *(told.otherwise.searched if told.otherwise else ())]
    if not steps:
        return tuple(f"{r.schedule}: {r.reason}" for r in told.resolution.rejected) or ("no schedule is installed",)
    return tuple(dict.fromkeys(f"{s.store}: {reason}" for s in steps for reason in s.reasons)) or (_NOTHING,)
