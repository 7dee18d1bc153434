"""Making problems: names and positions to canonical dims, defaults filled in, everything checked."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tlhub import shapes
from tlhub.errors import ArgumentError, did_you_mean, suggest
from tlhub.specs import DTYPES, Arg, Extent, Kernel, Option, Problem, Signature, Tensor, Value

_INVERSE_SQRT = re.compile(r"1/sqrt\((\w+)\)")


def make(kernel: Kernel, shape: shapes.Shape, dtype: str | Mapping[str, str], options: Mapping[str, Any]) -> Problem:
    """Return the canonical problem of *kernel*.

    *shape*: extents by position (all dims, or the required ones and as many trailing optional ones as
    given) or by name; a string is a symbol, and equal symbols mean equal extents.
    *dtype*: one name, or a mapping of input names to names. Raises ArgumentError.
    """
    main, given = _dtypes(kernel, dtype)
    chosen = _options(kernel, main, options)
    dims = shapes.canonical(shapes.extents(kernel, chosen, shape))
    args = [a for a in (*kernel.inputs, *kernel.outputs) if shapes.exists(a, chosen)]
    unknown = set(given) - {a.name for a in args if a.dtype == "dtype"}
    if unknown:
        name = sorted(unknown)[0]
        takes = {a.name: given.get(a.name, main) for a in args if a.dtype == "dtype"}
        raise ArgumentError(
            f"{kernel.name}: no input {name!r} takes a dtype here; inputs that do: {', '.join(takes)}",
            argument="dtype",
            hint=f"dtype={takes!r}",
        )
    dtypes: dict[str, str] = {}
    for arg in args:
        dtypes[arg.name] = _dtype_of(arg, given.get(arg.name, main), chosen, dtypes)
    problem = Problem(kernel.name, kernel.revision, dims, tuple(dtypes.items()), tuple(chosen.items()))
    reason = kernel.check(problem) if kernel.check else None
    if reason:
        raise ArgumentError(f"{kernel.name}: {reason}", hint=_contract(kernel))
    return problem


def signature(kernel: Kernel, problem: Problem) -> Signature:
    """Return the arguments of the problem's binary, in the order in which it takes them."""
    options, extents, dtypes = problem.option, problem.dim, dict(problem.dtypes)

    def tensors(args: Iterable[Arg], output: bool) -> tuple[Tensor, ...]:
        return tuple(
            Tensor(a.name, a.dims, tuple(extents[d] for d in a.dims), dtypes[a.name], output)
            for a in args
            if shapes.exists(a, options)
        )

    elide = next((d.name for d in kernel.dims if d.elide), None)
    parts = {d.name: piece for d in shapes.there(kernel, options) if (piece := shapes.part(d, options))}
    return Signature(tensors(kernel.inputs, False), tensors(kernel.outputs, True), kernel.scalars, elide, parts)


def symbols(kernel: Kernel, dtype: str, options: Mapping[str, Any]) -> dict[str, Extent]:
    """Return the shape of *kernel* that leaves every dim open which there is under *options*."""
    return {d.name: d.name for d in shapes.there(kernel, _options(kernel, dtype, options))}


def generalise(problem: Problem, symbolic: Iterable[str]) -> Problem:
    """Return *problem* with the dims named in *symbolic* made symbols, each its own."""
    free = set(symbolic)
    dims = tuple((name, f"free_{name}" if name in free else extent) for name, extent in problem.dims)
    return Problem(problem.kernel, problem.revision, shapes.canonical(dims), problem.dtypes, problem.options)


def typed(kernel: Kernel, problem: Problem) -> tuple[dict[str, Extent], str | dict[str, str], dict[str, Value]]:
    """Return the dims, dtype and options for which ``make`` gives *problem*, without what is default."""
    extents, options = problem.dim, problem.option
    dims_there = shapes.there(kernel, options)
    defaults = {d.name: extents.get(str(d.default), d.default) for d in dims_there if d.default is not None}
    parts = [d.name for d in dims_there if shapes.part(d, options)]
    shown = [(n, e) for n, e in problem.dims if n not in parts and (n not in defaults or e != defaults[n])]
    dims = {n: e.replace("?", "n") if isinstance(e, str) else e for n, e in shown}
    given = input_dtypes(kernel, problem.dtypes)
    dtype = problem.dtype if len(set(given.values())) == 1 else given
    usual = {o.name: default(o, problem.dtype) for o in kernel.options}
    return dims, dtype, {n: v for n, v in problem.options if v != usual[n]}


def serves(general: Problem, problem: Problem) -> bool:
    """Tell whether a binary made for *general* computes *problem*: some extents for its symbols fit."""
    if (general.kernel, general.revision, general.dtypes, general.options) != (
        problem.kernel,
        problem.revision,
        problem.dtypes,
        problem.options,
    ):
        return False
    bound: dict[str, Extent] = {}
    for (_, wide), (_, narrow) in zip(general.dims, problem.dims, strict=True):
        if isinstance(wide, str):
            if bound.setdefault(wide, narrow) != narrow:
                return False
        elif wide != narrow:
            return False
    return True


