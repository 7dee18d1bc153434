"""The worker process: one toolchain, one job at a time, JSON lines on a pipe of its own.

Whatever compilers and plugins print goes to a log: the pipe's descriptors are not stdin and stdout. Every
exception becomes a reply; the end of the pipe ends the worker.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from tlhub.build import check, frontends, shim
from tlhub.build.program import ABI, LIBRARY
from tlhub.errors import BuildError, TlhubError, describe
from tlhub.specs import Problem, Scalar, Signature, Tensor

Job = Mapping[str, Any]


def main(toolchain: str, read_from: str, write_to: str, scratch: str, memory: str) -> None:
    """Serve jobs until the pipe ends. *memory* is the most data in bytes, 0 for no limit."""
    _limit_memory(int(memory))
    # a descriptor of its own: that of the jobs is closed when they end
    watch = threading.Thread(target=_end_with_parent, args=(os.dup(int(read_from)), scratch), daemon=True)
    watch.start()
    os.set_inheritable(int(read_from), False)
    os.set_inheritable(int(write_to), False)
    try:
        with os.fdopen(int(read_from), "rb") as jobs, os.fdopen(int(write_to), "wb", buffering=0) as replies:
            worker = Worker(toolchain)
            for line in jobs:
                replies.write(json.dumps(worker.answer(json.loads(line))).encode() + b"\n")
    except BrokenPipeError:
        pass
    watch.join()  # the parent is gone


_END = """
import os, shutil, signal, sys, time
try:
    os.killpg(int(sys.argv[1]), signal.SIGKILL)
except ProcessLookupError:
    pass
for _ in range(100):  # what was killed may be at its last file
    shutil.rmtree(sys.argv[2], ignore_errors=True)
    if not os.path.lexists(sys.argv[2]):
        break
    time.sleep(0.02)
"""


def _end_with_parent(pipe: int, scratch: str) -> None:
    """End this process and the compilers that it runs as soon as nobody holds the other end of *pipe*.

    The scratch folder goes when none of them writes to it any more: another process sees to both.
    """
    watch = select.poll()
    watch.register(pipe, 0)
    while not any(event & (select.POLLHUP | select.POLLERR) for _, event in watch.poll()):
        pass
    end = [sys.executable, "-I", "-S", "-c", _END, str(os.getpgid(0)), scratch]
    subprocess.Popen(end, cwd=os.sep, stdin=subprocess.DEVNULL, start_new_session=True).wait()


class Worker:
    """The state of a worker: whether its toolchain is ready, and which files of plugins it has imported."""

    def __init__(self, toolchain: str) -> None:
        self.frontend = importlib.import_module(frontends.module(toolchain))
        self.ready = False
        self.imported: dict[str, tuple[int, int] | None] = {}
        self._home = os.getcwd()

    def answer(self, job: Job) -> dict[str, Any]:
        """Do *job* and return the reply: ``built``, ``stale`` (a new worker must do it) or ``error``.

        A job without a program asks for the ``identity`` of what would compile.
        """
        start = time.perf_counter()
        try:
            if self._stale():
                return {"stale": True}
            backend, assemble = self._prepare(job)
            if job["program"] is None:
                identity = getattr(backend, "identity", None)
                return {"identity": identity and {**self.frontend.identity(), **identity(job["arch"])}}
            built = self._build(job, assemble)
            return {"built": {**built, "seconds": time.perf_counter() - start}}
        except BuildError as error:
            traceback.print_exc()
            return {"error": error.message, "hint": error.hint}
        except BaseException as error:  # a program that exits, say
            return {"error": _describe(error, job), "hint": error.hint if isinstance(error, TlhubError) else None}
        finally:
            os.chdir(self._home)  # the staging folder will be moved
            sys.stdout.flush()
            sys.stderr.flush()

    def _prepare(self, job: Job) -> tuple[ModuleType, Any]:
        """Make back end and front end ready; return the back end and its ``assemble``."""
        sys.path[:] = job["path"]
        backend, assemble = _function(job["assemble"])
        prepare = getattr(backend, "prepare", None)
        if prepare:
            prepare(job["arch"])
        if not self.ready:
            self.frontend.prepare()
            self.ready = True
        return backend, assemble

    def _build(self, job: Job, assemble: Any) -> dict[str, Any]:
        arch, problem, signature = job["arch"], problem_of(job), signature_of(job)
        program = _function(job["program"])[1]
        # not every compiler takes every path: they get relative names
        os.chdir(job["folder"])
        folder = os.curdir
        self._remember(job["packages"])
        made = self.frontend.translate(program, problem, signature, job["config"], arch, job["options"], folder)
        self._remember(job["packages"])
        assembled = assemble(made, problem, signature, folder, arch)
        with open(os.path.join(folder, LIBRARY), "rb") as file:
            data = file.read()
        library = check.check(data, job["machine"], shim.EXPORTS)
        return {
            "toolchain": {**made.toolchain, **assembled.toolchain},
            "abi": ABI,
            "machine": library.machine,
            "glibc": library.glibc,
            "resources": {**made.resources, **assembled.resources, "library": len(data)},
            "least_driver": assembled.least_driver,
            "warnings": assembled.warnings,
            "members": [LIBRARY, made.source, *assembled.members],
        }

    def _remember(self, packages: list[str]) -> None:
        """Note the files of the program's *packages*, to see when one changes."""
        for name, loaded in list(sys.modules.items()):
            file = getattr(loaded, "__file__", None)
            if file and name.partition(".")[0] in packages:
                self.imported.setdefault(file, _stamp(file))

    def _stale(self) -> bool:
        """Tell whether a module was edited since it was imported: its old code must not be built again."""
        return any(_stamp(file) != stamp for file, stamp in self.imported.items())


