"""Workloads: lists of problems in TOML, for ``tlhub cache prewarm --from`` and its like.

[[problem]]
kernel = "gemm"
shape = [1024, 1024, 1024]              # or { M = 1024, N = 1024, K = 1024 }; a string is a symbol
dtype = "float32"                       # or { a = "float8_e4m3fn", b = "float8_e5m2" }
options = { trans_b = true }            # optional
arch = "cpu:x86-64-v3"                  # optional; default: the arch of the default device
schedule = "..."                        # optional

Lists of several are every combination of them: ``shapes``, ``dtypes``, ``archs``, ``schedules``, and ``options``, which
may be a table or a list of tables.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from tlhub.catalog import Catalog
from tlhub.devices import canonical_arch
from tlhub.errors import ArgumentError, TlhubError, UnknownName, suggest
from tlhub.problem import make
from tlhub.specs import Kernel, Value

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_KINDS: dict[str, tuple[tuple[type, ...], str, str]] = {
    # key -> types, what it is, an example
    "kernel": ((str,), "a name", '"gemm"'),
    "shape": ((list, dict), "a list of extents or a table of dim names", "[1024, 1024, 1024]"),
    "dtype": ((str, dict), "a dtype's name or a table of arguments to names", '"float32"'),
    "options": ((dict,), "a table", "{ trans_b = true }"),
    "arch": ((str,), "a name", '"cpu:native"'),
    "schedule": ((str,), "a name", '"blocked"'),
}
_SEVERAL = {"shapes": "shape", "dtypes": "dtype", "options": "options", "archs": "arch", "schedules": "schedule"}
"""Keys that hold a list, and what each of its values is."""

_REQUIRED = ("kernel", "shape", "dtype")
_EXAMPLE = r'[[problem]]\nkernel = "gemm"\nshape = ["M", "N", "K"]\ndtype = "float32"\n'


@dataclass(frozen=True)
class Item:
    """One problem for one arch (None: that of the default device), as ``tlhub.get`` takes it."""

    kernel: str
    shape: tuple[Any, ...] | dict[str, Any]
    dtype: str | dict[str, str]
    options: dict[str, Value]
    arch: str | None = None
    schedule: str | None = None

    def request(self) -> dict[str, Any]:
        """Return the keyword arguments of ``tlhub.get``."""
        return {
            "kernel": self.kernel,
            "shape": self.shape,
            "dtype": self.dtype,
            "arch": self.arch,
            "schedule": self.schedule,
            **self.options,
        }


@dataclass(frozen=True)
class Mistake:
    """A problem that cannot be asked for. ``where``: the file and the problem's number; ``error``: what is wrong."""

    where: str
    error: TlhubError

    def __str__(self) -> str:
        return f"{self.where}: {self.error}"


def read(path: str, catalog: Catalog) -> tuple[Item | Mistake, ...]:
    """Return the problems of the file *path*, one for each arch that a problem names, each checked against its
    kernel's contract; what is wrong with one leaves the others alone. Of a folder: those of its files ``*.toml``.

    Raises ArgumentError, which names the file, if it cannot be read or is no list of problems.
    """
    if os.path.isdir(path):
        files = sorted(f for f in os.listdir(path) if f.endswith(".toml"))
        if not files:
            text = f"workload {path!r} cannot be read: it is a folder without files *.toml"
            raise ArgumentError(text, argument="workload", hint=f"ls {shlex.quote(path)}")
        return tuple(item for file in files for item in read(os.path.join(path, file), catalog))
    try:
        with open(path, "rb") as file:
            text = file.read().decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        file_name = shlex.quote(path)
        missing = isinstance(error, FileNotFoundError)
        hint = f"printf '{_EXAMPLE}' > {file_name}" if missing else f"file {file_name}"
        raise ArgumentError(f"workload {path!r} cannot be read: {reason}", argument="workload", hint=hint) from error
    return parse(text, path, catalog)


def whole(path: str, catalog: Catalog) -> Iterator[Item]:
    """Iterate over the problems of *path*, all of which are needed: raises what is wrong with one, and says where."""
    for item in read(path, catalog):
        if isinstance(item, Mistake):
            raise type(item.error)(f"{item.where}: {item.error.message}", hint=item.error.hint) from item.error
        yield item


