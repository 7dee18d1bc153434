"""The host function of a kernel as C: arguments to launches, by the first branch whose condition holds. Pure.

Names of its own start with an underscore, or with ``tlhub``: a dim and a scalar may have any other.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from math import prod

from tlhub.build.program import Branch, DeviceProgram, Expression, Launch, Parameter, TensorMap
from tlhub.build.shim import needs_workspace, string
from tlhub.specs import Problem, Signature
from tlhub_cuda.launches import CTYPES, MAP_TYPES, PROMOTIONS, SWIZZLES

PROGRAM = "program.c"
"""Name of the generated file."""


def source(program: DeviceProgram, problem: Problem, signature: Signature, image: str, digest: str) -> str:
    """Return ``program.c``, which includes the device code in the file *image*, of digest *digest*.

    It defines ``program.symbol`` and, if some call needs scratch memory, ``tlhub_workspace``.
    """
    kernels = _kernels(program.branches)
    rows = "\n".join(f'  {{"{name}", {shared}, {cluster}, 0}},' for name, (shared, cluster) in kernels.items())
    names = _Names(problem, signature, program.values)
    workspace = f"\n{_workspace(program.branches, names)}" if needs_workspace(program) else ""
    return f"""/* The launches of a call. Generated. The device code is {digest}. */
#include "cuda_launch.h"

__asm__(
    ".pushsection .rodata\\n.balign 64\\n.globl tlhub_image\\n.hidden tlhub_image\\n"
    "tlhub_image:\\n.incbin \\"{image}\\"\\n.byte 0\\n.popsection\\n");
extern const char tlhub_image[] __attribute__((visibility("hidden")));

static tlhub_kernel tlhub_kernels[] = {{
{rows}
}};

const tlhub_code_t tlhub_code = {{{string(problem.kernel)}, tlhub_image, {len(kernels)}, tlhub_kernels}};

