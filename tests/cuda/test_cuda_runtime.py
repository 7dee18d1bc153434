"""CompiledKernel on a GPU, with the fake driver and arrays of a CuPy of the tests' own."""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from types import ModuleType, SimpleNamespace

import cuda_lab
import numpy as np
import pytest
from cuda_array import Array

from tlhub.errors import DeviceError

KIB = 1 << 10


@functools.cache
def built(name):
    contract = {"axpy": cuda_lab.AXPY, "scale": cuda_lab.SCALE, "sums": cuda_lab.SUM}[name]
    return cuda_lab.build(f"cuda_programs:{name}", contract)


# -- in the process with the driver ----------------------------------------------------------------


def fake_cupy():
    """Install the module ``cupy`` and return the type of its arrays."""
    if "cupy" in sys.modules:
        return sys.modules["cupy"].ndarray
    state = SimpleNamespace(stream=0, device=0, made=[])

    @contextlib.contextmanager
    def using(field, value):
        before = getattr(state, field)
        setattr(state, field, value)
        yield
        setattr(state, field, before)

    class ndarray:
        def __init__(self, shape, dtype="float32", address=1 << 20, device=0):
            self.shape, self.dtype, self.address, self.index = tuple(shape), np.dtype(dtype), address, device

        @property
        def device(self):
            entered = using("device", self.index)
            entered.id = self.index
            return entered

        def __dlpack_device__(self):
            return 2, self.index

        def __dlpack__(self, stream=None):
            assert stream == -1, "another stream would wait for CuPy's"
            return Array(self.shape, self.address, self.dtype.name, device=self.index).__dlpack__()

    ndarray.__module__ = "cupy"

    def empty(shape, dtype):
        array = ndarray(shape, dtype, (1 << 42) + (len(state.made) << 30), state.device)
        state.made.append((array.shape, array.dtype.name, state.device, state.stream))
        return array

    module = ModuleType("cupy")
    module.ndarray, module.empty, module.state = ndarray, empty, state
    module.cuda = SimpleNamespace(
        get_current_stream=lambda index: SimpleNamespace(ptr=state.stream),
        ExternalStream=lambda handle, index: using("stream", handle),
    )
    sys.modules["cupy"] = module
    return ndarray


def kernel(name, library, arch=cuda_lab.ARCH):
    """Return the CompiledKernel of a library; every dim is symbolic."""
    from tlhub.problem import make, signature
    from tlhub.runtime import CompiledKernel, Library

    contract = {"axpy": cuda_lab.AXPY, "scale": cuda_lab.SCALE, "sums": cuda_lab.SUM}[name]
    problem = make(contract, tuple(d.name for d in contract.dims), "float32", {})
    loaded = Library(cuda_lab.load(library))
    return CompiledKernel(
        contract,
        problem,
        signature(contract, problem),
        loaded.bind(problem),
        scratch=loaded.scratch,
        schedule="lab",
        config={},
        arch=arch,
        origin="built",
        match="exact",
        entry=None,
    )


def run(name, library, arrays, *, current=0, what="__call__", **how):
    """Call on CuPy arrays of those fields; return the driver's calls, what was made, and the error's class and text."""
    ndarray = fake_cupy()
    state = sys.modules["cupy"].state
    state.stream = current
    state.made.clear()
    made = [a if a is None or not isinstance(a, dict) else ndarray(**a) for a in arrays]
    how = {k: ndarray(**v) if isinstance(v, dict) else v for k, v in how.items()}
    error = result = None
    try:
        result = getattr(kernel(name, library), what)(*made, **how)
    except Exception as raised:
        error = type(raised).__name__, str(raised)
    try:
        calls = cuda_lab.take()
    except OSError:  # no driver
        calls = []
    shown = result if isinstance(result, int) else getattr(result, "shape", None)
    return SimpleNamespace(said=cuda_lab.Said(calls, None), made=list(state.made), error=error, result=shown)


def jax_stream(library):
    """Return the error of a call on JAX arrays with a stream."""
    array = type("ArrayImpl", (Array,), {"__module__": "jaxlib._jax"})
    try:
        kernel("axpy", library)(array((9,)), array((9,)), stream=5)
    except Exception as raised:
        return type(raised).__name__, str(raised)


