from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cache_help import BUILD, MEMBERS, lookup, make_manifest, publish, serves

from tlhub.cache.entry import LARGEST_MANIFEST, Damaged, Entry, Manifest, Member
from tlhub.cache.store import Store

pytestmark = pytest.mark.light

WHOLE = make_manifest(
    covers={"M": {"min": 1, "max": 512, "multiple": 8}}, resources={"registers": 168, "rate": 0.5}, least_driver=580
).with_members({name: Member.of(data) for name, data in MEMBERS.items()})


def sealed(fields: dict[str, Any]) -> bytes:
    """Return the bytes of a manifest with these fields and a digest of the whole that is right."""
    body = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    return f'{body[:-1]},"sha256":"{hashlib.sha256(body.encode()).hexdigest()}"}}\n'.encode()


def test_a_manifest_comes_back_as_it_was() -> None:
    data = WHOLE.to_bytes()
    assert Manifest.parse(data) == WHOLE
    assert Manifest.parse(data).problem == WHOLE.problem
    assert list(json.loads(data))[-1] == "sha256"
    assert json.loads(data)["provenance"]["seconds"] == 0.25


def test_no_byte_of_a_manifest_can_change() -> None:
    data = WHOLE.to_bytes()
    for position in range(len(data)):
        for flip in (0x01, 0x20, 0x80, 0xFF):
            altered = bytes((*data[:position], data[position] ^ flip, *data[position + 1 :]))
            with pytest.raises(Damaged):
                Manifest.parse(altered)
        with pytest.raises(Damaged):
            Manifest.parse(data[:position])
    for more in (b" ", b"\n", b"\0", data):
        with pytest.raises(Damaged):
            Manifest.parse(data + more)


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(Manifest)])
def test_each_field_is_needed_and_typed(name: str) -> None:
    fields = WHOLE.to_json()
    assert Manifest.parse(sealed(fields)) == WHOLE
    for wrong in (None, 1.5, [[1]], {"a": [1]}, True, -1, b"x".hex() if name.endswith("digest") else object):
        if wrong is object:
            changed = {k: v for k, v in fields.items() if k != name}
        elif type(wrong) is type(fields[name]) and name in ("source_digest",):
            continue
        else:
            changed = {**fields, name: wrong}
        with pytest.raises(Damaged):
            Manifest.parse(sealed(changed))


KEY_FIELDS = {
    "kernel": "other",
    "kernel_revision": 2,
    "dims": [["B", 1], ["M", 65], ["N", 48], ["K", 32]],
    "dtypes": [["a", "float32"], ["b", "float32"], ["c", "float64"]],
    "options": [],
    "arch": "cpu:x86-64-v4",
    "schedule": "other",
    "schedule_revision": 4,
    "source_digest": "6" * 64,
    "config": {"tile": 32, "pack": True, "order": "mnk"},
    "toolchain": {},
    "abi": "2",
    "platform": {"os": "linux", "machine": "riscv64", "glibc": "2.34"},
    "problem_digest": "0" * 64,
    "build_digest": "0" * 64,
}


@pytest.mark.parametrize("name", sorted(KEY_FIELDS))
def test_a_field_of_the_key_that_was_edited_is_damage_even_under_a_right_seal(name: str) -> None:
    with pytest.raises(Damaged, match="digest is not that of its fields"):
        Manifest.parse(sealed({**WHOLE.to_json(), name: KEY_FIELDS[name]}))


@pytest.mark.parametrize(
    "member", ["../kernel.c", "/etc/passwd", "a/b", "", ".", "..", ".hidden", "entry.json", "x" * 25, "a b", "é", "a\0"]
)
def test_names_of_members_are_plain(member: str) -> None:
    fields = WHOLE.to_json()
    fields["members"] = {**fields["members"], member: {"size": 1, "sha256": "0" * 64}}
    with pytest.raises(Damaged, match="no name of a member"):
        Manifest.parse(sealed(fields))


