"""The pure decision: which schedules serve a problem on a device, best first, and why the others do not."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from tlhub.errors import UnknownName, debugging, describe, suggest
from tlhub.specs import Config, DeviceFacts, Problem, Schedule


@dataclass(frozen=True)
class Candidate:
    """A schedule with a config, and why it stands where it does."""

    schedule: Schedule
    config: Config
    reason: str

    def to_json(self) -> dict[str, Any]:
        return {
            "schedule": self.schedule.name,
            "revision": self.schedule.revision,
            "config": dict(self.config),
            "reason": self.reason,
        }


@dataclass(frozen=True)
class Rejected:
    """A schedule that does not serve the problem, and why."""

    schedule: str
    reason: str

    def to_json(self) -> dict[str, Any]:
        return {"schedule": self.schedule, "reason": self.reason}


@dataclass(frozen=True)
class Resolution:
    """Ranked candidates and rejected schedules: the first half of a trace.

    ``by_name``: the first that would serve if it were asked for, where it ranks before the candidates.
    """

    candidates: tuple[Candidate, ...]
    rejected: tuple[Rejected, ...]
    by_name: str | None = None


def resolve(
    schedules: Iterable[Schedule],
    problem: Problem,
    facts: DeviceFacts,
    *,
    asked: str | None = None,
    unproven: Callable[[Schedule], str | None] = lambda schedule: None,
    broken: Callable[[Schedule], str | None] = lambda schedule: None,
) -> Resolution:
    """Rank *schedules* for *problem* on a device with *facts*.

    An explicit *asked* leaves only the schedule of that name (UnknownName if there is none); then the
    declared priority decides, then the name. Facts about the machine come in as arguments; so does what was
    measured, and what is installed: *unproven* tells why a schedule that would serve is served only when asked for,
    *broken* why it cannot; None where they have nothing to say.
    """
    schedules = tuple(schedules)
    if asked is not None and asked not in [s.name for s in schedules]:
        names = sorted(s.name for s in schedules)
        raise UnknownName(
            f"unknown schedule {asked!r} of {problem.kernel}; known: {', '.join(names) or 'none'}",
            hint=suggest(asked, names, f"tlhub schedules {problem.kernel}"),
        )
    candidates: list[Candidate] = []
    rejected: list[Rejected] = []
    by_name: str | None = None
    for schedule in sorted(schedules, key=lambda s: (-s.priority, s.name)):
        reason = f"not the schedule asked for, {asked!r}" if asked not in (None, schedule.name) else None
        chosen: Config = {}
        if reason is None:
            reason, chosen = _judge(schedule, problem, facts)
            reason = reason or broken(schedule)
        if reason is None and asked is None:
            why = "experimental" if schedule.experimental else unproven(schedule)
            if why:
                reason = f"{why}: served when asked for by name"
                by_name = by_name or (None if candidates else schedule.name)
        if reason is None:
            why = "asked for" if asked else f"priority {schedule.priority}"
            candidates.append(Candidate(schedule, chosen, why))
        else:
            rejected.append(Rejected(schedule.name, reason))
    return Resolution(tuple(candidates), tuple(rejected), by_name)


def config_of(schedule: Schedule, problem: Problem, facts: DeviceFacts) -> Config | None:
    """Return the config that *schedule* has for *problem* on a device with *facts*, or None if it does not serve it."""
    reason, found = _judge(schedule, problem, facts)
    return found if reason is None else None


def _judge(schedule: Schedule, problem: Problem, facts: DeviceFacts) -> tuple[str | None, Config]:
    """Return why *schedule* does not serve the problem (None if it does), and its first config."""
    target = facts.arch.partition(":")[0]
    if target not in schedule.targets:
        return f"for {', '.join(schedule.targets)}, not {target}", {}
    if schedule.kernel_revision != problem.revision:
        return f"for revision {schedule.kernel_revision} of {problem.kernel}, which is at {problem.revision}", {}
    try:
        reason = schedule.supports(problem, facts)
        configs = () if reason else tuple(schedule.configs(problem, facts))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a plugin's mistake costs its own schedule, nothing else
        if debugging():
            raise
        return f"its plugin failed: {describe(error)} ({_where(error)})", {}
    if reason:
        return reason if isinstance(reason, str) else f"its plugin failed: supports() is {reason!r}, no reason", {}
    return (None, configs[0]) if configs else ("no config fits", {})


def _where(error: BaseException) -> str:
    """Return the file and line where *error* was raised."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}" if trace else "unknown place"
