"""Measuring on a GPU: tlhub and its peers in turn in one process, as a caller sees them and on the GPU alone.

They cannot disturb each other as threads of a CPU do, and in one process both find the GPU equally warm.
"""

from __future__ import annotations

import gc
import itertools
import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from tlhub.bench.side import LeftOut
from tlhub.specs import DTYPES, Kernel, Problem, Signature, Tensor

Call = Callable[[], Any]

_CALLS = 100
"""Calls before the one wait of a reading, where they do not take too long together."""

_RECORDED = 20
"""Launches of a graph at least: what starting it costs is divided by them."""

_WARM = 0.1
"""Seconds until clocks and caches have settled."""

_GUARD = 64  # elements before and after a checked output: a multiple of every alignment that a kernel asks for


def compare(
    kernel: Kernel,
    problem: Problem,
    compiled: Any,
    index: int,
    peers: Mapping[str, str],
    *,
    rounds: int,
    seconds: float,
    seed: int,
    l2: int,
) -> dict[str, Any]:
    """Check *compiled*, then time it against *peers* (names to import paths) on the GPU of that index.

    Returns ``worst``, the largest error in units of the tolerance, or the ``fault`` that keeps it from being timed;
    ``taken``, by side the seconds of each round: ``call`` as a caller sees one, ``device`` on the GPU alone;
    ``libraries``, by peer what it runs on, and ``left_out``, by peer why it did not run.
    """
    from tlhub.problem import signature
    from tlhub.testing.data import default_scalars, function

    arrays = pick(index, peers)
    sign, scalars = signature(kernel, problem), default_scalars(kernel, problem)
    seeds = itertools.count(seed)
    sets = [{t.name: arrays.random(t, next(seeds)) for t in sign.inputs} for _ in range(_sets(sign, l2))]
    try:
        worst = check(kernel, problem, compiled, arrays, sets[0], scalars, sign.outputs)
    except AssertionError as error:
        return {"worst": None, "fault": str(error), "taken": {}, "libraries": {}, "left_out": {}}
    sides, left_out = {"tlhub": [_ours(compiled, s, [arrays.empty(t) for t in sign.outputs]) for s in sets]}, {}
    for name, path in peers.items():
        if name != arrays.name:
            left_out[name] = f"the arrays are those of {arrays.name}"
            continue
        try:
            sides[name] = [function(path)(problem, s, scalars) for s in sets]
        except NotImplementedError as error:
            left_out[name] = str(error) or "it does not compute this problem"
    taken = in_turn(sides, arrays, rounds, seconds)
    libraries = {name: arrays.version for name in sides if name != "tlhub"}
    del sides, sets
    arrays.free()
    return {"worst": worst, "fault": None, "taken": taken, "libraries": libraries, "left_out": left_out}


def in_turn(
    sides: Mapping[str, list[Call]], arrays: Any, rounds: int, seconds: float
) -> dict[str, dict[str, list[float]]]:
    """Return by side the seconds of a call, ``call`` and ``device``, round by round; who begins changes each time.

    *sides*: of each the same call on different operands. A caller's time is that of calls on the first operands with
    one wait at the end; the GPU's is that of a graph of launches that go round the operands, so that a matrix which
    the L2 cache would hold comes from memory; CuPy records no graphs of cuBLAS.
    """
    each = {name: _warm_up(calls[0], arrays) for name, calls in sides.items()}
    graphs = {}
    for name, calls in sides.items() if arrays.graphs else ():
        for call in calls:
            call()
        graphs[name] = arrays.recorded([calls[i % len(calls)] for i in range(_launches(calls))])
    taken: dict[str, dict[str, list[float]]] = {name: {"call": [], "device": []} for name in sides}
    order = list(sides)
    for _ in range(rounds):
        for name in order:
            count = max(3, min(_CALLS, round(seconds / each[name])))
            taken[name]["call"].append(_waited(sides[name][0], count, arrays) / count)
        for name in order if graphs else ():
            launches = _launches(sides[name])
            replays = max(1, round(seconds / each[name] / launches))
            taken[name]["device"].append(arrays.elapsed(graphs[name], replays) / replays / launches)
        order.reverse()
    return taken


