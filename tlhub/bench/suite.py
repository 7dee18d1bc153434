"""Suites: every problem of a workload measured in turn, as one table; a row without figures says why."""

from __future__ import annotations

import contextlib
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tlhub.bench.measure import bench
from tlhub.bench.report import Report, ratios, span
from tlhub.bench.side import Side
from tlhub.errors import TlhubError, UnknownName, suggest
from tlhub.workload import Item, Mistake


@dataclass(frozen=True)
class Row:
    """A problem and its measurement; ``reason`` says why there is none."""

    title: str
    report: Report | None = None
    reason: str | None = None

    @property
    def fault(self) -> str | None:
        return self.reason if self.report is None else self.report.fault

    def ratios(self) -> dict[str, dict[str, float]]:
        """Return by peer the ``ratio``, and the ``device_ratio`` of a GPU's time alone."""
        if self.report is None or self.report.ours is None:
            return {}
        return {p.name: ratios(self.report.ours, p.timing) for p in self.report.peers if p.timing}

    def to_json(self) -> dict[str, Any]:
        return {"title": self.title, "reason": self.reason} | (self.report.to_json() if self.report else {})


@dataclass(frozen=True)
class Suite:
    """The rows of a suite, and what they come to."""

    name: str
    rows: tuple[Row, ...]

    def summary(self) -> dict[str, dict[str, dict[str, float]]]:
        """Return by peer and kind of ratio its geometric mean and the least."""
        found: dict[str, dict[str, list[float]]] = {}
        for row in self.rows:
            for peer, kinds in row.ratios().items():
                for kind, value in kinds.items():
                    found.setdefault(peer, {}).setdefault(kind, []).append(value)
        return {
            peer: {
                kind: {"geomean": statistics.geometric_mean(values), "least": min(values), "count": len(values)}
                for kind, values in kinds.items()
            }
            for peer, kinds in found.items()
        }

    def to_json(self) -> dict[str, Any]:
        return {"suite": self.name, "summary": self.summary(), "rows": [r.to_json() for r in self.rows]}

    def __str__(self) -> str:
        summary = self.summary()
        columns = [(peer, kind) for peer, kinds in summary.items() for kind in kinds]
        heads = [peer if kind == "ratio" else f"{peer}, GPU" for peer, kind in columns]
        wide = max(len(row.title) for row in self.rows) + 2
        lines = [f"{'':<{wide}}{'a call':>10}{'GPU':>10}{'memory':>8}" + "".join(f"{head:>14}" for head in heads)]
        for row in self.rows:
            report, ours = row.report, row.report.ours if row.report else None
            if report is None or ours is None:
                lines.append(f"{row.title:<{wide}}  {(row.fault or '').partition(chr(10))[0]}")
                continue
            alone = span(statistics.median(ours.device)) if ours.device else ""
            part = report.memory(ours)
            memory = "" if part is None else f"{part:.2f}"
            found = row.ratios()
            cells = [f"{found[peer][kind]:.2f}" if kind in found.get(peer, ()) else "" for peer, kind in columns]
            figures = f"{span(ours.seconds):>10}{alone:>10}{memory:>8}" + "".join(f"{c:>14}" for c in cells)
            lines.append(f"{row.title:<{wide}}{figures}")
        for what in ("geomean", "least") if columns else ():
            cells = [f"{summary[peer][kind][what]:.2f}" for peer, kind in columns]
            lines.append(f"{what:<{wide}}{'':>28}" + "".join(f"{c:>14}" for c in cells))
        return "\n".join(line.rstrip() for line in lines)


def read(name: str) -> tuple[Item | Mistake, ...]:
    """Return the problems of the suite *name*, one of the registry's or a workload file. Raises UnknownName."""
    import tlhub_registry
    from tlhub import catalog, workload

    if name.endswith(".toml"):
        return workload.read(name, catalog.load())
    known = suites()
    if name not in known:
        raise UnknownName(
            f"unknown suite {name!r}; known: {', '.join(known)}, or a file NAME.toml",
            hint=suggest(name, known, f"tlhub bench --suite {known[0]}"),
        )
    return workload.parse(tlhub_registry.workload(f"suites/{name}"), name, catalog.load())


def suites() -> list[str]:
    """Return the names of the registry's suites."""
    import tlhub_registry

    folder = Path(tlhub_registry.__file__).parent / "workloads" / "suites"
    return sorted(path.stem for path in folder.glob("*.toml"))


def run(
    name: str,
    *,
    device: Any = None,
    arch: str | None = None,
    schedule: str | None = None,
    threads: int | None = None,
    peers: Sequence[str] | None = None,
    rounds: int = 7,
    say: Callable[[str], None] = lambda text: None,
) -> Suite:
    """Measure every problem of the suite *name*, as ``bench`` does. On a GPU one process measures all.

    *device*, *arch* and *schedule* hold for all problems, whatever the suite says.
    Raises UnknownName, ArgumentError and DeviceError for what is wrong with all of them; what is wrong with one is its
    row's reason.
    """
    from tlhub import catalog
    from tlhub.devices import locate

    items, place = read(name), locate(catalog.load(), device, arch)
    how = {"device": device, "threads": threads, "peers": peers, "rounds": rounds, "say": say}
    rows: list[Row] = []
    with contextlib.ExitStack() as stack:
        worker: Side | None = None
        for number, item in enumerate(items, 1):
            if isinstance(item, Mistake):
                rows.append(Row(item.where, reason=str(item.error)))
                continue
            asked = item.request() | {"schedule": schedule or item.schedule}
            if device is not None or arch is not None:  # what is asked for holds for all
                asked["arch"] = arch
            title = _title(item)
            say(f"{number} of {len(items)}: {title}")
            if worker is None and place.target.name != "cpu":
                worker = stack.enter_context(Side("tlhub", os.cpu_count() or 1))
            try:
                rows.append(Row(title, bench(**asked, **how, worker=worker)))
            except TlhubError as error:
                rows.append(Row(title, reason=str(error)))
            if worker is not None and worker.failed:  # a GPU that failed in a process fails whatever follows in it
                stack.close()
                worker = None
    return Suite(name, tuple(rows))


def _title(item: Item) -> str:
    from tlhub import catalog, problem
    from tlhub.explanation import show_problem

    return show_problem(problem.make(catalog.load().kernel(item.kernel), item.shape, item.dtype, item.options))
