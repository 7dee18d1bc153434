"""Wheels of binaries: a plugin with a read-only store, and the list of what that covers.

The wheel is built by hatchling from a project that is written for it. What says when and how long an entry was built is
left out of its manifest, so that the same sources and the same compilers give the same bytes; of one that somebody
signed nothing is, and its signatures go with it.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tlhub.cache import signature, vouching
from tlhub.cache.entry import Entry
from tlhub.cache.manifest import MANIFEST, Manifest
from tlhub.catalog import Catalog
from tlhub.errors import ArgumentError, BuildError, CacheError
from tlhub.explanation import problem_json
from tlhub.files import write_whole
from tlhub.needs import need, requirement
from tlhub.packaging.cover import Served
from tlhub.plugins import CORE
from tlhub.specs import Need

_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
_VERSION = re.compile(r"[0-9]+(\.[0-9]+)*((a|b|rc)[0-9]+)?(\.post[0-9]+)?(\.dev[0-9]+)?")
_KEPT = ("tlhub", "plugin", "plugin_version")
_OLDEST_GLIBC = (2, 17)  # of what is named manylinux on every machine

_PROJECT = """\
[build-system]
requires = ["hatchling>=1.26"]
build-backend = "hatchling.build"

[project]
name = {name}
version = {version}
description = {summary}
readme = "README.md"
requires-python = ">=3.10"
dependencies = {dependencies}

[project.entry-points.tlhub]
{short} = {module}

[tool.hatch.build]
ignore-vcs = true

[tool.hatch.build.targets.wheel]
packages = [{module}]
core-metadata-version = "2.3"

[tool.hatch.build.targets.wheel.hooks.custom]
path = "tag.py"
"""
_TAG = """\
from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class Tag(BuildHookInterface):
    def initialize(self, version, build_data):
        build_data.update(tag={tag!r}, pure_python=False)
