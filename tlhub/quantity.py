"""Sizes and ages: the one way in which tlhub writes each, and how they are typed."""

from __future__ import annotations

import re

from tlhub.errors import ArgumentError


def size(count: float) -> str:
    """Return a number of bytes for people to read: ``672.7 KiB``. This one format is used everywhere."""
    if count < 1024:
        return f"{count:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        count /= 1024
        if round(count, 1) < 1024:
            return f"{count:.1f} {unit}"
    return f"{count / 1024:.1f} TiB"


def age(seconds: float) -> str:
    """Return a span of time in its largest unit: ``3 d``. One that lies ahead counts as now."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds // length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def parse_age(text: str) -> float:
    """Return seconds: ``30d``, ``12h``, ``90min``, ``45s``. Raises ArgumentError."""
    return _quantity(text, "an age", {"s": 1, "min": 60, "h": 3600, "d": 86400, "w": 604800}, "30d")


def parse_size(text: str) -> int:
    """Return bytes: ``2GiB``, ``500MiB``, ``10kB``, ``0``. Raises ArgumentError."""
    binary = {f"{p}ib": 1024**i for i, p in enumerate(("k", "m", "g", "t"), 1)}
    decimal = {f"{p}b": 1000**i for i, p in enumerate(("k", "m", "g", "t"), 1)}
    return int(_quantity(text, "a size", {"": 1, "b": 1, **binary, **decimal}, "2GiB"))


def _quantity(text: str, what: str, units: dict[str, int], example: str) -> float:
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)", text.strip().lower())
    if found is None or found[2] not in units:
        raise ArgumentError(
            f"{text.strip()!r} is not {what}; units: {', '.join(u for u in units if u)}",
            argument=what,
            hint=f"such as {example}",
        )
    return float(found[1]) * units[found[2]]
