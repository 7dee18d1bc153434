"""Which stream a call runs on: the libraries' own, one that is named; without the libraries."""

from __future__ import annotations

import contextlib
import sys
from types import ModuleType, SimpleNamespace

import pytest

from tlhub.runtime import load, streams

_CUDA = 2


class _Array:
    """An array of a library, on a GPU unless ``index`` is None."""

    def __init__(self, index: int | None = 1) -> None:
        self.index, self.device = index, SimpleNamespace(id=index)

    def __dlpack__(self, **_):
        raise AssertionError("nothing is handed over")

    def __dlpack_device__(self):
        return (1, 0) if self.index is None else (_CUDA, self.index)

    def devices(self):
        return [SimpleNamespace(get_stream_for_external_ready_events=lambda: 0x1A)]


def of_library(name):
    """Return the type of array that a library of that name has, and a type derived from it."""
    kind = type("Array", (_Array,), {"__module__": f"{name}.core"})
    return kind, type("Derived", (kind,), {"__module__": "mine"})


@pytest.fixture
def libraries(monkeypatch):
    """PyTorch and CuPy as far as streams go; ``entered`` tells what was made current."""
    entered = []

    @contextlib.contextmanager
    def enter(what):
        entered.append(what)
        yield

    torch, cupy = ModuleType("torch"), ModuleType("cupy")
    torch.cuda = SimpleNamespace(
        current_stream=lambda device: SimpleNamespace(cuda_stream=0x70 + device.id),
        Stream=SimpleNamespace,
        ExternalStream=lambda handle, device: ("torch", handle, device.id),
        stream=enter,
    )
    cupy.cuda = SimpleNamespace(
        get_current_stream=lambda index: SimpleNamespace(ptr=0xC0 + index),
        ExternalStream=lambda handle, index: enter(("cupy", handle, index)),
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    return entered


@pytest.fixture
def told(monkeypatch):
    """What tvm-ffi is told of streams."""
    found = []

    @contextlib.contextmanager
    def on_stream(*arguments):
        found.append(arguments)
        yield

    monkeypatch.setattr(streams, "on_stream", on_stream)
    return found


@pytest.mark.parametrize(
    ("stream", "handle"),
    [
        (0, 0),
        (0x7F00, 0x7F00),
        (SimpleNamespace(cuda_stream=5), 5),
        (SimpleNamespace(ptr=6), 6),
        (SimpleNamespace(__cuda_stream__=lambda: (0, 7)), 7),
        (True, None),
        (1.0, None),
        ("main", None),
        (object(), None),
    ],
)
def test_handles(stream, handle):
    assert streams.handle(stream) == handle


@pytest.mark.parametrize(("name", "handle"), [("torch", 0x71), ("cupy", 0xC1), ("jaxlib", 0x1A), ("other", None)])
def test_the_stream_of_a_library(libraries, told, name, handle):
    for kind in of_library(name):
        assert streams.of(kind()) == handle
        told.clear()
        with streams.current(kind()):
            assert told == ([] if handle is None else [(_CUDA, 1, handle)])
        assert streams.of(kind(index=None)) is None
        with streams.current(kind(index=None)):
            assert len(told) == (handle is not None)


def test_a_named_stream_is_made_the_librarys_current_one(libraries, told):
    for name in ("torch", "cupy"):
        with streams.entered(of_library(name)[0](), 9, 9):
            assert libraries.pop() == (name, 9, 1)
    stream = SimpleNamespace(cuda_stream=9)
    with streams.entered(of_library("torch")[0](), stream, 9):
        assert libraries.pop() is stream
    for name, handle in (("torch", 0x71), ("cupy", 0xC1)):  # they are current already
        with streams.entered(of_library(name)[0](), handle, handle):
            assert not libraries
    assert not told
    with streams.entered(of_library("other")[0](), 9, 9):
        assert told == [(_CUDA, 1, 9)] and not libraries


@pytest.mark.parametrize("x", [[1.0], None, _Array(index=None)])
def test_what_is_on_no_gpu_has_no_stream(libraries, told, x):
    with streams.entered(x, 9, 9), streams.current(x):
        assert not libraries and not told


def test_the_stream_is_that_of_the_call_alone():
    tvm_ffi = pytest.importorskip("tvm_ffi")
    seen = lambda: tvm_ffi.core._env_get_current_stream(_CUDA, 3)  # noqa: E731
    before = seen()
    with contextlib.suppress(ZeroDivisionError), load.on_stream(_CUDA, 3, 0x55):
        assert seen() == 0x55
        raise ZeroDivisionError
    assert seen() == before
