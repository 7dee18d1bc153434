"""Whether a plugin keeps the rules of the hooks, and whether what it brings is right: run by its own tests."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, NamedTuple

from tlhub import catalog as catalogs
from tlhub import plugins
from tlhub.build.frontends import FRONTENDS
from tlhub.devices import Place, locate
from tlhub.errors import ArgumentError, TlhubError
from tlhub.problem import default, input_dtypes, make, symbols
from tlhub.specs import Arg, DeviceFacts, Dim, Kernel, Problem, Schedule, Target, Value
from tlhub.testing.modules import unnamed_sources
from tlhub.testing.numbers import check

_SIZES = (33, 64, 16, 128, 8, 1)
"""Extents tried for every required dim, until a schedule serves the problem; the first has no round tile."""

_MOST_BUILDS = 24
"""Problems that are built of one schedule on one target."""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. ``state``: ``ok``, ``failed`` or ``skipped``; ``detail`` says why."""

    subject: str
    state: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.state:<7} {self.subject}" + (f": {self.detail}" if self.detail else "")


@dataclass
class Report:
    """What ``conformance`` found, in the order in which it looked."""

    findings: list[Finding] = field(default_factory=list)

    def add(self, subject: str, fault: str | None = None) -> None:
        self.findings.append(Finding(subject, "failed" if fault else "ok", fault or ""))

    def skip(self, subject: str, why: str) -> None:
        self.findings.append(Finding(subject, "skipped", why))

    @property
    def failed(self) -> list[Finding]:
        return [f for f in self.findings if f.state == "failed"]

    def __str__(self) -> str:
        return "\n".join(map(str, self.findings))


def conformance(
    plugin: str | ModuleType, *, build: bool = True, thorough: bool = True, archs: Sequence[str] = ()
) -> Report:
    """Look at everything that the installed *plugin* (its module, or the module's name) declares.

    The hooks must return valid records; every import path must name a function in a fresh process; every
    module of the plugin that a program imports must be among its schedule's sources. Of each schedule whose
    target has a device here, one small problem is built and checked against the reference, then one for each
    dtype and each value of an option that its ``supports`` accepts, the rest as it was: at most 24 builds a
    schedule. *thorough* False leaves it at the first, *build* False builds none. Where a target has no device here,
    the first is built for each of *archs* that is its, ``cuda:sm_90a``, and not run. Raises AssertionError that lists
    all that failed, UnknownName for an arch that there is not.
    """
    name = plugin if isinstance(plugin, str) else plugin.__name__
    catalog = catalogs.load()
    found = next((p for p in catalog.plugins if p.module.partition(":")[0] == name), None)
    if found is None:
        names = ", ".join(p.module for p in catalog.plugins)
        raise AssertionError(f"{name!r} is no installed plugin; those that are: {names}")
    report = Report()
    most = (_MOST_BUILDS if thorough else 1) if build else 0
    work = _Work(catalog, report, most, [locate(catalog, arch=arch) for arch in archs])
    report.add(f"plugin {found.name}", found.error)
    for refused in found.refused:
        report.add(f"plugin {found.name}", refused)
    for kernel in found.kernels:
        report.add(f"kernel {kernel.name}", _kernel_fault(kernel))
    for target in found.targets:
        report.add(f"target {target.name}", _target_fault(target))
    _imports(found, report)
    for schedule in found.schedules:
        _schedule(work, found, schedule)
    if report.failed:
        raise AssertionError("\n".join(["the plugin does not conform:", *map(str, report.failed)]))
    return report


# -- records ---------------------------------------------------------------------------------------


def _kernel_fault(kernel: Kernel) -> str | None:
    """Return what is inconsistent in a contract, or None."""
    dims = {d.name: d for d in kernel.dims}
    options = {o.name: o for o in kernel.options}
    names = [*[d.name for d in kernel.dims], *[s.name for s in kernel.scalars], *options]
    twice = sorted({n for n in names if names.count(n) > 1})
    if twice:
        return f"the name {twice[0]!r} is declared twice among its dims, options and scalars"
    for arg in (*kernel.inputs, *kernel.outputs):
        for dim in arg.dims:
            without = next((n for n, v in dims[dim].when.items() if n not in arg.when or arg.when[n] != v), None)
            if without:
                return f"argument {arg.name!r} has dim {dim!r}, which exists when {without}={dims[dim].when[without]!r}"
        if arg.dtype.startswith("as:") and arg.dtype.removeprefix("as:") not in [a.name for a in kernel.inputs]:
            return f"argument {arg.name!r} has dtype {arg.dtype!r}, which names no input"
    conditional: tuple[Dim | Arg, ...] = (*kernel.dims, *kernel.inputs, *kernel.outputs)
    for what in conditional:
        for name, value in what.when.items():
            if name not in options or value not in options[name].choices:
                return f"{what.name!r} exists when {name}={value!r}, which no option allows"
    for option in kernel.options:
        fault = next((d for d in kernel.dtypes if default(option, d) not in option.choices), None)
        if fault:
            return f"option {option.name!r} has no valid default for dtype {fault!r}"
    for pattern in kernel.patterns:
        unknown = [d for d in pattern if d not in dims]
        if unknown:
            return f"a pattern names dim {unknown[0]!r}, which the kernel does not declare"
    try:
        flops = kernel.flops(dict.fromkeys(dims, 2))
    except Exception as error:
        return f"flops() failed for dims of 2: {type(error).__name__}: {error}"
    return None if flops >= 0 else f"flops() is {flops!r} for dims of 2"


