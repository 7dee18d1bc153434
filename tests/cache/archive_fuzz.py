"""Hostile archives by the thousand: a sound one with a few things done to it, as hypothesis chooses."""

from __future__ import annotations

import contextlib
import io
import tarfile
from collections.abc import Iterator
from pathlib import Path

from backports import zstd
from cache_help import GENERAL, MEMBERS, files_below, make_manifest, publish
from hypothesis import strategies as st

from tlhub.cache import archive, signature
from tlhub.cache.store import Store
from tlhub.errors import CacheError

BLOCK = tarfile.BLOCKSIZE
_KINDS = b"0\0001234567LKSgxX"
_NAMES = ("/etc/passwd", "../../escaped", "v1/../../escaped", "v1/a/b/c/d/entry.json", "", ".", "a" * 100, "\xff")
_SIZES = (0, 1, 511, 512, 1000, 1 << 20, (1 << 33) - 1)
_DEED = 6

SIGNERS = ("0" * 16, "f" * 16)
"""Ids of keys that nobody has."""

DEEDS = 4
deeds = st.binary(min_size=DEEDS * _DEED, max_size=DEEDS * _DEED)
"""Four things to do one after the other, six bytes each: one draw, for a draw costs more than an archive."""


class Lab:
    """A folder with an archive of two entries, one of them signed.

    It knows what is to be found outside the store that others are put into.
    """

    def __init__(self, folder: Path) -> None:
        self.file = folder / "hostile.tar.zst"
        self.store = Store("user", folder / "store" / "root")
        source = Store("source", folder / "source")
        entries = [publish(source), publish(source, make_manifest(GENERAL))]
        for signer in SIGNERS:
            signature.write(source, entries[0].manifest.sha256, signer, bytes(signature.LENGTH))
        archive.pack(entries, str(self.file))
        self.sound = zstd.decompress(self.file.read_bytes())
        self.keys = {entry.key for entry in entries}
        self.folder = folder
        self.outside = self._outside()

    def feed(self, data: bytes) -> bool:
        """Import *data*; return whether it was taken. Nothing but a CacheError, or whole entries in the store."""
        self.file.write_bytes(data)
        try:
            done = archive.unpack(str(self.file), self.store)
        except CacheError:
            done = None
        assert self._outside() == self.outside
        for entry in (*done.added, *done.present) if done else ():
            assert entry.key in self.keys
            assert {name: entry.read(name) for name in MEMBERS} == MEMBERS
        return done is not None

    def read(self, data: bytes) -> None:
        """Read the tar file *data*; what is taken for whole is imported too."""
        with contextlib.suppress(archive.Refused):
            assert {manifest.build_digest for manifest in archive.read(io.BytesIO(data))} <= self.keys
            assert self.feed(zstd.compress(data, 1))

    def _outside(self) -> list[str]:
        return [name for name in files_below(self.folder) if not name.startswith("store/root/")]


def mutations(data: bytes, doings: bytes) -> Iterator[bytes]:
    """Iterate over what *data* is after each of *doings*: headers have right checksums, and blocks stay blocks."""
    for start in range(0, len(doings), _DEED):
        high, low, what, *how = doings[start : start + _DEED]
        at = (high << 8 | low) % max(len(data), 1)
        block = at // BLOCK * BLOCK
        match what % 6:
            case 0:
                data = data[:at] + bytes(how[:1]) + data[at + 1 :]
            case 1:
                data = data[:at] + bytes(how) * (how[0] % 64) + data[at:]
            case 2:
                data = data[:at] + data[at + 1 + 8 * how[0] :]
            case 3:
                data = data[: block + how[0] % 8 * BLOCK] + data[block:]
            case 4:
                data = data[:at]
            case _:
                data = data[:block] + _any_header(*how) + data[block:]
        yield data


def _any_header(name: int, kind: int, size: int) -> bytes:
    return header(
        _NAMES[name % len(_NAMES)],
        bytes([_KINDS[kind % len(_KINDS)]]),
        _SIZES[size % len(_SIZES)],
        _NAMES[size % len(_NAMES)],
        0o4777 if size > 127 else 0o644,
    )


def header(name: str, kind: bytes, size: int, link: str, mode: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.type, info.size, info.linkname, info.mode = kind, size, link, mode
    return info.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")