{_refusal(names)}{workspace}
{_program(program, names, list(kernels))}"""


class _Names:
    """What expressions may name, and the C that declares it from the arguments of a call."""

    def __init__(self, problem: Problem, signature: Signature, values: Mapping[str, Expression]) -> None:
        self.values = values
        tensors = (*signature.inputs, *signature.outputs)
        number = len(tensors)
        self.tensors = {t.name: f"const DLTensor *const tensor_{t.name} = {_tensor(i)};" for i, t in enumerate(tensors)}
        self.dims = {}
        # two dims of one symbol have one extent: either tells the other
        places = {e: (i, axis) for i, t in enumerate(tensors) for axis, e in enumerate(t.extents)}
        for name, extent in problem.dims:
            if isinstance(extent, int):
                self.dims[name] = f"const int64_t {name} = {extent};"
            elif extent in places:
                i, axis = places[extent]
                self.dims[name] = f"const int64_t {name} = ({_tensor(i)})->shape[{axis}];"
        self.scalars = {}
        for i, scalar in enumerate(signature.scalars, number):
            ctype, field = ("int64_t", "v_int64") if scalar.kind == "int" else ("double", "v_float64")
            self.scalars[scalar.name] = f"const {ctype} {scalar.name} = _args[{i}].{field};"
        self.workspace = f"void *const WORKSPACE = _args[{number + len(signature.scalars)}].v_ptr;"

    def declare(self, expressions: Iterable[Expression]) -> str:
        """Return the declarations that *expressions* need."""
        words = _words(*expressions)
        for name, value in reversed([*self.values.items()]):  # a value may name those before it
            words |= _words(value) if name in words else set()
        lines = [line for known in (self.tensors, self.dims, self.scalars) for n, line in known.items() if n in words]
        if "WORKSPACE" in words:
            lines.append(self.workspace)
        if "SMS" in words:
            lines += ["int64_t SMS;", f"if (tlhub_multiprocessors({_DEVICE}, &SMS)) return -1;"]
        lines += [f"const int64_t {name} = {value};" for name, value in self.values.items() if name in words]
        return "".join(f"  {line}\n" for line in lines)


def _words(*expressions: Expression) -> set[str]:
    return set(re.findall(r"[A-Za-z_]\w*", " ".join(map(str, expressions))))


def _tensor(i: int) -> str:
    return f"(const DLTensor *)_args[{i}].v_ptr"


_DEVICE = f"({_tensor(0)})->device.device_id"


def _refusal(names: _Names) -> str:
    """Return the function that says of a call that no branch serves it."""
    dims, tensors = (", ".join(map(string, known)) or "0" for known in (names.dims, names.tensors))
    return f"""static int tlhub_refuse_call(const TVMFFIAny *_args) {{
  static const char *const _dims[] = {{{dims}}}, *const _tensors[] = {{{tensors}}};
{names.declare(names.dims)}  const int64_t _extents[] = {{{_list(names.dims) or "0"}}};
  return tlhub_refuse(_dims, _extents, {len(names.dims)}, _tensors, _args, {len(names.tensors)});
}}
"""


def _workspace(branches: Iterable[Branch], names: _Names) -> str:
    """Return the function that answers the bytes of scratch memory that a call needs."""
    used = names.declare(e for branch in branches for e in (branch.when, branch.workspace))
    cases = "".join(f"  if ({b.when or 1}) {{\n    *_bytes = {b.workspace};\n    return 0;\n  }}\n" for b in branches)
    return f"""int tlhub_workspace(const TVMFFIAny *_args, int64_t *_bytes) {{
{used}{cases}  return tlhub_refuse_call(_args);
}}
"""


def _program(program: DeviceProgram, names: _Names, kernels: list[str]) -> str:
    cases = "".join(_case(branch, kernels) for branch in program.branches)
    return f"""int {program.symbol}(void *_self, const TVMFFIAny *_args, int32_t _count, TVMFFIAny *_result) {{
{names.declare(_expressions(program.branches))}  tlhub_call _call;
  (void)_self, (void)_count, (void)_result;
{cases}  return tlhub_refuse_call(_args);
}}
"""


def _case(branch: Branch, kernels: list[str]) -> str:
    """Return the lines of a branch: all is computed and checked before anything is launched."""
    lines: list[str] = []
    steps: list[str] = []
    for i, launch in enumerate(branch.launches):
        number = kernels.index(launch.kernel)
        lines += [f"/* {launch.kernel} */", *_launch(launch, f"{i}", number)]
        maps = [k for k, parameter in enumerate(launch.parameters) if isinstance(parameter, TensorMap)]
        steps += [
            f"tlhub_encode(&_map_{i}_{k}, &_tile_{i}_{k}, _at_{i}_{k}, _dims_{i}_{k}, _strides_{i}_{k})" for k in maps
        ]
    count = range(len(branch.launches))
    steps += [f"tlhub_start(&_call, &_launch_{i}, _grid_{i}, _parameters_{i})" for i in count]
    fit = " || ".join(f"tlhub_check(&_launch_{i}, _grid_{i})" for i in count)
    lines += [
        f"if ({fit} || tlhub_begin(&_call, {_DEVICE})) return -1;",
        "return tlhub_end(&_call, " + "\n        || ".join(steps) + ");",
    ]
    return f"  if ({branch.when or 1}) {{\n" + "".join(f"    {line}\n" for line in lines) + "  }\n"


def _launch(launch: Launch, i: str, number: int) -> list[str]:
    lines: list[str] = []
    addresses: list[str] = []
    for k, parameter in enumerate(launch.parameters):
        if isinstance(parameter, TensorMap):
            lines += _map(parameter, f"{i}_{k}", f"{number}, {k}")
            addresses.append(f"&_map_{i}_{k}")
        else:
            lines += _value(parameter, f"{i}_{k}", f"{number}, {k}")
            addresses.append(f"(void *)&_value_{i}_{k}")
    block, cluster = (f"{{{_list(sizes)}}}" for sizes in (launch.block, launch.cluster))
    flags = f"{int(launch.cooperative)}, {int(launch.programmatic)}"
    return [
        *lines,
        f"void *_parameters_{i}[] = {{{_list(addresses) or '0'}}};",
        f"static const tlhub_launch _launch_{i} = {{{number}, {block}, {cluster}, {launch.shared}, {flags}}};",
        f"const int64_t _grid_{i}[] = {{{_list(launch.grid)}}};",
    ]


def _map(tensor_map: TensorMap, i: str, where: str) -> list[str]:
    swizzle, promotion = SWIZZLES[tensor_map.swizzle], PROMOTIONS[tensor_map.promotion]
    tile = f"{where}, {MAP_TYPES[tensor_map.dtype][0]}, {len(tensor_map.box)}, {swizzle}, {promotion}"
    return [
        f"tlhub_map _map_{i};",
        f"static const tlhub_tile _tile_{i} = {{{tile}, {{{_list(tensor_map.box)}}}}};",
        f"const void *_at_{i} = (const void *)({tensor_map.address});",
        f"const uint64_t _dims_{i}[] = {{{_list(tensor_map.dims)}}};",
        f"const uint64_t _strides_{i}[] = {{{_list(tensor_map.strides) or '0'}}};",
    ]


def _value(parameter: Parameter, i: str, where: str) -> list[str]:
    """Return the lines that make ``_value_I``. What does not fit an integer type is refused, not cut off."""
    ctype, value = parameter.ctype, parameter.value
    if ctype in ("float", "double") or CTYPES.get(ctype, 8) == 8:
        return [f"{ctype} _value_{i} = ({ctype})({value});"]
    return [
        f"const int64_t _wide_{i} = (int64_t)({value});",
        f"{ctype} _value_{i} = ({ctype})_wide_{i};",
        f"if (_value_{i} != _wide_{i}) return tlhub_too_large({where}, _wide_{i});",
    ]


def _kernels(branches: Iterable[Branch]) -> dict[str, tuple[int, int]]:
    """Return the most dynamic shared memory in bytes and the largest cluster in blocks that each kernel gets."""
    found: dict[str, tuple[int, int]] = {}
    for branch in branches:
        for launch in branch.launches:
            shared, cluster = found.get(launch.kernel, (0, 1))
            found[launch.kernel] = (max(shared, launch.shared), max(cluster, prod(launch.cluster)))
    return found


def _expressions(branches: Iterable[Branch]) -> Iterator[Expression]:
    """Yield every expression but those of the scratch memory's size."""
    for branch in branches:
        yield branch.when
        for launch in branch.launches:
            yield from launch.grid
            for parameter in launch.parameters:
                if isinstance(parameter, TensorMap):
                    yield from (parameter.address, *parameter.dims, *parameter.strides)
                else:
                    yield parameter.value


def _list(expressions: Iterable[Expression]) -> str:
    return ", ".join(f"{e}" for e in expressions)
