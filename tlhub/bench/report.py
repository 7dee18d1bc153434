"""What a measurement found: numbers, and the same as text and as JSON."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Timing:
    """Seconds a call, one number for each round, and what ran. ``device``: the same on a GPU alone."""

    rounds: tuple[float, ...]
    package: str | None = None
    device: tuple[float, ...] = ()

    @property
    def seconds(self) -> float:
        """The median round."""
        return statistics.median(self.rounds)

    def to_json(self) -> dict[str, Any]:
        found = {
            "seconds": self.seconds,
            "best": min(self.rounds),
            "rounds": list(self.rounds),
            "library": self.package,
        }
        if self.device:
            found["device"] = {"seconds": statistics.median(self.device), "rounds": list(self.device)}
        return found


@dataclass(frozen=True)
class Peer:
    """A library that does the same, and how it did; ``missing`` says why it was left out."""

    name: str
    timing: Timing | None = None
    missing: str | None = None


@dataclass(frozen=True)
class Report:
    """A kernel's measurement. ``worst``: its largest error in units of the tolerance; ``fault``: why it is wrong.

    ``threads``: of a CPU, 0 on a GPU. ``bytes`` of operands and results, and ``bandwidth``, the bytes a second at which
    the GPU reads memory, where these were measured.
    """

    problem: Mapping[str, Any]
    title: str
    arch: str
    model: str
    threads: int
    schedule: str
    config: Mapping[str, Any]
    origin: str
    key: str
    flops: float
    worst: float | None
    fault: str | None
    ours: Timing | None = None
    peers: Sequence[Peer] = field(default_factory=tuple)
    bytes: int = 0
    bandwidth: float | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            **self.problem,
            "arch": self.arch,
            "model": self.model,
            "threads": self.threads,
            "schedule": self.schedule,
            "config": dict(self.config),
            "origin": self.origin,
            "key": self.key,
            "flops": self.flops,
            "bytes": self.bytes,
            "bandwidth": self.bandwidth,
            "check": {"passed": self.fault is None, "worst": self.worst, "fault": self.fault},
            "tlhub": self._side(self.ours),
            "peers": {
                p.name: {"missing": p.missing}
                if p.timing is None or self.ours is None
                else {**self._side(p.timing), **ratios(self.ours, p.timing)}  # type: ignore[dict-item]
                for p in self.peers
            },
        }

    def _side(self, timing: Timing | None) -> dict[str, Any] | None:
        if timing is None:
            return None
        found = {**timing.to_json(), "gflops": gflops(self.flops, timing.seconds)}
        return found if self.memory(timing) is None else {**found, "memory": self.memory(timing)}

    def memory(self, timing: Timing) -> float | None:
        """Return the part of the bandwidth at which a side moved each byte once, or None where it is not known."""
        if not self.bandwidth or not timing.device:
            return None
        return self.bytes / statistics.median(timing.device) / self.bandwidth

    def __str__(self) -> str:
        threads = f", {self.threads} thread{'s' if self.threads != 1 else ''}" if self.threads else ""
        config = ", ".join(f"{k}={v}" for k, v in self.config.items())
        lines = [
            f"{self.title} on {self.arch} ({self.model}){threads}",
            f"schedule  {self.schedule}" + (f" ({config})" if config else "") + f", origin {self.origin}",
        ]
        if self.fault:
            return "\n".join([*lines, f"check     FAILED against the float64 reference: {self.fault}"])
        lines.append(f"check     right: the worst error is {self.worst:.2g} of the tolerance (float64 reference)")
        if self.ours is None:
            return "\n".join(lines)
        measured = [("tlhub", self.ours)] + [(p.name, p.timing) for p in self.peers if p.timing]
        width = max(len(name) for name, _ in measured) + 2
        on_gpu = f"{'on the GPU':>14}{'GFLOP/s':>10}{'ratio':>8}" if self.ours.device else ""
        on_gpu += f"{'memory':>8}" if self.bandwidth else ""
        lines.append(f"{'':<{width}}{'a call':>12}{'GFLOP/s':>10}{'ratio':>8}{on_gpu}")
        for name, timing in measured:
            row = f"{name:<{width}}" + self._columns(timing.rounds, self.ours.rounds, 12)
            if timing.device:
                row += self._columns(timing.device, self.ours.device, 14)
            if (part := self.memory(timing)) is not None:
                row += f"{part:>8.2f}"
            lines.append(row + (f"   {timing.package}" if timing.package else ""))
        if self.bandwidth:
            lines.append(f"memory    of the {self.bandwidth / 1e12:.2f} TB/s at which it is read, each byte once")
        lines += [f"left out: {p.name} ({p.missing})" for p in self.peers if p.missing]
        return "\n".join(line.rstrip() for line in lines)

    def _columns(self, rounds: tuple[float, ...], ours: tuple[float, ...], width: int) -> str:
        seconds = statistics.median(rounds)
        faster = "" if rounds is ours else f"{ratio(ours, rounds):.2f}"
        return f"{span(seconds):>{width}}{gflops(self.flops, seconds):>10.1f}{faster:>8}"


def ratios(ours: Timing, theirs: Timing) -> dict[str, float]:
    """Return the ``ratio`` of a call, and ``device_ratio`` where the GPU alone was timed too."""
    found = {"ratio": ratio(ours.rounds, theirs.rounds)}
    if ours.device and theirs.device:
        found["device_ratio"] = ratio(ours.device, theirs.device)
    return found


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return how many times as fast as theirs ours is: the median over rounds, so that a slow phase of the machine,
    which both sides of a round see, cancels."""
    return statistics.median(t / o for o, t in zip(ours, theirs, strict=True))


def gflops(flops: float, seconds: float) -> float:
    """Return 1e9 operations a second."""
    return flops / seconds / 1e9


def span(seconds: float) -> str:
    """Return a span of time for people to read: ``9.41 ms``."""
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * scale >= 1 or unit == "us":
            return f"{seconds * scale:.3g} {unit}" if seconds * scale < 1000 else f"{seconds * scale:.0f} {unit}"
    raise AssertionError("unreachable")
