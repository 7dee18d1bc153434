"""The user's keys: public ones whose signatures count, and private ones to sign with.

<config>/tlhub/trusted/NAME.pub      keys that are trusted
<config>/tlhub/keys/NAME.key         keys to sign with, mode 0600, and NAME.pub to hand out
"""

from __future__ import annotations

import functools
import os
import re
import shlex
import stat
from collections.abc import Mapping
from typing import NamedTuple

from tlhub import files
from tlhub.cache import home, signature, trust
from tlhub.cache.entry import Damaged, Folder
from tlhub.errors import ArgumentError, CacheError, UnknownName, suggest
from tlhub.specs import Finding

_LARGEST = 4096
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@-]{0,63}")


class Key(NamedTuple):
    """A public key of 32 bytes, and what the user calls it."""

    name: str
    public: bytes

    @property
    def id(self) -> str:
        return signature.key_id(self.public)


def trusted() -> Mapping[str, Key]:
    """Return the keys that are trusted by their ids. Raises CacheError where others could have written the list."""
    folder = home.config("trusted")
    try:
        info = os.lstat(folder) if folder else None
    except OSError:
        info = None
    return _trusted(folder, info.st_mtime_ns, info.st_ctime_ns) if folder and info else {}


@functools.lru_cache(maxsize=4)  # a file that comes or goes changes the times of its folder
def _trusted(path: str, *times: int) -> Mapping[str, Key]:
    try:
        with Folder(path) as folder:
            refused = trust.refusal_of_folder(path, folder.info(), trust.STRICT)
            names = [] if refused else sorted(file for file in os.listdir(path) if file.endswith(".pub"))
            found = [Key(file[: -len(".pub")], _public(folder, file)) for file in names]
    except Damaged as error:
        refused = error.reason
    if refused:
        text, hint = trust.remedy(refused)
        raise CacheError(f"no trusted key counts: {text}", hint=hint)
    return {key.id: key for key in found}


def _public(folder: Folder, file: str) -> bytes:
    try:
        return signature.public_from_pem(folder.read(file, _LARGEST, trust.STRICT)[0])
    except ValueError as error:
        path = f"{folder.path}/{file}"
        raise Damaged(f"{path}: {error}{trust.MEND}rm {shlex.quote(path)}") from error


def check(asking: str) -> Finding:
    """Say whose signatures count where *asking* wants some, for ``tlhub doctor``. Raises CacheError."""
    names = ", ".join(key.name for key in trusted().values())
    if names:
        return Finding("signatures", True, f"{asking} asks for them, and trusted are {names}")
    text = f"{asking} asks for them, and no key is trusted: none counts"
    return Finding("signatures", False, text, "tlhub trust add NAME FILE")


def trust_key(name: str, file: str) -> Key:
    """Trust the public key in *file*, and call it *name*. Raises ArgumentError and CacheError."""
    check_name(name)
    try:
        with open(file, "rb") as opened:
            key = Key(name, signature.public_from_pem(opened.read(_LARGEST)))
    except OSError as error:
        own = str(home.config(f"keys/{name}.pub"))
        there = f"tlhub trust add {name} {shlex.quote(own)}" if own != file and os.path.exists(own) else None
        hint = there or f"ls -l {shlex.quote(os.path.dirname(file) or '.')}"
        message = f"public key {file!r} cannot be read: {error.strerror}"
        raise ArgumentError(message, argument="file", hint=hint) from error
    except ValueError as error:
        hint = f"openssl pkey -in {shlex.quote(file)} -pubout"
        raise ArgumentError(f"public key {file!r}: {error}", argument="file", hint=hint) from error
    for known in trusted().values():
        if (known.name == name) != (known.public == key.public):
            what = f"{name!r} is key {known.id} already" if known.name == name else f"it is trusted as {known.name!r}"
            raise ArgumentError(f"key {key.id}: {what}", argument="name", hint=f"tlhub trust rm {known.name}")
    folder = home.make(home.config("trusted"))
    _write(f"{folder}/{name}.pub", signature.public_to_pem(key.public), 0o644)
    _trusted.cache_clear()  # two changes within a tick of the clock look like one
    return key


def distrust(name: str) -> Key:
    """Trust a key no longer, and return it. Raises UnknownName and CacheError."""
    found = {key.name: key for key in trusted().values()}
    if name not in found:
        listed = ", ".join(found) or "none"
        raise UnknownName(f"no trusted key {name!r}; trusted: {listed}", hint=suggest(name, found, "tlhub trust ls"))
    path = f"{home.config('trusted')}/{name}.pub"
    try:
        os.unlink(path)
    except OSError as error:
        raise CacheError(f"{path} cannot be removed: {error.strerror}", hint=f"rm {shlex.quote(path)}") from error
    _trusted.cache_clear()
    return found[name]


def generate(name: str) -> tuple[str, str]:
    """Make a pair of keys to sign with, and return the files of both, the private first.

    Raises ArgumentError and CacheError.
    """
    check_name(name)
    folder = home.make(home.config("keys"))
    private, public = f"{folder}/{name}.key", f"{folder}/{name}.pub"
    if os.path.lexists(private):
        hint = f"tlhub trust add {name} {shlex.quote(public)}"
        raise ArgumentError(f"{private} is there already", argument="name", hint=hint)
    pem, raw = signature.create()
    _write(public, signature.public_to_pem(raw), 0o644)
    _write(private, pem, 0o600)  # last: where it is there, the pair is whole
    return private, public


def signer(named: str) -> signature.Signer:
    """Return the private key in the file *named*, or the one of that name among the user's own.

    Raises ArgumentError, and CacheError where others can read it.
    """
    path = named if os.sep in named or os.path.isfile(named) else str(home.config(f"keys/{named}.key"))
    try:
        with open(path, "rb") as file:
            mode, pem = stat.S_IMODE(os.fstat(file.fileno()).st_mode), file.read(_LARGEST)
    except OSError as error:
        hint = f"tlhub trust keygen {named if _NAME.fullmatch(named) else 'NAME'}"
        raise ArgumentError(f"key {path!r} cannot be read: {error.strerror}", argument="key", hint=hint) from error
    if trust.CHECKED and mode & 0o077:
        raise CacheError(f"key {path!r} (mode {mode:04o}) is open to others", hint=f"chmod 600 {shlex.quote(path)}")
    return signature.Signer(pem, path)


def check_name(name: str) -> None:
    """Raise ArgumentError unless *name* can be a file's."""
    if not _NAME.fullmatch(name):
        allowed = "at most 64 letters, digits, '-', '_', '.' and '@'"
        message = f"a key cannot be called {name!r}; allowed are {allowed}"
        raise ArgumentError(message, argument="name", hint="tlhub trust ls")


def _write(path: str, data: bytes, mode: int) -> None:
    try:
        files.write_whole(path, data, mode)
    except OSError as error:
        hint = f"df -h {shlex.quote(os.path.dirname(path))}"
        raise CacheError(f"{path} cannot be written: {error.strerror}", hint=hint) from error
