"""Operands: the problem that a caller's arrays pose, read off their shapes, dtypes and device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tlhub.catalog import Catalog
from tlhub.errors import ArgumentError, DeviceError, describe
from tlhub.problem import dtype_name, make, signature, symbols
from tlhub.specs import DTYPES, Kernel, Tensor

_CUDA_HOST = 3
_MANAGED = {13: 2}
"""DLPack's numbers of memory that the CPU reads too, and of CUDA's managed memory, which its devices read."""

_ASARRAY = "numpy.asarray(...) makes an array of most things"


def read(kernel: Kernel, arrays: tuple[Any, ...], options: Mapping[str, Any]) -> tuple[dict[str, int], dict[str, str]]:
    """Return the extents of the kernel's dims and the dtypes of its inputs, as *arrays* have them.

    Raises ArgumentError where the arrays do not fit together.
    """
    dtype = _dtype_of(arrays[0], kernel, kernel.inputs[0].name) if arrays else kernel.dtypes[0]
    inputs = _inputs(kernel, dtype, options)
    names = [t.name for t in inputs]

    def call(more: Mapping[str, Any]) -> str:
        return f"tlhub.get_for({', '.join(filter(None, (repr(kernel.name), *names, _typed({**options, **more}))))})"

    if len(arrays) != len(inputs):
        count = "no arrays were" if not arrays else "1 array was" if len(arrays) == 1 else f"{len(arrays)} arrays were"
        more = "".join(f"; {name} with {_typed(when)}" for name, when in _others(kernel, names).items())
        raise ArgumentError(f"{kernel.name}: {count} given; its inputs are {', '.join(names)}{more}", hint=call({}))

    def form(when: Mapping[str, Any]) -> str | None:
        return call(when) if _fit(kernel, dtype, arrays, {**options, **when}) else None

    extents = _bound(kernel, inputs, arrays, form)
    own = {a.name for a in kernel.inputs if a.dtype == "dtype"}
    pairs = zip(inputs, arrays, strict=True)
    return extents, {t.name: _dtype_of(a, kernel, t.name) for t, a in pairs if t.name in own}


def _inputs(kernel: Kernel, dtype: str, options: Mapping[str, Any]) -> Sequence[Tensor]:
    """Return the inputs with these options, of dims that are all symbols."""
    return signature(kernel, make(kernel, symbols(kernel, dtype, options), dtype, options)).inputs


def _fit(kernel: Kernel, dtype: str, arrays: tuple[Any, ...], options: Mapping[str, Any]) -> bool:
    """Tell whether *arrays* have the shapes of the inputs with these options."""
    try:
        inputs = _inputs(kernel, dtype, options)
        if len(inputs) != len(arrays):
            return False
        make(kernel, _bound(kernel, inputs, arrays, lambda when: None), dtype, options)
    except ArgumentError:
        return False
    return True


def _bound(
    kernel: Kernel, inputs: Sequence[Tensor], arrays: tuple[Any, ...], form: Callable[[Mapping[str, Any]], str | None]
) -> dict[str, int]:
    """Return the extents of the dims of *inputs*. *form(when)*: the call to type for inputs of other options, or None
    where the arrays are none of those."""
    elide = next((d.name for d in kernel.dims if d.elide), None)
    extents: dict[str, int] = {}
    for tensor, array in zip(inputs, arrays, strict=True):
        _bind(kernel, tensor, array, elide, extents, form)
    return extents


def _typed(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in values.items())


def _others(kernel: Kernel, names: Sequence[str]) -> dict[str, Mapping[str, Any]]:
    """Return the inputs that are not among *names*, with the options that each of their forms asks for."""
    found: dict[str, Mapping[str, Any]] = {}
    for arg in kernel.inputs:
        if arg.name not in names:
            kept = found.get(arg.name, arg.when)
            found[arg.name] = {name: value for name, value in kept.items() if arg.when.get(name) == value}
    return found


def _bind(
    kernel: Kernel,
    tensor: Tensor,
    array: Any,
    elide: str | None,
    extents: dict[str, int],
    form: Callable[[Mapping[str, Any]], str | None],
) -> None:
    """Learn the extents of *tensor*'s dims from *array*. *form*: as of ``_bound``."""
    try:
        given = shape = tuple(array.shape)
    except (AttributeError, TypeError):
        raise ArgumentError(
            f"{kernel.name}: argument {tensor.name!r} is {type(array).__name__}, not an array",
            argument=tensor.name,
            hint=_ASARRAY,
        ) from None
    if len(shape) == len(tensor.dims) - 1 and tensor.dims[0] == elide:
        shape = (1, *shape)
    wanted = "(" + ", ".join(tensor.dims) + ")"
    if len(shape) != len(tensor.dims):
        forms = [a for a in kernel.inputs if a.name == tensor.name]
        read = next(f" with {_typed(a.when)}" if a.when else "" for a in forms if a.dims == tensor.dims)
        other = next(filter(None, (form(a.when) for a in forms if len(a.dims) == len(shape))), None)
        raise ArgumentError(
            f"{kernel.name}: argument {tensor.name!r}{read}: expected dims {wanted}, got shape {given}",
            argument=tensor.name,
            expected=f"dims {wanted}",
            got=str(given),
            hint=other or f"tlhub kernels {kernel.name}",
        )
    try:
        shape = tuple(map(int, shape))
    except (TypeError, ValueError):
        raise ArgumentError(
            f"{kernel.name}: argument {tensor.name!r}: expected a shape of integers, got {given}",
            argument=tensor.name,
            expected="a shape of integers",
            got=str(given),
            hint=_ASARRAY,
        ) from None
    for dim, extent in zip(tensor.dims, shape, strict=True):
        if extents.setdefault(dim, extent) != extent:
            raise ArgumentError(
                f"{kernel.name}: argument {tensor.name!r}: expected {dim}={extents[dim]}, got shape {given}",
                argument=tensor.name,
                expected=f"{dim}={extents[dim]}",
                got=str(given),
                hint=f"its dims are {wanted}: tlhub kernels {kernel.name}",
            )


