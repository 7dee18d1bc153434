"""Arrays of every library: handing them to a kernel, and making results of the caller's kind.

Strides, offsets and alignment are the host shim's matter. Here is only what DLPack cannot say: NumPy's
read-only flag, dtypes of ml_dtypes, PyTorch's lazy negation and gradients, JAX's immutable arrays.

On a GPU PyTorch and CuPy hand over on their current stream, so nobody waits; JAX has its external stream wait.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from typing import Any

from tlhub.errors import ArgumentError
from tlhub.runtime import streams
from tlhub.runtime.load import tensor_from_capsule
from tlhub.specs import DTYPES, Tensor

Lazy = Callable[[Any], bool]

READABLE: dict[type, Lazy | None] = {}
"""Types whose arrays tvm-ffi reads as they are. PyTorch's have a function that tells of one that is not what
its memory says, and an attribute ``requires_grad``."""

WRITABLE: dict[type, Lazy | None] = {}
"""The same for outputs."""

Maker = Callable[[Any, tuple[int, ...], str], Any]

MAKERS: dict[type, Maker] = {}
"""Types of which new arrays can be made and written: how, from an array of the kind, a shape and a dtype."""

ASARRAY = "numpy.asarray(...) makes one of most things"
NEW_OUTPUT = "leave out= away: the result is a new array"
FRESH_OUTPUT = "out=numpy.empty_like(out), or leave out= away: the result is a new array"

_CPU = 1  # DLPack's number
_DTYPE_OFFSET = 20  # of DLTensor.dtype: after a pointer, two integers of 32 bits and one

_capsule_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def refuse(kernel: str, what: Tensor | str, expected: str, got: str, hint: str | None = None) -> ArgumentError:
    """Return the error in the words that the host shim uses, of an array or of another argument by name."""
    name, shown = (what.name, called(what)) if isinstance(what, Tensor) else (what, repr(what))
    return ArgumentError(
        f"{kernel}: argument {shown}: expected {expected}, got {got}",
        argument=name,
        expected=expected,
        got=got,
        hint=hint,
    )


def called(tensor: Tensor) -> str:
    """Return what errors call an array argument: an output's caller knows it as ``out``."""
    return f"{tensor.name!r} (out)" if tensor.output else repr(tensor.name)


def converted(x: Any, tensor: Tensor, got: str) -> str:
    """Return what to write for the array *x*, whose dtype is *got*, so that it is what *tensor* asks for: a conversion,
    where that keeps its values, or rounds them."""
    if tensor.output:
        return NEW_OUTPUT
    library, dtype = streams.made_by(x), tensor.dtype
    if not _keeps_values(got, dtype):
        return "tlhub kernels"
    if library == "torch":
        return f"{tensor.name}.to(torch.{dtype})"
    narrow = dtype == "bfloat16" or dtype.startswith("float8")  # NumPy code keeps their bits in unsigned integers
    kind = f"ml_dtypes.{dtype}" if narrow and library == "numpy" else repr(dtype)
    return f"{tensor.name}.{'view' if narrow and got == f'uint{DTYPES[dtype][1]}' else 'astype'}({kind})"


def _keeps_values(got: str, dtype: str) -> bool:
    """Tell whether numbers of dtype *got* are as good in *dtype*: no code changes its sign, nothing needs a scale."""
    if dtype.startswith(("int", "uint")):
        return got.startswith(dtype.rstrip("0123456789")) and got.lstrip("uint").isdigit()
    return not dtype.startswith("float8") or got == f"uint{DTYPES[dtype][1]}"


def copied(x: Any, name: str) -> str:
    """Return what to write for a copy of the array *x*, in C order and aligned."""
    return f"{name}.contiguous().clone()" if streams.made_by(x) == "torch" else f"{name}.copy()"


def elsewhere(x: Any, name: str, expected: str) -> str:
    """Return what to write for the array *x*, so that it is on the device that is *expected*."""
    library, cuda = streams.made_by(x), "on cuda" in expected
    if library == "torch":
        return f"{name}.cuda()" if cuda else f"{name}.cpu()"
    if library == "cupy" and not cuda:
        return f"cupy.asnumpy({name})"
    if library == "numpy" and cuda:
        return f"torch.from_numpy({name}).cuda()" if sys.modules.get("torch") else f"cupy.asarray({name})"
    return "tlhub targets"


def readable(x: Any, tensor: Tensor, kernel: str) -> Any:
    """Return *x* as tvm-ffi takes it, for reading. Raises ArgumentError."""
    return _handed(x, tensor, kernel, writing=False)