@pytest.mark.parametrize(
    "change",
    [
        lambda f: f.update(format=2),
        lambda f: f.update(more=1),
        lambda f: f["members"].pop("kernel.so"),
        lambda f: f["members"]["kernel.so"].update(size=True),
        lambda f: f["members"]["kernel.so"].update(size=1 << 60),
        lambda f: f["members"]["kernel.so"].update(sha256="A" * 64),
        lambda f: f["members"]["kernel.so"].update(mode=1),
        lambda f: f["members"].update({f"m{i}": {"size": 1, "sha256": "0" * 64} for i in range(64)}),
        lambda f: f["covers"].update(M={"max": -1}),
        lambda f: f["covers"].update(M={"multiple": 0}),
        lambda f: f["covers"].update(M={"most": 1}),
        lambda f: f["provenance"].update(seconds=float("inf")),
        lambda f: f["resources"].update(x=float("nan")),
    ],
)
def test_strictness(change: Callable[[dict[str, Any]], None]) -> None:
    fields = json.loads(json.dumps(WHOLE.to_json()))
    change(fields)
    with pytest.raises(Damaged):
        Manifest.parse(sealed(fields))


@pytest.mark.parametrize(
    "text", ["[]", "1", "null", '"x"', "{}", "{", "[" * 100_000, '{"format":1e999}', '{"format":' + "9" * 5000 + "}"]
)
def test_what_is_no_manifest(text: str) -> None:
    body = text.encode()
    seal = b',"sha256":"%b"}\n' % hashlib.sha256(body).hexdigest().encode()
    with pytest.raises(Damaged):
        Manifest.parse(body[:-1] + seal)


def test_a_huge_manifest_is_not_read() -> None:
    with pytest.raises(Damaged, match="larger"):
        Manifest.parse(b" " * (LARGEST_MANIFEST + 1))


# -- entries on disk -----------------------------------------------------------------------------------


def test_every_flipped_byte_and_every_prefix_is_a_miss(store: Store) -> None:
    """Of each file of an entry, and nothing is deleted by reading it."""
    folder = Path(str(publish(store).folder))
    assert serves(store)
    for file in sorted(folder.iterdir()):
        whole = file.read_bytes()
        for position in range(len(whole)):
            file.write_bytes(bytes((*whole[:position], whole[position] ^ 0x01, *whole[position + 1 :])))
            assert not serves(store), (file.name, position)
        for length in range(len(whole)):
            file.write_bytes(whole[:length])
            assert not serves(store), (file.name, length)
        file.write_bytes(whole + b"\0")
        assert not serves(store)
        file.unlink()
        assert not serves(store)
        file.write_bytes(whole)
    assert serves(store)
    assert len(list(folder.iterdir())) == 3


def test_one_writers_library_beside_anothers_manifest_is_a_miss(store: Store, tmp_path: Path) -> None:
    """The same build by two writers, whose libraries differ in a byte: what is there of both serves nobody."""
    theirs = {**MEMBERS, "kernel.so": MEMBERS["kernel.so"][:-1] + b"!"}
    mine, other = publish(store), publish(Store("other", tmp_path / "other"), members=theirs)
    assert mine.key == other.key and mine.manifest.sha256 != other.manifest.sha256
    for name in ("kernel.so", "entry.json"):
        place = Path(str(mine.folder), name)
        whole = place.read_bytes()
        os.replace(shutil.copy(Path(str(other.folder), name), tmp_path), place)
        assert not serves(store), name
        place.write_bytes(whole)
    assert serves(store)


def test_reads_name_what_is_wrong(store: Store) -> None:
    entry = publish(store)
    folder = Path(str(entry.folder))
    assert entry.read("kernel.so") == MEMBERS["kernel.so"]
    with pytest.raises(Damaged, match=r"no member 'x'; it has kernel\.c, kernel\.so"):
        entry.read("x")
    (folder / "kernel.so").write_bytes(b"x")
    with pytest.raises(Damaged, match="torn: 1 bytes, not 204"):
        entry.read("kernel.so")
    (folder / "kernel.so").unlink()
    with pytest.raises(Damaged, match=r"kernel\.so is missing") as caught:
        entry.read("kernel.so")
    assert caught.value.hint == "tlhub cache verify"
    os.mkfifo(folder / "kernel.so")
    with pytest.raises(Damaged, match="not a regular file"):
        entry.read("kernel.so")


