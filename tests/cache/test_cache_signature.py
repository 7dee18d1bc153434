"""Signatures and who vouches for an entry: keys, policies, what is remembered, and what an attacker may try."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from cache_help import ARCH, PROBLEM, lookup, make_manifest, publish
from signing_help import sign, trust_new

from tlhub.cache import home, keyring, signature, vouching
from tlhub.cache.chain import Chain, Wanted
from tlhub.cache.copying import copy
from tlhub.cache.entry import Entry
from tlhub.cache.store import Store
from tlhub.errors import ArgumentError, CacheError
from tlhub.stores import prebuilt_store


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(vouching, "_unkept", set())


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Be another process of this user."""
    monkeypatch.setattr(vouching, "_unkept", set())


def find(store: Store) -> tuple[bool, str]:
    """Return whether the chain serves from the store, and why not."""
    want = Wanted("gemm.cpu", 3, "5" * 64, {"tile": 64, "pack": True, "order": "mnk"}, [PROBLEM])
    hit, trace = Chain([store]).find(ARCH, [want])
    return hit is not None, "; ".join(trace[-1].reasons)


@pytest.fixture
def strict(tmp_path: Path) -> Store:
    return Store("site", tmp_path / "root", signed="require")


def test_only_a_trusted_signature_makes_an_entry_serve(strict: Store) -> None:
    entry = publish(strict)
    assert find(strict) == (False, f"{entry.key[:16]}: nobody whom you trust signed it (you trust no key)")
    private, public = keyring.generate("alice")
    sign(strict, entry, keyring.signer("alice"))
    assert not find(strict)[0]
    keyring.trust_key("alice", public)
    assert find(strict) == (True, "")
    keyring.distrust("alice")
    assert not find(strict)[0]  # though it was noted that her signature held


