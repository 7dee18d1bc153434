"""Archives: the same entries are the same bytes, and nothing but whole entries comes out of one."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import io
import os
import sys
import tarfile
from pathlib import Path

import pytest
from archive_fuzz import DEEDS, SIGNERS, Lab, deeds, header, mutations
from backports import zstd
from cache_help import GENERAL, MEMBERS, PROBLEM, files_below, make_manifest, publish, serves
from hypothesis import HealthCheck, given, settings

from tlhub.cache import archive, signature
from tlhub.cache.entry import Damaged
from tlhub.cache.manifest import Member
from tlhub.cache.store import Store
from tlhub.errors import ArgumentError, CacheError
from tlhub.files import write_whole


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path)


def test_a_round_trip_is_the_same_entries(lab: Lab, tmp_path: Path) -> None:
    done = archive.unpack(str(lab.file), lab.store)
    assert {entry.key for entry in done.added} == lab.keys and done.present == ()
    assert serves(lab.store)
    left, right = tmp_path / "source" / "v1", tmp_path / "store" / "root" / "v1"
    kept = [[n for n in files_below(side) if not n.startswith((".staging", ".locks"))] for side in (left, right)]
    names = kept[0]
    assert names == kept[1] and sum(n.startswith(".signatures/") for n in names) == len(SIGNERS)
    assert all((left / name).read_bytes() == (right / name).read_bytes() for name in names)
    again = archive.unpack(str(lab.file), lab.store)
    assert again.added == () and {entry.key for entry in again.present} == lab.keys


def test_the_same_entries_are_the_same_bytes(lab: Lab, tmp_path: Path) -> None:
    archive.unpack(str(lab.file), lab.store)
    entries = [lab.store.open(item) for item in lab.store.entries()]
    os.utime(f"{entries[0].folder}/kernel.so", (1, 1))
    os.chmod(f"{entries[0].folder}/kernel.so", 0o400)
    archive.pack([*entries[::-1], entries[0]], str(tmp_path / "again"))
    assert (tmp_path / "again").read_bytes() == lab.file.read_bytes()


def test_it_is_a_tar_file(lab: Lab) -> None:
    with tarfile.open(fileobj=io.BytesIO(lab.sound)) as found:
        members = found.getmembers()
        assert len(members) == 2 * (len(MEMBERS) + 1) + len(SIGNERS) and all(m.isfile() for m in members)
        assert {(m.mtime, m.uid, m.gid, m.uname, m.gname, m.mode) for m in members} == {(0, 0, 0, "", "", 0o644)}


def test_an_entry_that_is_not_whole_is_not_packed(tmp_path: Path) -> None:
    entry = publish(Store("source", tmp_path / "source"))
    Path(str(entry.folder), "kernel.c").write_bytes(b"altered")
    target = tmp_path / "x"
    target.write_text("before")
    with pytest.raises(Damaged):
        archive.pack([entry], str(target))
    assert target.read_text() == "before" and files_below(tmp_path)[-1] == "x"


def test_a_damaged_entry_of_the_store_gets_a_whole_one_beside_it(lab: Lab) -> None:
    (first, *_) = archive.unpack(str(lab.file), lab.store).added
    Path(str(first.folder), "kernel.so").write_bytes(b"altered")
    done = archive.unpack(str(lab.file), lab.store)
    assert [entry.key for entry in done.added] == [first.key]
    assert str(done.added[0].folder).endswith(".1")


def test_only_what_is_meant_comes_in(lab: Lab) -> None:
    done = archive.unpack(str(lab.file), lab.store, lambda manifest: manifest.dims == GENERAL.dims)
    assert [entry.manifest.problem for entry in done.added] == [GENERAL]


MANIFEST = make_manifest().with_members({name: Member.of(data) for name, data in MEMBERS.items()})
MANIFEST_DIGEST = MANIFEST.sha256
TEXT = signature.to_text(bytes(signature.LENGTH))


def sign(digest: str = MANIFEST_DIGEST, text: bytes = TEXT, signer: str = "0" * 16) -> tuple[str, bytes]:
    """Return name and content of a file with a signature."""
    return f"{signature.SIGNATURES}/{digest}.{signer}.sig", text


def entry_tar(*signatures: tuple[str, bytes], **changes: bytes) -> bytes:
    """Return the tar of one entry, with other files of these names in place of its own (without a dot)."""
    data = {"entry.json": MANIFEST.to_bytes(), **dict(sorted(MEMBERS.items()))}
    own = [(f"{MANIFEST.folder}/{name}", changes.get(name.replace(".", ""), data[name])) for name in data]
    files = [own[0], *signatures, *own[1:]]
    return b"".join(archive.header(name, len(found)) + found + bytes(-len(found) % 512) for name, found in files)


END = bytes(1024)
SOUND = entry_tar()


def form(kind: bytes, name: str = "v1/x", link: str = "", size: int = 0) -> bytes:
    return header(name, kind, size, link, 0o644)


HOSTILE = {
    "absolute": form(b"0", "/tmp/escaped"),
    "above": form(b"0", "v1/../../escaped/entry.json"),
    "symbolic link": form(b"2", "v1/x", "/etc"),
    "hard link": form(b"1", "v1/x", "/etc/passwd"),
    "character device": form(b"3"),
    "block device": form(b"4"),
    "folder": form(b"5", "v1/"),
    "pipe": form(b"6"),
    "long name": form(b"L", "././@LongLink", size=10),
    "extended header": form(b"x", size=20),
    "no header": b"\1" * 512,
    "huge manifest": archive.header("v1/a/b/c/d/entry.json", 1 << 30),
    "no manifest": archive.header("v1/a/b/c/d/kernel.so", 0),
    "twice": SOUND + SOUND,
    "unknown member": SOUND + archive.header("v1/a/b/c/d/other.so", 0),
    "altered member": entry_tar(kernelso=MEMBERS["kernel.so"][::-1]),
    "short member": entry_tar(kernelso=MEMBERS["kernel.so"][:-1]),
    "another's manifest": entry_tar(entryjson=b"{}"),
    "dirty padding": SOUND[:-1] + b"x",
    "signature of another entry": entry_tar(sign("1" * 64)),
    "signature in another folder": entry_tar((f"v1/{MANIFEST_DIGEST}.{'0' * 16}.sig", TEXT)),
    "signature above": entry_tar((f"v1/.signatures/../{MANIFEST_DIGEST}.{'0' * 16}.sig", TEXT)),
    "signature of no key": entry_tar((f"v1/.signatures/{MANIFEST_DIGEST}.sig", TEXT)),
    "truncated signature": entry_tar(sign(text=TEXT[:-6] + b"\n")),
    "signature that is text": entry_tar(sign(text=b"!" * (len(TEXT) - 1) + b"\n")),
    "signature with a tail": entry_tar(sign(text=TEXT + b"\n")),
    "signature in another form": entry_tar(sign(text=TEXT[:-1] + b" ")),
    "signature twice": entry_tar(sign(), sign()),
    "signatures out of order": entry_tar(sign(signer="1" * 16), sign(signer="0" * 16)),
    "signature after the members": SOUND + archive.header(sign()[0], len(TEXT)) + TEXT + bytes(-len(TEXT) % 512),
    "file of another mode": SOUND.replace(b"0000644", b"0004755", 1),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_archive_is_refused_whole(lab: Lab, what: str) -> None:
    for before in (b"", SOUND) if what not in ("twice",) else (b"",):
        assert not lab.feed(zstd.compress(before + HOSTILE[what] + END))
        assert list(lab.store.entries()) == []


def test_a_manifest_of_another_folder_or_form(lab: Lab) -> None:
    """What an entry is called follows from what it is, and its manifest has one form."""
    for old, new in ((b"gemm/", b"gamm/"), (b'"abi":"1",', b'"abi":"1" ,')):
        data = bytearray(SOUND)
        at = data.find(old)
        assert at > 0
        data[at : at + len(old)] = new[: len(old)]
        assert not lab.feed(zstd.compress(bytes(data) + END))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"no archive",
        zstd.compress(b""),
        zstd.compress(SOUND),
        zstd.compress(SOUND + END[:-1]),
        zstd.compress(SOUND + END + b"\0"),
        zstd.compress(SOUND + END)[:-3],
        zstd.compress(SOUND + END) + b"more",
    ],
)
def test_what_is_not_whole_is_refused(lab: Lab, data: bytes) -> None:
    assert not lab.feed(data)
    assert not os.path.exists(str(lab.store.root))


def test_a_sound_one_after_all_that_is_taken(lab: Lab) -> None:
    assert lab.feed(zstd.compress(SOUND + END))


def test_an_empty_archive_is_sound(lab: Lab) -> None:
    assert lab.feed(zstd.compress(END)) and list(lab.store.entries()) == []


def test_zeros_that_expand_without_end_are_not_read(lab: Lab) -> None:
    """100 GB of zeros in a few bytes a frame: refused at the first block that is none of an entry."""
    frame = zstd.compress(bytes(1 << 26))
    head = archive.header("v1/a/b/c/d/entry.json", (1 << 33) - 1)
    assert not lab.feed(zstd.compress(head) + frame * 1500)


def test_the_error_names_the_file_and_what_is_wrong(lab: Lab) -> None:
    lab.file.write_bytes(zstd.compress(SOUND + HOSTILE["absolute"] + END))
    with pytest.raises(CacheError, match=r"hostile.tar.zst' is refused: .*'/tmp/escaped'.*; nothing of it was"):
        archive.verify(str(lab.file))
    for path in (str(lab.file.parent), str(lab.file) + "x", "a\0b"):
        with pytest.raises(ArgumentError, match="cannot be read"):
            archive.verify(path)


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ArgumentError, match="only a file can be"):
        archive.verify(str(tmp_path / "pipe"))


def test_a_store_that_takes_nothing_is_an_error(lab: Lab, tmp_path: Path) -> None:
    for store in (Store("memory", None), Store("site", tmp_path / "site", "site", writable=False)):
        with pytest.raises(CacheError):
            archive.unpack(str(lab.file), store)


def test_a_place_that_cannot_be_written(lab: Lab, tmp_path: Path) -> None:
    entry = publish(Store("other", tmp_path / "other"))
    for place, hint in ((tmp_path / "none" / "x", "mkdir -p "), (tmp_path, "tlhub cache export ")):
        with pytest.raises(ArgumentError, match="cannot be written") as caught:
            archive.pack([entry], str(place))
        assert str(caught.value.hint).startswith(f"{hint}{tmp_path}/")


def test_what_is_no_file_is_not_replaced(lab: Lab, tmp_path: Path) -> None:
    entry, pipe = publish(Store("other", tmp_path / "other")), tmp_path / "pipe"
    os.mkfifo(pipe)
    for place in (str(pipe), ""):
        with pytest.raises(ArgumentError, match="cannot be written: it is no file") as caught:
            archive.pack([entry], place)
        assert caught.value.hint == "tlhub cache export kernels.tar.zst"
    with pytest.raises(OSError, match="it is no file"):
        write_whole(str(pipe), "")
    assert pipe.is_fifo()


def test_a_full_disk_leaves_what_was_there(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, entries = lab.file.read_bytes(), [publish(Store("other", tmp_path / "other"))]

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CacheError, match="cannot be written: No space left"):
        archive.pack(entries, str(lab.file))
    assert lab.file.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_without_the_library_the_hint_installs_it(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd", None)
    archive._zstd.cache_clear()
    with contextlib.closing(io.BytesIO()), pytest.raises(CacheError) as caught:
        archive.verify(str(lab.file))
    assert caught.value.hint == "pip install 'tlhub-core[archive]'"
    archive._zstd.cache_clear()


def test_a_manifest_with_paths_for_members_never_reaches_the_disk(lab: Lab) -> None:
    """Signed by its own digest, and still no path: names of members are checked where manifests are read."""
    evil = make_manifest(dataclasses.replace(PROBLEM, kernel="../../up"))
    evil = evil.with_members({"../../escaped": Member.of(b"x"), "kernel.so": Member.of(b"x")})
    data = evil.to_bytes()
    tar = archive.header(f"{evil.folder}/entry.json", len(data)) + data + bytes(-len(data) % 512)
    assert not lab.feed(zstd.compress(tar + END))


# -- fuzzing ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab(tmp_path_factory.mktemp("fuzzed"))


FUZZ = settings(deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))


@settings(FUZZ, max_examples=10_000 // DEEDS)
@given(doings=deeds)
def test_fuzzed_tar(fuzzed: Lab, doings: bytes) -> None:
    for data in mutations(fuzzed.sound, doings):
        fuzzed.read(data)


@settings(FUZZ, max_examples=100)
@given(doings=deeds)
def test_fuzzed_compression(fuzzed: Lab, doings: bytes) -> None:
    for data in mutations(zstd.compress(fuzzed.sound, 1), doings):
        fuzzed.feed(data)
