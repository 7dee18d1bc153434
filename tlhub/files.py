"""Small files that several processes read and write."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from typing import BinaryIO

HOST = os.uname().nodename if hasattr(os, "uname") else os.environ.get("COMPUTERNAME", "here")


@contextlib.contextmanager
def replacing(path: str, mode: int = 0o666) -> Iterator[BinaryIO]:
    """Give a new file, its *mode* before the umask, that takes the place of *path* once it is whole.

    Whoever reads *path* finds what was there before, or all of it. Of a link the link is replaced, not what it names:
    others may have put it there. What is no file, a device or a pipe, is never replaced. Raises OSError.
    """
    with contextlib.suppress(FileNotFoundError):
        if stat.S_IFMT(os.lstat(path).st_mode) not in (stat.S_IFREG, stat.S_IFLNK, stat.S_IFDIR):
            raise OSError(errno.EEXIST, "it is no file", path)
    draft = os.path.join(os.path.dirname(path), f".{os.getpid()}-{os.urandom(6).hex()}")
    try:
        with open(draft, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            yield file
        os.replace(draft, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(draft)
        raise


def write_whole(path: str, data: str | bytes, mode: int = 0o666) -> None:
    """Put *data* in the file *path* as ``replacing`` does. Raises OSError."""
    with replacing(path, mode) as file:
        file.write(data.encode() if isinstance(data, str) else data)
