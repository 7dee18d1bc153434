"""Shapes: the dims of a kernel by name and by position, checked, with defaults filled in. Pure."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tlhub.errors import ArgumentError, suggest
from tlhub.specs import Arg, Dim, Extent, Kernel, Value

Shape = Any
"""A sequence of extents in the kernel's order, or a mapping of dim names to extents."""

_SYMBOL = re.compile(r"[A-Za-z_][A-Za-z0-9_]*|\?[0-9]+")
_PART = re.compile(r"(\w+)/(\w+)")
_LARGEST = 2**31 - 1


def exists(what: Arg | Dim, options: Mapping[str, Value]) -> bool:
    """Tell whether there is *what* under *options*, all of which are given."""
    return all(options[name] == value for name, value in what.when.items())


def extent(value: Any, kernel: str, dim: str) -> Extent:
    """Return *value* as an extent: an integer of at least 0 (no bool, no float), or a symbol."""
    if isinstance(value, str):
        if _SYMBOL.fullmatch(value):
            return value
    elif not isinstance(value, bool):
        try:
            number = operator.index(value)
        except TypeError:
            number = -1
        if 0 <= number <= _LARGEST:
            return number
    raise ArgumentError(
        f"{kernel}: dim {dim} is {value!r}; a dim is an integer from 0 to {_LARGEST}, or a name such as {dim!r} "
        "for a symbolic one",
        argument=dim,
        expected="an integer or a name",
        got=repr(value),
        hint=f"{dim}={_nearest_extent(value)}",
    )


def _nearest_extent(value: Any) -> int:
    """Return the extent that was meant by *value*, 64.0 say, else one as an example."""
    if isinstance(value, float) and value.is_integer() and 0 <= value <= _LARGEST:
        return int(value)
    return 1024


def there(kernel: Kernel, options: Mapping[str, Value]) -> tuple[Dim, ...]:
    """Return the dims that there are under *options*, all of which are given."""
    return tuple(d for d in kernel.dims if exists(d, options))


def part(dim: Dim, options: Mapping[str, Value]) -> tuple[str, int] | None:
    """Return the dim that *dim* follows from and over what it is, or None where it is one of its own."""
    match = _PART.fullmatch(dim.default) if isinstance(dim.default, str) else None
    return (match[1], int(match[2]) if match[2].isdigit() else int(options[match[2]] or 0)) if match else None


