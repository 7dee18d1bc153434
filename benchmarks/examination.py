"""One problem of a schedule on the device that is here: whether its numbers are right, and how long it takes.

certify.py runs this file as ``examination.py PIPE`` with a line of JSON on stdin for each problem, ``["prove"|"time",
{problem}]``; the answers go to PIPE, a line of JSON each.
"""

from __future__ import annotations

import functools
import json
import math
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from tlhub import bench, catalog, devices, hub, sources, testing
from tlhub.bench.child import Runner
from tlhub.errors import DeviceError, describe
from tlhub.problem import make, signature, typed
from tlhub.runtime.kernel import CompiledKernel
from tlhub.specs import Kernel, Problem
from tlhub.testing.devices import drawn, pick
from tlhub.testing.numbers import check_there
from tlhub.workload import Item

CALLS = 3
"""Calls that must give the same bits, but where a problem's option ``deterministic`` is not set."""

ROUNDS, SECONDS = 3, 0.02
"""Rounds of a measurement, and seconds of one side of a round."""

CHECKED = 1 << 24
"""Elements of all arrays up to which every case is tried, and nothing is timed; of larger problems random data alone,
made on the device."""

EXTENTS = (1, 9, 17, 33, 65, 1000, 2560, 4104)
"""What symbolic dims are in turn, all at once; the last is timed."""

Array = np.ndarray[Any, Any]
Row = dict[str, Any]


def answer(examine: Mapping[str, Callable[[Item], Row]], pipe: int) -> None:
    """Examine the problems on stdin as they come and write a line for each to *pipe*."""
    with os.fdopen(pipe, "w", encoding="utf-8", buffering=1) as answers:
        for line in sys.stdin:
            what, item = json.loads(line)
            try:
                row = examine[what](Item(**{**item, "shape": shape_of(item["shape"])}))
            except Exception as error:
                row = {"fault": describe(error).partition("\nhint:")[0]}
            answers.write(json.dumps(row) + "\n")


def shape_of(shape: Any) -> Any:
    return shape if isinstance(shape, dict) else tuple(shape)


def prove(item: Item) -> Row:
    """Return what was proved, with the largest error in tolerances. Raises AssertionError for a wrong number."""
    place = devices.locate(catalog.load(), arch=item.arch)
    if place.device is None:
        raise DeviceError(f"no device here runs {place.arch}")
    kernel = hub.get(**item.request())
    known = catalog.load().schedules[item.kernel]
    schedule = next(s for s in known if s.name == item.schedule)
    if kernel.entry.manifest.source_digest != sources.digest(schedule):
        raise AssertionError("the binary in the store is of other sources; prebuild it again")
    seed = int.from_bytes(os.urandom(4), "little")
    error, tried = 0.0, concrete(kernel.kernel, kernel.problem)
    for problem in tried:
        if not small(kernel.kernel, problem):
            if problem is not tried[-1]:  # that is measured
                error = max(error, check_large(kernel, problem, place.device, seed))
            continue
        for case in CASES:
            scalars = moved(kernel.kernel, problem) if case.moved else None
            arrays = testing.inputs(kernel.kernel, problem, seed, scalars=scalars)
            arrays = case.spoil(arrays, np.random.default_rng(seed))
            times = CALLS if problem.option.get("deterministic", True) else 1
            how = {"device": place.device, "times": times, "gap": case.gap, "scalars": scalars}
            error = max(error, testing.check(kernel, dims=problem.dim, arrays=arrays, **how))
    return {
        "arch": kernel.arch,
        "dims": kernel.problem.dim,
        "dtypes": dict(kernel.problem.dtypes),
        "options": item.options,
        "entry": kernel.key,
        "error": error,
    }


def check_large(kernel: CompiledKernel, problem: Problem, device: str, seed: int) -> float:
    """Return the error of random data that is made on the device, in tolerances. Raises AssertionError."""
    arrays, scalars = pick(device), testing.default_scalars(kernel.kernel, problem)
    given = drawn(kernel.kernel, problem, scalars, arrays, seed)
    return check_there(kernel, kernel.kernel, problem, given, scalars, arrays)


