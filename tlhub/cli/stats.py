"""``cache stats``: what look-ups came to, in all processes, and what the cache holds."""

from __future__ import annotations

import re
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import click

from tlhub.cli import output
from tlhub.cli.command import Command, json_option
from tlhub.cli.entries import items_of, root_of, user_store
from tlhub.errors import ArgumentError
from tlhub.quantity import age, size

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from tlhub.cache.store import Item


@click.command(cls=Command)
@json_option
@click.option("--prometheus", is_flag=True, help="In Prometheus' text format.")
@click.option("--zero", is_flag=True, help="Then count from nothing again.")
def stats(as_json: bool, prometheus: bool, zero: bool) -> None:
    """Show hits by tier, misses, builds, seconds saved and errors of all processes, and bytes by plugin and arch.

    A process adds what it counted when it has built something, and when it ends.
    """
    from tlhub.cache import stats as counted

    if as_json and prometheus:
        raise ArgumentError("--json and --prometheus are two forms of one document", hint="tlhub cache stats --json")
    store = user_store()
    root, items, told = root_of(store), items_of(store), counted.read(store)
    found = summary(told.counts, items)
    if as_json:
        output.write_json({"path": root, "since": told.since, **found})
    elif prometheus:
        output.write("\n".join(metrics(found)))
    else:
        _show(found, told.since, root)
    if zero:
        counted.zero(store)
        output.note("counting starts again")


def summary(counts: Mapping[str, float], items: Iterable[Item]) -> dict[str, Any]:
    """Return the document of ``--json``, but for where and since when."""
    held = Counter[tuple[str, str]]()
    number = Counter[tuple[str, str]]()
    for item in items:
        m = item.manifest
        who = (str(m.provenance.get("plugin", "?")), m.arch) if m else ("?", "?")
        held[who] += item.size
        number[who] += 1
    holds = [{"plugin": p, "arch": a, "entries": number[p, a], "size": held[p, a]} for p, a in sorted(held)]
    return {
        "hits": _group(counts, "hits."),
        "misses": int(counts.get("misses", 0)),
        "builds": int(counts.get("builds", 0)),
        "build_seconds": round(counts.get("build_seconds", 0.0), 3),
        "saved_seconds": round(counts.get("saved_seconds", 0.0), 3),
        "errors": _group(counts, "errors."),
        "entries": number.total(),
        "size": held.total(),
        "holds": holds,
    }


def metrics(found: Mapping[str, Any]) -> list[str]:
    """Return the lines of Prometheus' text format."""
    holds = [({"plugin": h["plugin"], "arch": h["arch"]}, h) for h in found["holds"]]
    families: list[tuple[str, str, str, list[tuple[Mapping[str, str], float]]]] = [
        (
            "hits_total",
            "counter",
            "look-ups that a tier answered",
            [({"tier": t}, n) for t, n in found["hits"].items()],
        ),
        ("misses_total", "counter", "look-ups that no tier answered", [({}, found["misses"])]),
        ("builds_total", "counter", "entries built", [({}, found["builds"])]),
        ("build_seconds_total", "counter", "seconds that builds took", [({}, found["build_seconds"])]),
        ("saved_seconds_total", "counter", "seconds of builds that hits saved", [({}, found["saved_seconds"])]),
        ("errors_total", "counter", "look-ups that failed", [({"class": c}, n) for c, n in found["errors"].items()]),
        ("entries", "gauge", "entries in the cache", [(labels, h["entries"]) for labels, h in holds]),
        ("size_bytes", "gauge", "bytes of the entries in the cache", [(labels, h["size"]) for labels, h in holds]),
    ]
    lines = []
    for name, kind, text, samples in families:
        lines += [f"# HELP tlhub_cache_{name} {text}", f"# TYPE tlhub_cache_{name} {kind}"]
        lines += [f"tlhub_cache_{name}{_labels(labels)} {value}" for labels, value in samples]
    return lines


def _labels(labels: Mapping[str, str]) -> str:
    shown = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())
    return f"{{{shown}}}" if shown else ""


def _escaped(text: str) -> str:
    return re.sub(r'([\\"])', r"\\\1", text).replace("\n", r"\n")


def _group(counts: Mapping[str, float], prefix: str) -> dict[str, int]:
    return {name.removeprefix(prefix): int(counts[name]) for name in sorted(counts) if name.startswith(prefix)}


def _show(found: Mapping[str, Any], since: float | None, root: str) -> None:
    def of(group: Mapping[str, int]) -> str:
        named = ", ".join(f"{name} {count}" for name, count in group.items())
        return f"{sum(group.values())}" + (f" ({named})" if named else "")

    output.fields(
        [
            ("hits", of(found["hits"])),
            ("misses", found["misses"]),
            ("builds", f"{found['builds']} in {found['build_seconds']:.1f} s"),
            ("saved", f"{found['saved_seconds']:.1f} s"),
            ("errors", of(found["errors"])),
            ("counted", "nothing yet" if since is None else f"for {age(time.time() - since)}"),
            ("entries", f"{found['entries']}, {size(found['size'])} in {root}"),
        ]
    )
    if found["holds"]:
        rows = [(h["plugin"], h["arch"], h["entries"], size(h["size"])) for h in found["holds"]]
        output.write("")
        output.table(["plugin", "arch", "entries", "size"], rows, right=["entries", "size"])
