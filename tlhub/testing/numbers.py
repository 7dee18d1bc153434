"""Running a compiled kernel and holding its numbers against the contract's reference and tolerance."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tlhub.problem import input_dtypes
from tlhub.specs import Extent, Kernel, Problem
from tlhub.testing.data import Array, default_scalars, function, inputs, poisoned, spilled
from tlhub.testing.devices import fetched, float64, on_gpu, put

_LONG = 1e11
"""Operations of a problem whose reference takes seconds on a CPU; on a GPU it is computed there."""


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
) -> float:
    """Run *what* on random data with poisoned outputs, and return its worst ratio of error to bound.

    *what*: a CompiledKernel, or a Problem, which ``tlhub.get`` then serves on this machine.
    *dims*: extents for the symbolic dims. *arrays*: inputs by name in place of random ones.
    *kernel*: the contract (default: that of *what*, or the installed one of the problem's name).
    *device*: where it runs (default: the first device of its target).
    *times*: how often it is called; all calls must give the same bits.
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
    given = dict(arrays) if arrays is not None else inputs(contract, problem, seed, scale)
    values = default_scalars(contract, problem, scalars)
    device = device or f"{getattr(what, 'arch', 'cpu').partition(':')[0]}:0"
    names = [name for name, _ in problem.dtypes]
    placed = [put(given[name], device)[0] for name in names[: len(given)]]
    outputs = _run(what, contract, problem, placed, values, device)
    for _ in range(times - 1):
        again = _run(what, contract, problem, placed, values, device)
        for name, one, other in zip(names[len(given) :], outputs, again, strict=True):
            if one.tobytes() != other.tobytes():
                raise AssertionError(f"{contract.name}: two calls gave output {name!r} different bits")
    reference, bounds = _expected(contract, problem, given, values, device)
    return max(
        (compare(o, r, b, name) for name, o, r, b in zip(names[len(given) :], outputs, reference, bounds, strict=True)),
        default=0.0,
    )


def _run(
    what: Any,
    contract: Kernel,
    problem: Problem,
    placed: Sequence[Any],
    values: Mapping[str, float],
    device: str,
) -> tuple[Array, ...]:
    """Call *what* on *placed*, its inputs on *device*, and return its outputs. Raises AssertionError."""
    outputs = poisoned(contract, problem)
    targets = [put(o, device) for o in outputs]
    out = tuple(array for array, _ in targets)
    what(*placed, out=out[0] if len(out) == 1 else out, **values)
    for _, fetch in targets:
        fetch()
    for (name, _), output in zip(problem.dtypes[len(placed) :], outputs, strict=True):
        if spilled(output):
            raise AssertionError(f"{contract.name}: something was written outside output {name!r}")
    return outputs


def _expected(
    contract: Kernel, problem: Problem, given: Mapping[str, Array], values: Mapping[str, float], device: str
) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    """Return the reference and the bounds, computed on a GPU where that takes long and they can be."""
    compute, bound = function(contract.reference), function(contract.tolerance)
    if on_gpu(device) and contract.flops({**problem.dim, **problem.option}) > _LONG:
        with contextlib.suppress(ImportError, TypeError):  # no CuPy, or a reference that takes NumPy's arrays only
            wide = float64(given, device)
            reference = compute(problem, wide, values)
            bounds = bound(problem, wide, values, reference)
            return tuple(map(fetched, reference)), tuple(map(fetched, bounds))
    reference = compute(problem, given, values)
    return reference, bound(problem, given, values, reference)


def compare(output: Any, reference: Any, bound: Any, name: str = "output") -> float:
    """Return the worst ratio of error to *bound* over all elements; NaN and infinities must be equal.

    Raises AssertionError for the worst element where that is above 1, with its place, value, what was
    expected and the bound, and how many are wrong.
    """
    got, want = np.asarray(output).astype(np.float64), np.asarray(reference).astype(np.float64)
    if got.shape != want.shape:
        raise AssertionError(f"{name}: shape {got.shape}, expected {want.shape}")
    limit = np.broadcast_to(np.asarray(bound, dtype=np.float64), want.shape)
    if not want.size:
        return 0.0
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        error = np.abs(got - want)
        same = (got == want) | (np.isnan(got) & np.isnan(want))
        # a value beyond the range of the output's format is right as the infinity that the format rounds it to
        rounded = want.astype(np.asarray(output).dtype).astype(np.float64)
        same |= np.isinf(rounded) & (got == rounded)
        ratio = np.where(same, 0.0, error / limit)
    ratio[np.isnan(ratio)] = np.inf  # a NaN or an infinity on one side only, or a bound that is none
    place = np.unravel_index(int(ratio.argmax()), ratio.shape)
    worst = float(ratio[place])
    if worst > 1:
        raise AssertionError(
            f"{name}[{', '.join(str(int(i)) for i in place)}] is {float(got[place])!r}, "
            f"expected {float(want[place])!r} within {limit[place]:.3g}: {worst:.3g} times the bound; "
            f"{int((ratio > 1).sum())} of {ratio.size} elements are out of it"
        )
    return worst


def bind(problem: Problem, dims: Mapping[str, Extent]) -> Problem:
    """Return *problem* with its symbolic dims set from *dims*; equal symbols take equal extents."""
    bound = {extent: dims[name] for name, extent in problem.dims if isinstance(extent, str) and name in dims}
    fixed = [(name, bound.get(extent, extent) if isinstance(extent, str) else extent) for name, extent in problem.dims]
    for name, extent in fixed:
        if dims.get(name, extent) != extent:
            raise AssertionError(f"dim {name} is {extent!r} in the problem and {dims[name]!r} here")
    return Problem(problem.kernel, problem.revision, tuple(fixed), problem.dtypes, problem.options)