def _dtype_of(array: Any, kernel: Kernel, name: str) -> str:
    """Return the dtype of *array*; refuse one that no input of *kernel* has, and say how to convert it."""
    try:
        dtype = dtype_name(array.dtype)
    except AttributeError:
        raise ArgumentError(
            f"{kernel.name}: argument {name!r} is {type(array).__name__}, not an array", argument=name, hint=_ASARRAY
        ) from None
    if dtype in kernel.dtypes:
        return dtype
    allowed = ", ".join(kernel.dtypes)
    usual = "float32" if "float32" in kernel.dtypes else kernel.dtypes[0]
    # NumPy code keeps the bits of formats that it lacks in unsigned integers of their width
    bits = {f"uint{DTYPES[d][1]}": d for d in reversed(kernel.dtypes) if d == "bfloat16" or d.startswith("float8")}
    if dtype in bits:
        hint = f"{name}.view(ml_dtypes.{bits[dtype]})"
    elif usual.startswith(("float8", "int")):  # a cast would need a scale
        hint = f"tlhub kernels {kernel.name}"
    elif type(array).__module__.partition(".")[0] == "torch":
        hint = f"{name}.to(torch.{usual})"
    else:
        hint = f"{name}.astype({usual!r})"
    raise ArgumentError(
        f"{kernel.name}: argument {name!r}: expected a dtype of {allowed}, got {dtype}",
        argument=name,
        expected=f"a dtype of {allowed}",
        got=dtype,
        hint=hint,
    )


def device_of(catalog: Catalog, array: Any) -> str:
    """Return the device that *array* is on, ``cpu:0``. Raises DeviceError where no target serves it, ArgumentError."""
    try:
        ask = array.__dlpack_device__
    except AttributeError:
        return "cpu"
    try:
        kind, index = map(int, ask())
    except Exception as error:
        raise ArgumentError(
            f"the device of the {type(array).__name__} is not known: its __dlpack_device__ raised {describe(error)}",
            expected="an array that tells its device",
            hint=_ASARRAY,
        ) from error
    if kind == _CUDA_HOST:
        return "cpu"
    for target in catalog.targets.values():
        if target.device_type == _MANAGED.get(kind, kind):
            return f"{target.name}:{index}"
    raise DeviceError(f"no installed plugin serves devices of DLPack type {kind}", hint="tlhub targets")
