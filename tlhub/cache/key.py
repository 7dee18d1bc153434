"""Keys: canonical bytes, their digests, and the folder that they name. Pure.

Two digests, because a machine that only serves has no compiler to ask for its version: the *problem
digest* says what is computed and for which arch, the *build digest* adds how it was compiled.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

from tlhub.specs import Extent, Problem, Value

FORMAT = 1
"""Number of the layout of keys, manifests and folders; another number is another cache."""

_FLOAT = "$float"
_SIMPLE = frozenset((str, int, bool, type(None)))
_encode = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, check_circular=False).encode
_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]")
_RESERVED = re.compile(r"(con|prn|aux|nul|com[0-9]|lpt[0-9])(\..*)?", re.IGNORECASE)
_ARCH, _NAME, _DIGITS = 24, 32, 16


def canonical(value: Any) -> bytes:
    """Return the one UTF-8 JSON text of *value*: sorted keys, no spaces, floats as tagged hexadecimal.

    Takes None, bool, int, float, str, lists, tuples and mappings with str keys; TypeError for all else.
    Different values have different texts (True, 1, 1.0 and "0x1.0p+0" are four), except that a tuple
    is a list.
    """
    try:
        return _encode(_tagged(value)).encode()
    except UnicodeEncodeError as error:  # a lone surrogate: it has no UTF-8
        raise TypeError(f"no text of Unicode: {value!r}") from error


def digest(value: Any) -> str:
    """Return the SHA-256 of the canonical bytes of *value*, in hexadecimal."""
    return hashlib.sha256(canonical(value)).hexdigest()


def problem_digest(problem: Problem, arch: str) -> str:
    """Return the digest of what is computed, and for which exact arch."""
    return digest_of_problem(problem.kernel, problem.revision, problem.dims, problem.dtypes, problem.options, arch)


def digest_of_problem(
    kernel: str,
    revision: int,
    dims: tuple[tuple[str, Extent], ...],
    dtypes: tuple[tuple[str, str], ...],
    options: tuple[tuple[str, Value], ...],
    arch: str,
) -> str:
    """Return the problem digest from its fields, as a manifest has them."""
    number: dict[str, str] = {}  # symbols count by first appearance: no name reaches a key
    extents = [number.setdefault(extent, f"?{len(number)}") if type(extent) is str else extent for _, extent in dims]
    return digest(
        {
            "format": FORMAT,
            "kernel": kernel,
            "kernel_revision": revision,
            "dims": [name for name, _ in dims],
            "extents": extents,
            "arguments": [name for name, _ in dtypes],
            "dtypes": [dtype for _, dtype in dtypes],
            "options": [name for name, _ in options],
            "values": [value for _, value in options],
            "arch": arch,
        }
    )


def build_digest(
    problem_digest: str,
    *,
    schedule: str,
    schedule_revision: int,
    source_digest: str,
    config: Mapping[str, Value],
    toolchain: Mapping[str, str],
    abi: str,
    platform: Mapping[str, str],
) -> str:
    """Return the digest of one build. *platform* has ``os``, ``machine`` and ``glibc`` (the least that serves)."""
    return digest(
        {
            "format": FORMAT,
            "problem_digest": problem_digest,
            "schedule": schedule,
            "schedule_revision": schedule_revision,
            "source_digest": source_digest,
            "config": config,
            "toolchain": toolchain,
            "abi": abi,
            "platform": platform,
        }
    )


def folder(arch: str, kernel: str, problem_digest: str, build_digest: str) -> str:
    """Return the entry's folder below the root, with ``/``: at most 95 characters, each part a safe name."""
    return f"{parent(arch, kernel, problem_digest)}/{build_digest[:_DIGITS]}"


def parent(arch: str, kernel: str, problem_digest: str) -> str:
    """Return the folder below the root that holds every entry of a problem."""
    where, what = safe_name(arch.replace(":", "-"), _ARCH), safe_name(kernel, _NAME)
    return f"v{FORMAT}/{where}/{what}/{problem_digest[:_DIGITS]}"


@functools.lru_cache(maxsize=256)
def safe_name(text: str, longest: int) -> str:
    """Return *text* as a file name that any file system takes; a changed one ends with a digest of the whole."""
    safe = _UNSAFE.sub("_", text)
    if safe == text and 0 < len(text) <= longest and text[0] not in ".-" and text[-1] != "." and not _reserved(text):
        return text
    mark = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return f"{safe[: longest - 10].replace('.', '_').strip('-') or 'x'}--{mark}"


def _reserved(text: str) -> bool:
    """Tell whether Windows keeps the name for a device."""
    return _RESERVED.fullmatch(text) is not None


def _tagged(value: Any) -> Any:
    """Return *value* with each float made a mapping of its own; raise TypeError for what has no canonical form."""
    kind = type(value)
    if kind in _SIMPLE:
        return value
    if kind is list or kind is tuple:
        # Most lists are short and simple, and this is on the way of every lookup: look at types, copy nothing.
        return value if _SIMPLE.issuperset(map(type, value)) else [_tagged(item) for item in value]
    if kind is float:
        return {_FLOAT: value.hex()}
    if isinstance(value, Mapping):
        for name in value:
            if type(name) is not str or name == _FLOAT:
                raise TypeError(f"no key of a canonical mapping: {name!r}; keys are str, {_FLOAT!r} is taken")
        if kind is dict and _SIMPLE.issuperset(map(type, value.values())):
            return value
        return {name: _tagged(item) for name, item in value.items()}
    raise TypeError(f"no canonical form of {kind.__name__}: {value!r}; allowed are what JSON has, and float")
