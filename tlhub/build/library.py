"""The library of a kernel: static C that is compiled once a worker, the C of one kernel, and how they are linked.

No path reaches a shell: the compiler runs with the staging folder as working directory and relative names.
A library is linked against a stand-in for libtvm_ffi that has only the functions that may be called, so that
one that calls anything else does not link, here or for another machine.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterable, Mapping
from types import ModuleType

from tlhub.build import shim
from tlhub.build.compiler import Compiler, Job, find
from tlhub.build.program import LIBRARY

_COMPILE = (
    "-std=c11",
    "-O2",
    "-fPIC",
    "-fwrapv",
    "-fvisibility=hidden",
    "-fno-math-errno",
    "-Wall",
    "-ffunction-sections",
    "-c",
)
_LINK = (
    "-shared",
    "-s",
    "-static-libgcc",
    "-Wl,-z,now",
    "-Wl,-z,relro",
    "-Wl,-z,noexecstack",
    "-Wl,-z,nodelete",  # its threads and its bound functions outlive any handle
    "-Wl,--gc-sections",
    "-Wl,--no-undefined",
    "-Wl,--version-script=exports.map",
    "-Wl,-soname,kernel.so",
)
_STANDIN = "libtvm_ffi.so"


class Base:
    """What the libraries of a back end have in common: the host shim, and *files*, C sources and headers by name.

    ``libraries``: of the system, that they are linked with. ``writers``: modules of the back end that decide what else
    is compiled, and how.
    """

    def __init__(
        self, files: Mapping[str, str], libraries: tuple[str, ...] = ("-lm",), writers: Iterable[ModuleType] = ()
    ) -> None:
        self._files = {**shim.static("host_shim.h", "host_shim.c"), **files}
        self._headers = [name for name in self._files if name.endswith(".h")]
        self._libraries = libraries
        self._writers = (sys.modules[__name__], shim, *writers)
        self._static: dict[str, Job] = {}

    def prepare(self, machine: str) -> None:
        """Start compiling the static files for *machine*. Raises BuildError without a compiler."""
        if machine not in self._static:
            self._static[machine] = Job(find(machine), self._compile)

    def identity(self, machine: str) -> Mapping[str, str]:
        """Return what makes the host's part of a library what it is: the compiler for *machine*, and a digest of the
        code that is in every library and of that which writes the rest. Raises BuildError without a compiler."""
        self.prepare(machine)
        texts = [*self._files.items(), *((m.__name__, _source(m)) for m in self._writers)]
        digest = hashlib.sha256(repr((texts, self._libraries)).encode()).hexdigest()
        return {"cc": self._static[machine].compiler.version, "host": digest[:16]}

    def link(
        self, folder: str, machine: str, sources: Mapping[str, str], parts: Iterable[str], exports: Iterable[str]
    ) -> None:
        """Make ``kernel.so`` in *folder* of *sources*, C texts by name, and leave nothing else of the work.

        *parts*: files in the folder that go into it, and then away: objects are linked, others are for the sources
        to include. *exports*: functions besides those that every library exports. Raises BuildError.
        """
        self.prepare(machine)
        compiler = self._static[machine].compiler
        try:
            static = self._static[machine].collect()
        except BaseException:
            del self._static[machine]
            raise
        headers = {name: self._files[name] for name in self._headers}
        texts = {**headers, **sources, "exports.map": _version_script((*shim.EXPORTS, *exports))}
        for name, text in texts.items():
            _write(folder, name, text.encode())
        for name, data in static.items():
            _write(folder, name, data)
        made = [_compile(compiler, folder, name) for name in sources]
        objects = [name for name in (*parts, *static, *made) if name.endswith(".o")]
        compiler.run(folder, [*_LINK, *objects, _STANDIN, *self._libraries, "-o", LIBRARY])
        for name in {*texts, *static, *made, *parts}:
            os.unlink(os.path.join(folder, name))

    def _compile(self, compiler: Compiler, folder: str) -> Mapping[str, bytes]:
        """Compile the static files and the stand-in for libtvm_ffi."""
        for name, text in self._files.items():
            _write(folder, name, text.encode())
        made = [_compile(compiler, folder, name) for name in self._files if name.endswith(".c")]
        _write(folder, "libtvm_ffi.c", "".join(f"void {name}(void) {{}}\n" for name in shim.TVM_FFI).encode())
        standin = ["-shared", "-fPIC", "-nostdlib", "-Wl,-soname,libtvm_ffi.so", "libtvm_ffi.c", "-o", _STANDIN]
        compiler.run(folder, standin)
        return {name: _read(folder, name) for name in (*made, _STANDIN)}


def _compile(compiler: Compiler, folder: str, source: str) -> str:
    made = source.removesuffix(".c") + ".o"
    compiler.run(folder, [*_COMPILE, source, "-o", made], include=True)
    return made


def _version_script(exports: Iterable[str]) -> str:
    """Return a version script: the functions that the host calls, and nothing of the program's own."""
    return f"{{ global: {' '.join(f'{name};' for name in exports)} local: *; }};\n"


def _source(module: ModuleType) -> str:
    assert module.__file__
    return _read(*os.path.split(module.__file__)).decode()


def _write(folder: str, name: str, data: bytes) -> None:
    with open(os.path.join(folder, name), "wb") as file:
        file.write(data)


def _read(folder: str, name: str) -> bytes:
    with open(os.path.join(folder, name), "rb") as file:
        return file.read()