"""
_PLUGIN = '''\
"""{summary}"""

from pathlib import Path

from tlhub.hooks import hookimpl
from tlhub.specs import Need, PrebuiltStore

TLHUB_API = 1


@hookimpl
def tlhub_stores():
    needs = (
{needs}    )
    return [PrebuiltStore({name!r}, str(Path(__file__).resolve().with_name("store")), needs)]
'''
_FINDS = """
tlhub finds them once this is installed, and compiles nothing of what they cover: `coverage.json` in the package lists
every problem.
"""


@dataclass(frozen=True)
class Package:
    """What a wheel is to be. ``tag``: of its platform; ``signatures``: by the manifest's SHA-256 and the key's id."""

    name: str
    version: str
    archs: tuple[str, ...]
    manifests: tuple[Manifest, ...]
    needs: tuple[Need, ...]
    tag: str
    signatures: Mapping[str, Mapping[str, bytes]]

    @property
    def module(self) -> str:
        return self.name.replace("-", "_")

    @property
    def summary(self) -> str:
        kernels = sorted({manifest.kernel for manifest in self.manifests})
        return f"Prebuilt kernels of tlhub for {', '.join(self.archs)}: {', '.join(kernels)}"

    def to_json(self) -> dict[str, Any]:
        """Return the coverage list."""
        return {
            "name": self.name,
            "version": self.version,
            "tag": self.tag,
            "archs": list(self.archs),
            "needs": [requirement(wanted) for wanted in self.needs],
            "revisions": _revisions(self.manifests),
            "entries": [
                {**_covered(manifest), "signed_by": sorted(self.signatures.get(manifest.sha256, ()))}
                for manifest in self.manifests
            ],
        }


def name_of(archs: Sequence[str], name: str | None = None) -> str:
    """Return the distribution's name: ``tlhub-prebuilt-NAME-sm90a``, of several archs ``tlhub-prebuilt-NAME-cuda``.

    Raises ArgumentError for a name that is none, and for archs of several targets: one package is for one kind of
    device.
    """
    if name is not None and not _NAME.fullmatch(name):
        near = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-0123456789")
        raise ArgumentError(
            f"the package's name is {name!r}; a name is lower-case letters and digits in words joined by '-', "
            "and begins with a letter",
            argument="name",
            hint=f"--name {near or 'my-kernels'}",
        )
    targets = sorted({arch.partition(":")[0] for arch in archs})
    if len(targets) > 1:
        raise ArgumentError(
            f"the problems are for {', '.join(archs)}; one package is for archs of one target",
            argument="arch",
            hint=f"--arch {archs[0]}",
        )
    place = archs[0].partition(":")[2].replace("_", "") if len(archs) == 1 else targets[0]
    return "-".join(["tlhub-prebuilt", *([name] if name else []), place])


def check(archs: Sequence[str], name: str | None, version: str | None) -> None:
    """Raise ArgumentError for what is wrong with a package, BuildError without hatchling: before a kernel is built."""
    name_of(archs, name)
    if version is not None and not _VERSION.fullmatch(version):
        raise ArgumentError(
            f"the package's version is {version!r}; a version is numbers joined by '.', such as 1.2 or 1.2.0rc1",
            argument="version",
            hint="--version 1.0",
        )
    if importlib.util.find_spec("hatchling") is None:
        raise BuildError("wheels are built by hatchling, which is missing", hint="pip install 'tlhub-core[package]'")


def plan(served: Iterable[Served], catalog: Catalog, name: str | None = None, version: str | None = None) -> Package:
    """Return the package of *served*; *version* is by default that of tlhub-core.

    Raises ArgumentError, CacheError for a platform without a tag and for a signature that does not hold, and BuildError
    for entries that were built of other sources than those installed.
    """
    served = sorted(served, key=lambda found: found.entry.manifest.folder)
    old = next((found for found in served if not found.current), None)
    if old:
        raise BuildError(
            f"entry {old.entry.key[:16]} of {old.schedule.kernel}/{old.schedule.name} was built of other sources "
            "than those installed",
            hint="export TLHUB_MATCH=compatible  # and the same again: it is then built anew",
        )
    entries = [found.entry for found in served]
    lists = functools.cache(signature.listed)
    signatures = {entry.manifest.sha256: found for entry in entries if (found := _signatures(entry, lists))}
    manifests = tuple(m if m.sha256 in signatures else _without_time(m) for m in (entry.manifest for entry in entries))
    archs = tuple(sorted({manifest.arch for manifest in manifests}))
    brought = {p.distribution: p.version for p in catalog.plugins}
    wanted = {CORE} | {catalog.owner(found.schedule).distribution for found in served}
    wanted |= {p.distribution for p in catalog.plugins for k in p.kernels if k.name in {m.kernel for m in manifests}}
    needs = tuple(need(distribution, brought[distribution]) for distribution in sorted(wanted))
    tag = tag_of(manifests)
    return Package(name_of(archs, name), version or brought[CORE], archs, manifests, needs, tag, signatures)


def tag_of(manifests: Iterable[Manifest]) -> str:
    """Return the wheel's tag: any Python, and a platform with the glibc that the entries need.

    Raises CacheError for entries of several platforms, or of one that wheels of theirs cannot name.
    """
    platforms = sorted({(m.platform.get("os", ""), m.platform.get("machine", "")) for m in manifests})
    if len(platforms) != 1 or platforms[0][0] != "linux":
        found = ", ".join(" ".join(platform) for platform in platforms)
        raise CacheError(f"a wheel is for one machine under Linux; these entries are for {found}")
    needed = [tuple(map(int, m.glibc.split("."))) for m in manifests if m.glibc]
    major, minor, *_ = max([_OLDEST_GLIBC, *needed])
    return f"py3-none-manylinux_{major}_{minor}_{platforms[0][1]}"


def write(package: Package, served: Iterable[Served], folder: str) -> str:
    """Build the wheel of *package*, with the bytes of *served*, in *folder*, and return its path.

    Raises Damaged for an entry that is not whole, BuildError where hatchling fails, and CacheError.
    """
    entries = {found.entry.key: found.entry for found in served}
    with tempfile.TemporaryDirectory(prefix="tlhub-package-") as project:
        inside = Path(project, package.module)
        for manifest in package.manifests:
            place = inside / "store" / manifest.folder
            place.mkdir(parents=True)
            (place / MANIFEST).write_bytes(manifest.to_bytes())
            for member in manifest.members:
                (place / member).write_bytes(entries[manifest.build_digest].read(member))
        for digest, found in package.signatures.items():
            for signer, made in found.items():
                place = inside / "store" / signature.SIGNATURES / signature.file_name(digest, signer)
                place.parent.mkdir(exist_ok=True)
                place.write_bytes(signature.to_text(made))
        (inside / "__init__.py").write_text(_plugin(package), "utf-8")
        (inside / "coverage.json").write_text(json.dumps(package.to_json(), indent=1) + "\n", "utf-8")
        Path(project, "pyproject.toml").write_text(_project(package), "utf-8")
        Path(project, "tag.py").write_text(_TAG.format(tag=package.tag), "utf-8")
        Path(project, "README.md").write_text(_readme(package), "utf-8")
        return _build(project, folder)


def _build(project: str, folder: str) -> str:
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", "dist"]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, check=False)
    if done.returncode:
        said = "\n".join((done.stdout + done.stderr).strip().splitlines()[-5:])
        raise BuildError(f"hatchling failed:\n{said}", hint="pip install --upgrade hatchling")
    (made,) = Path(project, "dist").iterdir()
    path = os.path.join(folder, made.name)
    try:
        os.makedirs(folder, exist_ok=True)
        write_whole(path, made.read_bytes())
    except OSError as error:
        hint = f"df -h {shlex.quote(folder)}"
        raise CacheError(f"the wheel {path!r} cannot be written: {error.strerror or error}", hint=hint) from error
    return path


def _signatures(entry: Entry, lists: Callable[[str], signature.Listed]) -> Mapping[str, bytes]:
    """Return the signatures that lie beside *entry*, by key. Raises CacheError for one that does not hold."""
    good, wrong = vouching.sift(entry.manifest, signature.beside(entry, lists))
    if wrong:
        raise CacheError(f"entry {entry.key[:16]} cannot be packed with {wrong[0]}", hint="tlhub trust sign --key NAME")
    return good


def _without_time(manifest: Manifest) -> Manifest:
    return replace(manifest, provenance={k: v for k, v in manifest.provenance.items() if k in _KEPT})


def _project(package: Package) -> str:
    quoted = {
        "name": package.name,
        "version": package.version,
        "summary": package.summary,
        "dependencies": [requirement(wanted) for wanted in package.needs],
        "module": package.module,
    }
    short = package.module.removeprefix("tlhub_")
    return _PROJECT.format(short=short, **{name: json.dumps(value) for name, value in quoted.items()})


def _plugin(package: Package) -> str:
    needs = "".join(f"        {wanted!r},\n" for wanted in package.needs)
    return _PLUGIN.format(summary=package.summary, name=package.name, needs=needs)


def _readme(package: Package) -> str:
    head = f"# {package.name}\n\n{package.summary}.\n\n"
    head += "| kernel | schedule | arch | binaries |\n| --- | --- | --- | --- |\n"
    row = "| {kernel}, revision {kernel_revision} | {schedule}, revision {schedule_revision} | {arch} | {entries} |\n"
    return head + "".join(row.format(**revision) for revision in _revisions(package.manifests)) + _FINDS


def _revisions(manifests: Iterable[Manifest]) -> list[dict[str, Any]]:
    counts = Counter((m.kernel, m.kernel_revision, m.schedule, m.schedule_revision, m.arch) for m in manifests)
    names = ("kernel", "kernel_revision", "schedule", "schedule_revision", "arch")
    return [{**dict(zip(names, what, strict=True)), "entries": count} for what, count in sorted(counts.items())]


def _covered(manifest: Manifest) -> dict[str, Any]:
    return {
        **problem_json(manifest.problem),
        "kernel_revision": manifest.kernel_revision,
        "arch": manifest.arch,
        "schedule": manifest.schedule,
        "schedule_revision": manifest.schedule_revision,
        "covers": {dim: dict(limits) for dim, limits in manifest.covers.items()},
        "least_driver": manifest.least_driver,
        "glibc": manifest.glibc,
        "abi": manifest.abi,
        "key": manifest.build_digest,
    }
