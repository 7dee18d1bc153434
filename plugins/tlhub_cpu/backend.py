"""The back end of CPUs: an object file and the host shim to one shared library.

No path reaches a shell: the compiler runs with the staging folder as working directory and relative names.
The library is linked against a stand-in for libtvm_ffi that has only the functions that may be called,
so that a program that calls anything else does not link, here or for another machine.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from tlhub.build import shim
from tlhub.build.compiler import Compiler, Job, find
from tlhub.build.program import LIBRARY, Assembled, DeviceProgram
from tlhub.specs import Problem, Signature
from tlhub_cpu.arch import spec

_COMPILE = ("-std=c11", "-O2", "-fPIC", "-fwrapv", "-fvisibility=hidden", "-fno-math-errno", "-Wall", "-c")
_LINK = (
    "-shared",
    "-s",
    "-static-libgcc",
    "-Wl,-z,now",
    "-Wl,-z,relro",
    "-Wl,-z,noexecstack",
    "-Wl,-z,nodelete",  # its threads and its bound functions outlive any handle
    "-Wl,--no-undefined",
    "-Wl,--version-script=exports.map",
    "-Wl,-soname,kernel.so",
)
_STANDIN = "libtvm_ffi.so"
_KDL_CPU = 1

_static: dict[str, Job] = {}
"""Static objects by machine: compiled once a worker."""


def prepare(arch: str) -> None:
    """Start compiling what every library of *arch* has in common. Raises BuildError without a compiler."""
    machine = spec(arch).machine
    if machine not in _static:
        _static[machine] = Job(find(machine), _compile_static)


def assemble(program: DeviceProgram, problem: Problem, signature: Signature, folder: str, arch: str) -> Assembled:
    """Link *program* and the host shim of *problem* to ``kernel.so`` in *folder*. Raises BuildError."""
    contract = shim.contract(problem, signature, program, _KDL_CPU)
    prepare(arch)
    machine = spec(arch).machine
    static = _static[machine]
    try:
        parts = static.collect()
    except BaseException:
        del _static[machine]
        raise
    compiler = static.compiler
    texts = {**shim.static("host_shim.h"), shim.CONTRACT: contract, "exports.map": _exports()}
    for name, text in texts.items():
        _write(folder, name, text.encode())
    for name, data in parts.items():
        _write(folder, name, data)
    objects = [n for n in parts if n.endswith(".o")]
    compiler.run(folder, [*_COMPILE, shim.CONTRACT, "-o", "contract.o"], include=True)
    compiler.run(folder, [*_LINK, program.code, *objects, "contract.o", _STANDIN, "-lm", "-o", LIBRARY])
    for name in {*texts, *parts, "contract.o", program.code}:
        os.unlink(os.path.join(folder, name))
    return Assembled(identity(arch))


def identity(arch: str) -> Mapping[str, str]:
    """Return what this back end adds to the toolchain's identity. Raises BuildError without a compiler."""
    prepare(arch)
    return {"cc": _static[spec(arch).machine].compiler.version}


def _compile_static(compiler: Compiler, folder: str) -> Mapping[str, bytes]:
    """Compile the shim, the pool and the stand-in for libtvm_ffi."""
    for name, text in shim.static("host_shim.h", "host_shim.c", "cpu_pool.c").items():
        _write(folder, name, text.encode())
    _write(folder, "libtvm_ffi.c", "".join(f"void {name}(void) {{}}\n" for name in shim.TVM_FFI).encode())
    compiler.run(folder, [*_COMPILE, "host_shim.c", "-o", "host_shim.o"], include=True)
    compiler.run(folder, [*_COMPILE, "cpu_pool.c", "-o", "cpu_pool.o"], include=True)
    compiler.run(folder, ["-shared", "-fPIC", "-nostdlib", "-Wl,-soname,libtvm_ffi.so", "libtvm_ffi.c", "-o", _STANDIN])
    return {name: _read(folder, name) for name in ("host_shim.o", "cpu_pool.o", _STANDIN)}


def _exports() -> str:
    """Return a version script: the functions that the host calls, and nothing of the program's own."""
    names = "".join(f" {name};" for name in (*shim.EXPORTS, *shim.POOL_EXPORTS))
    return f"{{ global:{names} local: *; }};\n"


def _write(folder: str, name: str, data: bytes) -> None:
    with open(os.path.join(folder, name), "wb") as file:
        file.write(data)


def _read(folder: str, name: str) -> bytes:
    with open(os.path.join(folder, name), "rb") as file:
        return file.read()