def watched(library, columns, *, out=True):
    """Sum rows, for each number of *columns* once, on arrays of no known library; return what happened in each call.

    ``main`` and ``workspace``: a call of the library; ``finished``: the output; ``freed``: the scratch memory.
    """
    from tlhub.runtime import arrays

    called, happened = kernel("sums", library), []

    def noted(what, function):
        return lambda *arguments: (happened[-1].append(what), function(*arguments))[1]

    def empty_like(x, shape, dtype):
        made = Array(shape, 1 << 36 if dtype == "uint8" else 1 << 40, dtype)
        if dtype == "uint8":
            weakref.finalize(made, lambda: happened[-1].append("freed"))
        return made, noted("finished", lambda x: x)

    called.function, called._scratch = noted("main", called.function), noted("workspace", called._scratch)
    before, arrays.empty_like = arrays.empty_like, empty_like
    try:
        for n in columns:
            happened.append([])
            called(Array((100, n), 1 << 30), out=Array((100,), 1 << 40) if out else None)
    finally:
        arrays.empty_like = before
        cuda_lab.take()
    return happened


def vectors(n=1000, **fields):
    return [{"shape": (n,), "address": (i + 1) << 20, **fields} for i in range(2)]


# -- calls -----------------------------------------------------------------------------------------


def test_an_output_is_made_on_the_device_and_the_stream_of_the_inputs(driver):
    done = driver.do(run, "axpy", built("axpy").linked, vectors(device=1), current=0x33)
    assert done.error is None and done.result == (1000,)
    assert done.made == [((1000,), "float32", 1, 0x33)]
    assert (done.said.launch["stream"], done.said.launch["current"]) == (0x33, 1)


def test_a_named_stream_is_the_calls_and_the_outputs(driver):
    done = driver.do(run, "axpy", built("axpy").linked, vectors(), current=0x33, stream=0x44)
    assert done.error is None and done.made == [((1000,), "float32", 0, 0x44)]
    assert done.said.launch["stream"] == 0x44
    stream = SimpleNamespace(ptr=0x55)
    out = {"shape": (1000,), "address": 1 << 30}
    done = driver.do(run, "axpy", built("axpy").linked, vectors(), stream=stream, out=out, alpha=3.0)
    assert done.error is None and not done.made and done.said.launch["stream"] == 0x55
    assert cuda_lab.number(done.said.launch["parameters"][3], "f") == 3.0
    after = driver.do(run, "axpy", built("axpy").linked, vectors())
    assert after.said.launch["stream"] == 0


@pytest.mark.parametrize("stream", [1.5, "main", True])
def test_what_is_no_stream(driver, stream):
    kind, text = driver.do(run, "axpy", built("axpy").linked, vectors(), stream=stream).error
    assert kind == "ArgumentError" and "axpy: argument 'stream': expected a stream of PyTorch or CuPy, or its" in text


def test_jax_takes_no_stream(driver):
    """It waits for one of its own: what ran on another would not be waited for."""
    kind, text = driver.do(jax_stream, built("axpy").linked)
    assert kind == "ArgumentError" and "axpy: argument 'stream': expected None, for JAX waits for a stream" in text
    assert "hint: leave stream= away" in text


def test_scratch_memory_is_kept_until_the_output_is_finished(driver):
    (done,) = driver.do(watched, built("sums").linked, [500], out=False)
    assert done == ["workspace", "main", "finished", "freed"]


def test_a_call_after_one_that_needed_scratch_memory_asks_for_it_first(driver):
    called = driver.do(watched, built("sums").linked, [500, 500, 500, 20, 20])
    asked = ["workspace", "main", "freed"]
    # the first call may find it out by a refusal; of those that need none, one asks before it knows
    assert called[1:] == [asked, asked, ["workspace", "main"], ["main"]]


def test_scratch_memory_is_made_where_it_is_needed(driver):
    library = built("sums").linked
    need = 4 * 133 * 100  # the second device of the fake driver has 133 multiprocessors
    done = driver.do(run, "sums", library, [{"shape": (100, 500), "device": 1}], current=0x66)
    assert done.error is None
    assert done.made == [((100,), "float32", 1, 0x66), ((need,), "uint8", 1, 0x66)]
    assert [c["stream"] for c in done.said.launches()] == [0x66, 0x66]
    short = driver.do(run, "sums", library, [{"shape": (100, 20)}])
    assert short.made == [((100,), "float32", 0, 0)] and short.said.launch["kernel"] == "whole"


