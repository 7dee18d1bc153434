"""Mistakes: what a library refuses, as the error that names the argument and what to do about it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeGuard

from tlhub.errors import ArgumentError, DeviceError, PluginError, suggest
from tlhub.problem import default
from tlhub.runtime import arrays

if TYPE_CHECKING:
    from tlhub.runtime.kernel import CompiledKernel

_REFUSAL = re.compile(r"(?P<kernel>.+?): argument '(?P<argument>[^']*)': expected (?P<expected>.*), got (?P<got>.*)")
_PROGRAM = "tlhub_program"
"""What toolchain tvm names the program: it is in the message of every check that TVM put there."""
_COUNT = re.compile(r".+?: expected \d+ arguments \(.*\), got \d+")

_UNFIT = "; nothing was launched"
"""How a library ends what it says where the device does not take its code, and nothing of it ever ran."""


def of_device(called: CompiledKernel, error: RuntimeError) -> Exception:
    """Return the DeviceError that the library's own word on the driver stands for, any other error as it is."""
    line = str(error).strip().partition("\n")[0]
    return DeviceError(line, hint="tlhub doctor") if line.startswith(f"{called.kernel.name}: ") else error


def is_unfit(error: Exception) -> TypeGuard[DeviceError]:
    """Tell whether other code may serve in the place of a library's that failed so."""
    return isinstance(error, DeviceError) and error.message.endswith(_UNFIT)


def of_call(called: CompiledKernel, error: Exception, inputs: tuple[Any, ...], scalars: Mapping[str, Any]) -> Exception:
    """Return the ArgumentError that the library's own refusal stands for."""
    if isinstance(error, ArgumentError):
        return error
    line = str(error).strip().partition("\n")[0]
    match = _REFUSAL.fullmatch(line)
    if match:
        return _of_argument(called, match["argument"], match["expected"], match["got"], inputs)
    if _COUNT.fullmatch(line) or len(inputs) != len(called.signature.inputs):
        return of_count(called, inputs)
    if _PROGRAM in str(error):  # the shim let it pass: not the caller's fault
        return PluginError(
            f"{called.kernel.name}: the program of {called.schedule!r} refuses what the contract allows: {error}",
            hint=f"tlhub schedules {called.kernel.name}",
        )
    for scalar in called.signature.scalars:  # tvm-ffi has refused a larger integer, without a word of which
        value = scalars.get(scalar.name)
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            hint = f"{scalar.name}=float(...)" if scalar.kind == "float" else f"leave {scalar.name}= away"
            return arrays.refuse(called.kernel.name, scalar.name, "a number of 64 bits", "a larger integer", hint)
    told = line if line.startswith(f"{called.kernel.name}: ") else f"{called.kernel.name}: {line}"
    return ArgumentError(told, hint=f"tlhub kernels {called.kernel.name}")


def _of_argument(
    called: CompiledKernel, argument: str, expected: str, got: str, inputs: tuple[Any, ...]
) -> ArgumentError:
    """Return the refusal of an argument with what to do about it."""
    sign = called.signature
    place, tensor = next(((i, t) for i, t in enumerate((*sign.inputs, *sign.outputs)) if t.name == argument), (0, None))
    if tensor is None:
        kind = next((s.kind for s in sign.scalars if s.name == argument), None)
        hint = f"{argument}={kind}(...)" if kind else f"leave {argument}= away"
        return arrays.refuse(called.kernel.name, argument, expected, got, hint)
    if tensor.output:
        other = expected.startswith(("shape", "dtype", "an array o"))
        hint = arrays.NEW_OUTPUT if other else arrays.FRESH_OUTPUT
    elif expected.startswith("dtype"):
        hint = arrays.converted(inputs[place], tensor, got)
    elif expected.startswith("shape"):
        hint = _other_get(called)
    elif expected.startswith("an array of "):
        hint = arrays.ASARRAY
    elif expected.startswith("an array on"):
        hint = arrays.elsewhere(inputs[place], argument, expected)
    elif got == "others":  # a program's own refusal, of what an array holds say
        hint = f"tlhub kernels {called.kernel.name}"
    else:  # of other strides, or aligned
        hint = arrays.copied(inputs[place], argument)
    return arrays.refuse(called.kernel.name, tensor, expected, got, hint)


def _other_get(called: CompiledKernel) -> str:
    """Return the call that makes a kernel for arrays of other shapes."""
    usual = {o.name: default(o, called.problem.dtype) for o in called.kernel.options}
    options = [f"{name}={value!r}" for name, value in called.problem.options if value != usual[name]]
    words = [repr(called.kernel.name), *[t.name for t in called.signature.inputs], *options]
    return f"tlhub.get_for({', '.join(words)})"


def of_count(called: CompiledKernel, inputs: tuple[Any, ...]) -> ArgumentError:
    """Return the refusal of a number of inputs."""
    names = [t.name for t in called.signature.inputs]
    expected = f"{len(names)} inputs ({', '.join(names)})"
    missing = names[len(inputs)] if len(inputs) < len(names) else None
    return ArgumentError(
        f"{called.kernel.name}: expected {expected}, got {len(inputs)}",
        argument=missing,
        expected=expected,
        got=str(len(inputs)),
        hint=f"kernel({', '.join(names)})" if missing else "outputs are passed as out=",
    )


def of_scalar(called: CompiledKernel, name: str) -> ArgumentError:
    """Return the refusal of a scalar *name* that the kernel has not."""
    known = [s.name for s in called.signature.scalars]
    inputs, outputs = ([t.name for t in side] for side in (called.signature.inputs, called.signature.outputs))
    told = f"no scalar {name!r}; its scalars are {', '.join(known) or 'none'}"
    if name in inputs:
        told = f"{name!r} is an input, and was passed by name"
        hint = f"inputs go by position: kernel({', '.join(inputs)})"
    elif name in outputs:
        told = f"{name!r} is an output, and was passed by name"
        hint = f"outputs are passed as out=: kernel({', '.join(inputs)}, out={name})"
    elif name in called.problem.option:
        hint = f"{name} is an option of the lookup: tlhub.get({called.kernel.name!r}, ..., {name}=...)"
    else:
        hint = suggest(name, known, f"tlhub kernels {called.kernel.name}")
    return ArgumentError(f"{called.kernel.name}: {told}", argument=name, hint=hint)
