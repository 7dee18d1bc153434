"""nvcc: finding one by one rule, running it, and reading what it says of the kernels.

The rule: ``$CUDA_HOME``, ``$CUDA_PATH``, ``PATH``, then the pip package nvidia-cuda-nvcc, found without an import.
nvcc needs a host compiler: the one that ``$NVCC_CCBIN`` names, else gcc, clang or cc of ``PATH``.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shlex
import shutil
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tlhub.build.compiler import execute
from tlhub.errors import BuildError

_HINT = 'pip install "tlhub-core[nvcc]"'

Release = tuple[int, int]

SINCE: Mapping[str, Release] = {"sm_89": (11, 8), "sm_90a": (12, 0), "sm_100a": (12, 8), "sm_120a": (12, 8)}
"""The release of CUDA that an arch came with."""

_DRIVERS: Mapping[Release, int] = {
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
    (13, 2): 595,
    (13, 3): 610,
    (13, 4): 615,
}
"""The driver that came with a release of CUDA. The launches need one of CUDA 12, whatever compiled the kernels."""


@dataclass(frozen=True)
class Nvcc:
    """An nvcc. ``version``: what it says of itself, ``13.0.88``."""

    command: str
    version: str

    @property
    def release(self) -> Release:
        major, minor, *_ = self.version.split(".")
        return int(major), int(minor)

    def serve(self, arch: str) -> None:
        """Raise BuildError if this nvcc is too old for *arch* (``sm_100a``)."""
        since = SINCE.get(arch, (0, 0))
        if self.release < since:
            raise BuildError(
                f"nvcc {self.version} does not know {arch}; CUDA {_dotted(since)} and later do",
                hint=another(lambda release: release >= since) or _installed(),
            )

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


def another(fits: Callable[[Release], bool]) -> str | None:
    """Return the command that makes tlhub use another nvcc that is here, of a release that *fits*; None without one."""
    for _, command in _candidates():
        version = _version(command) if command else None
        if command and version and fits(Nvcc(command, version).release):
            return _use(os.path.dirname(os.path.dirname(os.path.abspath(command))))
    return None


def least_driver(release: Release, arch: str) -> int:
    """Return the least driver for what *release* compiled for *arch*.

    Every driver of the release's major version runs a cubin, if it knows the device; of a major that is not known yet
    it is the newest known. PTX is compiled by the driver, which must be as new as the release: raises BuildError where
    that driver is not known.
    """
    oldest, newest = min(_DRIVERS), max(_DRIVERS)
    if not arch.startswith("compute_"):
        release = max((release[0], 0), SINCE.get(arch, oldest), oldest)
        return max(driver for known, driver in _DRIVERS.items() if known <= release)
    if release > newest:
        raise BuildError(
            f"nvcc {_dotted(release)} writes PTX for drivers that tlhub does not know; it knows those up to "
            f"CUDA {_dotted(newest)}",
            hint=another(lambda other: other <= newest) or _installed(f"nvidia-cuda-nvcc<{newest[0]}.{newest[1] + 1}"),
        )
    return min(driver for known, driver in _DRIVERS.items() if known >= release)


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
        hint="install gcc, or name another in NVCC_CCBIN",
    )


def _installed(*requirements: str) -> str:
    """Return the command that installs NVIDIA's package and makes tlhub use it, whatever else is here."""
    words = " ".join(f'"{requirement}"' for requirement in ("tlhub-core[nvcc]", *requirements))
    return f"pip install {words} && {_use(os.path.join(sysconfig.get_path('purelib'), 'nvidia', 'cu13'))}"


def _use(home: str) -> str:
    return f"export CUDA_HOME={shlex.quote(home)}"


def _dotted(release: Release) -> str:
    return ".".join(map(str, release))
