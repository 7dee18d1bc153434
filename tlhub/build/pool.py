"""The pool of workers: started once, reused, several at a time, one toolchain a worker.

A worker that hangs is killed with its process group; one that crashes takes its job with it and nothing
else. Both are a BuildError with the end of what was printed and the path of a log.
"""

from __future__ import annotations

import atexit
import os
import re
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tlhub.build import frontends
from tlhub.errors import BuildError
from tlhub.problem import signature
from tlhub.specs import Config, Kernel, Problem, Schedule, Signature, Target

if TYPE_CHECKING:
    from tlhub.build.process import Process

TIMEOUT = 600.0
"""Seconds that a build may take."""


@dataclass(frozen=True)
class Built:
    """What a build left in its folder. ``members`` are file names; ``resources`` are numbers by name.

    ``machine`` is what the library runs on (``x86_64``), ``glibc`` the least version that it needs, "" if none,
    ``least_driver`` the least driver, 0 if none; ``warnings`` are the compilers' own.
    """

    toolchain: Mapping[str, str]
    abi: str
    machine: str
    glibc: str
    resources: Mapping[str, int]
    least_driver: int
    warnings: tuple[str, ...]
    members: tuple[str, ...]
    seconds: float


class Pool:
    """Up to *size* workers at a time; *memory* limits the data of each, in bytes."""

    def __init__(self, size: int | None = None, memory: int | None = None) -> None:
        self.size = size or max(1, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1)
        self.memory = _default_memory() if memory is None else memory
        self._idle: list[Process] = []
        self._all: set[Process] = set()
        self._free = threading.Condition()

    def build(
        self,
        kernel: Kernel,
        problem: Problem,
        schedule: Schedule,
        config: Config,
        arch: str,
        target: Target,
        folder: str,
        *,
        timeout: float = TIMEOUT,
    ) -> Built:
        """Compile *schedule* for *problem* into the staging *folder*: the library and its readable source.

        Raises BuildError: no toolchain, no compiler, a program that fails, a time-out, a crash.
        """
        job = _job(problem, signature(kernel, problem), schedule, config, arch, target, folder)
        fields = self._ask(schedule.toolchain, job, timeout)["built"]
        return Built(**{**fields, "warnings": tuple(fields["warnings"]), "members": tuple(fields["members"])})

    def identity(
        self, toolchain: str, arch: str, target: Target, *, timeout: float = TIMEOUT
    ) -> Mapping[str, str] | None:
        """Return the versions of what would compile for *arch*, or None where the back end does not tell.

        Raises BuildError.
        """
        from tlhub.build.process import import_path

        job = {"path": import_path(), "program": None, "arch": arch, "assemble": target.assemble}
        told: Mapping[str, str] | None = self._ask(toolchain, job, timeout)["identity"]
        return told

    def _ask(self, toolchain: str, job: Mapping[str, Any], timeout: float) -> dict[str, Any]:
        """Have a worker of *toolchain* do *job* and return its reply. Raises BuildError."""
        frontends.module(toolchain)  # an unknown one is told before a process is started
        until = time.monotonic() + timeout
        for _ in range(2):
            worker = self._take(toolchain)
            try:
                reply: dict[str, Any] = worker.ask(job, max(0.0, until - time.monotonic()), timeout)
            except BaseException:
                self._drop(worker)
                raise
            if not reply.get("stale"):
                break
            self._drop(worker)  # a plugin's module was edited: a new process imports what is there now
        failed = "built" not in reply and "identity" not in reply
        log = worker.keep_log() if failed else None
        self._give(worker)
        if failed:
            told = reply.get("error", "the plugin's modules change while they are built")
            raise BuildError(told, hint=reply.get("hint"), log=log)
        return reply

    def close(self) -> None:
        """End all workers."""
        with self._free:
            workers, self._idle, self._all = list(self._all), [], set()
        for worker in workers:
            worker.end()

    def _take(self, toolchain: str) -> Process:
        with self._free:
            while True:
                for worker in self._idle:
                    if worker.toolchain == toolchain and worker.alive():
                        self._idle.remove(worker)
                        return worker
                if len(self._all) < self.size:
                    break
                if self._idle:  # one of another toolchain, or a dead one, makes room
                    worker = self._idle.pop(0)
                    self._all.discard(worker)
                    worker.end()
                    break
                self._free.wait()
            from tlhub.build.process import Process

            worker = Process(toolchain, self.memory)
            self._all.add(worker)
            return worker

    def _give(self, worker: Process) -> None:
        with self._free:
            if worker in self._all:
                self._idle.append(worker)
            self._free.notify()

    def _drop(self, worker: Process) -> None:
        with self._free:
            self._all.discard(worker)
            self._free.notify()
        worker.end()


_default: Pool | None = None
_lock = threading.Lock()


def default() -> Pool:
    """Return this process's pool."""
    global _default
    with _lock:
        if _default is None:
            _default = Pool()
        return _default


def _close() -> None:
    if _default is not None:
        _default.close()


def _after_fork() -> None:
    """A forked child starts workers of its own."""
    global _default, _lock
    _lock = threading.Lock()
    if _default is not None:
        for worker in _default._all:
            worker.forget()
        _default = None


atexit.register(_close)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _job(
    problem: Problem, sign: Signature, schedule: Schedule, config: Config, arch: str, target: Target, folder: str
) -> dict[str, Any]:
    from tlhub.build.process import import_path

    options = dict(target.options(arch))
    return {
        "path": import_path(),
        "problem": problem.to_json(),
        "signature": {
            "inputs": [list(t) for t in sign.inputs],
            "outputs": [list(t) for t in sign.outputs],
            "scalars": [[s.name, s.kind, s.default] for s in sign.scalars],
            "elide": sign.elide,
            "parts": {name: list(piece) for name, piece in sign.parts.items()},
        },
        "program": schedule.program,
        "packages": sorted({re.split("[:./]", m)[0] for m in (schedule.program, *schedule.sources)}),
        "config": dict(config),
        "arch": arch,
        "options": options,
        "assemble": target.assemble,
        "machine": options.get("mtriple", "").partition("-")[0] or os.uname().machine,
        "folder": os.path.abspath(folder),
    }


def _default_memory() -> int:
    """Return three quarters of the memory of the machine, or 0 where it is not known."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4 * 3
    except (ValueError, OSError, AttributeError):
        return 0
