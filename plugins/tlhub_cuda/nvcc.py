"""nvcc: finding one by one rule, running it, and reading what it says of the kernels.

The rule: ``$CUDA_HOME``, ``$CUDA_PATH``, ``PATH``, then the pip package nvidia-cuda-nvcc, found without an import.
nvcc needs a host compiler: the one that ``$NVCC_CCBIN`` names, else gcc, clang or cc of ``PATH``.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tlhub.build.compiler import execute
from tlhub.errors import BuildError

_HINT = 'pip install "tlhub-core[nvcc]"'

SINCE: Mapping[str, tuple[int, int]] = {"sm_89": (11, 8), "sm_90a": (12, 0), "sm_100a": (12, 8), "sm_120a": (12, 8)}
"""The release of CUDA that an arch came with."""

_DRIVERS: Mapping[tuple[int, int], int] = {
    (12, 0): 525,
    (12, 1): 530,
    (12, 2): 535,
    (12, 3): 545,
    (12, 4): 550,
    (12, 5): 555,
    (12, 6): 560,
    (12, 8): 570,
    (12, 9): 575,
    (13, 0): 580,
    (13, 1): 590,
}
"""The driver that came with a release of CUDA."""


@dataclass(frozen=True)
class Nvcc:
    """An nvcc. ``version``: what it says of itself, ``13.0.88``."""

    command: str
    version: str

    @property
    def release(self) -> tuple[int, int]:
        major, minor, *_ = self.version.split(".")
        return int(major), int(minor)

    def serve(self, arch: str) -> None:
        """Raise BuildError if this nvcc is too old for *arch* (``sm_100a``)."""
        since = SINCE.get(arch, (0, 0))
        if self.release < since:
            least = ".".join(map(str, since))
            raise BuildError(f"nvcc {self.version} does not know {arch}; CUDA {least} and later do", hint=_HINT)

    def run(self, folder: str, arguments: Sequence[str]) -> str:
        """Run in *folder* and return what it printed. Raises BuildError with that if it fails."""
        done = execute([self.command, "-ccbin", _host_compiler(), *arguments], folder)
        if done.returncode:
            said = "\n".join(done.stdout.strip().splitlines()[-30:]) or f"exit code {done.returncode}"
            raise BuildError(f"nvcc {self.version} failed:\n{said}")
        return done.stdout


class Usage(NamedTuple):
    """What a kernel uses: registers a thread, the rest in bytes; ``shared`` is what it declares by itself."""

    registers: int
    spills: int
    stack: int
    shared: int


def find() -> Nvcc:
    """Return the nvcc to use. Raises BuildError that lists where it was looked for."""
    looked = []
    for where, command in _candidates():
        version = _version(command) if command else None
        if command and version:
            return Nvcc(command, version)
        looked.append(f"{where} ({'does not run' if command else 'not found'})")
    raise BuildError(f"no nvcc; looked for {', '.join(looked)}", hint=_HINT)


def least_driver(release: tuple[int, int], arch: str) -> int:
    """Return the least driver for what *release* compiled for *arch*.

    Every driver of the release's major version runs a cubin, if it knows the device. PTX is compiled by the driver,
    which must be as new as the release.
    """
    if not arch.startswith("compute_"):
        release = max((release[0], 0), SINCE.get(arch, (0, 0)))
    return max((driver for known, driver in _DRIVERS.items() if known <= release), default=0)


def usage(said: str) -> dict[str, Usage]:
    """Return what each kernel uses, from what ``ptxas -v`` printed."""
    found = {}
    for name, text in _ENTRY.findall(said):
        number = {key: sum(map(int, re.findall(pattern, text))) for key, pattern in _NUMBERS.items()}
        found[name] = Usage(**number)
    return found


_ENTRY = re.compile(r"Compiling entry function '([\w$]+)' for '\w+'\n(.*?)(?=^[^\n]*Compiling entry|\Z)", re.M | re.S)
_NUMBERS = {
    "registers": r"Used (\d+) registers",
    "spills": r"(\d+) bytes spill",  # stores and loads
    "stack": r"(\d+) bytes stack frame",
    "shared": r"(\d+) bytes smem",
}


def warnings(said: str) -> tuple[str, ...]:
    """Return the lines that warn, and what ptxas says of slow code (C75xx: wgmma serialized), each once."""
    lines = (line.strip() for line in said.splitlines())
    return tuple(dict.fromkeys(line for line in lines if re.search(r"\bwarning( #\S+)? ?:|\(C75\d\d\)", line)))


def _candidates() -> Iterator[tuple[str, str | None]]:
    """Yield what is looked for, and the command where it is there."""
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        home = os.environ.get(variable)
        if home:
            path = os.path.join(home, "bin", "nvcc")
            yield f"{path} of ${variable}", shutil.which(path)
        else:
            yield f"${variable}/bin/nvcc", None
    yield "nvcc in PATH", shutil.which("nvcc")
    spec = importlib.util.find_spec("nvidia")
    for place in (spec.submodule_search_locations or ()) if spec else ():
        path = os.path.join(place, "cu13", "bin", "nvcc")
        if os.path.isfile(path):
            yield path, shutil.which(path)
    yield "the pip package nvidia-cuda-nvcc", None


@functools.cache
def _version(command: str) -> str | None:
    """Return the version that *command* tells, or None if it does not run."""
    try:
        done = execute([command, "--version"], None)
    except BuildError:
        return None
    match = re.search(r"\bV(\d+\.\d+[.\d]*)", done.stdout)
    return match[1] if match and done.returncode == 0 else None


def _host_compiler() -> str:
    """Return the host compiler. Raises BuildError without one."""
    named = os.environ.get("NVCC_CCBIN")
    if named:
        return named
    for name in ("gcc", "clang", "cc"):
        if shutil.which(name):
            return name
    raise BuildError(
        "nvcc needs a host compiler; looked in PATH for gcc, clang and cc",
        hint="install gcc, or: export NVCC_CCBIN=/path/to/gcc",
    )