def writable(x: Any, tensor: Tensor, kernel: str) -> Any:
    """Return *x* as tvm-ffi takes it, for writing. Raises ArgumentError."""
    return _handed(x, tensor, kernel, writing=True)


def memory(x: Any) -> Any:
    """Return the array *x*, of which only the memory matters, as tvm-ffi takes it."""
    return tensor_from_capsule(x.__dlpack__(stream=-1)) if streams.made_by(x) == "cupy" else x


def direct(inputs: tuple[Any, ...]) -> bool:
    """Tell whether tvm-ffi reads all *inputs* as they are."""
    for x in inputs:
        if type(x) not in READABLE:
            return False
        lazy = READABLE[type(x)]
        if lazy is not None and (lazy(x) or x.requires_grad):
            return False
    return True


def empty_like(x: Any, shape: tuple[int, ...], dtype: str) -> tuple[Any, Callable[[Any], Any] | None]:
    """Return a new array of the kind of *x*, on its device, and how to finish it once it is written.

    NumPy for NumPy, PyTorch for PyTorch, what its array namespace gives for others. Where arrays are
    immutable (JAX) it is a NumPy array or the memory of a new one, and finishing makes it one of the kind.
    """
    library = streams.made_by(x)
    if library == "torch":
        return _torch_empty(x, shape, dtype), None
    if library == "cupy":
        return _cupy_empty(x, shape, dtype), None
    if library == "jax":
        return _jax_empty(x, shape, dtype)
    if library != "numpy" and hasattr(x, "__array_namespace__"):
        namespace = x.__array_namespace__()
        known = getattr(namespace, dtype, None)
        if known is not None:
            return namespace.empty(shape, dtype=known, device=x.device), None
    made = _numpy_empty(x, shape, dtype)
    back = getattr(sys.modules.get(library), "from_dlpack", None) if library != "numpy" else None
    return made, back


# -- one library each ------------------------------------------------------------------------------


def _handed(x: Any, tensor: Tensor, kernel: str, *, writing: bool) -> Any:
    library = streams.made_by(x)
    try:
        if library == "numpy":
            return _numpy(x, tensor, kernel, writing)
        if library == "torch":
            return _torch(x, tensor, kernel)
        if library == "cupy":
            return _cupy(x, tensor, kernel)
        if library == "jax" and writing:
            raise refuse(
                kernel, tensor, "an array that may be written", "a JAX array, which is immutable",
                "leave out= away: the result is a new JAX array",
            )  # fmt: skip
        if not hasattr(type(x), "__dlpack__"):
            raise refuse(
                kernel,
                tensor,
                f"an array of {tensor.dtype}",
                _what(x),
                NEW_OUTPUT if writing else ASARRAY,
            )
        stream = streams.of(x)
        handed = tensor_from_capsule(x if stream is None else x.__dlpack__(stream=stream))
    except ArgumentError:
        raise
    except Exception as error:  # whatever another library raises where it cannot export
        reason = str(error).strip().partition("\n")[0]
        raise refuse(kernel, tensor, "an array that DLPack can hand over", f"{_what(x)} ({reason})") from None
    if hasattr(x, "shape"):
        READABLE.setdefault(type(x), None)
    if library != "jax":
        WRITABLE.setdefault(type(x), None)
    return handed


def _numpy(x: Any, tensor: Tensor, kernel: str, writing: bool) -> Any:
    import numpy as np

    # looked up, not imported: np.ma takes an import lock, which a fork may leave locked in the child, and 10 ms
    if isinstance(x, getattr(sys.modules.get("numpy.ma"), "MaskedArray", ())):
        raise refuse(kernel, tensor, "an array without a mask", "a masked array", "pass array.filled(0)")
    if not x.dtype.isnative:
        raise refuse(
            kernel, tensor, f"an array of {tensor.dtype} in this machine's byte order", f"dtype {x.dtype.str!r}",
            "array.astype(array.dtype.newbyteorder('='))",
        )  # fmt: skip
    if writing and not x.flags.writeable:
        raise refuse(kernel, tensor, "an array that may be written", "a read-only array", FRESH_OUTPUT)
    item = x.dtype.itemsize
    if not item or any(s % item for s, n in zip(x.strides, x.shape, strict=True) if n > 1):
        raise refuse(
            kernel,
            tensor,
            f"strides of whole items of {item} bytes",
            f"strides of {x.strides} bytes",
            "numpy.ascontiguousarray(array)",
        )
    name = x.dtype.name
    view = x.view(np.ndarray)
    label: tuple[int, int] | None = None
    if x.dtype.type.__module__.partition(".")[0] == "ml_dtypes":
        if name not in DTYPES:
            raise refuse(kernel, tensor, f"dtype {tensor.dtype}", name, converted(x, tensor, name))
        label = DTYPES[name]
        view = view.view(f"u{item}")
    elif x.dtype.kind not in "biufc":
        raise refuse(kernel, tensor, f"dtype {tensor.dtype}", name, converted(x, tensor, name))
    if not view.flags.writeable:
        view = np.asarray(_Borrowed(view))
    if type(x) is np.ndarray:
        READABLE[np.ndarray] = WRITABLE[np.ndarray] = None
        MAKERS[np.ndarray] = _numpy_empty
    capsule = view.__dlpack__()
    if label is not None:
        _relabel(capsule, label)
    return tensor_from_capsule(capsule)