def quotient(whole: int, over: int) -> int:
    """Return *whole* / *over*, rounded up; 1 where *over* is 0."""
    return -(-whole // over) if over else 1


def extents(kernel: Kernel, options: Mapping[str, Value], shape: Shape) -> tuple[tuple[str, Extent], ...]:
    """Return the extents of the dims that there are under *options*, as *shape* gives them. Raises ArgumentError."""
    dims = there(kernel, options)
    names = [d.name for d in dims]
    if isinstance(shape, Mapping):
        given = dict(shape)
        for name in given:
            if name not in names:
                under = next((f"{n}={v!r}" for d in kernel.dims if d.name == name for n, v in d.when.items()), None)
                raise ArgumentError(
                    f"{kernel.name}: no dim {name!r}{f' but with {under}' if under else ''}; "
                    f"its dims are {', '.join(names)}",
                    argument="shape",
                    hint=under or suggest(name, names, _usage(dims)),
                )
    elif isinstance(shape, (str, bytes)) or not isinstance(shape, Sequence):
        raise ArgumentError(
            f"{kernel.name}: the shape is {shape!r}; pass a tuple of extents or a mapping of dim names",
            argument="shape",
            hint=_commas(str(shape)) or _usage(dims),
        )
    else:
        given = dict(zip(_positions(kernel.name, _free(dims), shape), shape, strict=True))
    missing = [d.name for d in dims if d.default is None and d.name not in given]
    if missing:
        raise ArgumentError(
            f"{kernel.name}: dim {missing[0]} is missing; required: {_required(dims)}",
            argument=missing[0],
            hint=_usage(dims),
        )
    values: dict[str, Extent] = {n: extent(v, kernel.name, n) for n, v in given.items()}
    for dim in dims:
        if piece := part(dim, options):
            values[dim.name] = _follow(kernel, dim, piece, values)
        elif dim.name not in values:
            values[dim.name] = values[dim.default] if isinstance(dim.default, str) else dim.default  # type: ignore[assignment]
    return tuple((n, values[n]) for n in names)


def _free(dims: Sequence[Dim]) -> list[Dim]:
    """Return those of *dims* that do not follow from another one."""
    return [d for d in dims if not (isinstance(d.default, str) and _PART.fullmatch(d.default))]


def _follow(kernel: Kernel, dim: Dim, piece: tuple[str, int], values: Mapping[str, Extent]) -> Extent:
    """Return the extent of *dim*, which is *piece* of another one. Raises ArgumentError where *values* has another."""
    (name, over), given = piece, values.get(dim.name)
    follows: Extent
    whole = values[name]
    if isinstance(whole, str):
        follows = given if isinstance(given, str) and given != whole else f"{whole}/{over}"
    else:
        follows = quotient(whole, over)
    if given not in (None, follows):
        raise ArgumentError(
            f"{kernel.name}: dim {dim.name} is {given!r}; it is {dim.default} rounded up: "
            f"{follows!r} for {name}={whole!r}",
            argument=dim.name,
            expected=f"{dim.name}={follows}",
            got=repr(given),
            hint=_divisor(kernel, dim, whole, given) or f"leave {dim.name} away, or {dim.name}={follows}",
        )
    return follows


def _divisor(kernel: Kernel, dim: Dim, whole: Extent, given: Extent | None) -> str | None:
    """Return the option, and its value, under which *dim* of *whole* is what was *given*, or None."""
    if isinstance(whole, str) or not isinstance(given, int):
        return None
    over = str(dim.default).partition("/")[2]
    choices = next((o.choices for o in kernel.options if o.name == over), ())
    return next((f"{over}={c!r}" for c in choices if quotient(whole, int(c or 0)) == given), None)


def _positions(kernel: str, dims: Sequence[Dim], shape: Sequence[Any]) -> list[str]:
    """Return the names of those of *dims* that *shape* gives by position."""
    count = len(shape)
    required = [d.name for d in dims if d.default is None]
    names = [d.name for d in dims]
    if count == len(names):
        return names
    if len(required) <= count < len(names) and (count == len(required) or names[: len(required)] == required):
        return [*required, *[n for n in names if n not in required]][:count]
    raise ArgumentError(
        f"{kernel}: {count} {'dim was' if count == 1 else 'dims were'} given; it takes {_required(dims)}",
        argument="shape",
        expected=_required(dims),
        got=f"{count} dims",
        hint=(_commas(shape[0]) if count == 1 else None) or _usage(dims),
    )


def _usage(dims: Sequence[Dim]) -> str:
    """Show how *dims* are given, by extents that most kernels take: ``by position 16,16, by name M=16,N=16``."""
    required = [d.name for d in dims if d.default is None]
    return f"by position {','.join('16' for _ in required)}, by name {','.join(f'{n}=16' for n in required)}"


def _commas(typed: Any) -> str | None:
    """Return what to type for ``64x64x64``: the same numbers, separated by commas; in Python outside of a string."""
    if not isinstance(typed, str) or not re.fullmatch(r"\s*\d+(\s*\D\s*\d+)+\s*", typed):
        return None
    numbers = re.findall(r"[0-9]+", typed)
    if typed.count(",") == len(numbers) - 1:
        return f"dims are a tuple: ({', '.join(numbers)})"
    return f"dims are separated by commas: {','.join(numbers)}"


def _required(dims: Sequence[Dim]) -> str:
    """Show *dims* as a usage line does: ``M, N, K and optionally B=1``."""
    required = ", ".join(d.name for d in dims if d.default is None)
    optional = ", ".join(f"{d.name}={d.default}" for d in _free(dims) if d.default is not None)
    return f"{required} and optionally {optional}" if optional else required


def canonical(dims: Iterable[tuple[str, Extent]]) -> tuple[tuple[str, Extent], ...]:
    """Number the symbols by first appearance, so that their names reach no key."""
    number: dict[str, str] = {}
    return tuple((n, number.setdefault(e, f"?{len(number)}") if isinstance(e, str) else e) for n, e in dims)