def measure(item: Item) -> Row:
    """Return times, of random data of the largest extents, and its error, in tolerances; None for times of a small
    problem. Raises AssertionError."""
    kernel = hub.get(**item.request())
    last = concrete(kernel.kernel, kernel.problem)[-1]
    if small(kernel.kernel, last):
        return {"error": 0.0, "seconds": None, "peer": None, "ratio": None, "device_ratio": None}
    dims = last.dim
    report = bench.bench(**{**item.request(), "shape": dims}, rounds=ROUNDS, seconds=SECONDS, worker=Here())
    if report.fault or report.ours is None or report.worst is None:
        raise AssertionError(report.fault)
    if report.key != kernel.key:
        raise AssertionError(f"the store has a binary for {dims} alone, and that was timed; use another store")
    timed = report.to_json()
    peer, against = next(((n, p) for n, p in timed["peers"].items() if "ratio" in p), (None, {}))
    return {
        "error": report.worst,
        "seconds": rounded(report.ours.seconds),
        "peer": peer,
        "ratio": rounded(against.get("ratio")),
        "device_ratio": rounded(against.get("device_ratio")),
    }


def small(kernel: Kernel, problem: Problem) -> bool:
    found = signature(kernel, problem)
    return sum(math.prod(t.extents) for t in (*found.inputs, *found.outputs)) <= CHECKED


def concrete(kernel: Kernel, problem: Problem) -> list[Problem]:
    """Return *problem*, or where dims are symbolic what it is at each of EXTENTS."""
    dims, dtype, options = typed(kernel, problem)
    symbolic = [name for name, extent in dims.items() if isinstance(extent, str)]
    if not symbolic:
        return [problem]
    return [make(kernel, {**dims, **dict.fromkeys(symbolic, n)}, dtype, options) for n in EXTENTS]


def rounded(number: float | None) -> float | None:
    return None if number is None else float(f"{number:.4g}")


class Here:
    """Stands for the process of a measurement: this one has the libraries loaded already."""

    def ask(self, what: str, **arguments: Any) -> Any:
        return getattr(Runner(), what)(**arguments)


# -- data ------------------------------------------------------------------------------------------


def plain(arrays: dict[str, Array], rng: np.random.Generator) -> dict[str, Array]:
    return arrays


def odd(count: int) -> int:
    """Return a gap after which rows of *count* elements do not stay aligned."""
    return 3 + count % 2


def even(count: int) -> int:
    """Return a gap after which rows of *count* elements begin at multiples of 16."""
    return 16 + -count % 16


def with_gaps(
    arrays: dict[str, Array], rng: np.random.Generator, gap: Callable[[int], int], offset: int = 0
) -> dict[str, Array]:
    """Return *arrays* as views that begin *offset* elements into rows that are longer by a *gap*, with NaN (or ones) in
    what is not theirs."""

    def apart(array: Array) -> Array:
        if not array.ndim:
            return array
        count = array.shape[-1]
        whole = np.full((*array.shape[:-1], count + gap(count)), np.nan if inexact(array) else 1, array.dtype)
        view = whole[..., offset : offset + count]
        view[...] = array
        return view

    return {name: apart(array) for name, array in arrays.items()}


def moved(kernel: Kernel, problem: Problem) -> dict[str, float]:
    """Return scalars that are no defaults, and no two the same: bounds where none were, and factors that are not 1."""
    usual = testing.default_scalars(kernel, problem)
    return {
        s.name: 7 + i if s.kind == "int" else (0.75 + i / 8) * (usual[s.name] or 4.0)
        for i, s in enumerate(kernel.scalars)
    }


def with_specials(arrays: dict[str, Array], rng: np.random.Generator) -> dict[str, Array]:
    """Return *arrays* with a NaN and two infinities each, at random places."""
    for array in arrays.values():
        if inexact(array) and array.size:
            for value in (np.nan, np.inf, -np.inf):
                array[tuple(rng.integers(array.shape))] = value
    return arrays


def inexact(array: Array) -> bool:
    return "float" in array.dtype.name


class Case(NamedTuple):
    """What is done to the inputs, the ``gap`` between the rows of outputs, and whether scalars are ``moved``."""

    spoil: Callable[[dict[str, Array], np.random.Generator], dict[str, Array]]
    gap: Callable[[int], int] = lambda count: 0
    moved: bool = False


CASES = (
    Case(plain),
    Case(functools.partial(with_gaps, gap=even), even, moved=True),
    Case(functools.partial(with_gaps, gap=odd, offset=1), odd),
    Case(with_specials),
)

if __name__ == "__main__":
    answer({"prove": prove, "time": measure}, int(sys.argv[1]))
