"""Hostile artifacts and layers: what a registry could send that is whole by every digest, and wrong all the same."""

from __future__ import annotations

import io
import json
import random
import tarfile
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st
from remote_help import make_manifest, problem

from tlhub.cache import archive
from tlhub.cache.entry import Manifest, Member
from tlhub.remote import artifact, layer

ARCH = "cpu:x86-64-v3"
CONTENT = {"kernel.c": b"// source\n", "kernel.so": b"\x7fELF library"}
MANIFESTS = [
    make_manifest(problem(m), ARCH).with_members({name: Member.of(data) for name, data in CONTENT.items()})
    for m in (1, 2, 3)
]
FRONT, PLAN = layer.plan(MANIFESTS, {MANIFESTS[0].sha256: {"0" * 16: bytes(64)}})
GOOD = artifact.document([artifact.Layer(ARCH, f"sha256:{'0' * 64}", 10_000, layer.sha256(FRONT), len(FRONT))])

ODD_NAMES = st.sampled_from(
    [
        "../../../../escaped",
        "/tmp/escaped",
        "v1/../../escaped/entry.json",
        "v1/.signatures/../../escaped.sig",
        f"{MANIFESTS[0].folder}/entry.json",
        f"{MANIFESTS[1].folder}/entry.json",
        f"{MANIFESTS[0].folder}/../entry.json",
        "entry.json",
        "/entry.json",
        f"v1/.signatures/{MANIFESTS[0].sha256}.{'0' * 16}.sig",
        "",
        "a" * 100,
        "\u00fc/entry.json",
    ]
)
KINDS = st.sampled_from(
    [tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.CHRTYPE, b"S", b"x"]
)
_BYTES = b'\0\xff0123456789{}[]",:./-aeu'
CONTENTS = st.one_of(
    st.sampled_from([m.to_bytes() for m in MANIFESTS]), st.just(b"A" * 88), st.binary(max_size=40), st.just(b"{}")
)


@st.composite
def tars(draw: st.DrawFn) -> bytes:
    """A tar of files with odd names, kinds and sizes."""
    made = b""
    for _ in range(draw(st.integers(0, 3))):
        content = draw(CONTENTS)
        info = tarfile.TarInfo(draw(ODD_NAMES))
        info.type, info.linkname = draw(KINDS), draw(st.sampled_from(["", "/etc", ".."]))
        info.size = draw(st.sampled_from([len(content), 0, 1 << 20, 1 << 33]))
        made += info.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape") + archive.padded(content)
    return made


@st.composite
def spoilt(draw: st.DrawFn, good: bytes) -> bytes:
    """*good* with bytes altered, cut out, doubled or put in."""
    data = bytearray(good)
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(data)))
        end = min(len(data), start + draw(st.integers(0, 600)))
        kind = draw(st.sampled_from(["flip", "cut", "double", "put"]))
        if kind == "flip" and start < len(data):
            data[start] ^= draw(st.integers(1, 255))
        elif kind == "cut":
            del data[start:end]
        elif kind == "double":
            data[start:start] = data[start:end]
        else:
            data[start:start] = draw(st.binary(max_size=16))
    return bytes(data)


def mutated(good: bytes, dice: random.Random) -> bytes:
    """Return *good* with bytes altered, cut out or doubled in one to four places."""
    data = bytearray(good)
    for _ in range(dice.randint(1, 4)):
        start, length, kind = dice.randrange(len(data) + 1), dice.randrange(600), dice.random()
        if kind < 0.7 and data:
            data[min(start, len(data) - 1)] = dice.choice(_BYTES)
        elif kind < 0.85:
            del data[start : start + length]
        else:
            data[start:start] = data[start : start + length]
    return bytes(data)


FRONTS = st.one_of(tars(), spoilt(FRONT), st.binary(max_size=2000))
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from([ARCH, "sha256:" + "0" * 64]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def documents(draw: st.DrawFn) -> bytes:
    """A manifest of an artifact in which a value here or there is any other."""
    found: Any = json.loads(GOOD)
    for _ in range(draw(st.integers(1, 3))):
        places = list(_places(found))
        if not places:
            break
        holder, name = draw(st.sampled_from(places))
        if draw(st.booleans()):
            holder[name] = draw(VALUES)
        else:
            del holder[name]
    return json.dumps(found).encode()


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    names = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for name in names:
        yield value, name
        yield from _places(value[name])


DOCUMENTS = st.one_of(documents(), spoilt(GOOD), st.binary(max_size=200))


class Shelved:
    """A registry in memory, as far as reading goes: every digest in it is right."""

    def __init__(self, front: bytes, body: bytes, size: int | None = None) -> None:
        self.requests = 0
        self._layer = front + body
        whole = len(self._layer) if size is None else size
        listed = artifact.Layer(ARCH, layer.sha256(self._layer), whole, layer.sha256(front), len(front))
        self._document = artifact.document([listed])
        self.reference = "oci://example.org/hostile:t"

    def manifest(self) -> bytes:
        return self._document

    def read(self, digest: str, start: int, end: int) -> Iterator[bytes]:
        source = io.BytesIO(self._layer[start:end])
        while chunk := source.read(700):
            yield chunk


def body(manifests: list[Manifest]) -> bytes:
    """Return what has to follow the front of *manifests*."""
    rows = layer.plan(manifests, {})[1].rows
    parts = [layer.member_header(r, n) + archive.padded(CONTENT[n]) for r in rows for n, _, _ in r.members()]
    return b"".join(parts) + archive.END
