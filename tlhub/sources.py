"""The source digest of a schedule: what its program's bytes are, whoever installed them and wherever."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os

from tlhub.errors import PluginError
from tlhub.specs import Schedule


def digest(schedule: Schedule) -> str:
    """Return the SHA-256 of the modules and files of *schedule*'s programs. Raises PluginError if one is missing."""
    return _digest(schedule.sources or (schedule.program.partition(":")[0],))


def fault(schedule: Schedule) -> str | None:
    """Return which of *schedule*'s sources is missing, or None."""
    try:
        digest(schedule)
    except PluginError as error:
        return error.message
    return None


@functools.cache
def _digest(modules: tuple[str, ...]) -> str:
    total = hashlib.sha256()
    for name in modules:
        data = _read(name)
        total.update(f"{name}\0{len(data)}\0".encode())
        total.update(data)
    return total.hexdigest()


def _read(name: str) -> bytes:
    """Return the bytes of a module, ``package.module``, or of a file in a package, ``package/folder/file``."""
    package, slash, path = name.partition("/")
    try:
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.origin:
            raise ImportError(f"no module {package!r}")
        with open(os.path.join(os.path.dirname(spec.origin), path) if slash else spec.origin, "rb") as file:
            return file.read()
    except (ImportError, ValueError, OSError) as error:
        raise PluginError(f"source {name!r} of a schedule cannot be found: {error}") from error
