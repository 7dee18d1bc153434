"""Measuring on a GPU: tlhub and its peers in turn in one process, as a caller sees them and on the GPU alone.

They cannot disturb each other as threads of a CPU do, and in one process both find the GPU equally warm.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from tlhub.bench.side import LeftOut, or_left_out
from tlhub.specs import DTYPES, Kernel, Problem, Signature

Call = Callable[[], Any]

_CALLS = 100
"""Calls before the one wait of a reading, where they do not take too long together."""

_RECORDED = 20
"""Launches of a graph at least: what starting it costs is divided by them."""

_WARM = 0.1
"""Seconds until clocks and caches have settled."""

_READ = 1 << 30
"""Bytes that are read to learn the bandwidth of memory, far more than a cache holds."""


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
    ``bytes`` of all operands and results, and ``bandwidth``, the bytes a second at which this GPU reads memory, None
    where that was not measured; ``libraries``, by peer what it runs on, which is what its call's ``package`` says, or
    else the arrays' own; ``left_out``, by peer why it did not run.
    """
    from tlhub.problem import signature
    from tlhub.testing.data import default_scalars, function
    from tlhub.testing.devices import drawn, pick
    from tlhub.testing.numbers import check_there

    library = {name: name.partition("-")[0] for name in peers}
    try:
        arrays = pick(f"cuda:{index}", library.values())
    except ImportError as error:
        raise LeftOut(str(error)) from error
    sign, scalars = signature(kernel, problem), default_scalars(kernel, problem)
    seeds = range(seed, seed + _sets(sign, l2) * len(sign.inputs), len(sign.inputs))
    sets = [drawn(kernel, problem, scalars, arrays, first) for first in seeds]
    try:
        worst = check_there(compiled, kernel, problem, sets[0], scalars, arrays)
    except AssertionError as error:
        return {"worst": None, "fault": str(error)}
    sides, left_out = {"tlhub": [_ours(compiled, s, [arrays.empty(t) for t in sign.outputs]) for s in sets]}, {}
    for name, path in peers.items():
        if library[name] != arrays.name:
            left_out[name] = f"the arrays are those of {arrays.name}"
            continue
        try:
            with or_left_out():
                calls = [function(path)(problem, s, scalars) for s in sets]
                calls[0]()  # some tell only now
            sides[name] = calls
        except LeftOut as reason:
            left_out[name] = str(reason)
    graphs = TorchGraphs(arrays.wait) if arrays.name == "torch" else None  # CuPy records none of cuBLAS
    taken = in_turn(sides, arrays.wait, graphs, rounds, seconds)
    found = {
        "worst": worst,
        "fault": None,
        "taken": taken,
        "bytes": _bytes(sign),
        "bandwidth": None if graphs is None else graphs.bandwidth(),
        "libraries": {n: getattr(calls[0], "package", arrays.version) for n, calls in sides.items() if n != "tlhub"},
        "left_out": left_out,
    }
    del sides, sets
    arrays.free()
    return found


def in_turn(
    sides: Mapping[str, list[Call]], wait: Call, graphs: Graphs | None, rounds: int, seconds: float
) -> dict[str, dict[str, list[float]]]:
    """Return by side the seconds of a call, ``call`` and ``device``, round by round; who begins changes each time.

    *sides*: of each the same call on different operands; *wait* for what they do. A caller's time is that of calls on
    the first operands with one wait at the end; the GPU's, where *graphs* can take it, is that of a graph of launches
    that go round the operands, so that a matrix which the L2 cache would hold comes from memory.
    """
    each = {name: _warm_up(calls[0], wait) for name, calls in sides.items()}
    recorded = {}
    if graphs is not None:
        for name, calls in sides.items():
            for call in calls:
                call()
            recorded[name] = graphs.recorded([calls[i % len(calls)] for i in range(_launches(calls))])
    taken: dict[str, dict[str, list[float]]] = {name: {"call": [], "device": []} for name in sides}
    order = list(sides)
    for _ in range(rounds):
        for name in order:
            count = max(3, min(_CALLS, round(seconds / each[name])))
            taken[name]["call"].append(_waited(sides[name][0], count, wait) / count)
        if graphs is not None:
            for name in order:
                launches = _launches(sides[name])
                replays = max(1, round(seconds / each[name] / launches))
                taken[name]["device"].append(graphs.elapsed(recorded[name], replays) / replays / launches)
        order.reverse()
    return taken


def _sets(sign: Signature, l2: int) -> int:
    """Return how many sets of operands together are twice what the L2 cache holds, at most the launches of a graph."""
    return max(1, min(_RECORDED, math.ceil(2 * l2 / max(_bytes(sign), 1))))


def _bytes(sign: Signature) -> int:
    tensors = (*sign.inputs, *sign.outputs)
    return sum(math.prod(map(int, t.extents)) * DTYPES[t.dtype][1] // 8 for t in tensors)


def _ours(compiled: Any, inputs: Mapping[str, Any], outputs: list[Any]) -> Call:
    operands, out = tuple(inputs.values()), outputs[0] if len(outputs) == 1 else tuple(outputs)
    return lambda: compiled(*operands, out=out)


def _launches(calls: list[Call]) -> int:
    """Return how many launches a graph of *calls* has: each of them as often."""
    return len(calls) * math.ceil(_RECORDED / len(calls))


def _warm_up(call: Call, wait: Call) -> float:
    """Run until clocks have settled, and return the seconds a call."""
    call()
    wait()
    spent, count, each = 0.0, 1, 0.0
    while spent < _WARM:
        taken = _waited(call, count, wait)
        spent, each, count = spent + taken, taken / count, min(2 * count, _CALLS)
    return each


def _waited(call: Call, count: int, wait: Call) -> float:
    wait()
    start = time.perf_counter()
    for _ in range(count):
        call()
    wait()
    return time.perf_counter() - start


class Graphs(Protocol):
    """Launches that are recorded once and timed by the GPU."""

    def recorded(self, calls: list[Call]) -> Any:
        """Return a graph that holds *calls*, once launched."""

    def elapsed(self, graph: Any, times: int) -> float:
        """Return the seconds that the GPU takes for *times* launches of *graph*."""

    def bandwidth(self) -> float:
        """Return the bytes a second at which the GPU reads memory."""


class TorchGraphs:
    """CUDA graphs and events of PyTorch on its current device."""

    def __init__(self, wait: Call) -> None:
        import torch

        self._torch, self._wait = torch, wait

    def recorded(self, calls: list[Call]) -> Any:
        self._wait()
        graph = self._torch.cuda.CUDAGraph()
        with self._torch.cuda.graph(graph):
            for call in calls:
                call()
        graph.replay()
        return graph

    def elapsed(self, graph: Any, times: int) -> float:
        start, end = (self._torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._wait()
        start.record()
        for _ in range(times):
            graph.replay()
        end.record()
        self._wait()
        return float(start.elapsed_time(end)) / 1e3

    def bandwidth(self) -> float:
        index = self._torch.cuda.current_device()
        if index not in _bandwidths:
            words = self._torch.rand(_READ // 4, device="cuda")
            graph = self.recorded([words.sum] * _RECORDED)
            _bandwidths[index] = max(_READ * _RECORDED / self.elapsed(graph, 1) for _ in range(5))
        return _bandwidths[index]


_bandwidths: dict[int, float] = {}
"""What was measured, by the index of the GPU."""
