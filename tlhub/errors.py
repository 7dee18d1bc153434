"""Errors: one class for each remedy, each also derived from the built-in that fits.

A message is lower case, shows what the user typed with ``!r``, says what is allowed, and ends with a
line ``hint: ...`` that works when it is pasted.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TypeVar

Otherwise = TypeVar("Otherwise", str, None)


class TlhubError(Exception):
    """Base of every error that tlhub raises on purpose."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message if hint is None else f"{message}\nhint: {hint}")
        self.message, self.hint = message, hint


class PluginError(TlhubError, ImportError):
    """A plugin broke a rule of the hooks, or could not be imported."""


class UnknownName(TlhubError, LookupError):
    """No kernel, schedule, target, arch or device has that name."""


class NoSchedule(TlhubError, NotImplementedError):
    """No schedule serves the problem; the message holds the trace."""


class NotPrebuilt(TlhubError, LookupError):
    """Compiling is off or the lookup is pinned, and no store has an entry that serves the problem."""


class BuildError(TlhubError, RuntimeError):
    """A worker or a compiler failed; ``log`` is the path of what it printed; without *hint* that is shown."""

    def __init__(self, message: str, *, hint: str | None = None, log: str | None = None) -> None:
        if log is not None:
            import shlex  # for a failed build, not for every process

            message, hint = f"{message}\nlog: {log}", hint or f"cat {shlex.quote(log)}"
        super().__init__(message, hint=hint)
        self.log = log


class CacheError(TlhubError, OSError):
    """A store cannot be used: the message names the folder and the remedy."""


class ArgumentError(TlhubError, ValueError, TypeError):
    """An argument is wrong: which one, what was expected, what was given."""

    def __init__(
        self,
        message: str,
        *,
        argument: str | None = None,
        expected: str | None = None,
        got: str | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message, hint=hint)
        self.argument, self.expected, self.got = argument, expected, got


class DeviceError(TlhubError, RuntimeError):
    """A device is missing, or cannot run what was asked of it."""


def debugging() -> bool:
    """Tell whether TLHUB_DEBUG asks for tracebacks, and for what a broken plugin raised."""
    return os.environ.get("TLHUB_DEBUG", "") not in ("", "0")


def describe(error: BaseException) -> str:
    """Return the type and the text of *error*, which may be a plugin's: its ``__str__`` may raise in its turn."""
    kind = type(error).__name__
    try:
        text = str(error).strip()
    except KeyboardInterrupt:
        raise
    except BaseException:
        return kind
    return f"{kind}: {text}" if text else kind


def suggest(word: object, known: Iterable[str], otherwise: Otherwise) -> str | Otherwise:
    """Return the hint for a name that is unknown: the nearest of *known*, or *otherwise* where none is near."""
    near = did_you_mean(word, known)
    return f"did you mean {near!r}?" if near else otherwise


def did_you_mean(word: object, known: Iterable[str]) -> str | None:
    """Return the name among *known* that is nearest to *word*, or None."""
    import difflib  # for the one who mistyped, not for every process

    close = difflib.get_close_matches(str(word), list(known), n=1, cutoff=0.5)
    return close[0] if close else None
