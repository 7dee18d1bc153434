"""The C compiler: finding one by one rule, and running it. Used by back ends, in workers.

The rule: ``$CC``, then cc, gcc, clang, the cross compiler of the machine, and zig (``python -m ziglang cc``);
the first one that compiles for the machine asked for.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tlhub.errors import BuildError

_GLIBC = "2.17"  # what zig links for: old enough for every system that Python 3.10 runs on
_MACHINES = {"AMD64": "x86_64", "arm64": "aarch64"}


@dataclass(frozen=True)
class Compiler:
    """A C compiler that makes code for Linux on ``machine``. ``version`` is its first line about itself."""

    command: tuple[str, ...]
    machine: str
    version: str

    def run(self, folder: str, arguments: Sequence[str], *, include: bool = False) -> None:
        """Run in *folder*, with tvm-ffi's headers if *include*. Raises BuildError with what it printed."""
        headers = ["-I", tvm_ffi_headers()] if include else []
        done = execute([*self.command, *headers, *arguments], folder)
        if done.returncode:
            said = "\n".join(done.stdout.strip().splitlines()[-20:]) or f"exit code {done.returncode}"
            raise BuildError(f"the C compiler {shlex.join(self.command)!r} failed:\n{said}")


class Job(threading.Thread):
    """Work in a temporary folder, started at once: *work(folder)* returns file contents by name."""

    def __init__(self, compiler: Compiler, work: Callable[[Compiler, str], Mapping[str, bytes]]) -> None:
        super().__init__(name="tlhub-compiler", daemon=True)
        self.compiler = compiler
        self._work = work
        self._result: Mapping[str, bytes] | BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            with tempfile.TemporaryDirectory(prefix="tlhub-cc-") as folder:
                self._result = self._work(self.compiler, folder)
        except BaseException as error:  # raised again where it is collected
            self._result = error

    def collect(self) -> Mapping[str, bytes]:
        """Wait, and return the files. Raises what the work raised."""
        self.join()
        if isinstance(self._result, Mapping):
            return self._result
        raise self._result or BuildError("the C compiler was not run")


def find(machine: str) -> Compiler:
    """Return a C compiler for Linux on *machine* (``x86_64``, ``aarch64``). Raises BuildError if there is none."""
    looked: list[str] = []
    for command in _candidates(machine):
        name = shlex.join(command)
        if shutil.which(command[0]) is None:
            looked.append(f"{name} (not found)")
            continue
        made_for = _line([*command, "-dumpmachine"])
        if not made_for.startswith(machine) or "linux" not in made_for:
            looked.append(f"{name} (compiles for {made_for or 'nothing that it would tell'})")
            continue
        return Compiler(command, machine, _line([*command, "--version"]) or name)
    if importlib.util.find_spec("ziglang"):
        zig = (sys.executable, "-m", "ziglang")
        version = _line([*zig, "version"])
        if version:
            command = (*zig, "cc", "-target", f"{machine}-linux-gnu.{_GLIBC}")
            return Compiler(command, machine, f"zig {version} (glibc {_GLIBC})")
        looked.append("python -m ziglang (does not run)")
    else:
        looked.append("python -m ziglang (not installed)")
    raise BuildError(
        f"no C compiler for Linux on {machine}; looked for {', '.join(looked)}", hint='pip install "tlhub-core[cc]"'
    )


def here() -> str:
    """Return the machine that this is, by the name that compilers give it."""
    name = platform.machine()
    return _MACHINES.get(name, name)


def tvm_ffi_headers() -> str:
    """Return the folder of tvm-ffi's headers. Raises BuildError."""
    spec = importlib.util.find_spec("tvm_ffi")
    for place in (spec.submodule_search_locations or ()) if spec else ():
        folder = os.path.join(place, "include")
        if os.path.isfile(os.path.join(folder, "tvm", "ffi", "c_api.h")):
            return folder
    raise BuildError("apache-tvm-ffi has no headers here", hint="pip install --force-reinstall apache-tvm-ffi")


def _candidates(machine: str) -> list[tuple[str, ...]]:
    wanted = tuple(shlex.split(os.environ.get("CC", "")))
    found: list[tuple[str, ...]] = [wanted] if wanted else []
    found += [("cc",), ("gcc",), ("clang",)]
    if machine != here():
        found.append((f"{machine}-linux-gnu-gcc",))
    return found


def _line(command: Sequence[str]) -> str:
    """Return the first line that *command* prints, or an empty string if it fails."""
    try:
        done = execute(command, None)
    except BuildError:
        return ""
    return done.stdout.partition("\n")[0].strip() if done.returncode == 0 else ""


def _environment() -> dict[str, str]:
    env = {**os.environ, "LC_ALL": "C"}
    if not env.get("HOME") and not env.get("XDG_CACHE_HOME"):
        env.setdefault("ZIG_GLOBAL_CACHE_DIR", os.path.join(tempfile.gettempdir(), "zig"))  # it insists on one
    return env


def execute(command: Sequence[str], folder: str | None) -> subprocess.CompletedProcess[str]:
    """Run a compiler in *folder*, without a shell; what it prints is one text. Raises BuildError if it does not run."""
    try:
        return subprocess.run(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=_environment(),
            text=True,
            errors="replace",
            check=False,
        )
    except OSError as error:
        raise BuildError(f"the compiler {command[0]!r} does not run: {error}") from None
