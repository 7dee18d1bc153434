"""Checking a kernel, then timing it against its peers, round by round in turn."""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tlhub.bench.report import Peer, Report, Timing
from tlhub.bench.side import LeftOut, Side
from tlhub.errors import ArgumentError, DeviceError, UnknownName, did_you_mean

_REST = 0.05
"""Seconds between rounds: OpenBLAS's idle threads spin for 26 ms after a call and would take cores from the other."""

_SPREAD = 1.5
"""A side's median round to its best: above it something else was running."""

_EXTENT = 64
"""What a hint puts for a symbolic dim."""


def bench(
    kernel: str,
    shape: Any,
    dtype: Any,
    *,
    device: Any = None,
    arch: str | None = None,
    schedule: str | None = None,
    threads: int | None = None,
    peers: Sequence[str] | None = None,
    rounds: int = 7,
    seconds: float = 0.2,
    say: Callable[[str], None] = lambda text: None,
    **options: Any,
) -> Report:
    """Measure one concrete problem on this machine.

    It is checked first, on random data with a poisoned output, against the contract's float64 reference and
    tolerance; a kernel that is wrong is not timed. Then each side runs in a process of its own, warmed up and
    long-lived, *rounds* rounds of *seconds* in turn; the figures are medians of rounds.

    *threads*: for all sides (default: as tlhub has it in this process). *peers*: names of the
    contract's peers (default: all); one whose package is missing is left out and named.
    Raises what ``tlhub.get`` does, ArgumentError for a symbolic dim, and DeviceError where nothing here runs it.
    *say* is told what is being done, and what makes the figures doubtful.
    """
    from tlhub import catalog, hub, problem
    from tlhub.devices import locate
    from tlhub.explanation import command, problem_json, show_problem
    from tlhub.runtime.threads import num_threads
    from tlhub.testing.numbers import bind

    known = catalog.load()
    contract = known.kernel(kernel)
    made = problem.make(contract, shape, dtype, options)
    symbols = [name for name, extent in made.dims if isinstance(extent, str)]
    place = locate(known, device, arch)
    if symbols:
        example = command(bind(made, dict.fromkeys(symbols, _EXTENT)), place)
        raise ArgumentError(
            f"{kernel}: dim {symbols[0]} is symbolic; bench needs a number",
            argument=symbols[0],
            hint=f"tlhub bench {example}",
        )
    if rounds < 1 or (threads is not None and threads < 1):
        raise ArgumentError("rounds and threads are at least 1", argument="rounds" if rounds < 1 else "threads")
    for name in peers or ():
        if name not in contract.peers:
            near = did_you_mean(name, contract.peers)
            raise UnknownName(
                f"{kernel}: unknown peer {name!r}; known: {', '.join(contract.peers) or 'none'}",
                hint=f"tlhub bench {command(made, place)} --peer {near}" if near else f"tlhub kernels {kernel}",
            )
    if place.device is None:
        raise DeviceError(f"{place.arch} cannot be timed: no device here runs that arch", hint="tlhub targets")
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0  # before we add to it ourselves
    threads = threads or num_threads()
    request = {"kernel": kernel, "shape": shape, "dtype": dtype, "options": options}
    request |= {"device": device, "arch": arch, "schedule": schedule}
    compiled = hub.get(kernel, shape, dtype, device=device, arch=arch, schedule=schedule, **options)
    facts: dict[str, Any] = {
        "problem": problem_json(made),
        "title": show_problem(made),
        "arch": compiled.arch,
        "model": place.facts.model,
        "threads": threads,
        "schedule": compiled.schedule,
        "config": compiled.config,
        "origin": compiled.origin,
        "key": compiled.key,
        "flops": float(contract.flops({**made.dim, **made.option})),
    }
    seed = int.from_bytes(os.urandom(4), "little")
    with contextlib.ExitStack() as stack:
        ours = stack.enter_context(Side("tlhub", threads))
        ours.ask("prepare", side="tlhub", request=request, seed=seed, threads=threads)
        say("checking against the float64 reference")
        try:
            worst = ours.ask("check", seed=seed + 1)["worst"]
        except AssertionError as error:
            return Report(**facts, worst=None, fault=str(error))
        sides, left_out, libraries = {"tlhub": ours}, {}, {}
        for name in contract.peers if peers is None else peers:
            side = stack.enter_context(Side(name, threads))
            try:
                libraries[name] = side.ask("prepare", side=name, request=request, seed=seed, threads=threads)["library"]
                sides[name] = side
            except LeftOut as error:
                left_out[name] = str(error)
        say(f"timing {', '.join(sides)}: {rounds} rounds")
        taken = alternate(sides, rounds, seconds)
    for doubt in doubts(taken, load, os.cpu_count() or 1):
        say(f"warning: {doubt}; the figures may be far off")
    found = [Peer(name, Timing(tuple(taken[name]), libraries[name])) for name in libraries]
    found += [Peer(name, missing=why) for name, why in left_out.items()]
    return Report(**facts, worst=worst, fault=None, ours=Timing(tuple(taken["tlhub"])), peers=tuple(found))


def doubts(taken: Mapping[str, Sequence[float]], load: float, cores: int) -> list[str]:
    """Return why the rounds of the sides are not to be relied on: a busy machine, or a side that was disturbed."""
    found = [f"the machine is busy: load average {load:.1f} on {cores} cores"] if load > cores else []
    for name, rounds in taken.items():
        spread = statistics.median(rounds) / min(rounds)
        if spread > _SPREAD:
            found.append(f"{name} was disturbed: its median round takes {spread:.1f} times its best")
    return found


def alternate(sides: dict[str, Any], rounds: int, seconds: float) -> dict[str, list[float]]:
    """Return the seconds a call of every side, round by round; who begins changes with each round."""
    taken: dict[str, list[float]] = {name: [] for name in sides}
    order = list(sides)
    for _ in range(rounds):
        for name in order:
            time.sleep(_REST)
            taken[name].append(sides[name].ask("round", seconds=seconds))
        order.reverse()
    return taken