class _Borrowed:
    """The memory of a read-only array, as an array interface that does not say so. It is only read."""

    def __init__(self, array: Any) -> None:
        interface = dict(array.__array_interface__)
        interface["data"] = (interface["data"][0], False)
        interface["strides"] = array.strides
        self.__array_interface__ = interface
        self._keep = array


def _relabel(capsule: Any, dtype: tuple[int, int]) -> None:
    """Write the contract's dtype over that of the integer view that a fresh DLPack *capsule* holds."""
    at = _capsule_pointer(capsule, b"dltensor") + _DTYPE_OFFSET
    ctypes.c_uint8.from_address(at).value = dtype[0]


def _torch(x: Any, tensor: Tensor, kernel: str) -> Any:
    torch = sys.modules["torch"]
    if x.layout is not torch.strided or x.device.type == "meta":
        raise refuse(
            kernel, tensor, "a dense tensor", f"a tensor of layout {x.layout} on {x.device}", "tensor.to_dense()"
        )
    if x.is_neg() or x.is_conj():
        raise refuse(
            kernel, tensor, "a tensor without lazy negation or conjugation", "one with it",
            "tensor.resolve_neg().resolve_conj()",
        )  # fmt: skip
    if x.requires_grad and torch.is_grad_enabled():
        raise refuse(
            kernel, tensor, "a tensor that needs no gradient", "one that requires grad",
            "tensor.detach(), or call it under torch.no_grad()",
        )  # fmt: skip
    READABLE[type(x)] = WRITABLE[type(x)] = torch.Tensor.is_neg
    MAKERS[type(x)] = _torch_empty
    return tensor_from_capsule(x.detach())


def _cupy(x: Any, tensor: Tensor, kernel: str) -> Any:
    """Without a word on streams: the call runs on CuPy's current one."""
    if x.dtype.type.__module__.partition(".")[0] != "ml_dtypes":
        return tensor_from_capsule(x.__dlpack__(stream=-1))
    name = x.dtype.name
    if name not in DTYPES:
        raise refuse(kernel, tensor, f"dtype {tensor.dtype}", name, converted(x, tensor, name))
    capsule = x.view(f"u{x.dtype.itemsize}").__dlpack__(stream=-1)
    _relabel(capsule, DTYPES[name])
    return tensor_from_capsule(capsule)


def _what(x: Any) -> str:
    kind = type(x)
    return "None" if x is None else f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")


def _torch_empty(x: Any, shape: tuple[int, ...], dtype: str) -> Any:
    return x.new_empty(shape, dtype=getattr(sys.modules["torch"], dtype))


def _numpy_empty(x: Any, shape: tuple[int, ...], dtype: str) -> Any:
    import numpy as np

    return np.empty(shape, _numpy_dtype(dtype))


def _cupy_empty(x: Any, shape: tuple[int, ...], dtype: str) -> Any:
    with x.device:
        return sys.modules["cupy"].empty(shape, _numpy_dtype(dtype))


def _jax_empty(x: Any, shape: tuple[int, ...], dtype: str) -> tuple[Any, Callable[[Any], Any]]:
    import jax

    if x.__dlpack_device__()[0] == _CPU:
        return _numpy_empty(x, shape, dtype), lambda made: jax.device_put(made, next(iter(x.devices())))
    # Nobody else has seen this array, so its memory may be written. JAX does not know that a kernel still reads the
    # inputs, and would give their memory away: the result is waited for.
    fresh = jax.numpy.empty(shape, dtype, device=next(iter(x.devices())))
    made = tensor_from_capsule(fresh.__dlpack__(stream=streams.of(x)))
    return made, lambda written: jax.block_until_ready(jax.dlpack.from_dlpack(written))


def _numpy_dtype(name: str) -> Any:
    import numpy as np

    try:
        return np.dtype(name)
    except TypeError:
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, name))
