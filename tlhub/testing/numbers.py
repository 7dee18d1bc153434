"""Running a compiled kernel and holding its numbers against the contract's reference and tolerance."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tlhub.problem import input_dtypes
from tlhub.specs import Extent, Kernel, Problem
from tlhub.testing.data import Array, default_scalars, function, inputs, numpy_dtype, poisoned, spilled
from tlhub.testing.devices import Arrays, fetched, float64, on_gpu, put

UNKNOWN = -np.inf
"""The bound of an element of which nothing can be said: an infinity of either sign, say."""

_LONG = 1e8
"""Operations of a problem whose reference takes long on a CPU; on a GPU it is computed there."""


def check(
    what: Any,
    *,
    dims: Mapping[str, Extent] | None = None,
    arrays: Mapping[str, Array] | None = None,
    scalars: Mapping[str, float] | None = None,
    seed: int = 0,
    scale: float = 1.0,
    kernel: Kernel | None = None,
    device: str | None = None,
    times: int = 1,
    gap: Callable[[int], int] = lambda count: 0,
) -> float:
    """Run *what* on random data with poisoned outputs, and return its worst ratio of error to bound.

    *what*: a CompiledKernel, or a Problem, which ``tlhub.get`` then serves on this machine.
    *dims*: extents for the symbolic dims. *arrays*: inputs by name in place of random ones.
    *kernel*: the contract (default: that of *what*, or the installed one of the problem's name).
    *device*: where it runs (default: the first device of its target).
    *times*: how often it is called; all calls must give the same bits. *gap*: how many elements that are not theirs
    lie between the outputs' rows of *count*.
    Raises AssertionError that names the element, its value, what the reference says and the bound; or says
    what was written outside an output.
    """
    from tlhub import catalog, hub

    problem = what if isinstance(what, Problem) else what.problem
    contract = kernel or getattr(what, "kernel", None)
    if not isinstance(contract, Kernel):
        contract = catalog.load().kernel(problem.kernel)
    if isinstance(what, Problem):
        what = hub.get(contract.name, problem.dim, input_dtypes(contract, problem.dtypes), **problem.option)
    problem = bind(problem, dims or {})
    given = dict(arrays) if arrays is not None else inputs(contract, problem, seed, scale, scalars)
    values = default_scalars(contract, problem, scalars)
    device = device or f"{getattr(what, 'arch', 'cpu').partition(':')[0]}:0"
    names = [name for name, _ in problem.dtypes]
    placed = [put(given[name], device)[0] for name in names[: len(given)]]
    place = functools.partial(put, device=device)
    outputs, _ = _run(what, contract, problem, placed, values, place, gap)
    for _ in range(times - 1):
        again, _ = _run(what, contract, problem, placed, values, place, gap)
        for name, one, other in zip(names[len(given) :], outputs, again, strict=True):
            if one.tobytes() != other.tobytes():
                raise AssertionError(f"{contract.name}: two calls gave output {name!r} different bits")
    reference, bounds = _expected(contract, problem, given, values, device)
    return max(
        (compare(o, r, b, name) for name, o, r, b in zip(names[len(given) :], outputs, reference, bounds, strict=True)),
        default=0.0,
    )


def check_there(
    what: Any,
    contract: Kernel,
    problem: Problem,
    given: Mapping[str, Any],
    values: Mapping[str, float],
    arrays: Arrays,
) -> float:
    """Do what ``check`` does once, where all is large: the inputs are *given* on a GPU, as *arrays* made them.

    The reference is computed, and held against the outputs, on the GPU where CuPy is installed, else on the host, which
    takes long. The host holds the poisoned outputs alone.
    """
    _, outputs = _run(what, contract, problem, tuple(given.values()), values, arrays.put)
    wide, found = {name: arrays.double(x) for name, x in given.items()}, map(arrays.double, outputs)
    try:
        reference, bounds = _held_to(contract, problem, wide, values)
    except TypeError:  # a reference that takes NumPy's arrays only
        wide, found = {name: fetched(x) for name, x in wide.items()}, map(fetched, found)
        reference, bounds = _held_to(contract, problem, wide, values)
    named = zip(problem.dtypes[len(given) :], found, reference, bounds, strict=True)
    worst = max((_worst(o, r, b, name, numpy_dtype(dtype)) for (name, dtype), o, r, b in named), default=0.0)
    del named, found, outputs, wide, reference, bounds
    arrays.free()
    return worst


def _run(
    what: Any,
    contract: Kernel,
    problem: Problem,
    placed: Sequence[Any],
    values: Mapping[str, float],
    place: Callable[[Array], tuple[Any, Callable[[], None]]],
    gap: Callable[[int], int] = lambda count: 0,
) -> tuple[tuple[Array, ...], tuple[Any, ...]]:
    """Call *what* on *placed*, its inputs on the device that *place* puts arrays on; return its outputs as NumPy's and
    as they are there. Raises AssertionError where something was written beside them."""
    outputs = poisoned(contract, problem, gap)
    targets = [place(o) for o in outputs]
    out = tuple(array for array, _ in targets)
    what(*placed, out=out[0] if len(out) == 1 else out, **values)
    for _, fetch in targets:
        fetch()
    for (name, _), output in zip(problem.dtypes[len(placed) :], outputs, strict=True):
        if spilled(output):
            raise AssertionError(f"{contract.name}: something was written outside output {name!r}")
    return outputs, out


def _expected(
    contract: Kernel, problem: Problem, given: Mapping[str, Array], values: Mapping[str, float], device: str
) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    """Return the reference and the bounds, computed on a GPU where that takes long and they can be."""
    if on_gpu(device) and contract.flops({**problem.dim, **problem.option}) > _LONG:
        with contextlib.suppress(ImportError, TypeError):  # no CuPy, or a reference that takes NumPy's arrays only
            reference, bounds = _held_to(contract, problem, float64(given, device), values)
            return tuple(map(fetched, reference)), tuple(map(fetched, bounds))
    return _held_to(contract, problem, given, values)


def _held_to(
    contract: Kernel, problem: Problem, inputs: Mapping[str, Any], values: Mapping[str, float]
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return the reference and the bounds, as arrays of the library that *inputs* are of."""
    reference = function(contract.reference)(problem, inputs, values)
    return reference, function(contract.tolerance)(problem, inputs, values, reference)


def compare(output: Any, reference: Any, bound: Any, name: str = "output") -> float:
    """Return the worst ratio of error to *bound* over all elements; NaN and infinities must be equal. Where the
    bound is UNKNOWN, anything is right.

    Raises AssertionError for the worst element where that is above 1, with its place, value, what was
    expected and the bound, and how many are wrong.
    """
    got, want = np.asarray(output).astype(np.float64), np.asarray(reference).astype(np.float64)
    if got.shape != want.shape:
        raise AssertionError(f"{name}: shape {got.shape}, expected {want.shape}")
    limit = np.broadcast_to(np.asarray(bound, dtype=np.float64), want.shape)
    return _worst(got, want, limit, name, np.asarray(output).dtype)


def _worst(got: Any, want: Any, limit: Any, name: str, dtype: np.dtype[Any]) -> float:
    """Return what ``compare`` does of an output of *dtype*: float64 arrays of one shape and one library, NumPy's or
    one that follows its protocols."""
    if not want.size:
        return 0.0
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        same = (got == want) | ((got != got) & (want != want)) | (limit == UNKNOWN)
        # a value that may be beyond the range of the output's format is right as the infinity that it is rounded to
        same = same | ((abs(got) == np.inf) & (abs(want) + limit >= _infinite(dtype)) & ((got > 0) == (want > 0)))
        ratio = np.where(same, 0.0, abs(got - want) / limit)
        ratio = np.where(ratio == ratio, ratio, np.inf)  # NaN or infinity on one side only, or a bound that is none
    place = np.unravel_index(int(ratio.argmax()), ratio.shape)
    worst = float(ratio[place])
    if worst > 1:
        raise AssertionError(
            f"{name}[{', '.join(str(int(i)) for i in place)}] is {float(got[place])!r}, "
            f"expected {float(want[place])!r} within {float(limit[place]):.3g}: {worst:.3g} times the bound; "
            f"{int((ratio > 1).sum())} of {ratio.size} elements are out of it"
        )
    return worst


def _infinite(dtype: np.dtype[Any]) -> float:
    """Return the least number that *dtype* rounds to infinity; infinity itself where it holds none, or none less."""
    if dtype.kind in "biu" or not np.isinf(np.array(np.inf).astype(dtype).astype(np.float64)):
        return np.inf
    try:
        limits: Any = np.finfo(dtype)
    except ValueError:
        import ml_dtypes

        limits = ml_dtypes.finfo(dtype)
    largest = float(limits.max)
    return largest + largest / (2 ** (limits.nmant + 1) - 1) / 2  # half a unit in its last place above it


def bind(problem: Problem, dims: Mapping[str, Extent]) -> Problem:
    """Return *problem* with its symbolic dims set from *dims*; equal symbols take equal extents."""
    bound = {extent: dims[name] for name, extent in problem.dims if isinstance(extent, str) and name in dims}
    fixed = [(name, bound.get(extent, extent) if isinstance(extent, str) else extent) for name, extent in problem.dims]
    for name, extent in fixed:
        if dims.get(name, extent) != extent:
            raise AssertionError(f"dim {name} is {extent!r} in the problem and {dims[name]!r} here")
    return Problem(problem.kernel, problem.revision, tuple(fixed), problem.dtypes, problem.options)