def check(
    kernel: Kernel,
    problem: Problem,
    compiled: Any,
    arrays: Any,
    inputs: Mapping[str, Any],
    scalars: Mapping[str, float],
    outputs: tuple[Tensor, ...],
) -> float:
    """Run *compiled* on *inputs* with poisoned outputs; return the worst error in units of the tolerance.

    The reference is computed in float64 on the GPU where CuPy is installed, else on the host, which takes long.
    Raises AssertionError, which says what is wrong.
    """
    from tlhub.testing.data import function

    guarded = [arrays.guarded(t) for t in outputs]
    out = [inside for inside, _ in guarded]
    compiled(*inputs.values(), out=out[0] if len(out) == 1 else tuple(out), **scalars)
    arrays.wait()
    for tensor, (_, whole) in zip(outputs, guarded, strict=True):
        if arrays.spilled(whole):
            raise AssertionError(f"{kernel.name}: something was written outside output {tensor.name!r}")
    doubles = {name: arrays.double(x) for name, x in inputs.items()}
    expected = function(kernel.reference)(problem, doubles, scalars)
    bounds = function(kernel.tolerance)(problem, doubles, scalars, expected)
    worst = 0.0
    for tensor, got, want, bound in zip(outputs, out, expected, bounds, strict=True):
        worst = max(worst, _worst(tensor.name, arrays.double(got), want, bound))
    del doubles, expected, bounds
    arrays.free()
    return worst


def _worst(name: str, got: Any, want: Any, bound: Any) -> float:
    """Return the worst ratio of error to *bound*, of float64 arrays of one library. Raises AssertionError above 1."""
    same = (got == want) | ((got != got) & (want != want))
    with np.errstate(invalid="ignore"):  # of infinities
        error = abs(got - want)
    wrong = ~((error <= bound) | same)
    if bool(wrong.any()):
        place = tuple(int(i[0]) for i in wrong.nonzero())
        raise AssertionError(
            f"{name}[{', '.join(map(str, place))}] is {float(got[place])!r}, expected {float(want[place])!r} within "
            f"{float(bound[place]):.3g}; {int(wrong.sum())} of {wrong.size} elements are out of it"
        )
    error[same] = 0.0
    return float((error / bound).max()) if wrong.size else 0.0


