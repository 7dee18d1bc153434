"""Manifests: what ``entry.json`` says of an entry, written in one form and read strictly. Pure."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

from tlhub.cache import key
from tlhub.errors import CacheError
from tlhub.specs import LIBRARY, Extent, Problem, Value

MANIFEST = "entry.json"
LARGEST_MANIFEST = 1 << 20
LARGEST_MEMBER = 1 << 30
MOST_MEMBERS = 64
_MEMBER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,23}")
_HEX = re.compile(r"[0-9a-f]{64}")
_SEAL = len(',"sha256":"') + 64 + len('"}\n')
_encode = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False).encode


class Damaged(CacheError):
    """An entry is missing a part, torn, altered, or not to be trusted: ``reason``. Lookups treat it as a miss."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the entry is not usable: {reason}", hint="tlhub cache verify")
        self.reason = reason


class Member(NamedTuple):
    """A file of an entry: its size in bytes and its SHA-256 in hexadecimal."""

    size: int
    sha256: str

    @classmethod
    def of(cls, data: bytes) -> Member:
        return cls(len(data), hashlib.sha256(data).hexdigest())


@dataclass(frozen=True)
class Manifest:
    """What ``entry.json`` says: every field of the key in clear, and what vouches for the members.

    ``platform``: ``os``, ``machine`` and ``glibc`` (the least version that the library needs, "" for none).
    ``covers``: for symbolic dims, ``{"min", "max", "multiple"}`` of the extents that the entry serves.
    ``least_driver``: the least driver that runs it (580), 0 for any. ``provenance``: ``tlhub``, ``plugin``,
    ``plugin_version``, ``created`` (UTC, ISO 8601), ``seconds`` (of the build).
    Make one with ``Manifest.make``; the members are filled in when it is published.
    """

    kernel: str
    kernel_revision: int
    dims: tuple[tuple[str, Extent], ...]
    dtypes: tuple[tuple[str, str], ...]
    options: tuple[tuple[str, Value], ...]
    arch: str
    schedule: str
    schedule_revision: int
    source_digest: str
    config: Mapping[str, Value]
    toolchain: Mapping[str, str]
    abi: str
    platform: Mapping[str, str]
    problem_digest: str
    build_digest: str
    members: Mapping[str, Member] = field(default_factory=dict)
    covers: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    resources: Mapping[str, float | Value] = field(default_factory=dict)
    least_driver: int = 0
    provenance: Mapping[str, float | Value] = field(default_factory=dict)

    @classmethod
    def make(
        cls,
        problem: Problem,
        arch: str,
        *,
        schedule: str,
        schedule_revision: int,
        source_digest: str,
        config: Mapping[str, Value],
        toolchain: Mapping[str, str],
        abi: str,
        platform: Mapping[str, str],
        covers: Mapping[str, Mapping[str, int]] | None = None,
        resources: Mapping[str, float | Value] | None = None,
        least_driver: int = 0,
        provenance: Mapping[str, float | Value] | None = None,
    ) -> Manifest:
        """Return the manifest of a build, its digests computed, its members still to be filled in."""
        asked = key.problem_digest(problem, arch)
        built = key.build_digest(
            asked,
            schedule=schedule,
            schedule_revision=schedule_revision,
            source_digest=source_digest,
            config=config,
            toolchain=toolchain,
            abi=abi,
            platform=platform,
        )
        return cls(
            problem.kernel,
            problem.revision,
            problem.dims,
            problem.dtypes,
            problem.options,
            arch,
            schedule,
            schedule_revision,
            source_digest,
            dict(config),
            dict(toolchain),
            abi,
            dict(platform),
            asked,
            built,
            {},
            dict(covers or {}),
            dict(resources or {}),
            least_driver,
            dict(provenance or {}),
        )

    @property
    def problem(self) -> Problem:
        return Problem(self.kernel, self.kernel_revision, self.dims, self.dtypes, self.options)

    @property
    def parent(self) -> str:
        """The folder of the problem's entries below a store's root."""
        return key.parent(self.arch, self.kernel, self.problem_digest)

    @property
    def folder(self) -> str:
        """The folder of the entry below a root, in a store and in an archive."""
        return key.folder(self.arch, self.kernel, self.problem_digest, self.build_digest)

    @property
    def glibc(self) -> str:
        return self.platform.get("glibc", "")

    @functools.cached_property
    def sha256(self) -> str:
        """The SHA-256 of the bytes of ``entry.json``: what signatures and registries call the entry."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    def with_members(self, members: Mapping[str, Member]) -> Manifest:
        return replace(self, members=dict(members))

    def to_json(self) -> dict[str, Any]:
        """Return the manifest as ``entry.json`` has it, but for the digest of the whole."""
        members = {name: {"size": m.size, "sha256": m.sha256} for name, m in self.members.items()}
        return {"format": key.FORMAT, **{name: getattr(self, name) for name in _FIELDS}, "members": members}

    def to_bytes(self) -> bytes:
        """Return the bytes of ``entry.json``: sorted JSON on one line, the SHA-256 of it as last field."""
        body = _encode(self.to_json())
        return body[:-1].encode() + _seal(body.encode())

    @classmethod
    @functools.lru_cache(maxsize=256)  # a symbolic entry is found again for each new shape: the same bytes
    def parse(cls, data: bytes) -> Manifest:
        """Return the manifest that *data* is, byte for byte. Raises Damaged for anything else."""
        manifest = cls.glance(data)
        try:
            _check_digests(manifest)
        except (ValueError, TypeError) as error:
            raise Damaged(f"{MANIFEST} is malformed: {error}") from error
        return manifest

    @classmethod
    def glance(cls, data: bytes) -> Manifest:
        """Return what ``parse`` does, half as costly: that the digests are those of the fields is not checked.

        For listings of many: what is loaded is parsed. Raises Damaged.
        """
        if len(data) > LARGEST_MANIFEST:
            raise Damaged(f"{MANIFEST} is larger than {LARGEST_MANIFEST} bytes")
        body = data[:-_SEAL] + b"}"
        if data[-_SEAL:] != _seal(body):
            raise Damaged(f"{MANIFEST} is torn or altered: its bytes are not those that its digest names")
        try:
            return _manifest(json.loads(body))
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise Damaged(f"{MANIFEST} is malformed: {error}") from error


_FIELDS = tuple(f.name for f in fields(Manifest))


# -- strict reading of a manifest: the wrong type, name or size anywhere is damage -----------------------------


def _seal(body: bytes) -> bytes:
    """Return what follows the fields: the digest of the text without it, and the closing brace."""
    return b',"sha256":"%b"}\n' % hashlib.sha256(body).hexdigest().encode()


def _manifest(found: Any) -> Manifest:
    if type(found) is not dict or found.get("format") != key.FORMAT:
        shown = found.get("format") if type(found) is dict else None
        raise ValueError(f"its format is {shown!r}; this version reads {key.FORMAT}")
    if len(found) != len(_FIELDS) + 1:
        raise ValueError("it has not exactly the fields of its format")
    return Manifest(**{name: read(name, found[name]) for name, read in _READERS.items()})


def _check_digests(manifest: Manifest) -> None:
    asked = key.digest_of_problem(
        manifest.kernel,
        manifest.kernel_revision,
        manifest.dims,
        manifest.dtypes,
        manifest.options,
        manifest.arch,
    )
    if asked != manifest.problem_digest:
        raise ValueError("its problem digest is not that of its fields")
    built = key.build_digest(
        asked,
        schedule=manifest.schedule,
        schedule_revision=manifest.schedule_revision,
        source_digest=manifest.source_digest,
        config=manifest.config,
        toolchain=manifest.toolchain,
        abi=manifest.abi,
        platform=manifest.platform,
    )
    if built != manifest.build_digest:
        raise ValueError("its build digest is not that of its fields")


def _typed(*kinds: type) -> Callable[[str, Any], Any]:
    def read(name: str, value: Any) -> Any:
        if type(value) not in kinds or (type(value) is int and value < 0):
            raise ValueError(f"{name} is {value!r}")
        return value

    return read


def _pairs(*kinds: type) -> Callable[[str, Any], Any]:
    def read(name: str, value: Any) -> Any:
        if type(value) is not list:
            raise ValueError(f"{name} is no list")
        for pair in value:
            if type(pair) is not list or len(pair) != 2 or type(pair[0]) is not str or type(pair[1]) not in kinds:
                raise ValueError(f"{name} has {pair!r}")
        return tuple((pair[0], pair[1]) for pair in value)

    return read


def _mapping(*kinds: type) -> Callable[[str, Any], Any]:
    def read(name: str, value: Any) -> Any:
        if type(value) is not dict:
            raise ValueError(f"{name} is no mapping")
        for item in value.values():
            # 1e999 is a number of JSON, and infinity is none
            if type(item) not in kinds or (type(item) is float and not math.isfinite(item)):
                raise ValueError(f"{name} has {item!r}")
        return value

    return read


def _digits(name: str, value: Any) -> str:
    if type(value) is not str or not _HEX.fullmatch(value):
        raise ValueError(f"{name} is no SHA-256: {value!r}")
    return value


def _members(name: str, value: Any) -> dict[str, Member]:
    if type(value) is not dict or LIBRARY not in value or len(value) > MOST_MEMBERS:
        raise ValueError(f"members must be a mapping of at most {MOST_MEMBERS} files with {LIBRARY}")
    for member, facts in value.items():
        check_member(member)
        if type(facts) is not dict or facts.keys() != {"size", "sha256"}:
            raise ValueError(f"member {member!r} has not exactly size and sha256")
        if type(facts["size"]) is not int or not 0 <= facts["size"] <= LARGEST_MEMBER:
            raise ValueError(f"member {member!r} has size {facts['size']!r}")
        _digits(member, facts["sha256"])
    return {member: Member(facts["size"], facts["sha256"]) for member, facts in value.items()}


def check_member(name: str) -> None:
    """Raise ValueError unless *name* is a plain file name of at most 24 safe characters."""
    if not _MEMBER.fullmatch(name) or name == MANIFEST:
        raise ValueError(f"no name of a member: {name!r}; allowed are 24 letters, digits, '_', '.' and '-'")


def _covers(name: str, value: Any) -> dict[str, dict[str, int]]:
    if type(value) is not dict:
        raise ValueError("covers is no mapping")
    for dim, limits in value.items():
        if type(limits) is not dict or not limits.keys() <= {"min", "max", "multiple"}:
            raise ValueError(f"covers of {dim!r} is {limits!r}; allowed are min, max and multiple")
        for what, limit in limits.items():
            if type(limit) is not int or limit < (what == "multiple"):
                raise ValueError(f"covers of {dim!r}: {what} is {limit!r}")
    return value


_SCALARS = (str, int, float, bool, type(None))
_READERS: dict[str, Callable[[str, Any], Any]] = {
    "kernel": _typed(str),
    "kernel_revision": _typed(int),
    "dims": _pairs(int, str),
    "dtypes": _pairs(str),
    "options": _pairs(bool, int, str, type(None)),
    "arch": _typed(str),
    "schedule": _typed(str),
    "schedule_revision": _typed(int),
    "source_digest": _typed(str),
    "config": _mapping(bool, int, str, type(None)),
    "toolchain": _mapping(str),
    "abi": _typed(str),
    "platform": _mapping(str),
    "problem_digest": _digits,
    "build_digest": _digits,
    "members": _members,
    "covers": _covers,
    "resources": _mapping(*_SCALARS),
    "least_driver": _typed(int),
    "provenance": _mapping(*_SCALARS),
}
