"""``kernels``, ``schedules``, ``targets``, ``plugins``: what is installed, as tables and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from tlhub.cli import output
from tlhub.cli.command import Command, json_option, show
from tlhub.specs import Arg, Kernel, Schedule, Target, Value

if TYPE_CHECKING:
    from tlhub.catalog import Catalog


@click.command(cls=Command)
@click.argument("kernel", required=False)
@json_option
def kernels(kernel: str | None, as_json: bool) -> None:
    """List the kernels, or show one KERNEL's contract: dims, arguments, options, scalars."""
    from tlhub import catalog

    known = catalog.load()
    if kernel is not None:
        found = known.kernel(kernel)
        if as_json:
            output.write_json(_kernel_json(found, known.schedules.get(found.name, ())))
        else:
            _show_contract(found, known.schedules.get(found.name, ()))
        return
    if as_json:
        output.write_json([_kernel_json(k, known.schedules.get(k.name, ())) for k in known.kernels.values()])
        return
    rows = [
        (k.name, k.revision, _dims(k), ", ".join(k.dtypes), len(known.schedules.get(k.name, ())), _summary(k.doc))
        for k in known.kernels.values()
    ]
    columns = ["kernel", "revision", "dims", "dtypes", "schedules", "summary"]
    output.table(columns, rows, right=["revision", "schedules"])


@click.command(cls=Command)
@click.argument("kernel", required=False)
@json_option
def schedules(kernel: str | None, as_json: bool) -> None:
    """List the schedules, those of one KERNEL if it is named; of those for a GPU, what was measured."""
    from tlhub import catalog

    known = catalog.load()
    chosen = {kernel: known.schedules.get(known.kernel(kernel).name, ())} if kernel else known.schedules
    found = [s for group in chosen.values() for s in group]
    if as_json:
        output.write_json([_schedule_json(s, known) for s in found])
        return
    rows = [
        (
            s.kernel,
            s.name,
            s.revision,
            s.kernel_revision,
            ", ".join(s.targets),
            s.toolchain,
            s.priority,
            " ".join(s.symbolic) or "as asked",
            known.owner(s).distribution,
            _certificate(s, known),
        )
        for s in found
    ]
    columns = ["kernel", "schedule", "revision", "of kernel", "targets", "toolchain", "priority", "symbolic"]
    output.table([*columns, "from", "certificate"], rows, right=["revision", "of kernel", "priority"])


@click.command(cls=Command)
@json_option
def targets(as_json: bool) -> None:
    """List the targets, their archs, and the devices that are here."""
    from tlhub import catalog

    found = sorted(catalog.load().targets.values(), key=lambda t: (-t.rank, t.name))
    if as_json:
        output.write_json([_target_json(t) for t in found])
        return
    rows = []
    for target in found:
        here = [f"{target.name}:{f.index} {f.model} ({f.arch}, {f.cores} cores)" for f in target.devices()]
        rows.append((target.name, target.rank, "; ".join(here) or "none", ", ".join(target.archs)))
    output.table(["target", "rank", "devices here", "archs"], rows, right=["rank"])


@click.command(cls=Command)
@json_option
def plugins(as_json: bool) -> None:
    """List the plugins that were found: what each brings, or why it does not work."""
    from tlhub import catalog

    found = catalog.load().plugins
    if as_json:
        output.write_json([p.to_json() for p in found])
        return
    rows = []
    for plugin in found:
        brings = [
            f"{kind} {', '.join(sorted({r.name for r in records}))}"
            for kind, records in (
                ("kernels", plugin.kernels),
                ("targets", plugin.targets),
                ("schedules", plugin.schedules),
                ("stores", plugin.stores),
            )
            if records
        ]
        version = plugin.version + (" (editable)" if plugin.editable else "")
        rows.append((plugin.name, plugin.distribution, version, plugin.status, "; ".join(brings) or "nothing"))
    output.table(["plugin", "distribution", "version", "status", "brings"], rows)
    for plugin in found:
        for reason in [*([plugin.error] if plugin.error else []), *plugin.refused]:
            output.write(f"{plugin.name} of {plugin.distribution}: {reason}")


# -- records as rows and as JSON -------------------------------------------------------------------


def _show_contract(kernel: Kernel, schedules: tuple[Schedule, ...]) -> None:
    output.fields(
        [
            ("kernel", f"{kernel.name}, revision {kernel.revision}"),
            ("dims", _dims(kernel)),
            ("dtypes", ", ".join(kernel.dtypes)),
            ("inputs", _args(kernel.inputs)),
            ("outputs", _args(kernel.outputs)),
            ("scalars", ", ".join(f"{s.name}={s.default} ({s.kind})" for s in kernel.scalars) or "none"),
            ("schedules", ", ".join(s.name for s in schedules) or "none"),
            ("peers", ", ".join(kernel.peers) or "none"),
        ]
    )
    if kernel.options:
        output.write("")
        rows = [(o.name, ", ".join(map(show, o.choices)), _default(o.default), o.doc) for o in kernel.options]
        output.table(["option", "choices", "default", "meaning"], rows)
    if kernel.doc:
        output.write(f"\n{kernel.doc.strip()}")