def _target_fault(target: Target) -> str | None:
    for arch in target.archs:
        if target.canonical(arch) is None:
            return f"canonical({arch!r}) is None, and {arch!r} is listed"
    for facts in target.devices():
        if facts.arch.partition(":")[0] != target.name:
            return f"a device has arch {facts.arch!r}, which is not of the target"
        if target.runs(facts.arch, facts) is not None:
            return f"a device does not run its own arch {facts.arch!r}"
    return None


# -- import paths ----------------------------------------------------------------------------------

_IMPORT = """
import importlib, json, sys
found = {}
sys.modules.update(dict.fromkeys(sys.argv[1:]))  # hidden
for path in json.load(sys.stdin):
    module, _, name = path.partition(":")
    try:
        if not callable(getattr(importlib.import_module(module), name)):
            found[path] = f"{name} is not callable"
    except ImportError as error:
        found[path] = f"missing {error.name}" if error.name else str(error)
    except Exception as error:
        found[path] = f"{type(error).__name__}: {error}"
print("\\n" + json.dumps(found))
"""


def _imports(plugin: plugins.Plugin, report: Report) -> None:
    paths = {path: "" for k in plugin.kernels for path in (k.reference, k.tolerance, k.prepare) if path}
    paths |= {t.assemble: "" for t in plugin.targets}
    paths |= {path: name for k in plugin.kernels for name, path in k.peers.items()}
    _import(plugin, paths, report)
    programs = {s.program: s.toolchain for s in plugin.schedules}
    for toolchain in sorted(set(programs.values())):  # one a process, as in workers: two would not bear each other
        hidden = () if toolchain == "tilelang" else ("torch",)  # as there: TVM would import it, which takes seconds
        _import(plugin, {path: toolchain for path, t in programs.items() if t == toolchain}, report, hidden)


def _import(plugin: plugins.Plugin, paths: Mapping[str, str], report: Report, hidden: Sequence[str] = ()) -> None:
    """Import *paths* in a fresh process without *hidden*; each may lack the package that it is mapped to."""
    if not paths:
        return
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}\n{_IMPORT}", *hidden],
        input=json.dumps(list(paths)),
        capture_output=True,
        text=True,
    )
    if done.returncode:
        report.add(f"imports of {plugin.name}", f"a fresh process ended with {done.returncode}: {done.stderr[-500:]}")
        return
    faults: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    for path, needed in paths.items():
        fault = faults.get(path)
        if fault and needed and fault.partition(".")[0] == f"missing {needed}":
            report.skip(f"import {path}", f"{needed} is not installed")
        else:
            report.add(f"import {path}", fault)


# -- schedules -------------------------------------------------------------------------------------


class _Work(NamedTuple):
    """``builds``: how many problems are built at most of a schedule on a target; ``places``: of devices elsewhere."""

    catalog: catalogs.Catalog
    report: Report
    builds: int
    places: Sequence[Place]


def _schedule(work: _Work, plugin: plugins.Plugin, schedule: Schedule) -> None:
    catalog, report = work.catalog, work.report
    subject = f"schedule {schedule.kernel}/{schedule.name}"
    if schedule.toolchain not in FRONTENDS:
        known = ", ".join(sorted(FRONTENDS))
        report.add(f"{subject} toolchain", f"there is no toolchain {schedule.toolchain!r}; those that are: {known}")
    module = schedule.program.partition(":")[0]
    try:
        top = plugin.module.partition(":")[0]
        missing = unnamed_sources(module, schedule.sources or (module,), top, plugin.distribution)
    except (ImportError, SyntaxError) as error:
        report.add(f"{subject} sources", f"{type(error).__name__}: {error}")
        return
    report.add(
        f"{subject} sources",
        f"its program imports {', '.join(missing)}; name it in sources, or a change there finds the old binary"
        if missing
        else None,
    )
    served = schedule.kernel if schedule.kernel in catalog.kernels else f"{plugin.distribution}:{schedule.kernel}"
    kernel = catalog.kernels.get(served)
    if kernel is None:
        report.skip(subject, f"kernel {schedule.kernel!r} is not installed")
        return
    if not work.builds:
        report.skip(subject, "not asked to build")
        return
    for name in schedule.targets:
        _serve(work, schedule, kernel, name, f"{subject} on {name}")


