"""What the parameters of a TIR function, TVM's or TileLang's, stand for: arguments of the contract, or values.

A program's own names (of buffers, of symbols in their shapes and strides, of scalars) become the expressions that
``tlhub.build.program`` describes. Nothing here depends on which of the TVMs is imported.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tlhub.build.program import ANY, COMPACT, Buffer, Expression
from tlhub.errors import BuildError
from tlhub.specs import DTYPES, Scalar, Signature, Tensor


@dataclass(frozen=True)
class Arguments:
    """What the parameters of a function stand for.

    ``names``: the value of each symbol, number and pointer, by the hash of its variable: names repeat, variables do
    not. ``pointers``: by name, for TVM 0.27 makes new variables of these. ``conditions``: what the function takes for
    granted and only a call can tell, in C.
    """

    buffers: tuple[Buffer, ...]
    names: Mapping[int, Expression]
    pointers: Mapping[str, str]
    conditions: tuple[str, ...]


def arrays(
    function: Any, signature: Signature, kernel: str, more: Iterable[str] = (), narrow: bool = False
) -> list[Any]:
    """Return the buffers of the array arguments of *function*; refuse parameters that the contract does not have.

    *more*: names of integer parameters that follow the contract's. *narrow*: a float may be a float32.
    """
    tensors: tuple[Tensor | Scalar, ...] = (*signature.inputs, *signature.outputs)
    expected, added = (*tensors, *signature.scalars), set(more)
    params = [p for p in function.params if p.name not in added]
    if len(params) != len(expected):
        raise BuildError(
            f"{kernel}: the program has {len(params)} parameters ({', '.join(p.name for p in params)}); "
            f"the contract asks for {len(expected)}: {', '.join(e.name for e in expected)}"
        )
    found = []
    for param, want in zip(params, expected, strict=True):
        buffer = _param_buffer(function, param)
        if isinstance(want, Scalar):
            dtype = "handle" if buffer is not None else dtype_of(param)
            need = "int64" if want.kind == "int" else "float64"
            if dtype != need and not (narrow and (need, dtype) == ("float64", "float32")):
                raise BuildError(f"{kernel}: parameter {param.name!r} for scalar {want.name!r} is {dtype}, not {need}")
        elif buffer is None:
            raise BuildError(
                f"{kernel}: parameter {param.name!r} for argument {want.name!r} is no buffer",
                hint=f"T.match_buffer({param.name}, (...), {want.dtype!r}, align={DTYPES[want.dtype][1] // 8}, "
                "offset_factor=1)",
            )
        else:
            _check_shape(kernel, buffer, want)
            found.append(buffer)
    return found


def _check_shape(kernel: str, buffer: Any, want: Tensor) -> None:
    """Refuse a program that fixes an extent which the contract leaves open, or gives another value."""
    for name, extent, given in zip(want.dims, want.extents, buffer.shape, strict=False):
        if is_constant(given) and int(given) != extent:
            asked = extent if isinstance(extent, int) else "any extent"
            raise BuildError(
                f"{kernel}: the program's buffer for argument {want.name!r} has {int(given)} in dim {name}; "
                f"the problem asks for {asked}"
            )


def is_constant(value: Any) -> bool:
    return isinstance(value, int) or type(value).__name__ == "IntImm"


def _param_buffer(function: Any, param: Any) -> Any:
    mapped = getattr(function, "buffer_map", None)
    if mapped is not None:
        return mapped[param] if param in mapped else None
    kind = getattr(param, "ty", None)
    return kind if hasattr(kind, "data_alignment") else None


def dtype_of(param: Any) -> str:
    return str(param.dtype if hasattr(param, "dtype") else param.ty)


def bind(function: Any, signature: Signature, kernel: str, values: Mapping[str, Expression], vector: int) -> Arguments:
    """Return what the parameters of a device program's entry stand for.

    *values*: of its integer parameters that the contract does not have. *vector*: bytes of the widest load, to which
    a buffer that claims to be aligned must be, unless its last stride is a symbol. Raises BuildError.
    """
    buffers = arrays(function, signature, kernel, values, narrow=True)
    tensors = (*signature.inputs, *signature.outputs)
    params = [p for p in function.params if p.name not in values]
    names: dict[int, Expression] = {hash(p): values[p.name] for p in function.params if p.name in values}
    names |= {hash(p): s.name for p, s in zip(params[len(tensors) :], signature.scalars, strict=True)}
    given = set(names)
    pointers: dict[str, str] = {}
    conditions = []
    for param, tensor, buffer in zip(params, tensors, buffers, strict=False):
        data, place = getattr(buffer, "data", param), f"DATA({tensor.name})"
        names[hash(data)] = place
        if pointers.setdefault(data.name, place) != place:
            pointers[data.name] = ""  # of two buffers of one name neither is known by it
        if is_symbol(buffer.elem_offset):
            names[hash(buffer.elem_offset)] = 0  # the host shim adds it to the pointer
        claim = min(int(buffer.data_alignment), vector)
        in_vectors = not buffer.strides or is_constant(buffer.strides[-1])
        if in_vectors and claim > DTYPES[tensor.dtype][1] // 8:
            conditions.append(f"ALIGNED({place}, {claim})")
    extents = _extents(tensors, buffers, given, kernel)
    names |= {key: dim if isinstance(extent, str) else extent for key, (extent, dim) in extents.items()}
    strides = [_strides(t, b, names, given, kernel) for t, b in zip(tensors, buffers, strict=True)]
    made = (Buffer(t.name, str(b.dtype), len(b.shape), s) for t, b, s in zip(tensors, buffers, strides, strict=True))
    return Arguments(tuple(made), names, pointers, tuple(conditions))


def _extents(
    tensors: Iterable[Tensor], buffers: Iterable[Any], given: set[int], kernel: str
) -> dict[int, tuple[int | str, str]]:
    """Return the extent and the dim of each symbol that is the whole extent of a buffer, by its hash."""
    found: dict[int, tuple[int | str, str]] = {}
    for tensor, buffer in zip(tensors, buffers, strict=True):
        for dim, extent, symbol in zip(tensor.dims, tensor.extents, buffer.shape, strict=False):
            if is_symbol(symbol) and hash(symbol) not in given:
                known, other = found.setdefault(hash(symbol), (extent, dim))
                if known != extent:
                    raise BuildError(
                        f"{kernel}: {symbol} is dim {other} of one of the program's buffers, and dim {dim} of that for "
                        f"argument {tensor.name!r}; they may differ"
                    )
    return found


def _strides(
    tensor: Tensor, buffer: Any, names: dict[int, Expression], given: set[int], kernel: str
) -> str | tuple[int | None, ...]:
    """Return the strides of *buffer* as ``Buffer`` has them, and note in *names* those that are symbols of their own.

    What is made of *given* values is left to the program's conditions.
    """
    if not buffer.strides or _compact(buffer):
        return COMPACT
    found: list[int | None] = []
    for axis, stride in enumerate(buffer.strides):
        if is_constant(stride):
            found.append(int(stride))
            continue
        known = is_symbol(stride) and names.setdefault(hash(stride), place := f"STRIDE({tensor.name}, {axis})") == place
        if not known and not all(hash(variable) in given for variable in _variables(stride)):
            raise BuildError(
                f"{kernel}: stride {axis} of the program's buffer for argument {tensor.name!r} is {stride}; it may be "
                "an integer, a symbol of its own, or made of values that the program gives"
            )
        found.append(None)
    return ANY if all(s is None for s in found) else tuple(found)


def _compact(buffer: Any) -> bool:
    """Tell whether the strides of *buffer* are those of C order without gaps, whatever its symbols are."""
    import tvm

    analyzer, step = (tvm.arith if hasattr(tvm, "arith") else tvm.sym).Analyzer(), tvm.tirx.IntImm("int32", 1)
    for extent, stride in zip(reversed(buffer.shape), reversed(buffer.strides), strict=True):
        if not analyzer.can_prove_equal(stride, step):
            return False
        step = step * extent
    return True


def stride_conditions(buffer: Buffer) -> list[str]:
    """Return what the strides of *buffer* ask of a call, as C conditions. A dim of extent 1 asks nothing."""
    if buffer.strides == ANY:
        return []
    steps: list[Expression | None] = []
    if buffer.strides == COMPACT:
        inner = [f"EXTENT({buffer.name}, {axis})" for axis in range(buffer.ndim)]
        steps = [" * ".join(inner[axis + 1 :]) or 1 for axis in range(buffer.ndim)]
    else:
        steps = list(buffer.strides)
    return [
        f"(EXTENT({buffer.name}, {axis}) == 1 || STRIDE({buffer.name}, {axis}) == {step})"
        for axis, step in enumerate(steps)
        if step is not None
    ]


def is_symbol(value: Any) -> bool:
    return type(value).__name__ == "Var"


def _variables(value: Any) -> Iterator[Any]:
    """Yield the variables of an expression of shapes."""
    if is_symbol(value):
        yield value
    for part in ("a", "b", "value"):
        if not is_constant(value) and hasattr(value, part):
            yield from _variables(getattr(value, part))
