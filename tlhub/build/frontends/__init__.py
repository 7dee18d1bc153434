"""Front ends: a program and a config to a DeviceProgram, one module a toolchain.

A front end has ``prepare()``, called once in the worker before anything else is imported, ``identity()``, the versions
of what compiles, and ``translate(program, problem, signature, config, arch, options, folder) -> DeviceProgram``, which
writes its object file and its readable source into the folder, then the working directory. They raise BuildError.
"""

from __future__ import annotations

from tlhub.errors import BuildError, suggest

FRONTENDS = {toolchain: f"tlhub.build.frontends.{toolchain}" for toolchain in ("cuda", "tilelang", "tvm")}
"""Module of each toolchain."""


def module(toolchain: str) -> str:
    """Return the import name of the front end of *toolchain*. Raises BuildError."""
    if toolchain in FRONTENDS:
        return FRONTENDS[toolchain]
    raise BuildError(
        f"no front end for toolchain {toolchain!r}; there is one for {', '.join(sorted(FRONTENDS))}",
        hint=suggest(toolchain, FRONTENDS, None),
    )
