"""Which problems attention's CUDA schedules take: archs, types and channels. Pure.

What is not served gets the reason, and what is None.
"""

from __future__ import annotations

from collections.abc import Sequence

from tlhub.specs import DeviceFacts, Problem

HALVES = ("float16", "bfloat16")
OUT = (*HALVES, "float32")

_HOPPER = "cuda:sm_90a"
_LEAST = 80  # compute capability that has these products
_MOST = 256  # channels


def capability(arch: str) -> int:
    """Return the number of an arch, as 80 of ``cuda:sm_80`` and 90 of ``cuda:sm_90a``."""
    return int(arch.rpartition("_")[2].rstrip("af"))


def on_hopper(facts: DeviceFacts) -> str | None:
    """Return why *facts* are of no Hopper GPU, or None."""
    return None if facts.arch == _HOPPER else f"it is for {_HOPPER}, and this is {facts.arch}"


def by_mma(facts: DeviceFacts) -> str | None:
    """Return why *facts* are of a GPU without these products of warps, or None."""
    if capability(facts.arch) < _LEAST:
        return f"it is for compute capability 8.0 and newer, and this is {facts.arch}"
    return None


def unserved(
    problem: Problem, inputs: Sequence[str] = "qkv", types: Sequence[str] = HALVES, step: int = 8
) -> str | None:
    """Return why *problem* is not taken, or None: *inputs* are of one of *types*, an o that is none of them is of one
    of ``OUT``, and channels are multiples of *step*."""
    dtypes = dict(problem.dtypes)
    given = [dtypes[name] for name in inputs]
    if len(set(given)) > 1 or given[0] not in types:
        names = f"{', '.join(inputs[:-1])} and {inputs[-1]}"
        return (
            f"it takes {names} of one type, {' or '.join(types)}, not {', '.join(f'{n} {dtypes[n]}' for n in inputs)}"
        )
    if "o" not in inputs and dtypes["o"] not in OUT:
        return f"out_dtype={dtypes['o']!r}; it writes {', '.join(OUT)}"
    for name in ("D", "D_v"):
        extent = problem.dim[name]
        if isinstance(extent, str):
            return f"{name} is symbolic; it is compiled for one number of channels"
        if extent % step or not step <= extent <= _MOST:
            return f"{name}={extent}; it takes multiples of {step} from {step} to {_MOST}"
    return None
