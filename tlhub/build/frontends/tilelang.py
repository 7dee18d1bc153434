"""Toolchain tilelang: a prim_func, or several with the conditions under which each is taken, to CUDA C++.

TileLang brings a TVM of its own: no worker has both. It compiles nothing here, the back end of the target does.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tlhub.build.frontends import arguments, launches, present
from tlhub.build.program import ANY, Branch, Buffer, DeviceProgram, TileFunction, TileProgram
from tlhub.errors import BuildError
from tlhub.specs import Problem, Signature

_SOURCE = "program.cu"


def prepare() -> None:
    """Import TileLang, and with it torch. Raises BuildError if there is none."""
    present("tilelang")
    try:
        import tilelang
    except (ImportError, OSError) as error:
        raise BuildError(
            f"tilelang cannot be imported: {error}", hint='pip install --force-reinstall "tlhub-core[tilelang]"'
        ) from None
    tilelang.set_log_level("ERROR")


def identity() -> dict[str, str]:
    """Return the version of what makes the source, which comes with its own TVM and headers."""
    import tilelang

    return {"tilelang": tilelang.__version__}


def translate(
    program: Callable[[Problem, Mapping[str, Any], str], Any],
    problem: Problem,
    signature: Signature,
    config: Mapping[str, Any],
    arch: str,
    options: Mapping[str, str],
    folder: str,
) -> DeviceProgram:
    """Lower what *program* returns for *arch* and write ``program.cu`` to *folder*.

    *options* are fields of a tvm Target (``kind``, ``arch``). Raises BuildError.
    """
    functions, flags = _functions(program(problem, config, arch), problem.kernel)
    made = [_lower(f, f"{problem.kernel}_{i}", problem, signature, options) for i, f in enumerate(functions)]
    with open(os.path.join(folder, _SOURCE), "w", encoding="utf-8") as file:
        file.write("\n".join(source for source, _, _ in made))
    if len({buffers for _, _, buffers in made}) == 1:
        buffers, branches = made[0][2], tuple(branch for _, branch, _ in made)
    else:
        # what one function asks of strides is a condition of its branch, and no reason to refuse a call
        buffers = tuple(replace(b, strides=ANY) for b in made[0][2])
        branches = tuple(
            _with(branch, [c for b in own for c in arguments.stride_conditions(b)]) for _, branch, own in made
        )
    return DeviceProgram(
        code=_SOURCE,
        symbol="tlhub_program",
        buffers=buffers,
        source=_SOURCE,
        toolchain=identity(),
        branches=branches,
        flags=(*_headers(), *flags),
    )


def _functions(made: Any, kernel: str) -> tuple[tuple[TileFunction, ...], tuple[str, ...]]:
    """Return the functions of what a program returned, and its flags."""
    import tvm

    program = made if isinstance(made, TileProgram) else TileProgram((TileFunction(made),))
    wrong = [f for f in program.functions if not isinstance(f.function, tvm.tirx.PrimFunc)]
    if wrong or not program.functions:
        found = type(wrong[0].function).__name__ if wrong else "no function"
        raise BuildError(
            f"{kernel}: a program of toolchain 'tilelang' returns a prim_func, or a TileProgram of them; "
            f"this one returned {found}"
        )
    return program.functions, program.flags


def _lower(
    made: TileFunction, name: str, problem: Problem, signature: Signature, options: Mapping[str, str]
) -> tuple[str, Branch, tuple[Buffer, ...]]:
    """Return the source of a function, whose kernels are named after *name*, its branch, and its buffers."""
    import tilelang
    import tvm

    kernel = problem.kernel
    bound = arguments.bind(made.function, signature, kernel, made.values, _vector(options["arch"]))
    target = tvm.target.Target({key: options[key] for key in ("kind", "arch")})
    with target, tvm.transform.PassContext(opt_level=3, config=dict(made.passes)):
        lowered = tilelang.lower(made.function.with_attr("global_symbol", name), target=target)
    (host,) = lowered.host_mod.functions.values()
    devices = {str(f.attrs["global_symbol"]): f for f in lowered.device_mod.functions.values()}
    made_maps = host.attrs["tma_descriptor_args"] if "tma_descriptor_args" in host.attrs else {}
    maps = {var.name: launches.tensor_map(list(args), bound, kernel) for var, args in made_maps.items()}
    branch = Branch(launches.read(host, devices, bound, maps, kernel), when=made.when)
    needs = [*bound.conditions, *(c for m in maps.values() for c in launches.map_conditions(m))]
    return lowered.kernel_source, _with(branch, needs), bound.buffers


def _with(branch: Branch, conditions: Sequence[str]) -> Branch:
    """Return *branch*, taken only where all *conditions* hold too."""
    given = [f"({branch.when})"] if branch.when else []
    return replace(branch, when=" && ".join(dict.fromkeys([*given, *conditions])))


def _vector(arch: str) -> int:
    """Return the bytes of the widest load that TileLang makes for an arch (``sm_90a``)."""
    return 32 if int("".join(c for c in arch if c.isdigit())) >= 100 else 16


def _headers() -> tuple[str, ...]:
    """Return the flags that tell nvcc where the headers of the generated source are; their warnings are not ours."""
    import tilelang

    root = os.path.dirname(os.path.abspath(tilelang.__file__))
    folders = (os.path.join(root, "src"), os.path.join(root, "3rdparty", "cutlass", "include"))
    return (*(part for folder in folders for part in ("-isystem", folder)), "-diag-suppress", "1046,20012")
