"""Front ends: a program and a config to a DeviceProgram, one module a toolchain.

A front end has ``prepare()``, called once in the worker before anything else is imported, ``identity()``, the versions
of what compiles, and ``translate(program, problem, signature, config, arch, options, folder) -> DeviceProgram``, which
writes its object file and its readable source into the folder, then the working directory. They raise BuildError.
"""

from __future__ import annotations

from tlhub.errors import BuildError, did_you_mean

FRONTENDS = {"tvm": "tlhub.build.frontends.tvm"}
"""Module of each toolchain."""


def module(toolchain: str) -> str:
    """Return the import name of the front end of *toolchain*. Raises BuildError."""
    if toolchain in FRONTENDS:
        return FRONTENDS[toolchain]
    near = did_you_mean(toolchain, FRONTENDS)
    raise BuildError(
        f"no front end for toolchain {toolchain!r}; there is one for {', '.join(sorted(FRONTENDS))}",
        hint=f"did you mean {near!r}?" if near else None,
    )
