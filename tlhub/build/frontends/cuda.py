"""Toolchain cuda: CUDA C++ with its launches. The back end of the target compiles it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from tlhub.build.program import ANY, Buffer, CudaProgram, DeviceProgram
from tlhub.errors import BuildError
from tlhub.specs import Problem, Signature

_SOURCE = "program.cu"


def prepare() -> None:
    """Nothing is imported: nvcc is the back end's."""


def identity() -> dict[str, str]:
    """Return nothing: nvcc is part of the back end's identity."""
    return {}


def translate(
    program: Callable[[Problem, Mapping[str, Any], str], Any],
    problem: Problem,
    signature: Signature,
    config: Mapping[str, Any],
    arch: str,
    options: Mapping[str, str],
    folder: str,
) -> DeviceProgram:
    """Write the source that *program* returns to ``program.cu`` in *folder*. Raises BuildError.

    Whether the launches can work is for the target's back end to say, as for every toolchain.
    """
    made = program(problem, config, arch)
    if not isinstance(made, CudaProgram):
        raise BuildError(
            f"{problem.kernel}: a program of toolchain 'cuda' returns a CudaProgram; this one returned "
            f"{type(made).__name__}"
        )
    tensors = (*signature.inputs, *signature.outputs)
    unknown = set(made.strides) - {t.name for t in tensors}
    if unknown:
        raise BuildError(
            f"{problem.kernel}: strides of {', '.join(map(repr, sorted(unknown)))} are given; the contract has "
            f"{', '.join(t.name for t in tensors)}"
        )
    with open(os.path.join(folder, _SOURCE), "w", encoding="utf-8") as file:
        file.write(made.source)
    return DeviceProgram(
        code=_SOURCE,
        symbol="tlhub_program",
        buffers=tuple(Buffer(t.name, t.dtype, len(t.dims), made.strides.get(t.name, ANY)) for t in tensors),
        source=_SOURCE,
        toolchain=identity(),
        branches=made.branches,
        values=made.values,
        flags=made.flags,
    )
