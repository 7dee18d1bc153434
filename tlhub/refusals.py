"""Refusals: entries that a device here did not take, noted in the user's state folder; the entries stay as they are.

A refusal is of one build by one model of device with one driver, and for a week: what was at fault may be mended.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator
from typing import NamedTuple

from tlhub.files import write_whole
from tlhub.specs import DeviceFacts

LIFE = 7 * 86400.0
"""Seconds that a refusal is heeded."""

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
    found = _known(_folder()).get((key, facts.model, facts.driver))
    return found.reason if found and found.expires > time.time() else None


def note(key: str, facts: DeviceFacts, reason: str) -> None:
    """Note that the device does not take the build; where that cannot be written, this process alone knows it."""
    refusal, folder = Refusal(key, facts.model, facts.driver, reason, time.time() + LIFE), _folder()
    _known(folder)[refusal[:3]] = refusal
    if folder:
        with contextlib.suppress(OSError):
            os.makedirs(folder, mode=0o700, exist_ok=True)
            write_whole(_path(folder, refusal), json.dumps(refusal._asdict()))


def withdraw(key: str, facts: DeviceFacts) -> None:
    """Take back what was noted of the build on the device."""
    folder = _folder()
    refusal = _known(folder).pop((key, facts.model, facts.driver), None)
    if refusal and folder:
        with contextlib.suppress(OSError):
            os.unlink(_path(folder, refusal))


def current() -> list[Refusal]:
    """Return the refusals that are heeded, the last one first."""
    now = time.time()
    return sorted((r for r in _read(_folder()) if r.expires > now), key=lambda r: -r.expires)


def clear() -> None:
    """Forget all refusals. Raises OSError."""
    folder = _folder()
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
        with contextlib.suppress(OSError, ValueError, TypeError), open(f"{folder}/{name}", "rb") as file:
            found = Refusal(**json.loads(file.read(_LARGEST)))
            if name == os.path.basename(_path("", found)):
                yield found._replace(driver=int(found.driver), reason=str(found.reason), expires=float(found.expires))


def _path(folder: str, refusal: Refusal) -> str:
    return f"{folder}/{hashlib.sha256(repr(refusal[:3]).encode()).hexdigest()[:32]}.json"


def _folder() -> str | None:
    """Return the folder of refusals, None where there is no home to have one in."""
    if sys.platform in ("win32", "darwin"):
        import platformdirs

        return os.path.join(platformdirs.user_state_dir("tlhub", appauthor=False), "refusals")
    # the XDG rule, as tlhub.stores has it for the cache
    base, home = os.environ.get("XDG_STATE_HOME", "").strip(), os.environ.get("HOME", "")
    if not os.path.isabs(base):
        base = os.path.join(home, ".local", "state") if os.path.isabs(home) else ""
    return os.path.join(base, "tlhub", "refusals") if base else None
