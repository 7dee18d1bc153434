"""Loading libraries: verified bytes, without a window between the hash and the load, through tvm-ffi.

This is the only module that imports tvm_ffi, and it does so when the first library is loaded.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple

from tlhub.errors import CacheError
from tlhub.runtime import threads
from tlhub.specs import LIBRARY, Problem

if TYPE_CHECKING:
    from tlhub.cache.entry import Entry

_MFD_EXEC = 0x10
_F_ADD_SEALS, _ALL_SEALS = 1033, 0xF  # seal, shrink, grow, write

_loaded: dict[str, Library] = {}
_descriptors: list[int] = []
"""Kept open: glibc knows a library by its path, and a reused descriptor would name another's."""

_pool: int | None = None
_lock = threading.Lock()


class Library(NamedTuple):
    """A loaded library: never unloaded, for functions and threads of it may outlive every handle."""

    module: Any

    def bind(self, problem: Problem) -> Any:
        """Return the function that serves exactly *problem*: other extents are refused by the library."""
        symbols: dict[str, int] = {}
        return self.module["tlhub_bind"](
            *(e if isinstance(e, int) else -1 - symbols.setdefault(e, len(symbols)) for _, e in problem.dims)
        )

    @property
    def scratch(self) -> Any:
        """The function that tells how many bytes of workspace a call needs, None where no call needs any."""
        return self.module["tlhub_workspace"] if self.module.implements_function("tlhub_workspace") else None


def load_entry(entry: Entry) -> tuple[Library, bool]:
    """Return the library of *entry*, and whether this process had loaded it already.

    Raises what reading the entry raises, and CacheError where the library cannot be loaded.
    """
    name = entry.manifest.build_digest
    known = _loaded.get(name)
    return (known, True) if known else (load_library(entry.read(LIBRARY), name), False)


def load_library(data: bytes, name: str) -> Library:
    """Load the shared library *data*, once a *name* (the build digest). Raises CacheError."""
    with _lock:
        if name not in _loaded:
            _loaded[name] = _wire(_load(data, name), name)
        return _loaded[name]


def hide_torch() -> None:
    """Keep tvm_ffi from importing torch, which takes a second.

    For a command-line process of tlhub's own: torch tensors are served there, but tvm-ffi then refuses
    ``torch.dtype``, which breaks other code that passes one.
    """
    if "torch" not in sys.modules and "tvm_ffi" not in sys.modules:
        sys.modules["torch"] = None  # type: ignore[assignment]


def tensor_from_capsule(capsule: Any) -> Any:
    """Return a tvm_ffi.Tensor that owns what the DLPack *capsule* holds."""
    import tvm_ffi

    return tvm_ffi.from_dlpack(capsule)


def on_stream(kind: int, index: int, handle: int) -> AbstractContextManager[Any]:
    """Run kernels that are called inside on the stream of that handle, of a device by DLPack's number and its index."""
    import tvm_ffi

    context: AbstractContextManager[Any] = tvm_ffi.use_raw_stream(tvm_ffi.device(kind, index), handle)
    return context


def _wire(module: Any, name: str) -> Library:
    """Check that the library is one of tlhub's, and give it the process's pool of threads."""
    global _pool
    for needed in ("main", "tlhub_bind"):
        if not module.implements_function(needed):
            raise CacheError(f"library {name!r} does not export __tvm_ffi_{needed}: tlhub did not build it")
    if module.implements_function("tlhub_pool"):
        if _pool is None:
            threads.adopt(module["tlhub_set_threads"])
            _pool = module["tlhub_pool"]()
        else:
            module["tlhub_use_pool"](_pool)
    return Library(module)


def _load(data: bytes, name: str) -> Any:
    import tvm_ffi

    load = tvm_ffi.get_global_func("ffi.Module.load_from_file.so")
    failures: list[str] = []
    if hasattr(os, "memfd_create"):
        try:
            return load(_sealed(data, name), "so")
        except (OSError, RuntimeError) as error:
            failures.append(f"from memory: {_first_line(error)}")
    try:
        return _load_copy(data, load)
    except (OSError, RuntimeError) as error:
        failures.append(_first_line(error))
    import tempfile

    folder = tempfile.gettempdir()
    raise CacheError(
        f"library {name!r} could not be loaded from a private copy in {folder!r}, which may be full, read-only or "
        f"mounted noexec; name another folder in the variable TMPDIR ({'; '.join(failures)})",
        hint="export TMPDIR=$HOME/tmp && mkdir -p $TMPDIR",
    )


def _sealed(data: bytes, name: str) -> str:
    """Return the path of a file in memory that holds *data* and that nobody can change any more."""
    import fcntl

    label, flags = f"tlhub-{name[:16]}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        fd = os.memfd_create(label, flags | _MFD_EXEC)
    except OSError:  # before Linux 6.3
        fd = os.memfd_create(label, flags)
    _descriptors.append(fd)
    _write(fd, data)
    fcntl.fcntl(fd, _F_ADD_SEALS, _ALL_SEALS)
    return f"/proc/self/fd/{fd}"


def _load_copy(data: bytes, load: Any) -> Any:
    """Load from a copy in a folder of this user's alone; it may be removed once it is mapped."""
    import tempfile

    with tempfile.TemporaryDirectory(prefix="tlhub-load-") as folder:
        path = os.path.join(folder, LIBRARY)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o700)
        try:
            _write(fd, data)
        finally:
            os.close(fd)
        return load(path, "so")


def _write(fd: int, data: bytes) -> None:
    view: Sequence[int] | memoryview = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]  # type: ignore[arg-type]


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


def _renew_after_fork() -> None:
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_after_fork)