def _serve(work: _Work, schedule: Schedule, kernel: Kernel, target: str, subject: str) -> None:
    report, builds = work.report, work.builds
    if target not in work.catalog.targets:
        report.skip(subject, f"no installed plugin brings target {target!r}")
        return
    devices = work.catalog.targets[target].devices()
    if not devices:
        named = [place for place in work.places if place.target.name == target]
        if not named:
            report.skip(subject, f"target {target!r} has no device here; name what to compile for in archs")
        for place in named:
            _small(work, schedule, kernel, place.facts, f"{subject}, compiled for {place.arch}", arch=place.arch)
        return
    device = f"{target}:{devices[0].index}"
    small = _small(work, schedule, kernel, devices[0], subject, device=device)
    if small is None or builds == 1:
        return
    seen = {small}
    for name, candidates in _variations(kernel, small):
        found, reasons = _first_served(schedule, devices[0], candidates)
        if found in seen:
            continue
        if found is None:  # a parameter is obeyed or refused, and both are fine
            report.findings.append(Finding(f"{subject}: {name}", "ok", "refused: " + "; ".join(reasons)))
        elif len(seen) == builds:
            report.skip(f"{subject}: {name}", f"{builds} problems were built")
        else:
            seen.add(found)
            report.add(f"{subject}: {name}", _fault(schedule, kernel, found, device=device))


def _small(
    work: _Work, schedule: Schedule, kernel: Kernel, facts: DeviceFacts, subject: str, **place: str
) -> Problem | None:
    """Report on the first small problem that *schedule* serves on a device with *facts*, and return it."""
    small, reasons = _first_served(schedule, facts, _problems(kernel, kernel.dtypes, {}))
    none = "it serves no small problem: " + "; ".join(reasons)
    work.report.add(subject, none if small is None else _fault(schedule, kernel, small, **place))
    return small


def _fault(schedule: Schedule, kernel: Kernel, problem: Problem, **place: str) -> str | None:
    """Build *problem* with *schedule* for a place, *device* or *arch*; hold what a device runs against the reference.

    Return what is wrong, or None.
    """
    from tlhub import hub

    asked: dict[str, Any] = {**place, "schedule": schedule.name, **problem.option}
    try:
        made = hub.get(kernel.name, problem.dim, input_dtypes(kernel, problem.dtypes), **asked)
        if "device" in place:
            check(made, kernel=kernel, device=place["device"])
    except (AssertionError, TlhubError) as error:
        return str(error)
    except Exception as error:  # of the plugin's reference or tolerance, say
        return f"{type(error).__name__}: {error}"
    return None


def _variations(kernel: Kernel, base: Problem) -> Iterable[tuple[str, Iterable[Problem]]]:
    """Yield each other dtype and each other value of an option by name, with the problems that may show it.

    An option is varied for the dtype of *base* first, then for the others: some values are for some dtypes only.
    """
    others = [d for d in kernel.dtypes if d != base.dtype]
    for dtype in others:
        yield f"dtype={dtype!r}", _problems(kernel, (dtype,), {})
    for option in kernel.options:
        for value in option.choices:
            if value != base.option[option.name]:
                yield f"{option.name}={value!r}", _problems(kernel, (base.dtype, *others), {option.name: value})


def _first_served(schedule: Schedule, facts: Any, candidates: Iterable[Problem]) -> tuple[Problem | None, list[str]]:
    """Return the first of *candidates* that *schedule* serves on a device with *facts*, else why it serves none."""
    reasons: set[str] = set()
    for candidate in candidates:
        try:
            reason = schedule.supports(candidate, facts)
            if reason is None and schedule.configs(candidate, facts):
                return candidate, []
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
        reasons.add(reason or "no config fits")
    return None, sorted(reasons) or ["the contract allows no such problem"]


def _problems(kernel: Kernel, dtypes: Iterable[str], options: Mapping[str, Value]) -> Iterable[Problem]:
    """Yield the small problems of *dtypes* and *options* that the contract allows."""
    for dtype in dtypes:
        there = symbols(kernel, dtype, options)
        required = [d.name for d in kernel.dims if d.default is None and d.name in there]
        for size in _SIZES:
            with contextlib.suppress(ArgumentError):
                yield make(kernel, dict.fromkeys(required, size), dtype, options)
