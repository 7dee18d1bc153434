"""A worker process: its pipe, its log and its scratch folder, from outside."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from typing import Any, BinaryIO

from tlhub.errors import BuildError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_PREFIX = f"tlhub-worker-{os.getuid()}-" if hasattr(os, "getuid") else "tlhub-worker-"
_YOUNG = 60.0
"""Seconds that a scratch folder may be without a lock: it is being made."""

_BOOT = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]); from tlhub.build.worker import main; main(*sys.argv[2:])"
)


class Process:
    """A worker process, its pipe, its log and its scratch folder."""

    def __init__(self, toolchain: str, memory: int) -> None:
        self.toolchain = toolchain
        self._scratch, self._log = _scratch()
        self._mark = 0
        jobs_read, self._jobs = os.pipe()
        self._replies, replies_write = os.pipe()
        self._buffer = b""
        argv = [toolchain, str(jobs_read), str(replies_write), self._scratch, str(memory)]
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, json.dumps(import_path()), *argv],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                pass_fds=(jobs_read, replies_write),
                start_new_session=True,
                cwd=self._scratch,
                env={**os.environ, "TMPDIR": self._scratch},
            )
        except OSError as error:
            os.close(self._jobs)
            os.close(self._replies)
            self._clean()
            raise BuildError(f"a worker process could not be started: {error}") from None
        finally:
            os.close(jobs_read)
            os.close(replies_write)

    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, job: Mapping[str, Any], seconds: float, timeout: float) -> dict[str, Any]:
        """Send *job* and return the reply. Raises BuildError on a crash or after *seconds*."""
        self._log.seek(0, os.SEEK_END)
        self._mark = self._log.tell()
        try:
            _write_all(self._jobs, json.dumps(job).encode() + b"\n")
        except BrokenPipeError:
            raise self._died(job) from None
        until = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            selector.register(self._replies, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                if not selector.select(max(0.0, until - time.monotonic())):
                    words, log = self._last_words(), self.keep_log()
                    self.end()
                    raise BuildError(
                        f"building {job['program'] or 'nothing'} took longer than {timeout:g} seconds and was stopped"
                        f"{words}",
                        log=log,
                    )
                data = os.read(self._replies, 1 << 16)
                if not data:
                    raise self._died(job)
                self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        reply: dict[str, Any] = json.loads(line)
        return reply

    def end(self) -> None:
        """Kill the process group, reap it, and remove what it left."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass
        self._process.wait()
        for fd in (self._jobs, self._replies):
            try:
                os.close(fd)
            except OSError:
                pass
        self._jobs = self._replies = -1
        self._clean()

    def keep_log(self) -> str | None:
        """Copy what the last job printed to a file that stays, and return its path; None where there is no room."""
        try:
            fd, path = tempfile.mkstemp(prefix="tlhub-build-", suffix=".log")
        except OSError:
            return None
        try:
            with os.fdopen(fd, "wb") as file:
                file.write(self._printed())
        except OSError:
            os.unlink(path)
            return None
        return path

    def forget(self) -> None:
        """Close the descriptors in a forked child; the process and its files are the parent's."""
        for fd in (self._jobs, self._replies):
            os.close(fd)
        self._log.close()

    def _died(self, job: Mapping[str, Any]) -> BuildError:
        code = self._process.wait()
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        what = f"the {self.toolchain} worker died with {how} in {job['program'] or job['assemble']}"
        return BuildError(f"{what}{self._last_words()}", log=self.keep_log())

    def _printed(self) -> bytes:
        self._log.seek(self._mark)
        return self._log.read()

    def _last_words(self) -> str:
        lines = self._printed().decode(errors="replace").strip().splitlines()[-10:]
        return "".join(f"\n  {line}" for line in lines)

    def _clean(self) -> None:
        self._log.close()
        shutil.rmtree(self._scratch, ignore_errors=True)


def _scratch() -> tuple[str, BinaryIO]:
    """Return a new scratch folder and the log in it, locked for as long as this process or its worker lives."""
    folder = None
    try:
        _sweep(tempfile.gettempdir())
        folder = tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-")
        log = open(os.path.join(folder, "log"), "w+b")
    except OSError as error:
        if folder:
            shutil.rmtree(folder, ignore_errors=True)
        where = tempfile.tempdir or os.environ.get("TMPDIR") or "/tmp"
        raise BuildError(
            f"a build needs a folder for temporary files, and {where} takes none: {error.strerror or error}",
            hint="export TMPDIR=/a/folder/with/room",
        ) from None
    _lock(log)
    return folder, log


@functools.cache
def _sweep(parent: str) -> None:
    """Remove the scratch folders of one's own in *parent* that nobody holds: those that lived in them were killed."""
    with contextlib.suppress(OSError), os.scandir(parent) as found:
        for child in found:
            if re.match(rf"{_PREFIX}\d+-", child.name) and _abandoned(child):
                shutil.rmtree(child.path, ignore_errors=True)


def _abandoned(folder: os.DirEntry[str]) -> bool:
    try:
        info = folder.stat(follow_symlinks=False)
        if info.st_uid != os.getuid() or time.time() - info.st_mtime < _YOUNG:
            return False
        with open(os.path.join(folder.path, "log"), "rb") as log:
            return _lock(log)
    except FileNotFoundError:
        return True
    except OSError:
        return False


def _lock(file: BinaryIO) -> bool:
    """Lock *file* until it is closed, here and in the processes that inherit it; false if that cannot be."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (OSError, AttributeError):  # held, or no locks here
        return False
    return True


def import_path() -> list[str]:
    """Return the import path of this process, for a worker that may have another working directory."""
    return [os.path.abspath(p) for p in sys.path]


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
