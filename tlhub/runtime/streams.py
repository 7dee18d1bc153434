"""Streams: the one that a call runs on is the one that the caller's library works on, or the one that was named.

tvm-ffi asks PyTorch for its current stream when it is handed a tensor. Of other libraries it knows nothing: theirs is
set around the call.
"""

from __future__ import annotations

import operator
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from tlhub.runtime.load import on_stream

_CPU = 1  # DLPack's number


_libraries: dict[type, str] = {}


def made_by(x: Any) -> str:
    """Return the name of the array library that *x* is of, ``torch`` for one of a subclass of its tensors too."""
    kind = type(x)
    if kind not in _libraries:
        _libraries[kind] = _library_of(kind)
    return _libraries[kind]


def _library_of(kind: type) -> str:
    for base in kind.__mro__:
        name = base.__module__.partition(".")[0]
        if name in ("numpy", "torch", "cupy"):
            return name if hasattr(kind, "__dlpack__") else "builtins"
        if name in ("jax", "jaxlib"):
            return "jax"
    return kind.__module__.partition(".")[0]


def handle(stream: Any) -> int | None:
    """Return the handle that *stream* is or, as an object of PyTorch, CuPy or ``__cuda_stream__``, has; else None."""
    for name in ("cuda_stream", "ptr"):
        if hasattr(stream, name):
            return int(getattr(stream, name))
    if hasattr(stream, "__cuda_stream__"):
        return int(stream.__cuda_stream__()[1])
    try:
        return None if isinstance(stream, bool) else operator.index(stream)
    except TypeError:
        return None


def of(x: Any) -> int | None:
    """Return the handle of the stream that the library of *x* works on now, None where it is not known or has none."""
    return None if _device(x) is None else _of(x)


def current(x: Any) -> AbstractContextManager[Any]:
    """Run what is called inside on the stream that the library of *x* works on."""
    device = _device(x)
    found = None if device is None else _of(x)
    return nullcontext() if device is None or found is None else on_stream(*device, found)


def entered(x: Any, stream: Any, found: int) -> AbstractContextManager[Any]:
    """Make *stream*, of handle *found*, the current one of *x*'s library, which takes memory for it there too.

    Nothing where *x* is on no GPU: a call with it is refused.
    """
    name, device = made_by(x), _device(x)
    context: AbstractContextManager[Any] = nullcontext()
    if device is None or _of(x) == found:
        return context
    if name == "torch":
        cuda = sys.modules["torch"].cuda
        context = cuda.stream(stream if isinstance(stream, cuda.Stream) else cuda.ExternalStream(found, x.device))
    elif name == "cupy":
        context = sys.modules["cupy"].cuda.ExternalStream(found, device[1])
    else:
        context = on_stream(*device, found)
    return context


def _of(x: Any) -> int | None:
    """Return what ``of`` does, of an array on a GPU."""
    name = made_by(x)
    if name == "torch":
        return int(sys.modules["torch"].cuda.current_stream(x.device).cuda_stream)
    if name == "cupy":
        return int(sys.modules["cupy"].cuda.get_current_stream(x.device.id).ptr)
    if name == "jax":  # the one on which JAX waits for what it is handed
        return int(next(iter(x.devices())).get_stream_for_external_ready_events())
    return None


def _device(x: Any) -> tuple[int, int] | None:
    """Return DLPack's number and the index of the device that *x* is on, None where it has no streams."""
    if not hasattr(x, "__dlpack_device__"):
        return None
    kind, index = x.__dlpack_device__()
    return None if kind == _CPU else (int(kind), int(index))
