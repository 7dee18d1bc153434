"""The host shim of one problem: static C that reads a contract, and the contract, generated.

The static files are the same for every kernel, so that a worker compiles them once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from tlhub.build.program import ANY, COMPACT, Buffer, DeviceProgram
from tlhub.errors import BuildError
from tlhub.problem import root_of
from tlhub.specs import DTYPES, Problem, Scalar, Signature, Tensor

CONTRACT = "contract.c"
"""Name of the generated file."""

EXPORTS = ("__tvm_ffi_main", "__tvm_ffi_tlhub_bind")
"""What every library exports."""

POOL_EXPORTS = ("__tvm_ffi_tlhub_pool", "__tvm_ffi_tlhub_use_pool", "__tvm_ffi_tlhub_set_threads")
"""What a CPU library exports besides."""

WORKSPACE_EXPORT = "__tvm_ffi_tlhub_workspace"
"""What a library exports besides that may need scratch memory: the same arguments, to the bytes of it."""

TVM_FFI = (
    "TVMFFIErrorMoveFromRaised",
    "TVMFFIErrorSetRaised",
    "TVMFFIErrorSetRaisedFromCStr",
    "TVMFFIErrorSetRaisedFromCStrParts",
    "TVMFFIEnvGetStream",
    "TVMFFIFunctionCreate",
    "TVMFFIObjectDecRef",
)
"""The functions of tvm-ffi that the shim, the pool, launches and TVM's host code call."""

_MAX_RANK, _MAX_TENSORS, _MAX_SCALARS, _MAX_DIMS = 8, 24, 16, 32  # as in host_shim.h


def static(*names: str) -> dict[str, str]:
    """Return the text of the static C files *names* by name."""
    folder = Path(__file__).parent
    return {name: (folder / name).read_text(encoding="utf-8") for name in names}


def contract(problem: Problem, signature: Signature, program: DeviceProgram, device_type: int) -> str:
    """Return the C source of the contract that the shim holds every call to.

    *device_type* is DLPack's number. Raises BuildError where the program does not fit the signature.
    """
    tensors = (*signature.inputs, *signature.outputs)
    _check_sizes(problem, signature)
    if len(tensors) != len(program.buffers):
        raise BuildError(
            f"{problem.kernel}: the program takes {len(program.buffers)} arrays, and the contract names "
            f"{len(tensors)}: {', '.join(t.name for t in tensors)}"
        )
    number = {name: i for i, (name, _) in enumerate(problem.dims)}
    symbols: dict[str, int] = {}
    dims = ",\n".join(
        f"  {{{string(name)}, {e if isinstance(e, int) else -1 - symbols.setdefault(e, len(symbols))}, {of}, {over}}}"
        for name, e in problem.dims
        for of, over in [_part(signature, name, number)]
    )
    rows = ",\n".join(
        _tensor(problem, t, b, number, t.dims[:1] == (signature.elide,))
        for t, b in zip(tensors, program.buffers, strict=True)
    )
    scalars = ",\n".join(_scalar(problem, s, number) for s in signature.scalars) or "  {0}"
    workspace = "tlhub_workspace" if needs_workspace(program) else "0"
    return f"""/* What the host shim holds every call of {_comment(problem.kernel)} to. Generated. */
#include "host_shim.h"

int {program.symbol}(void *, const TVMFFIAny *, int32_t, TVMFFIAny *);
int tlhub_workspace(const TVMFFIAny *, int64_t *);

static const tlhub_dim dims[] = {{
{dims or "  {0}"}
}};

static const tlhub_tensor tensors[] = {{
{rows or "  {0}"}
}};

static const tlhub_scalar scalars[] = {{
{scalars}
}};

const tlhub_contract_t tlhub_contract = {{
  .kernel = {string(problem.kernel)}, .device_type = {device_type}, .num_dims = {len(problem.dims)},
  .num_inputs = {len(signature.inputs)}, .num_outputs = {len(signature.outputs)}, .num_scalars = {
        len(signature.scalars)
    },
  .dims = dims, .tensors = tensors, .scalars = scalars, .program = {program.symbol}, .workspace = {workspace},
}};
"""


