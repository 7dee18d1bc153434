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
from tlhub.specs import Kernel

_REST = 0.05
"""Seconds between rounds: OpenBLAS's idle threads spin for 26 ms after a call and would take cores from the other."""

_SPREAD = 1.5
"""A side's median round to its best: above it something else was running."""

_SECONDS, _SECONDS_GPU = 0.2, 0.05
"""Seconds of a side's round where none are asked for, on a CPU and on a GPU."""

_CPU = 1  # DLPack's number

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
    seconds: float | None = None,
    say: Callable[[str], None] = lambda text: None,
    worker: Side | None = None,
    **options: Any,
) -> Report:
    """Measure one concrete problem on this machine.

    It is checked first, on random data with a poisoned output, against the contract's float64 reference and
    tolerance; a kernel that is wrong is not timed. Then the sides take turns, *rounds* rounds of *seconds*; the
    figures are medians of rounds. On a CPU each runs in a process of its own, warmed up and long-lived; on a GPU all
    run in one, *worker* if that is given.

    *threads*: of a CPU, for all sides (default: as tlhub has it in this process). *peers*: names of the
    contract's peers for the device (default: all); one whose package is missing is left out and named.
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
    paths = peers_of(contract, place.target.name)
    for name in peers or ():
        if name not in paths:
            near = did_you_mean(name, paths)
            raise UnknownName(
                f"{kernel}: unknown peer {name!r}; known: {', '.join(paths) or 'none'}",
                hint=f"tlhub bench {command(made, place)} --peer {near}" if near else f"tlhub kernels {kernel}",
            )
    if place.device is None:
        raise DeviceError(f"{place.arch} cannot be timed: no device here runs that arch", hint="tlhub targets")
    paths = {name: path for name, path in paths.items() if peers is None or name in peers}
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0  # before we add to it ourselves
    on_cpu = place.target.device_type == _CPU
    threads = threads or num_threads()
    request = {"kernel": kernel, "shape": shape, "dtype": dtype, "options": options}
    request |= {"device": device, "arch": arch, "schedule": schedule}
    compiled = hub.get(kernel, shape, dtype, device=device, arch=arch, schedule=schedule, **options)
    facts: dict[str, Any] = {
        "problem": problem_json(made),
        "title": show_problem(made),
        "arch": compiled.arch,
        "model": place.facts.model,
        "threads": threads if on_cpu else 0,
        "schedule": compiled.schedule,
        "config": compiled.config,
        "origin": compiled.origin,
        "key": compiled.key,
        "flops": float(contract.flops({**made.dim, **made.option})),
    }
    seed = int.from_bytes(os.urandom(4), "little")
    if on_cpu:
        found = _apart(request, paths, threads, rounds, seconds or _SECONDS, seed, say)
    else:
        with contextlib.nullcontext(worker) if worker else Side("tlhub", threads) as side:
            say("checking against the float64 reference, then timing")
            how = {"rounds": rounds, "seconds": seconds or _SECONDS_GPU, "seed": seed}
            where = {"index": place.facts.index, "l2": place.facts.l2}
            try:
                found = side.ask("compare", request=request, peers=paths, **where, **how)
            except LeftOut as error:
                raise DeviceError(f"nothing can be timed on {place.arch}: {error}", hint="pip install torch") from None
    if found["fault"]:
        return Report(**facts, worst=None, fault=found["fault"])
    timed = {
        name: Timing(tuple(t["call"]), found["libraries"].get(name), tuple(t["device"]))
        for name, t in found["taken"].items()
    }
    for doubt in doubts({name: t.rounds for name, t in timed.items()}, load, os.cpu_count() or 1):
        say(f"warning: {doubt}; the figures may be far off")
    compared = [Peer(name, timing) for name, timing in timed.items() if name != "tlhub"]
    compared += [Peer(name, missing=why) for name, why in found["left_out"].items()]
    memory = {name: found[name] for name in ("bytes", "bandwidth")}
    return Report(**facts, **memory, worst=found["worst"], fault=None, ours=timed["tlhub"], peers=tuple(compared))


def peers_of(kernel: Kernel, target: str) -> dict[str, str]:
    """Return the peers of *kernel* for a target, by name, to their import paths."""
    pairs = [(name.rpartition(":"), path) for name, path in kernel.peers.items()]
    return {name: path for (of, _, name), path in pairs if (of or "cpu") == target}


def _apart(
    request: dict[str, Any],
    peers: Mapping[str, str],
    threads: int,
    rounds: int,
    seconds: float,
    seed: int,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Check and time on a CPU, each side in a process of its own; return what ``gpu.compare`` does."""
    with contextlib.ExitStack() as stack:
        ours = stack.enter_context(Side("tlhub", threads))
        ours.ask("prepare", side="tlhub", request=request, seed=seed, threads=threads)
        say("checking against the float64 reference")
        try:
            worst = ours.ask("check", seed=seed + 1)["worst"]
        except AssertionError as error:
            return {"fault": str(error)}
        sides, left_out, libraries = {"tlhub": ours}, {}, {}
        for name in peers:
            side = stack.enter_context(Side(name, threads))
            try:
                libraries[name] = side.ask("prepare", side=name, request=request, seed=seed, threads=threads)["library"]
                sides[name] = side
            except LeftOut as error:
                left_out[name] = str(error)
        say(f"timing {', '.join(sides)}: {rounds} rounds")
        taken = alternate(sides, rounds, seconds)
    timed = {name: {"call": found, "device": []} for name, found in taken.items()}
    found = {"worst": worst, "fault": None, "taken": timed, "libraries": libraries, "left_out": left_out}
    return found | {"bytes": 0, "bandwidth": None}


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