def test_a_signature_is_of_one_manifest_by_one_key(strict: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    alice, mallory = trust_new(), keyring.signer(keyring.generate("mallory")[0])
    entry = publish(strict)
    path = sign(strict, entry, alice)
    good = path.read_bytes()
    for bad in (b"", b"no base64!", good[:-5], good + b"AAAA", signature.to_text(bytes(64)), b"x" * 5000):
        path.write_bytes(bad)
        assert not find(strict)[0], bad
    signature.write(strict, entry.manifest.sha256, alice.id, mallory.sign(entry.manifest))
    assert not find(strict)[0]
    other = make_manifest(source_digest="6" * 64)
    signature.write(strict, entry.manifest.sha256, alice.id, alice.sign(other))
    assert not find(strict)[0]
    path.unlink()
    os.symlink("/dev/zero", path)
    assert not find(strict)[0]
    path.unlink()
    os.mkfifo(path)  # must not hang
    assert not find(strict)[0]
    path.unlink()
    path.write_bytes(good)
    assert find(strict)[0]


def test_every_flipped_bit_of_a_signature_is_refused(strict: Store) -> None:
    alice = trust_new()
    entry = publish(strict)
    good = alice.sign(entry.manifest)
    assert signature.holds(good, alice.public, entry.manifest)
    for position in range(len(good) * 8):
        bad = bytearray(good)
        bad[position // 8] ^= 1 << position % 8
        assert not signature.holds(bytes(bad), alice.public, entry.manifest)


def test_what_is_altered_after_signing_is_refused_whatever_was_noted(strict: Store) -> None:
    alice = trust_new()
    entry = publish(strict)
    sign(strict, entry, alice)
    assert find(strict)[0]
    library = Path(str(entry.folder), "kernel.so")
    library.write_bytes(library.read_bytes()[:-1] + b"\0")
    assert "altered" in find(strict)[1]
    # a whole entry of the attacker's making, of the same key: its manifest is another
    shutil.rmtree(str(entry.folder))
    forged = publish(Store("site", str(strict.root)), members={"kernel.so": b"\x7fELF evil"})
    assert forged.folder == entry.folder
    assert "nobody whom you trust signed it" in find(strict)[1]


def test_nothing_is_read_of_a_library_that_nobody_signed(strict: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The policy is asked first: neither to load nor to hash is it opened."""
    alice, read = trust_new(), []
    entry = publish(strict)
    real = Entry.prepare
    monkeypatch.setattr(Entry, "prepare", lambda self: (read.append(self.key), real(self)))
    assert not find(strict)[0] and not read
    sign(strict, entry, alice)
    assert find(strict)[0] and read == [entry.key]


def test_warn_serves_and_says_so(tmp_path: Path) -> None:
    store = Store("site", tmp_path / "root", signed="warn")
    publish(store)
    with pytest.warns(RuntimeWarning, match="nobody whom you trust signed it"):
        assert find(store)[0]


def test_the_variable_is_the_policy_of_stores_without_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, off = Store("site", tmp_path / "root"), Store("site", tmp_path / "root", signed="off")
    publish(store)
    assert find(store)[0]
    monkeypatch.setenv("TLHUB_SIGNED", "require")
    assert not find(store)[0] and find(off)[0]
    monkeypatch.setenv("TLHUB_SIGNED", "")
    assert find(store)[0]
    monkeypatch.setenv("TLHUB_SIGNED", "requires")
    with pytest.raises(ArgumentError, match="TLHUB_SIGNED is 'requires'; allowed are off, warn, require") as caught:
        find(store)
    assert caught.value.hint == "export TLHUB_SIGNED=require"


def test_what_this_user_built_needs_no_signature(strict: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    with strict.stage() as staged:
        Path(staged.path, "kernel.so").write_bytes(b"\x7fELF own")
        entry = strict.publish(staged, make_manifest(), own=True)
    assert find(strict)[0]
    forget(monkeypatch)
    assert find(strict)[0]
    monkeypatch.setenv("XDG_STATE_HOME", str(home.state("elsewhere")))  # another user
    assert not find(strict)[0]
    assert entry.published


def test_a_build_does_not_take_over_what_nobody_signed(strict: Store) -> None:
    """An attacker who put an entry first must not be served as the winner of the race."""
    evil = publish(Store("site", str(strict.root)), members={"kernel.so": b"\x7fELF evil"})
    with strict.stage() as staged:
        Path(staged.path, "kernel.so").write_bytes(b"\x7fELF own")
        mine = strict.publish(staged, make_manifest(), own=True)
    assert mine.read("kernel.so") == b"\x7fELF own"
    assert mine.folder == f"{evil.folder}.1"
    assert find(strict)[0]


def test_a_second_process_imports_no_cryptography(strict: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = publish(strict)
    sign(strict, entry, trust_new())
    here, root = os.path.dirname(__file__), str(strict.root)
    program = (
        f"import sys; sys.path.insert(0, {here!r}); import test_cache_signature as tests\n"
        f"from tlhub.cache.store import Store; found = tests.find(Store('site', {root!r}, signed='require'))\n"
        "print(found[0], any(name.startswith('cryptography.hazmat') for name in sys.modules))"
    )

    def run() -> str:
        return subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True
        ).stdout.strip()

    assert run() == "True True"
    assert run() == "True False"
    notes = Path(str(home.state("vouched")))
    notes.chmod(0o666)  # anybody could have written them
    assert run() == "True True"


def test_without_cryptography_a_signature_is_a_reason_and_a_hint(
    strict: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = publish(strict)
    sign(strict, entry, trust_new())
    for module in ("cryptography.hazmat.primitives", "cryptography.hazmat.primitives.asymmetric"):
        monkeypatch.setitem(sys.modules, module, None)
    assert "need the package 'cryptography'" in find(strict)[1]
    with pytest.raises(CacheError) as caught:
        signature.create()
    assert caught.value.hint == "pip install 'tlhub-core[trust]'"


def test_notes_do_not_grow_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vouching, "_MOST", 2000)
    for number in range(100):
        vouching.note("0" * 16, f"{number:064x}")
    path = Path(str(home.state("vouched")))
    assert path.stat().st_size < 2100 and stat.S_IMODE(path.stat().st_mode) == 0o600
    assert f"{99:064x}" in path.read_text() and f"{0:064x}" not in path.read_text()


@pytest.mark.parametrize("bits", [0o002, 0o020])
def test_a_list_of_keys_that_others_can_write_counts_for_nothing(strict: Store, bits: int) -> None:
    sign(strict, publish(strict), trust_new())
    assert find(strict)[0]
    folder = Path(str(home.config("trusted")))
    for path in (folder / "alice.pub", folder):
        mode = stat.S_IMODE(path.stat().st_mode)
        path.chmod(mode | bits)
        os.utime(folder)
        assert "no trusted key counts" in find(strict)[1]
        with pytest.raises(CacheError) as caught:
            keyring.trusted()
        subprocess.run(str(caught.value.hint), shell=True, check=True)
        os.utime(folder)
        assert find(strict)[0]


def test_a_copy_is_signed_as_its_original_is(strict: Store, tmp_path: Path) -> None:
    entry = publish(strict)
    sign(strict, entry, trust_new())
    other = Store("other", tmp_path / "other", signed="require")
    assert copy(entry, other) is not None
    assert find(other) == (True, "")
    assert set(signature.find(str(other.root), entry.manifest.sha256)) == set(keyring.trusted())


def test_what_a_package_brings_is_held_to_the_policy_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Store("made", tmp_path / "root")
    entry, shipped = publish(made), prebuilt_store("shipped", str(tmp_path / "root"))
    assert find(shipped)[0]
    monkeypatch.setenv("TLHUB_SIGNED", "require")
    assert find(shipped) == (False, f"{entry.key[:16]}: nobody whom you trust signed it (you trust no key)")
    sign(made, entry, trust_new())
    assert find(shipped) == (True, "")


# -- signatures that travel ------------------------------------------------------------------------


def test_what_travels_is_verified_where_the_key_is_trusted(tmp_path: Path) -> None:
    store, alice = Store("there", tmp_path / "there"), trust_new()
    manifest, root = publish(store).manifest, str(store.root)
    other = alice.sign(make_manifest(source_digest="6" * 64))
    assert vouching.keep(store, manifest, {alice.id: other, "0" * 16: other}) == (
        f"its signature by alice ({alice.id}), which does not hold",
    )
    assert signature.find(root, manifest.sha256) == {"0" * 16: other}  # nobody here can tell, and it counts nowhere
    good = alice.sign(manifest)
    assert vouching.keep(store, manifest, {alice.id: good, "0" * 16: good}) == ()
    assert signature.find(root, manifest.sha256) == {"0" * 16: other, alice.id: good}  # what is there stays
    signature.write(store, manifest.sha256, alice.id, other)
    assert vouching.keep(store, manifest, {alice.id: good}) == ()
    assert signature.find(root, manifest.sha256)[alice.id] == good  # unless it is wrong


def test_where_nobody_can_tell_signatures_are_carried_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, alice = Store("there", tmp_path / "there"), trust_new()
    manifest = publish(store).manifest
    for module in ("cryptography.hazmat.primitives", "cryptography.hazmat.primitives.asymmetric"):
        monkeypatch.setitem(sys.modules, module, None)
    assert vouching.keep(store, manifest, {alice.id: bytes(64)}) == ()
    assert signature.find(str(store.root), manifest.sha256) == {alice.id: bytes(64)}


def test_signatures_are_no_entries(strict: Store) -> None:
    entry = publish(strict)
    sign(strict, entry, trust_new())
    assert [item.reason for item in strict.entries()] == [None]
    assert len(lookup(strict).entries) == 1 and not lookup(strict).skipped
