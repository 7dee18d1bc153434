"""``doctor``: is everything here that tlhub needs, and if not, what to do."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from importlib import metadata

import click

from tlhub.cli import output
from tlhub.cli.command import FOUND_PROBLEMS, Command, json_option
from tlhub.errors import TlhubError, did_you_mean
from tlhub.specs import Finding

VARIABLES = (
    "TLHUB_CACHE_DIR",
    "TLHUB_CACHE_SIZE",
    "TLHUB_COMPILE",
    "TLHUB_DEVICE",
    "TLHUB_MATCH",
    "TLHUB_PINS",
    "TLHUB_RECORD",
    "TLHUB_STORES",
    "TLHUB_SIGNED",
    "TLHUB_OFFLINE",
    "TLHUB_NUM_THREADS",
    "TLHUB_DISABLE_PLUGINS",
    "TLHUB_DEBUG",
)
"""The environment variables that tlhub reads."""

_OLDEST_FFI = (0, 1, 11)
_PATIENCE = 120.0
"""Seconds that importing a compiler may take."""


@dataclass(frozen=True)
class Check:
    """One thing that was looked at. ``state``: ``ok``, ``warning`` (works, but) or ``failed``."""

    name: str
    state: str
    detail: str
    hint: str | None = None


@click.command(cls=Command)
@json_option
def doctor(as_json: bool) -> None:
    """Look at everything that tlhub needs, and say how to mend what is missing.

    Exits with 1 if a check fails; a warning is no failure.
    """
    checks = examine()
    failed = any(c.state == "failed" for c in checks)
    if as_json:
        output.write_json({"ok": not failed, "checks": [asdict(c) for c in checks]})
    else:
        for check in checks:
            output.write(f"{check.state:<8} {check.name:<12} {check.detail}")
            if check.hint:
                output.write(f"{'':<21} hint: {check.hint}")
    if failed:
        sys.exit(FOUND_PROBLEMS)


def examine() -> list[Check]:
    """Return every check's findings. A check that breaks is a failed one."""
    found: list[Check] = []
    for look in _LOOKS:
        try:
            found += look()
        except Exception as error:
            name = look.__name__.strip("_").replace("_", " ")
            found.append(Check(name, "failed", f"{type(error).__name__}: {error}", "TLHUB_DEBUG=1 tlhub doctor"))
    return found


# -- what is looked at -----------------------------------------------------------------------------


def _python() -> Iterable[Check]:
    version = platform.python_version()
    supported = (3, 10) <= sys.version_info[:2] <= (3, 13)
    detail = f"{platform.python_implementation()} {version}, tlhub-core {_version('tlhub-core')}"
    yield Check("python", "ok" if supported else "warning", detail, None if supported else "use Python 3.10 to 3.13")


def _platform() -> Iterable[Check]:
    machine, system = platform.machine(), platform.system()
    tested = system == "Linux" and machine in ("x86_64", "aarch64")
    libc = " ".join(platform.libc_ver()).strip()
    detail = f"{system} {machine}" + (f", {libc}" if libc else "")
    yield Check("platform", "ok" if tested else "warning", detail + ("" if tested else ": untested"))


def _tvm_ffi() -> Iterable[Check]:
    version = _version("apache-tvm-ffi")
    if version is None:
        yield Check("tvm-ffi", "failed", "not installed", "pip install apache-tvm-ffi")
    elif tuple(int(p) if p.isdigit() else 0 for p in version.split(".")[:3]) < _OLDEST_FFI:
        yield Check("tvm-ffi", "failed", f"{version} is too old", "pip install --upgrade apache-tvm-ffi")
    else:
        yield Check("tvm-ffi", "ok", version)


def _toolchains() -> Iterable[Check]:
    """Look only for what the installed schedules use: the rest cannot be missed."""
    from tlhub import catalog
    from tlhub.build.frontends import PACKAGES

    used = {s.toolchain for group in catalog.load().schedules.values() for s in group}
    for toolchain in sorted(used - {"cuda"}):  # that is nvcc, which its target looks for
        package = PACKAGES.get(toolchain, toolchain)
        version = _version(package)
        fault = _toolchain_fault(toolchain) if version else None
        if fault:
            hint: str | None = f"pip install --force-reinstall {package}"
            yield Check(toolchain, "failed", f"{package} {version}: {fault}", hint)
        elif version:
            yield Check(toolchain, "ok", f"{package} {version}")
        else:
            hint = f'pip install "tlhub-core[{toolchain}]"' if toolchain in PACKAGES else None
            yield Check(toolchain, "warning", f"not installed: what {toolchain} compiles is only found in stores", hint)


