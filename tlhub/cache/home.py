"""Home: the user's own folders, for the cache, what is configured, and what was learnt."""

from __future__ import annotations

import contextlib
import os
import stat
import sys

from tlhub.cache import trust
from tlhub.errors import CacheError


def cache(base: str, home: str) -> str | None:
    """Return the platform's folder for caches, None without a home. *base*: XDG_CACHE_HOME."""
    if sys.platform in ("win32", "darwin"):
        if sys.platform == "darwin" and not home:
            return None
        import platformdirs

        return platformdirs.user_cache_dir("tlhub", appauthor=False)
    return _xdg(base, ".cache", home)


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


def unusable(root: str) -> str | None:
    """Return why a folder that nobody named cannot be made or written, or None."""
    path = root
    while not os.path.lexists(path) and os.path.dirname(path) != path:
        path = os.path.dirname(path)
    if not os.path.isdir(path):
        return f"the cache folder {root} cannot be made: {path} is not a folder"
    if not os.access(path, os.W_OK | os.X_OK):
        return f"the cache folder {root} cannot be written: {path} is read-only"
    return None


def temporary() -> str | None:
    """Return a private folder for temporary files, the same for each process of a user, or None."""
    import tempfile

    try:
        if not hasattr(os, "geteuid"):
            return tempfile.mkdtemp(prefix="tlhub-")
        path = os.path.join(tempfile.gettempdir(), f"tlhub-{os.geteuid()}")
        try:
            os.mkdir(path, 0o700)
        except FileExistsError:  # ours from before, or a trap
            info = os.lstat(path)
            if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid() or info.st_mode & 0o077:
                return None
        return path
    except OSError:
        return None


def _path(variable: str, usual: str, name: str) -> str | None:
    base = os.environ.get(variable, "")
    if sys.platform == "win32" and not base:
        import platformdirs

        return os.path.join(platformdirs.user_config_dir("tlhub", appauthor=False), name)
    folder = _xdg(base, usual, os.environ.get("HOME", ""))
    return folder and os.path.join(folder, name)


def _xdg(base: str, usual: str, home: str) -> str | None:
    """Return tlhub's folder in *base*, or in *usual* of *home*; one that is not absolute counts as unset.

    The rule is platformdirs', whose import costs a third of a cold start, and which would turn an empty HOME into /.
    """
    if os.path.isabs(base.strip()):
        return os.path.join(base.strip(), "tlhub")
    return os.path.join(home, usual, "tlhub") if os.path.isabs(home) else None