def _dims(kernel: Kernel) -> str:
    return " ".join(
        d.name + ("" if d.default is None else f"={d.default}") + _when(d.when, "[", "]") for d in kernel.dims
    )


def _args(args: tuple[Arg, ...]) -> str:
    """Return the arguments with their dims and options; those that differ in dtype alone are one."""
    found: dict[str, dict[str, Value]] = {}
    for arg in args:
        shown = f"{arg.name}({', '.join(arg.dims)})"
        others = found.setdefault(shown, dict(arg.when))
        found[shown] = {name: value for name, value in others.items() if arg.when.get(name, value) == value}
    return "; ".join(shown + _when(when, " ") for shown, when in found.items())


def _when(when: Mapping[str, Value], before: str, after: str = "") -> str:
    """Return under which options there is an argument or dim, "" for all."""
    values = " and ".join(f"{name}={show(value)}" for name, value in when.items())
    return f"{before}if {values}{after}" if values else ""


def _default(default: Any) -> str:
    if isinstance(default, dict):
        by_value: dict[str, list[str]] = {}
        for dtype, value in default.items():
            by_value.setdefault(show(value), []).append(dtype)
        return "; ".join(f"{value} for {', '.join(dtypes)}" for value, dtypes in by_value.items())
    return show(default)


def _summary(doc: str) -> str:
    return doc.strip().partition("\n")[0]


def _kernel_json(kernel: Kernel, schedules: tuple[Schedule, ...]) -> dict[str, Any]:
    def args(found: tuple[Arg, ...]) -> list[dict[str, Any]]:
        return [{"name": a.name, "dims": list(a.dims), "dtype": a.dtype, "when": dict(a.when)} for a in found]

    return {
        "name": kernel.name,
        "revision": kernel.revision,
        "dims": [{"name": d.name, "default": d.default, "elide": d.elide, "when": dict(d.when)} for d in kernel.dims],
        "dtypes": list(kernel.dtypes),
        "inputs": args(kernel.inputs),
        "outputs": args(kernel.outputs),
        "options": [
            {
                "name": o.name,
                "choices": list(o.choices),
                "default": dict(o.default) if isinstance(o.default, dict) else o.default,
                "doc": o.doc,
            }
            for o in kernel.options
        ],
        "scalars": [{"name": s.name, "kind": s.kind, "default": s.default} for s in kernel.scalars],
        "patterns": [list(p) for p in kernel.patterns],
        "peers": list(kernel.peers),
        "schedules": [s.name for s in schedules],
        "doc": kernel.doc,
    }


def _certificate(schedule: Schedule, known: Catalog) -> str:
    """Return in short what proves a schedule's numbers."""
    from tlhub import certificates

    if schedule.experimental:
        return "experimental"
    if not certificates.needed(known, schedule):
        return "not needed"
    found = certificates.find(schedule)
    if found is None:
        return "missing"
    ratio = "" if found.ratio is None else f", {found.ratio:.2f} of its peer at least"
    return f"{found.device} {found.date}: {found.worst:.2g} of the tolerance at most{ratio}"


def _schedule_json(schedule: Schedule, known: Catalog) -> dict[str, Any]:
    from tlhub import certificates

    needed = certificates.needed(known, schedule)
    found = certificates.find(schedule) if needed else None
    return {
        "kernel": schedule.kernel,
        "name": schedule.name,
        "revision": schedule.revision,
        "kernel_revision": schedule.kernel_revision,
        "targets": list(schedule.targets),
        "toolchain": schedule.toolchain,
        "priority": schedule.priority,
        "symbolic": list(schedule.symbolic),
        "program": schedule.program,
        "sources": list(schedule.sources),
        "experimental": schedule.experimental,
        "needs_certificate": needed,
        "certificate": found and found.to_json(),
        "distribution": known.owner(schedule).distribution,
        "doc": schedule.doc,
    }


def _target_json(target: Target) -> dict[str, Any]:
    return {
        "name": target.name,
        "rank": target.rank,
        "archs": list(target.archs),
        "native": target.canonical("native"),
        "devices": [
            {
                "device": f"{target.name}:{f.index}",
                "arch": f.arch,
                "model": f.model,
                "cores": f.cores,
                "shared_memory": f.shared_memory,
                "l2": f.l2,
                "bandwidth": f.bandwidth,
                "driver": f.driver,
            }
            for f in target.devices()
        ],
        "models": list(target.models),
        "doc": target.doc,
    }