def test_scratch_memory_that_is_given(driver):
    library, a = built("sums").linked, {"shape": (100, 500)}
    assert driver.do(run, "sums", library, [a], what="workspace").result == 4 * 132 * 100
    assert driver.do(run, "sums", library, [{"shape": (100, 20)}], what="workspace").result == 0
    assert driver.do(run, "axpy", built("axpy").linked, vectors(), what="workspace").result == 0
    room = {"shape": (4 * 132 * 100,), "dtype": "uint8", "address": 1 << 36}
    done = driver.do(run, "sums", library, [a], workspace=room)
    assert done.error is None and done.made == [((100,), "float32", 0, 0)]
    assert cuda_lab.number(done.said.launches()[0]["parameters"][2]) == 1 << 36
    room["shape"] = (KIB,)
    kind, text = driver.do(run, "sums", library, [a], workspace=room).error
    assert kind == "ArgumentError" and "argument 'workspace': expected an array on cuda:0 of at least 52800" in text
    assert "hint: leave workspace= away" in text


# -- refusals --------------------------------------------------------------------------------------


def test_an_array_of_the_host(driver):
    a = np.ones(1000, "float32")
    kind, text = driver.do(run, "axpy", built("axpy").linked, [a, a]).error
    assert kind == "ArgumentError" and "argument 'a': expected an array on cuda, got one on cpu" in text
    assert "hint: cupy.asarray(a)" in text
    kind, text = driver.do(run, "axpy", built("axpy").linked, [*vectors()[:1], a]).error
    assert "argument 'b': expected an array on cuda, got one on cpu" in text and "cupy.asarray(b)" in text
    kind, text = driver.do(run, "axpy", built("axpy").linked, [a, a], stream=5).error
    assert "argument 'a': expected an array on cuda, got one on cpu" in text


def test_two_devices(driver):
    a, b = vectors()
    kind, text = driver.do(run, "axpy", built("axpy").linked, [a, {**b, "device": 1}]).error
    assert kind == "ArgumentError" and "argument 'b': expected an array on cuda:0 like 'a', got one on cuda:1" in text


def test_what_the_driver_says_is_a_device_error(fresh):
    kind, text = fresh("/var/empty").do(run, "axpy", built("axpy").linked, vectors()).error
    assert (kind, text) == (
        "DeviceError",
        "axpy: no CUDA driver: libcuda.so.1 was not found\nhint: tlhub doctor",
    )
    assert fresh("/var/empty").do(run, "sums", built("sums").linked, [{"shape": (9, 99)}]).error[0] == "DeviceError"


def test_a_call_that_no_branch_serves(driver):
    a = {"shape": (1 << 31, 1), "address": 1 << 50}
    kind, text = driver.do(run, "scale", built("scale").linked, [a]).error
    assert kind == "ArgumentError" and text.startswith("scale: ") and "launch scale_plain on a grid of" in text
    assert text.count("scale: ") == 1


def test_devices_by_dlpacks_numbers():
    from tlhub import operands
    from tlhub.catalog import load

    on = {2: "cuda:3", 13: "cuda:3", 3: "cpu"}
    for kind, device in on.items():
        array = SimpleNamespace(__dlpack_device__=lambda kind=kind: (kind, 3))
        assert operands.device_of(load(), array) == device


def test_a_kernel_for_a_gpu_that_is_not_here_says_why():
    """It is built and found, and only the call is refused."""
    from dataclasses import replace

    from tlhub import hub
    from tlhub.catalog import load
    from tlhub.devices import Place
    from tlhub.problem import make

    gemm, target = load().kernel("gemm"), load().targets["cuda"]
    away = replace(target, absent=lambda: "the NVIDIA driver lists no GPU")
    place = Place(away, "cuda:sm_90a", target.facts("cuda:sm_90a"), None)
    refuse = hub._not_here(make(gemm, (8, 8, 8), "float16", {}), place)
    text = r"gemm for cuda:sm_90a cannot run: no device here runs that arch \(the NVIDIA driver lists no GPU\)"
    with pytest.raises(DeviceError, match=text):
        refuse()
