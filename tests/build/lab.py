"""A small kernel to build and to call: what the tests of building and of calling share."""

from __future__ import annotations

import atexit
import functools
import itertools
import os
import shutil
import tempfile
from types import SimpleNamespace

import tlhub_cpu
from tlhub.build import pool
from tlhub.problem import generalise, make, signature
from tlhub.runtime import CompiledKernel, load_library
from tlhub.specs import Arg, Dim, Kernel, Scalar, Schedule

ARCH = f"cpu:{tlhub_cpu.TARGET.canonical('native')}"


def _kernel(name, dims, inputs, outputs, scalars=(), dtypes=("float32",)):
    return Kernel(name, 1, dims, inputs, outputs, dtypes, "lab:none", "lab:none", lambda dims: 1.0, scalars=scalars)


_BMN = ("B", "M", "N")
ADD = _kernel(
    "add",
    (Dim("B", 1, elide=True), Dim("M"), Dim("N")),
    (Arg("a", _BMN), Arg("b", _BMN)),
    (Arg("c", _BMN),),
    (Scalar("alpha", default=1.0),),
)
BITS = _kernel(
    "bits", (Dim("N"),), (Arg("a", ("N",)),), (Arg("c", ("N",)),), dtypes=("bfloat16", "float8_e4m3fn", "float16")
)
MOMENTS = _kernel(
    "moments",
    (Dim("M"), Dim("N")),
    (Arg("a", ("M", "N")),),
    (Arg("total", ("M",)), Arg("count", ("M",), "int64")),
    (Scalar("scale", default="1/sqrt(N)"), Scalar("shift", "int", 0)),
    ("float64",),
)


def schedule(program: str, toolchain: str = "tvm", module: str = "lab_programs") -> Schedule:
    return Schedule(program, "add", 1, 1, ("cpu",), toolchain, f"{module}:{program}")


def build(program, kernel=ADD, dims=None, *, folder=None, dtype=None, config=None, arch=ARCH, builder=None, **options):
    """Build a program; *dims* None leaves all dims symbolic."""
    problem = make(kernel, dims or tuple(d.name for d in kernel.dims), dtype or kernel.dtypes[0], {})
    folder = folder or os.path.join(_folders(), f"{next(_count)}")
    os.makedirs(folder, exist_ok=True)
    build_ = (builder or pool.default()).build
    name = program if isinstance(program, Schedule) else schedule(program)
    built = build_(kernel, problem, name, config or {}, arch, tlhub_cpu.TARGET, str(folder), **options)
    return SimpleNamespace(built=built, folder=str(folder), problem=problem, kernel=kernel)


def read(made, name="kernel.so") -> bytes:
    with open(os.path.join(made.folder, name), "rb") as file:
        return file.read()


_count = itertools.count()


@functools.cache
def _folders() -> str:
    folder = tempfile.mkdtemp(prefix="tlhub-lab-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@functools.cache
def linked(program, kernel_name="add", dims=None, dtype=None):
    """Build and load a program once a process."""
    kernel = {"add": ADD, "bits": BITS, "moments": MOMENTS}[kernel_name]
    made = build(program, kernel, dims, dtype=dtype)
    data = read(made)
    return made, load_library(data, f"{program}-{kernel_name}-{dims}-{dtype}"), data


def compiled(program, kernel_name="add", dims=None, dtype=None, wanted=None) -> CompiledKernel:
    """Return a callable; *wanted* are the dims that it is bound to, by default those it was built for."""
    made, loaded, _ = linked(program, kernel_name, dims, dtype)
    problem = made.problem if wanted is None else make(made.kernel, wanted, made.problem.dtype, {})
    entry = SimpleNamespace(
        manifest=SimpleNamespace(build_digest="0" * 64, members={"kernel.so": {}, "program.tir": {}}),
        read=lambda name: read(made, name),
    )
    return CompiledKernel(
        made.kernel,
        problem,
        signature(made.kernel, problem),
        loaded.bind(problem),
        schedule=program,
        config={},
        arch=ARCH,
        origin="built",
        match="exact",
        entry=entry,
    )


__all__ = ["ADD", "ARCH", "BITS", "MOMENTS", "build", "compiled", "generalise", "linked", "read", "schedule"]
