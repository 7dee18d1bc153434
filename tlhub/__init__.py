"""tlhub: a hub for tensor kernels.

    import tlhub

    gemm = tlhub.get("gemm", (1024, 1024, 1024), "float32")
    c = gemm(a, b)

Importing it costs next to nothing: what a name needs is imported when the name is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = ["explain", "freeze", "get", "get_for", "record", "set_num_threads"]

if TYPE_CHECKING:
    from tlhub.builds import freeze
    from tlhub.hub import explain, get, get_for
    from tlhub.recording import record
    from tlhub.runtime.threads import set_num_threads

_HOME = {
    "explain": "tlhub.hub",
    "freeze": "tlhub.builds",
    "get": "tlhub.hub",
    "get_for": "tlhub.hub",
    "record": "tlhub.recording",
    "set_num_threads": "tlhub.runtime.threads",
}


_MODULES = ("errors", "hooks", "specs", "testing")
"""The public modules: ``tlhub.errors`` is there whether or not something has imported it."""


def __getattr__(name: str) -> Any:
    if name not in _HOME and name not in _MODULES:
        raise AttributeError(f"module 'tlhub' has no attribute {name!r}")
    from importlib import import_module

    if name in _MODULES:
        return import_module(f"tlhub.{name}")
    value = globals()[name] = getattr(import_module(_HOME[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME, *_MODULES})
