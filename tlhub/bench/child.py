"""The process of one side: it makes its data, checks itself, and times a round whenever it is told to."""

from __future__ import annotations

import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

_BATCH = 1e-3
"""Seconds that one reading of the clock covers at least."""

Call = Callable[[], Any]


class Runner:
    """What the parent's words do. ``prepare`` comes first."""

    def __init__(self) -> None:
        self.call: Call = lambda: None
        self.compiled: Any = None
        self.batch = 1

    def prepare(self, side: str, request: Mapping[str, Any], seed: int, threads: int) -> dict[str, Any]:
        """Make the data and the callable of *side*: ``tlhub``, or the name of a peer."""
        from tlhub import catalog, problem
        from tlhub.bench.side import or_left_out
        from tlhub.testing.data import default_scalars, function, inputs, poisoned

        kernel = catalog.load().kernel(request["kernel"])
        made = problem.make(kernel, request["shape"], request["dtype"], request["options"])
        scalars = default_scalars(kernel, made)
        arrays = inputs(kernel, made, seed, scalars=scalars, whole=True)
        if side != "tlhub":
            with or_left_out():
                self.call = function(kernel.peers[side])(made, arrays, scalars)
            if sys.modules.get("torch"):  # None where it is hidden
                sys.modules["torch"].set_num_threads(threads)
        else:
            from tlhub import hub
            from tlhub.runtime.load import hide_torch

            hide_torch()
            place = {k: request[k] for k in ("device", "arch", "schedule")}
            self.compiled = hub.get(kernel.name, request["shape"], request["dtype"], **place, **request["options"])
            outputs = poisoned(kernel, made)
            positional = tuple(arrays.values())
            out = outputs[0] if len(outputs) == 1 else outputs
            compiled = self.compiled
            self.call = lambda: compiled(*positional, out=out)
        self._warm_up()
        return {"library": _library() if side != "tlhub" else None}

    def _warm_up(self) -> None:
        """Run until caches, pools and clocks have settled, and choose how many calls one reading covers."""
        self.call()
        started, calls = time.perf_counter(), 0
        while calls < 2 or time.perf_counter() - started < 0.05:
            self.call()
            calls += 1
        each = (time.perf_counter() - started) / calls
        self.batch = max(1, round(_BATCH / each))

    def check(self, seed: int) -> dict[str, Any]:
        """Hold the kernel against its reference on fresh data. Raises AssertionError."""
        from tlhub.testing import check

        return {"worst": check(self.compiled, seed=seed)}

    def compare(self, request: Mapping[str, Any], peers: Mapping[str, str], index: int, **how: Any) -> dict[str, Any]:
        """Check and time all sides of a problem in this process, on the GPU of that index: ``gpu.compare``."""
        from tlhub import catalog, hub, problem
        from tlhub.bench import gpu

        kernel = catalog.load().kernel(request["kernel"])
        made = problem.make(kernel, request["shape"], request["dtype"], request["options"])
        place = {k: request[k] for k in ("device", "arch", "schedule")}
        compiled = hub.get(kernel.name, request["shape"], request["dtype"], **place, **request["options"])
        return gpu.compare(kernel, made, compiled, index, peers, **how)

    def round(self, seconds: float) -> float:
        """Return the median seconds a call over *seconds*, at least three readings."""
        clock, call, batch = time.perf_counter, self.call, self.batch
        readings: list[float] = []
        end = clock() + seconds
        while len(readings) < 3 or clock() < end:
            start = clock()
            for _ in range(batch):
                call()
            readings.append((clock() - start) / batch)
        return statistics.median(readings)


def _library() -> str | None:
    """Return what a peer runs on: torch, or the BLAS that NumPy has loaded, where threadpoolctl is here to tell."""
    if sys.modules.get("torch"):
        return f"torch {sys.modules['torch'].__version__}"
    try:
        from threadpoolctl import threadpool_info
    except ImportError:
        return None
    for pool in threadpool_info():
        if pool.get("user_api") == "blas":
            parts = (pool.get("internal_api"), pool.get("version"), pool.get("architecture"))
            return " ".join(p for p in parts if p)
    return None


def main() -> None:
    """Answer requests, JSON lines on stdin and stdout, until stdin ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends this process
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    sys.stdout = sys.stderr
    runner = Runner()
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = {"value": getattr(runner, request.pop("do"))(**request)}
        except Exception as error:
            answer = {"error": type(error).__name__, "message": str(error)}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
