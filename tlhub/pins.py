"""Pins: the builds that a job has chosen, in a file that each of its ranks obeys (``TLHUB_PINS``).

A lookup that the file names gets that build or an error, whatever else would serve; all others are as free as ever.
"""

from __future__ import annotations

import functools
import json
import os
import shlex
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from tlhub.cache.key import problem_digest
from tlhub.errors import ArgumentError
from tlhub.explanation import problem_json
from tlhub.specs import Problem

FORMAT = 1


class Pin(NamedTuple):
    """A lookup (a problem for an arch, by the schedule *asked* for, or None) and the build digest that it gets."""

    problem: Problem
    arch: str
    asked: str | None
    key: str
    schedule: str

    def to_json(self) -> dict[str, Any]:
        told = {"arch": self.arch, "schedule": self.schedule, "asked": self.asked}
        return {
            **problem_json(self.problem),
            **told,
            "lookup": problem_digest(self.problem, self.arch),
            "key": self.key,
        }


def show(pins: Iterable[Pin]) -> dict[str, Any]:
    """Return the document that ``read`` reads."""
    return {"format": FORMAT, "pins": [pin.to_json() for pin in pins]}


def pinned(problem: Problem, arch: str, asked: str | None) -> str | None:
    """Return the build digest that TLHUB_PINS has for a lookup, or None. Raises what ``read`` does."""
    path = os.environ.get("TLHUB_PINS")
    return read(path).get((problem_digest(problem, arch), asked)) if path else None


@functools.cache
def read(path: str) -> Mapping[tuple[str, str | None], str]:
    """Return the build digests of a file of pins, by problem digest and schedule asked for. Raises ArgumentError."""
    try:
        with open(path, encoding="utf-8") as file:
            document = json.load(file)
        if document["format"] != FORMAT:
            raise ValueError(f"it has format {document['format']!r}, and this tlhub reads {FORMAT}")
        return {(pin["lookup"], pin["asked"]): str(pin["key"]) for pin in document["pins"]}
    except OSError as error:
        reason = f"cannot be read: {error.strerror}"
    except (KeyError, TypeError, RecursionError):
        reason = "holds no pins"
    except ValueError as error:  # of JSON and of UTF-8, too
        reason = f"holds no pins: {error}"
    to = "pins.json" if os.path.exists(path) else path  # what is something else is not to be written over
    raise ArgumentError(
        f"TLHUB_PINS names {path!r}, which {reason}",
        argument="TLHUB_PINS",
        hint=f"tlhub pin --from workload.toml --to {shlex.quote(to)}",
    )