def test_links_are_not_followed(store: Store, tmp_path: Path) -> None:
    folder = Path(str(publish(store).folder))
    target = tmp_path / "target.so"
    target.write_bytes(MEMBERS["kernel.so"])
    (folder / "kernel.so").unlink()
    (folder / "kernel.so").symlink_to(target)
    assert not serves(store)
    assert lookup(store).entries
    with pytest.raises(Damaged, match="is a link"):
        lookup(store).entries[0].read("kernel.so")


@pytest.mark.parametrize("depth", range(1, 5))
def test_folders_that_are_links_are_not_followed(store: Store, tmp_path: Path, depth: int) -> None:
    """Not the arch's folder, the kernel's, the problem's or the entry's, though what they lead to is whole."""
    folder = Path(str(publish(store).folder))
    place = folder.parents[4 - depth - 1] if depth < 4 else folder
    moved = tmp_path / "elsewhere"
    place.rename(moved)
    place.symlink_to(moved)
    assert not serves(store)
    reasons = " ".join(skipped.reason for skipped in lookup(store).skipped)
    assert "link" in reasons or "Not a directory" in reasons


def test_an_entry_in_another_place_is_a_miss(store: Store) -> None:
    entry = publish(store)
    folder = Path(str(entry.folder))
    other = make_manifest(dataclasses.replace(entry.manifest.problem, kernel="other"))
    assert other.problem_digest != entry.manifest.problem_digest
    place = Path(str(publish(store, other).folder)).parent / folder.name
    os.rename(folder, place)
    found = lookup(store, other)
    assert len(found.entries) == 1
    assert "folder of another" in found.skipped[0].reason
    moved = place.parent / ("0" * 16)
    os.rename(place, moved)
    assert "another build" in next(s.reason for s in lookup(store, other).skipped if s.folder == str(moved))


class Bomb:
    def __init__(self, marker: str) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path(self.marker),)


def test_a_pickle_is_data(store: Store, tmp_path: Path) -> None:
    folder = Path(str(publish(store).folder))
    marker = tmp_path / "marker"
    for file in sorted(folder.iterdir()):
        file.write_bytes(pickle.dumps(Bomb(str(marker))))
        assert not serves(store)
    assert not marker.exists()


def test_the_bytes_that_were_hashed_are_the_bytes_that_are_read(store: Store) -> None:
    publish(store)
    entry = lookup(store).entries[0]
    entry.prepare()
    (Path(str(entry.folder)) / "kernel.so").write_bytes(b"x" * len(MEMBERS["kernel.so"]))
    assert entry.read("kernel.so") == MEMBERS["kernel.so"]
    with pytest.raises(Damaged, match="altered"):
        entry.read("kernel.so")  # handed out once: now it is the disk's


@pytest.mark.parametrize("damage", ["torn", "missing", "link", "folder", "open", "altered"])
def test_large_texts_are_hashed_when_they_are_read(store: Store, damage: str, tmp_path: Path) -> None:
    text = b"text" * 25_000
    path = Path(str(publish(store, members={"kernel.so": b"ELF", "kernel.txt": text}).folder), "kernel.txt")
    if damage == "torn":
        path.write_bytes(text[:-1])
    elif damage == "altered":
        path.write_bytes(text[:-1] + b"T")
    elif damage == "open":
        path.chmod(0o666)
    else:
        path.rename(tmp_path / "moved")
        if damage == "link":
            path.symlink_to(tmp_path / "moved")
        elif damage == "folder":
            path.mkdir()
    (entry,) = lookup(store).entries
    if damage == "altered":
        entry.prepare()
        assert entry.read("kernel.so") == b"ELF"
    else:
        with pytest.raises(Damaged, match=r"kernel\.txt"):
            entry.prepare()
    with pytest.raises(Damaged):
        entry.read("kernel.txt")
    with pytest.raises(Damaged):
        entry.verify()


def test_an_entry_in_memory_reads_as_often_as_one_likes() -> None:
    entry = Entry(None, WHOLE, "user", held=MEMBERS)
    entry.verify()
    assert [entry.read("kernel.so") for _ in range(2)] == [MEMBERS["kernel.so"]] * 2
    assert not entry.published
    with pytest.raises(Damaged, match="no member"):
        entry.read("x")


def test_build_fields_are_in_clear() -> None:
    shown = json.loads(WHOLE.to_bytes())
    for name, value in BUILD.items():
        assert shown[name] == value
