"""The user's own files besides the cache: what is configured, and what was learnt. By the XDG rules, as on Linux."""

from __future__ import annotations

import contextlib
import os
import sys

from tlhub.cache import trust
from tlhub.errors import CacheError


def config(name: str) -> str | None:
    """Return the path of *name* in the user's configuration, None without a home."""
    return _path("XDG_CONFIG_HOME", ".config", name)


def state(name: str) -> str | None:
    """Return the path of *name* among what was learnt, None without a home."""
    return _path("XDG_STATE_HOME", ".local/state", name)


def make(folder: str | None) -> str:
    """Return *folder*, made with mode 0700 where it was missing. Raises CacheError."""
    if folder is None:
        raise CacheError("there is no home folder: HOME is not set", hint="export HOME=/a/folder/that/you/can/write")
    try:
        os.makedirs(os.path.dirname(folder), mode=0o700, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, 0o700)
        refused = trust.refusal_of_folder(folder, os.lstat(folder), trust.STRICT)
    except OSError as error:
        raise CacheError(f"{folder} cannot be made: {error.strerror}", hint="export HOME=/another/folder") from error
    if refused:
        text, hint = trust.remedy(refused)
        raise CacheError(text, hint=hint)
    return folder


def _path(variable: str, usual: str, name: str) -> str | None:
    base, home = os.environ.get(variable, "").strip(), os.environ.get("HOME", "")
    if os.path.isabs(base):
        return os.path.join(base, "tlhub", name)
    if sys.platform == "win32":
        import platformdirs

        return os.path.join(platformdirs.user_config_dir("tlhub", appauthor=False), name)
    return os.path.join(home, usual, "tlhub", name) if os.path.isabs(home) else None
