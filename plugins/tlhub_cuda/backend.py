"""The back end of NVIDIA GPUs: CUDA C++ to a cubin or to PTX, and that, its launches and the host shim to a library."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from pathlib import Path

from tlhub.build import compiler, library, shim
from tlhub.build.program import Assembled, DeviceProgram
from tlhub.specs import Problem, Signature
from tlhub_cuda import TARGET, host, image, launches, nvcc

_FLAGS = ("-O3", "-std=c++17", "-allow-unsupported-compiler")  # the host's code is thrown away
_FILES = ("cuda_launch.h", "cuda_launch.c")
_base = library.Base(
    {name: Path(__file__).with_name(name).read_text(encoding="utf-8") for name in _FILES},
    ("-lm", "-ldl", "-lpthread"),
    writers=(sys.modules[__name__], host),
)


def prepare(arch: str) -> None:
    """Start compiling what every library has in common. Raises BuildError without a C compiler."""
    _base.prepare(compiler.here())


def assemble(program: DeviceProgram, problem: Problem, signature: Signature, folder: str, arch: str) -> Assembled:
    """Compile *program* and link it to ``kernel.so`` in *folder*. Raises BuildError."""
    short = arch.partition(":")[2]
    contract = shim.contract(problem, signature, program, TARGET.device_type)
    launches.check(program, problem, signature, short)
    prepare(arch)
    found = nvcc.find()
    found.serve(short)
    driver = nvcc.least_driver(found.release, short)
    code, said = _compile(found, program, folder, short)
    data = Path(folder, code).read_bytes()
    usage = nvcc.usage(said)
    launches.check_code(program, problem.kernel, image.parameters(data), usage, short)
    program_c = host.source(program, problem, signature, code, hashlib.sha256(data).hexdigest())
    sources = {shim.CONTRACT: contract, host.PROGRAM: program_c}
    exports = [shim.WORKSPACE_EXPORT] if shim.needs_workspace(program) else []
    _base.link(folder, compiler.here(), sources, [code], exports)
    return Assembled(identity(arch), resources(program, usage), driver, warnings=nvcc.warnings(said))


def identity(arch: str) -> Mapping[str, str]:
    """Return what this back end adds to the toolchain's identity. Raises BuildError without its compilers."""
    return {"nvcc": nvcc.find().version, **_base.identity(compiler.here())}


def resources(program: DeviceProgram, usage: Mapping[str, nvcc.Usage]) -> dict[str, int]:
    """Return the registers a thread, bytes spilled, and bytes of shared memory a block: the most of any kernel.

    Of several kernels each has its own numbers besides, as ``NAME.registers``.
    """
    dynamic: dict[str, int] = {}
    for branch in program.branches:
        for launch in branch.launches:
            dynamic[launch.kernel] = max(launch.shared, dynamic.get(launch.kernel, 0))
    rows = {
        name: {"registers": u.registers, "spills": u.spills, "shared_memory": u.shared + dynamic[name]}
        for name, u in usage.items()
        if name in dynamic
    }
    found = {key: max(row[key] for row in rows.values()) for key in next(iter(rows.values()), {})}
    if len(rows) > 1:
        found.update((f"{name}.{key}", value) for name, row in rows.items() for key, value in row.items())
    return found


def _compile(found: nvcc.Nvcc, program: DeviceProgram, folder: str, arch: str) -> tuple[str, str]:
    """Compile the device code; return the name of its file, and what nvcc and ptxas said."""
    flags = [*_FLAGS, *program.flags]
    if not arch.startswith("compute_"):
        target = f"arch={arch.replace('sm_', 'compute_')},code={arch}"
        options = ["-cubin", "-gencode", target, "-Xptxas", "-v", program.code, "-o", "program.cubin"]
        return "program.cubin", found.run(folder, [*flags, *options])
    said = found.run(folder, [*flags, "-ptx", f"-arch={arch}", program.code, "-o", "program.ptx"])
    # a driver compiles it: it is tried here, and measured
    device = arch.replace("compute_", "sm_")
    said += found.run(folder, ["-cubin", f"-arch={device}", "-Xptxas", "-v", "program.ptx", "-o", "program.cubin"])
    Path(folder, "program.cubin").unlink()
    return "program.ptx", said
