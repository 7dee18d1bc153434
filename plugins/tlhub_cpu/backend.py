"""The back end of CPUs: an object file, the host shim and the thread pool to one shared library."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from tlhub.build import library, shim
from tlhub.build.program import Assembled, DeviceProgram
from tlhub.specs import Problem, Signature
from tlhub_cpu.arch import spec

_KDL_CPU = 1
_base = library.Base(shim.static("cpu_pool.c"), writers=(sys.modules[__name__],))


def prepare(arch: str) -> None:
    """Start compiling what every library of *arch* has in common. Raises BuildError without a compiler."""
    _base.prepare(spec(arch).machine)


def assemble(program: DeviceProgram, problem: Problem, signature: Signature, folder: str, arch: str) -> Assembled:
    """Link *program* and the host shim of *problem* to ``kernel.so`` in *folder*. Raises BuildError."""
    sources = {shim.CONTRACT: shim.contract(problem, signature, program, _KDL_CPU)}
    _base.link(folder, spec(arch).machine, sources, [program.code], shim.POOL_EXPORTS)
    return Assembled(identity(arch))


def identity(arch: str) -> Mapping[str, str]:
    """Return what this back end adds to the toolchain's identity. Raises BuildError without a compiler."""
    return _base.identity(spec(arch).machine)