def parse(text: str, path: str, catalog: Catalog) -> tuple[Item | Mistake, ...]:
    """Return the problems of a workload's *text*; *path* is what errors call it. Raises ArgumentError."""
    example = f"printf '{_EXAMPLE}' >> {shlex.quote(path)}"
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        line = re.search(r"line ([0-9]+)", str(error))
        show = f"sed -n {line[1]}p" if line else "tail -n 1"
        hint = f"{show} {shlex.quote(path)}"
        raise ArgumentError(f"workload {path!r} is not TOML: {error}", argument="workload", hint=hint) from error
    unknown = next((name for name in document if name != "problem"), None)
    tables = document.get("problem", [])
    if unknown is not None or not isinstance(tables, list) or not all(isinstance(t, dict) for t in tables):
        what = f"it has {unknown!r}" if unknown is not None else "'problem' is no array of tables"
        raise ArgumentError(
            f"workload {path!r}: {what}; it holds [[problem]] tables and nothing else",
            argument=unknown or "problem",
            hint=f"grep -n {shlex.quote(unknown or 'problem')} {shlex.quote(path)}",
        )
    if not tables:
        raise ArgumentError(f"workload {path!r} holds no problem", argument="problem", hint=example)
    found: list[Item | Mistake] = []
    for number, table in enumerate(tables, 1):
        try:
            found += _items(table, catalog)
        except TlhubError as error:
            found.append(Mistake(f"workload {path!r}, problem {number}", error))
    return tuple(found)


def show(item: Item) -> str:
    """Return the table that says *item*."""
    given = {name: getattr(item, name) for name in _KINDS}
    lines = [f"{name} = {_toml(value)}" for name, value in given.items() if value not in (None, {})]
    return "\n".join(["[[problem]]", *lines]) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{_key(name)} = {_toml(each)}" for name, each in value.items()) + " }"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_toml, value))}]"
    return json.dumps("none" if value is None else value, ensure_ascii=False)


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _toml(name)


def _items(table: dict[str, Any], catalog: Catalog) -> list[Item]:
    several = [name for name in _SEVERAL if name in table and (name not in _KINDS or isinstance(table[name], list))]
    lists = {name: table[name] for name in several}
    for name, values in lists.items():
        one = _SEVERAL[name]
        if not isinstance(values, list):
            raise ArgumentError(
                f"{name} is {values!r}; it is a list", argument=name, hint=f"{name} = [{_KINDS[one][2]}]"
            )
        if one != name and one in table:
            raise ArgumentError(f"{one} and {name} are both given", argument=name, hint=f"{one} = {_KINDS[one][2]}")
        if not values:
            raise ArgumentError(f"{name} is empty", argument=name, hint=f"{name} = [{_KINDS[one][2]}]")
    single = {name: value for name, value in table.items() if name not in lists}
    names = [_SEVERAL[name] for name in lists]
    return [_item({**single, **dict(zip(names, values, strict=True))}, catalog) for values in product(*lists.values())]


def _item(table: dict[str, Any], catalog: Catalog) -> Item:
    for name, value in table.items():
        if name not in _KINDS:
            known = list(dict.fromkeys((*_KINDS, *_SEVERAL)))
            raise ArgumentError(
                f"unknown key {name!r}; allowed: {', '.join(known)}",
                argument=name,
                hint=suggest(name, known, f"options = {{ {name} = ... }} if it is one of the kernel's"),
            )
        kinds, expected, example = _KINDS[name]
        if not isinstance(value, kinds):
            raise ArgumentError(
                f"{name} is {value!r}; it is {expected}",
                argument=name,
                expected=expected,
                got=repr(value),
                hint=f"{name} = {example}",
            )
    missing = next((name for name in _REQUIRED if name not in table), None)
    if missing:
        _, expected, example = _KINDS[missing]
        raise ArgumentError(f"{missing} is missing; it is {expected}", argument=missing, hint=f"{missing} = {example}")
    shape, options, arch = table["shape"], table.get("options", {}), table.get("arch")
    extents = tuple(shape) if isinstance(shape, list) else shape
    kernel = catalog.kernel(table["kernel"])
    options = {name: _choice(kernel, name, value) for name, value in options.items()}
    make(kernel, extents, table["dtype"], options)
    arch = None if arch is None else canonical_arch(catalog, arch)[1]
    schedule = _schedule(catalog, table["kernel"], table.get("schedule"))
    return Item(table["kernel"], extents, table["dtype"], options, arch, schedule)


def _choice(kernel: Kernel, name: str, value: Any) -> Any:
    """Return what an option is set to: TOML has no None, and ``"none"`` is it where that is a choice and no word is."""
    choices = next((o.choices for o in kernel.options if o.name == name), ())
    return None if value == "none" and None in choices and "none" not in choices else value


def _schedule(catalog: Catalog, kernel: str, name: str | None) -> str | None:
    known = [s.name for s in catalog.schedules.get(kernel, ())]
    if name is not None and name not in known:
        raise UnknownName(
            f"unknown schedule {name!r} of {kernel}; known: {', '.join(known) or 'none'}",
            hint=suggest(name, known, f"tlhub schedules {kernel}"),
        )
    return name
