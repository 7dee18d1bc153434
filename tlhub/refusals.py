"""Refusals: entries that a device here did not take, noted in the user's state folder; the entries stay as they are.

A refusal is of one build by one model of device with one driver, and for a week: what was at fault may be mended.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import time
from collections.abc import Iterator
from typing import NamedTuple

from tlhub.cache import home
from tlhub.files import write_whole
from tlhub.specs import DeviceFacts

LIFE = 7 * 86400.0
"""Seconds that a refusal is heeded."""

_REFUSALS = "refusals"
_LARGEST = 1 << 16  # bytes


class Refusal(NamedTuple):
    """A build digest, the model and driver (0: none) that did not take it, why, and when that ends (Unix time)."""

    key: str
    device: str
    driver: int
    reason: str
    expires: float


def why(key: str, facts: DeviceFacts) -> str | None:
    """Return why the device of *facts* does not take the build, or None where nothing is known against it."""
    found = _known(home.state(_REFUSALS)).get((key, facts.model, facts.driver))
    return found.reason if found and _heeded(found) else None


def note(key: str, facts: DeviceFacts, reason: str) -> None:
    """Note that the device does not take the build; where that cannot be written, this process alone knows it."""
    refusal, folder = Refusal(key, facts.model, facts.driver, reason, time.time() + LIFE), home.state(_REFUSALS)
    _known(folder)[refusal[:3]] = refusal
    if folder:
        with contextlib.suppress(OSError):
            write_whole(_path(home.make(folder), refusal), json.dumps(refusal._asdict()))


def withdraw(key: str, facts: DeviceFacts) -> None:
    """Take back what was noted of the build on the device."""
    folder = home.state(_REFUSALS)
    refusal = _known(folder).pop((key, facts.model, facts.driver), None)
    if refusal and folder:
        with contextlib.suppress(OSError):
            os.unlink(_path(folder, refusal))


def current() -> list[Refusal]:
    """Return the refusals that are heeded, the last one first."""
    return sorted(filter(_heeded, _read(home.state(_REFUSALS))), key=lambda r: -r.expires)


def clear() -> None:
    """Forget all refusals. Raises OSError."""
    folder = home.state(_REFUSALS)
    for refusal in _read(folder):
        os.unlink(_path(str(folder), refusal))
    _known.cache_clear()


def forget() -> None:
    """Read the state folder again at the next lookup."""
    _known.cache_clear()


@functools.cache
def _known(folder: str | None) -> dict[tuple[str, str, int], Refusal]:
    """Return what this process knows: the folder is read once."""
    return {refusal[:3]: refusal for refusal in _read(folder)}


def _read(folder: str | None) -> Iterator[Refusal]:
    """Iterate over the refusals in the folder; what is none is passed over."""
    try:
        names = os.listdir(folder) if folder else []
    except OSError:
        return
    for name in sorted(names):
        with (
            contextlib.suppress(OSError, ValueError, TypeError, RecursionError, OverflowError),
            open(f"{folder}/{name}", "rb") as file,
        ):
            found = Refusal(**json.loads(file.read(_LARGEST)))
            if name == os.path.basename(_path("", found)):
                driver, expires = int(found.driver), float(found.expires)
                yield Refusal(str(found.key), str(found.device), driver, str(found.reason), expires)


def _heeded(refusal: Refusal) -> bool:
    """Tell whether a refusal is of the last week: not of a time that a wrong clock once showed."""
    return 0 < refusal.expires - time.time() < 2 * LIFE


def _path(folder: str, refusal: Refusal) -> str:
    return f"{folder}/{hashlib.sha256(repr(refusal[:3]).encode()).hexdigest()[:32]}.json"