_PREPARE = """
import importlib, json, sys
sys.path[:] = json.loads(sys.argv[1])
importlib.import_module(sys.argv[2]).prepare()
"""


def _toolchain_fault(toolchain: str) -> str | None:
    """Return why the front end of *toolchain* cannot be made ready, as a worker would in a process of its own."""
    from tlhub.build.frontends import FRONTENDS
    from tlhub.build.process import import_path

    if toolchain not in FRONTENDS:
        return None
    argv = [sys.executable, "-I", "-c", _PREPARE, json.dumps(import_path()), FRONTENDS[toolchain]]
    try:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=_PATIENCE, check=False)
    except subprocess.TimeoutExpired:
        return f"importing it takes longer than {_PATIENCE:g} seconds"
    if not done.returncode:
        return None
    said = done.stderr.decode(errors="replace").strip().splitlines()
    lines = [line for line in said if not line.startswith(("hint:", " "))]
    return f"it cannot be imported: {lines[-1] if lines else f'exit code {done.returncode}'}"


def _compiler() -> Iterable[Check]:
    from tlhub.build.compiler import find

    try:
        yield Check("c compiler", "ok", find(platform.machine()).version)
    except TlhubError as error:
        yield Check("c compiler", "warning", _first_line(error) + ": nothing can be built", error.hint)


def _cache() -> Iterable[Check]:
    from tlhub.cache import listing, locks, mounts, staging, upkeep
    from tlhub.cache.store import LOCKS
    from tlhub.stores import user_store

    store = user_store()
    try:
        store.check()
    except TlhubError as error:
        yield Check("cache", "failed", _first_line(error), error.hint)
        return
    root = str(store.root)
    full = staging.no_room(root)
    if full:
        hint = "tlhub cache prune --max-size 1GiB, or TLHUB_CACHE_DIR=/a/folder/with/room"
        yield Check("cache", "failed", full, hint)
        return
    yield Check("cache", "ok", f"{root} (mode {os.stat(root).st_mode & 0o7777:04o}{staging.room(root)})")
    items = list(store.entries())
    found = (mounts.check(root), locks.check(f"{root}/{LOCKS}"), listing.check(items), upkeep.check(items))
    yield from map(_check, found)


def _plugins() -> Iterable[Check]:
    from tlhub import catalog, sources

    for plugin in catalog.load().plugins:
        if plugin.error:
            leave_out = f"export TLHUB_DISABLE_PLUGINS={plugin.name}"
            hint = leave_out if plugin.editable else f"pip install --upgrade {plugin.distribution}"
            yield Check("plugin", "failed", f"{plugin.name} of {plugin.distribution}: {plugin.error}", hint)
        elif faults := [*plugin.refused, *filter(None, map(sources.fault, plugin.schedules))]:
            yield Check("plugin", "warning", f"{plugin.name} of {plugin.distribution}: {'; '.join(faults)}")
        else:
            yield Check("plugin", "ok", f"{plugin.name} of {plugin.distribution} {plugin.version}")


def _devices() -> Iterable[Check]:
    from tlhub import catalog

    found = [(t, t.devices()) for t in catalog.load().targets.values()]
    if not any(devices for _, devices in found):
        yield Check("devices", "failed", "no target has a device here", "tlhub targets")
    for target, devices in found:
        here = ", ".join(f"{target.name}:{f.index} {f.model} ({f.arch}, {f.cores} cores)" for f in devices)
        detail = here or "no device here: kernels can be built for it, not called"
        why = target.absent()
        yield Check(f"target {target.name}", "ok", f"{detail} ({why})" if why else detail)
        yield from map(_check, target.checks())


