"""Small files that several processes read and write."""

from __future__ import annotations

import contextlib
import os
import threading

HOST = os.uname().nodename if hasattr(os, "uname") else os.environ.get("COMPUTERNAME", "here")


def write_whole(path: str, text: str) -> None:
    """Put *text* in the file *path*: whoever reads it finds what was there before, or all of it. Raises OSError."""
    folder, name = os.path.split(os.path.realpath(path))
    draft = os.path.join(folder, f".{name}.{HOST}-{os.getpid()}-{threading.get_ident()}")
    try:
        with open(draft, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(draft, os.path.join(folder, name))
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(draft)
        raise
