"""What NVML says of this machine's GPUs. Unlike the CUDA driver it needs no context, and a fork after it works."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

LIBRARY = "libnvidia-ml.so.1"

_MEMORY_CLOCK = 2
_TEXT = 96
"""Bytes that the longest text needs (NVML_DEVICE_NAME_V2_BUFFER_SIZE, NVML_DEVICE_UUID_V2_BUFFER_SIZE)."""


class Gpu(NamedTuple):
    """A GPU. ``lanes``: its CUDA cores; ``bandwidth``: of its memory, bytes a second; 0 or empty where not told."""

    model: str
    uuid: str
    capability: tuple[int, int]
    lanes: int
    bandwidth: float


class System(NamedTuple):
    """The GPUs that this process may use, in the order of the PCI bus, and the driver's version.

    ``cuda``: the newest major version of CUDA that the driver runs, 0 where it is not told. ``fault``: why there is
    nothing to say, or empty.
    """

    gpus: tuple[Gpu, ...] = ()
    driver: str = ""
    cuda: int = 0
    fault: str = ""


class _Failure(Exception):
    """A call failed."""


def query() -> System:
    """Ask NVML once, and leave nothing of it behind: no file is open, no thread runs."""
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError as error:
        return System(fault=f"no NVIDIA driver: {error}")
    try:
        _call(library, "nvmlInit_v2")
    except _Failure as error:
        return System(fault=f"NVML does not start: {error}")
    try:
        driver = _text(library, "nvmlSystemGetDriverVersion")
        cuda = _number(library, "nvmlSystemGetCudaDriverVersion_v2", default=0) // 1000
        count = _number(library, "nvmlDeviceGetCount_v2")
        found = [_gpu(library, index) for index in range(count)]
        return System(tuple(gpu for gpu in found if gpu), driver, cuda)
    except _Failure as error:
        return System(fault=f"NVML lists no GPU: {error}")
    finally:
        library.nvmlShutdown()


def _gpu(library: ctypes.CDLL, index: int) -> Gpu | None:
    """Return a GPU, or None for one that is lost or that this process may not use: CUDA does not count it."""
    handle = ctypes.c_void_p()
    major, minor = ctypes.c_int(), ctypes.c_int()
    try:
        _call(library, "nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle))
        _call(library, "nvmlDeviceGetCudaComputeCapability", handle, ctypes.byref(major), ctypes.byref(minor))
    except _Failure:
        return None
    bits = _number(library, "nvmlDeviceGetMemoryBusWidth", handle, default=0)
    clock = _number(library, "nvmlDeviceGetMaxClockInfo", handle, ctypes.c_int(_MEMORY_CLOCK), default=0)
    return Gpu(
        model=_text(library, "nvmlDeviceGetName", handle) or "NVIDIA GPU",
        uuid=_text(library, "nvmlDeviceGetUUID", handle),
        capability=(major.value, minor.value),
        lanes=_number(library, "nvmlDeviceGetNumGpuCores", handle, default=0),
        bandwidth=bits / 8 * clock * 1e6 * 2,  # both edges of the clock carry data
    )


def _text(library: ctypes.CDLL, function: str, *arguments: Any) -> str:
    """Return the text that *function* gives, or nothing where it fails."""
    text = ctypes.create_string_buffer(_TEXT)
    try:
        _call(library, function, *arguments, text, ctypes.c_uint(_TEXT))
    except _Failure:
        return ""
    return text.value.decode(errors="replace")


def _number(library: ctypes.CDLL, function: str, *arguments: Any, default: int | None = None) -> int:
    """Return the number that *function* gives, or *default*. Raises _Failure where there is none."""
    number = ctypes.c_uint()
    try:
        _call(library, function, *arguments, ctypes.byref(number))
    except _Failure:
        if default is None:
            raise
        return default
    return number.value


def _call(library: ctypes.CDLL, function: str, *arguments: Any) -> None:
    """Call *function*. Raises _Failure with what NVML says, or where the library is too old to have it."""
    try:
        code = getattr(library, function)(*arguments)
    except AttributeError:
        raise _Failure(f"{LIBRARY} has no {function}") from None
    if code:
        say = library.nvmlErrorString
        say.restype = ctypes.c_char_p
        raise _Failure(f"{function}: {say(code).decode(errors='replace')}")
