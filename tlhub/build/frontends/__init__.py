"""Front ends: a program and a config to a DeviceProgram, one module a toolchain.

A front end has ``prepare()``, called once in the worker before anything else is imported, ``identity()``, the versions
of what compiles, and ``translate(program, problem, signature, config, arch, options, folder) -> DeviceProgram``, which
writes its object file and its readable source into the folder, then the working directory. They raise BuildError.
"""

from __future__ import annotations

import importlib.util

from tlhub.errors import BuildError, suggest

FRONTENDS = {toolchain: f"tlhub.build.frontends.{toolchain}" for toolchain in ("cuda", "tilelang", "tvm")}
"""Module of each toolchain."""

PACKAGES = {"tilelang": "tilelang", "tvm": "apache-tvm"}
"""The distribution that a toolchain is, whose module has the toolchain's name."""


def module(toolchain: str) -> str:
    """Return the import name of the front end of *toolchain*. Raises BuildError."""
    if toolchain in FRONTENDS:
        return FRONTENDS[toolchain]
    raise BuildError(
        f"no front end for toolchain {toolchain!r}; there is one for {', '.join(sorted(FRONTENDS))}",
        hint=suggest(toolchain, FRONTENDS, None),
    )


def present(toolchain: str) -> None:
    """Raise BuildError where there is no such toolchain, or its package is not installed. Imports none."""
    module(toolchain)
    if toolchain in PACKAGES and importlib.util.find_spec(toolchain) is None:
        raise BuildError(f"{PACKAGES[toolchain]} is not installed", hint=f'pip install "tlhub-core[{toolchain}]"')