def problem_of(job: Job) -> Problem:
    """Return the problem of a job."""
    p = job["problem"]
    pairs = [tuple((name, value) for name, value in p[key]) for key in ("dims", "dtypes", "options")]
    return Problem(p["kernel"], p["kernel_revision"], *pairs)


def signature_of(job: Job) -> Signature:
    """Return the signature of a job's problem."""

    def tensors(rows: list[list[Any]]) -> tuple[Tensor, ...]:
        return tuple(Tensor(n, tuple(dims), tuple(extents), dtype, out) for n, dims, extents, dtype, out in rows)

    s = job["signature"]
    scalars = tuple(Scalar(name, kind, default) for name, kind, default in s["scalars"])
    parts = {name: (whole, over) for name, (whole, over) in s["parts"].items()}
    return Signature(tensors(s["inputs"]), tensors(s["outputs"]), scalars, s["elide"], parts)


def _function(path: str) -> tuple[ModuleType, Any]:
    """Import ``package.module:function``. Raises BuildError with the place where the import failed."""
    name, _, attribute = path.partition(":")
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        raise BuildError(f"{path!r} cannot be imported: {error}") from error
    found = getattr(module, attribute, None)
    if not callable(found):
        raise BuildError(f"{path!r} names no function; module {name!r} has no callable {attribute!r}")
    return module, found


def _stamp(file: str) -> tuple[int, int] | None:
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


def _describe(error: BaseException, job: Job) -> str:
    """Return the error with the end of its traceback, from the first frame that is not the worker's own."""
    traceback.print_exc()
    frames = traceback.extract_tb(error.__traceback__)
    ours = os.path.dirname(os.path.abspath(__file__))
    theirs = [f for f in frames if not os.path.abspath(f.filename).startswith(ours)] or list(frames)
    where = "\n".join(f"  {f.filename}:{f.lineno} in {f.name}: {f.line}" for f in theirs[-5:])
    what = error.message if isinstance(error, TlhubError) else describe(error)
    return f"{job['program'] or job['assemble']} failed: {what}\n{where}"


def _limit_memory(most: int) -> None:
    if most:
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        soft = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