def _part(signature: Signature, dim: str, number: Mapping[str, int]) -> tuple[int, int]:
    """Return the number of the dim that *dim* follows from, -1 where it follows from none, and over what it is."""
    whole, over = signature.parts.get(dim, ("", 0))
    return number.get(whole, -1), over


def needs_workspace(program: DeviceProgram) -> bool:
    """Tell whether some call of *program* needs scratch memory: its library then defines ``tlhub_workspace``."""
    return any(branch.workspace != 0 for branch in program.branches)


def _check_sizes(problem: Problem, signature: Signature) -> None:
    tensors = (*signature.inputs, *signature.outputs)
    sizes = (
        ("dims", len(problem.dims), _MAX_DIMS),
        ("arrays", len(tensors), _MAX_TENSORS),
        ("scalars", len(signature.scalars), _MAX_SCALARS),
        *((f"dims in argument {t.name!r}", len(t.dims), _MAX_RANK) for t in tensors),
    )
    for what, count, most in sizes:
        if count > most:
            raise BuildError(f"{problem.kernel}: {count} {what}; the host shim takes at most {most}")


def _tensor(problem: Problem, tensor: Tensor, buffer: Buffer, number: Mapping[str, int], elide: bool) -> str:
    where = f"{problem.kernel}: the program's buffer {buffer.name!r} for argument {tensor.name!r}"
    if buffer.ndim != len(tensor.dims):
        raise BuildError(
            f"{where} has {buffer.ndim} dims; the contract gives it {len(tensor.dims)}: ({', '.join(tensor.dims)})"
        )
    code, bits = DTYPES[tensor.dtype]
    stored = (1, bits) if buffer.dtype == f"uint{bits}" else DTYPES.get(buffer.dtype)
    if stored not in ((code, bits), (1, bits)):
        raise BuildError(
            f"{where} has dtype {buffer.dtype!r}; the contract asks for {tensor.dtype!r}, "
            f"which a program may also declare as 'uint{bits}'"
        )
    if buffer.strides == ANY:
        strides = ["TLHUB_ANY"] * buffer.ndim
    elif buffer.strides == COMPACT:
        strides = ["TLHUB_COMPACT"] * buffer.ndim
    else:
        strides = ["TLHUB_ANY" if s is None else str(int(s)) for s in buffer.strides]
    return (
        f"  {{{string(tensor.name)}, {{{code}, {bits}, 1}}, {{{stored[0]}, {stored[1]}, 1}}, {buffer.ndim}, "
        f"{int(elide)}, {int(tensor.output)},\n"
        f"   {{{', '.join(str(number[d]) for d in tensor.dims) or '0'}}}, {{{', '.join(strides) or '0'}}}}}"
    )


def _scalar(problem: Problem, scalar: Scalar, number: Mapping[str, int]) -> str:
    root, value, integer = -1, 0.0, 0
    if isinstance(scalar.default, str):
        dim = root_of(scalar.default)
        if dim not in number:
            raise BuildError(
                f"{problem.kernel}: the default of scalar {scalar.name!r} is {scalar.default!r}; "
                "it may be a number or '1/sqrt(DIM)'"
            )
        root = number[dim]
    elif scalar.kind == "int":
        integer = int(scalar.default)
    else:
        value = float(scalar.default)
    kind = "TLHUB_INT" if scalar.kind == "int" else "TLHUB_FLOAT"
    return f"  {{{string(scalar.name)}, {kind}, {root}, {_double(value)}, {integer}}}"


def _double(value: float) -> str:
    if value != value:
        return '__builtin_nan("")'
    if value in (float("inf"), float("-inf")):
        return f"{'-' if value < 0 else ''}__builtin_inf()"
    return value.hex()


def string(text: str) -> str:
    """Return *text* as a C string: bytes that are not plain become octal escapes."""
    plain = (chr(b) if 32 <= b < 127 and b not in b'"\\?' else f"\\{b:03o}" for b in text.encode())
    return '"' + "".join(plain) + '"'


def _comment(text: str) -> str:
    return re.sub(r"[^\w.:-]", "_", text, flags=re.ASCII)