def _environment() -> Iterable[Check]:
    set_here = sorted(name for name in os.environ if name.startswith("TLHUB_"))
    good: list[str] = []
    for name in set_here:
        found: list[Check] = []
        try:
            found += _read(name) if os.environ[name] else ()
        except TlhubError as error:
            text = _first_line(error)
            found.append(Check("environment", "failed", text if name in text else f"{name}: {text}", error.hint))
        yield from found
        if name in VARIABLES and all(c.state == "ok" for c in found):
            good.append(f"{name}={os.environ[name]!r}")
    if good or not set_here:
        yield Check("environment", "ok", ", ".join(good) or "nothing set")
    for name in set_here:
        if name not in VARIABLES:
            near = did_you_mean(name.removeprefix("TLHUB_"), [v.removeprefix("TLHUB_") for v in VARIABLES])
            hint = f"did you mean TLHUB_{near}?" if near else f"those that are: {', '.join(VARIABLES)}"
            yield Check("environment", "warning", f"{name} is set and is no variable of tlhub's", hint)


# -- the variables, each through what reads it: it raises what a lookup would ----------------------


def _read(name: str) -> Iterable[Check]:
    """Read a variable that is set. Raises what a lookup would."""
    from tlhub import builds, catalog, devices, pins, recording, stores
    from tlhub.cache import upkeep
    from tlhub.remote import registry
    from tlhub.runtime import threads

    lookups: dict[str, Callable[[], object]] = {
        "TLHUB_CACHE_SIZE": upkeep.limit,
        "TLHUB_COMPILE": builds.compiling_off,
        "TLHUB_DEVICE": lambda: devices.locate(catalog.load()),
        "TLHUB_MATCH": stores.match_policy,
        "TLHUB_NUM_THREADS": threads.num_threads,
        "TLHUB_OFFLINE": registry.offline,
        "TLHUB_PINS": lambda: pins.read(os.environ["TLHUB_PINS"]),
        "TLHUB_RECORD": lambda: recording.check(os.environ["TLHUB_RECORD"]),
    }
    more = {"TLHUB_STORES": _site_stores, "TLHUB_SIGNED": _signatures, "TLHUB_DISABLE_PLUGINS": _disabled_plugins}
    if name in lookups:
        lookups[name]()
    elif name in more:
        yield from more[name]()


def _site_stores() -> Iterable[Check]:
    from tlhub.cache import keyring
    from tlhub.stores import remote_stores, site_stores

    for store in remote_stores():
        try:
            store.check_readable()
            yield Check("store", "ok", store.name)
        except TlhubError as error:
            yield Check("store", "warning", f"{store.name}: {_first_line(error)}", error.hint)
    for store in site_stores():
        root = str(store.root)
        if not os.path.lexists(root):
            yield Check("store", "warning", f"{root} is not there", f"mkdir -p {shlex.quote(root)}")
            continue
        try:
            store.check_readable()
        except TlhubError as error:
            yield Check("store", "failed", _first_line(error), error.hint)
            continue
        refused = [item.reason for item in store.entries() if item.reason]
        if refused:
            text = f"{root}: {len(refused)} entries are not served, such as: {refused[0]}"
            yield Check("store", "warning", text, f"TLHUB_CACHE_DIR={shlex.quote(root)} tlhub cache verify")
        else:
            yield Check("store", "ok", root)
    asking = [store.name for store in (*site_stores(), *remote_stores()) if (store.signed or "off") != "off"]
    if asking:
        yield _check(keyring.check(", ".join(asking)))


def _signatures() -> Iterable[Check]:
    from tlhub.cache import keyring, vouching

    if vouching.policy() != "off":
        yield _check(keyring.check("TLHUB_SIGNED"))


def _disabled_plugins() -> Iterable[Check]:
    from tlhub import plugins

    known = sorted({name for pair in plugins.installed() for name in pair})
    for name in sorted(plugins.disabled().difference(known)):
        near = did_you_mean(name, known)
        hint = f"export TLHUB_DISABLE_PLUGINS={near}" if near else "tlhub plugins"
        yield Check("environment", "warning", f"TLHUB_DISABLE_PLUGINS: no plugin {name!r} is installed", hint)


_LOOKS: tuple[Callable[[], Iterable[Check]], ...] = (
    _python,
    _platform,
    _tvm_ffi,
    _toolchains,
    _compiler,
    _cache,
    _plugins,
    _devices,
    _environment,
)


def _check(found: Finding) -> Check:
    return Check(found.name, "ok" if found.ok else "warning", found.detail, found.hint)


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