def _sets(sign: Signature, l2: int) -> int:
    """Return how many sets of operands together are twice what the L2 cache holds, at most the launches of a graph."""
    tensors = (*sign.inputs, *sign.outputs)
    size = sum(math.prod(map(int, t.extents)) * DTYPES[t.dtype][1] // 8 for t in tensors)
    return max(1, min(_RECORDED, math.ceil(2 * l2 / max(size, 1))))


def _ours(compiled: Any, inputs: Mapping[str, Any], outputs: list[Any]) -> Call:
    operands, out = tuple(inputs.values()), outputs[0] if len(outputs) == 1 else tuple(outputs)
    return lambda: compiled(*operands, out=out)


def _launches(calls: list[Call]) -> int:
    """Return how many launches a graph of *calls* has: each of them as often."""
    return len(calls) * math.ceil(_RECORDED / len(calls))


def _warm_up(call: Call, arrays: Any) -> float:
    """Run until clocks have settled, and return the seconds a call."""
    call()
    arrays.wait()
    spent, count, each = 0.0, 1, 0.0
    while spent < _WARM:
        taken = _waited(call, count, arrays)
        spent, each, count = spent + taken, taken / count, min(2 * count, _CALLS)
    return each


def _waited(call: Call, count: int, arrays: Any) -> float:
    arrays.wait()
    start = time.perf_counter()
    for _ in range(count):
        call()
    arrays.wait()
    return time.perf_counter() - start


# -- arrays of one library each --------------------------------------------------------------------


def pick(index: int, peers: Iterable[str]) -> Any:
    """Return the arrays of PyTorch, or of CuPy where that is not installed or is the only peer. Raises LeftOut."""
    kinds = (TorchArrays, CupyArrays)
    for make in [kind for kind in kinds if kind.name in peers] or kinds:
        try:
            return make(index)
        except ImportError:
            continue
    raise LeftOut("neither torch nor cupy is installed, and a GPU's arrays are theirs")


class TorchArrays:
    """Arrays, waiting and graphs of PyTorch on one GPU."""

    name, graphs = "torch", True

    def __init__(self, index: int) -> None:
        import torch

        self._torch, self._device = torch, torch.device("cuda", index)
        torch.cuda.set_device(index)
        self.version = f"torch {torch.__version__}"

    def random(self, tensor: Tensor, seed: int) -> Any:
        torch, dtype = self._torch, getattr(self._torch, tensor.dtype)
        generator = torch.Generator(self._device).manual_seed(seed)
        if dtype.is_floating_point:
            wide = torch.float64 if dtype == torch.float64 else torch.float32
            return torch.randn(tensor.extents, dtype=wide, device=self._device, generator=generator).to(dtype)
        low, high = (0, 2) if dtype == torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
        return torch.randint(low, high, tensor.extents, dtype=dtype, device=self._device, generator=generator)

    def empty(self, tensor: Tensor) -> Any:
        return self._torch.empty(tensor.extents, dtype=getattr(self._torch, tensor.dtype), device=self._device)

    def guarded(self, tensor: Tensor) -> tuple[Any, Any]:
        """Return an array filled with a poison, and the larger one that it lies in."""
        dtype, size = getattr(self._torch, tensor.dtype), math.prod(map(int, tensor.extents))
        poison = float("nan") if dtype.is_floating_point else 0x55
        whole = self._torch.full((size + 2 * _GUARD,), poison, dtype=dtype, device=self._device)
        return whole[_GUARD : _GUARD + size].view(tensor.extents), whole

    def spilled(self, whole: Any) -> bool:
        edges = self._torch.cat([whole[:_GUARD], whole[-_GUARD:]])
        kept = edges.isnan() if edges.is_floating_point() else edges == 0x55
        return not bool(kept.all())

    def double(self, x: Any) -> Any:
        """Return *x* in float64 as an array that NumPy's functions take: CuPy's, or NumPy's where that is missing."""
        try:
            import cupy
        except ImportError:
            return x.double().cpu().numpy()
        return cupy.from_dlpack(x.double())

    def wait(self) -> None:
        self._torch.cuda.synchronize(self._device)

    def free(self) -> None:
        gc.collect()
        self._torch.cuda.empty_cache()
        _free_cupy()

    def recorded(self, calls: list[Call]) -> Call:
        """Return the launch of a CUDA graph that holds *calls*."""
        self.wait()
        graph = self._torch.cuda.CUDAGraph()
        with self._torch.cuda.graph(graph):
            for call in calls:
                call()
        replay: Call = graph.replay
        replay()
        return replay

    def elapsed(self, launch: Call, times: int) -> float:
        """Return the seconds that the GPU takes for *times* launches."""
        start, end = (self._torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.wait()
        start.record()
        for _ in range(times):
            launch()
        end.record()
        self.wait()
        return float(start.elapsed_time(end)) / 1e3


class CupyArrays:
    """Arrays and waiting of CuPy on one GPU."""

    name, graphs = "cupy", False

    def __init__(self, index: int) -> None:
        import cupy

        cupy.cuda.Device(index).use()
        self._cupy = cupy
        self.version = f"cupy {cupy.__version__}"

    def random(self, tensor: Tensor, seed: int) -> Any:
        from tlhub.testing.data import numpy_dtype

        dtype = numpy_dtype(tensor.dtype)
        generator = self._cupy.random.default_rng(seed)
        if dtype.kind in "biu":
            low, high = (0, 2) if dtype.kind == "b" else (self._cupy.iinfo(dtype).min, self._cupy.iinfo(dtype).max)
            return generator.integers(low, high, tensor.extents).astype(dtype)
        return generator.standard_normal(tensor.extents, dtype="float32").astype(dtype)

    def empty(self, tensor: Tensor) -> Any:
        from tlhub.testing.data import numpy_dtype

        return self._cupy.empty(tensor.extents, numpy_dtype(tensor.dtype))

    def guarded(self, tensor: Tensor) -> tuple[Any, Any]:
        from tlhub.testing.data import numpy_dtype

        dtype, size = numpy_dtype(tensor.dtype), math.prod(map(int, tensor.extents))
        whole = self._cupy.full(size + 2 * _GUARD, 0x55 if dtype.kind in "biu" else math.nan, dtype)
        return whole[_GUARD : _GUARD + size].reshape(tensor.extents), whole

    def spilled(self, whole: Any) -> bool:
        edges = self._cupy.concatenate([whole[:_GUARD], whole[-_GUARD:]])
        return not bool((edges == 0x55 if edges.dtype.kind in "biu" else edges != edges).all())

    def double(self, x: Any) -> Any:
        return x.astype("float64")

    def wait(self) -> None:
        self._cupy.cuda.get_current_stream().synchronize()

    def free(self) -> None:
        gc.collect()
        _free_cupy()


def _free_cupy() -> None:
    import sys

    if "cupy" in sys.modules:
        sys.modules["cupy"].get_default_memory_pool().free_all_blocks()