def patterns(kernel: Kernel, problem: Problem, symbolic: Sequence[str] = ()) -> tuple[Problem, ...]:
    """Return the problems whose binaries serve *problem*: itself, the one that a schedule builds which leaves the dims
    *symbolic* open, then the kernel's patterns that do."""
    found = [problem]
    for names in (symbolic, *kernel.patterns):
        general = generalise(problem, names)
        if general not in found and serves(general, problem):
            found.append(general)
    return tuple(found)


def root_of(default: str) -> str:
    """Return the dim in a scalar's default ``"1/sqrt(DIM)"``, "" for another text."""
    match = _INVERSE_SQRT.fullmatch(default)
    return match[1] if match else ""


def _contract(kernel: Kernel) -> str:
    """Return the command that shows what the kernel takes."""
    return f"tlhub kernels {kernel.name}"


# -- dtypes and options ----------------------------------------------------------------------------


def input_dtypes(kernel: Kernel, dtypes: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return those of *dtypes* that ``get`` takes: of the inputs whose dtype is the problem's own."""
    takes = {a.name for a in kernel.inputs if a.dtype == "dtype"}
    return {name: dtype for name, dtype in dtypes if name in takes}


def dtype_name(value: Any) -> str:
    """Return the plain name of a dtype: a string, or what NumPy, ml_dtypes, PyTorch and JAX use for one."""
    if isinstance(value, str):
        name = value
    elif getattr(value, "isnative", True) is False:
        name = str(value)  # ">f4": its name would not tell that its bytes are swapped
    else:
        name = getattr(value, "name", None) or getattr(value, "__name__", None) or str(value)
    return name.removeprefix("torch.").removeprefix("jnp.").removeprefix("numpy.").removeprefix("np.")


def _dtypes(kernel: Kernel, dtype: Any) -> tuple[str, dict[str, str]]:
    if isinstance(dtype, Mapping):
        given = {str(k): _check_dtype(kernel, dtype_name(v)) for k, v in dtype.items()}
        if not given:
            raise ArgumentError(
                f"{kernel.name}: the mapping of dtypes is empty", argument="dtype", hint=f"dtype={kernel.dtypes[0]!r}"
            )
        first = next(a.name for a in kernel.inputs if a.dtype == "dtype")
        return given.get(first, next(iter(given.values()))), given
    return _check_dtype(kernel, dtype_name(dtype)), {}


def _check_dtype(kernel: Kernel, name: str) -> str:
    if name in kernel.dtypes:
        return name
    what = "does not take" if name in DTYPES else "knows no"
    raise ArgumentError(
        f"{kernel.name}: it {what} dtype {name!r}; allowed: {', '.join(kernel.dtypes)}",
        argument="dtype",
        expected=", ".join(kernel.dtypes),
        got=name,
        hint=suggest(name, kernel.dtypes, _contract(kernel)),
    )


def _options(kernel: Kernel, dtype: str, given: Mapping[str, Any]) -> dict[str, Value]:
    known = {o.name: o for o in kernel.options}
    for name in given:
        if name not in known:
            raise _unknown_option(kernel, name)
    return {o.name: _choice(kernel, o, given[o.name]) if o.name in given else default(o, dtype) for o in kernel.options}


def default(option: Option, dtype: str) -> Value:
    """Return the option's value where none is given, for a problem of *dtype*."""
    if isinstance(option.default, Mapping):
        return option.default[dtype]
    return option.default


def _choice(kernel: Kernel, option: Option, value: Any) -> Value:
    if type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_"):
        value = bool(value)
    if not isinstance(value, (bool, int, str, type(None))) and all(isinstance(c, str) for c in option.choices):
        value = dtype_name(value)  # np.float32 for "float32"
    for choice in option.choices:
        if type(choice) is type(value) and choice == value:
            return choice
    shown = ", ".join(repr(c) for c in option.choices)
    numbers = isinstance(value, (int, float))  # 1 for True, as "true" is
    meant = [c for c in option.choices if numbers and c == value or str(c).lower() == str(value).lower()]
    written = {str(c): c for c in option.choices}
    near = did_you_mean(value, written)
    raise ArgumentError(
        f"{kernel.name}: option {option.name} is {value!r}; allowed: {shown}",
        argument=option.name,
        expected=shown,
        got=repr(value),
        hint=f"{option.name}={meant[0]!r}"
        if meant
        else f"did you mean {written[near]!r}?"
        if near
        else _contract(kernel),
    )


def _unknown_option(kernel: Kernel, name: str) -> ArgumentError:
    if any(s.name == name for s in kernel.scalars):
        return ArgumentError(
            f"{kernel.name}: {name} is a scalar: it is given at the call and is no part of the lookup",
            argument=name,
            hint=f"kernel = tlhub.get({kernel.name!r}, ...); kernel(..., {name}=...)",
        )
    names = [o.name for o in kernel.options]
    return ArgumentError(
        f"{kernel.name}: no option {name!r}; its options are {', '.join(names) or 'none'}",
        argument=name,
        hint=suggest(name, names, _contract(kernel)),
    )


def _dtype_of(arg: Arg, main: str, options: Mapping[str, Value], others: Mapping[str, str]) -> str:
    """Return the dtype of *arg*; *others*: those of the arguments before it."""
    if arg.dtype == "dtype":
        return main
    if arg.dtype.startswith("as:"):
        return others[arg.dtype.removeprefix("as:")]
    if arg.dtype.startswith("option:"):
        return str(options[arg.dtype.removeprefix("option:")])
    return arg.dtype
