"""How many threads CPU kernels use: one pool of threads a process, shared by all of its libraries."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable
from typing import Any

from tlhub.errors import ArgumentError

_VARIABLE = "TLHUB_NUM_THREADS"
_MOST = 1024

_wanted: int | None = None
_apply: Callable[[int], Any] | None = None


def set_num_threads(n: int | None) -> None:
    """Use *n* threads in CPU kernels from now on, the caller's included; None for the default.

    The default is ``TLHUB_NUM_THREADS``, else the cores that this process may run on. Raises ArgumentError.
    """
    global _wanted
    _wanted = None if n is None else _checked(n, "the number of threads", "tlhub.set_num_threads(2)")
    if _apply is not None:
        _apply(num_threads())


def num_threads() -> int:
    """Return how many threads CPU kernels use. Raises ArgumentError where ``TLHUB_NUM_THREADS`` is no number."""
    if _wanted is not None:
        return _wanted
    text = os.environ.get(_VARIABLE, "").strip()
    if text:
        return _checked(int(text) if text.isdecimal() else text, _VARIABLE, f"export {_VARIABLE}=2")
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(count, _MOST)


def adopt(apply: Callable[[int], Any]) -> None:
    """Take *apply*, of the library whose pool all use, as the way to change the number of threads."""
    global _apply
    apply(num_threads())
    _apply = apply


def _checked(value: Any, what: str, hint: str) -> int:
    try:
        n = -1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        n = -1
    if not 1 <= n <= _MOST:
        raise ArgumentError(f"{what} is {value!r}; allowed: 1 to {_MOST}", argument=what, hint=hint)
    return n
