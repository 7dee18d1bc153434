"""The launches of a lowered TIR function, TVM's or TileLang's, as data: its host code read, not run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from tlhub.build.frontends.arguments import Arguments, dtype_of, is_constant, is_symbol
from tlhub.build.program import Expression, Launch, Parameter, TensorMap
from tlhub.errors import BuildError

# of a quotient and a remainder neither side is negative: they count elements, tiles and threads
_OPERATORS = dict(
    zip(
        "Add Sub Mul Div FloorDiv Mod FloorMod LT LE GT GE EQ NE And Or".split(),
        "+ - * / / % % < <= > >= == != && ||".split(),
        strict=True,
    )
)
_CALLS = {"shift_right": "({0} >> {1})", "shift_left": "({0} << {1})", "bitwise_and": "({0} & {1})"}
_CTYPES = {
    "int32": "int",
    "int64": "int64_t",
    "uint32": "unsigned",
    "uint64": "uint64_t",
    "float32": "float",
    "float64": "double",
    "bool": "bool",
}
_ATOM = re.compile(r"\w+|[A-Z]+\([\w, ]*\)")
_MAP_DTYPES = {0: "uint8", 3: "int32", 5: "int64", 6: "float16", 7: "float32", 8: "float64", 9: "bfloat16"}
_SWIZZLES = (0, 32, 64, 128)
_PROMOTIONS = (0, 64, 128, 256)


def read(
    host: Any, devices: Mapping[str, Any], arguments: Arguments, maps: Mapping[str, TensorMap], kernel: str
) -> tuple[Launch, ...]:
    """Return the launches of the lowered function *host*, in its order.

    *devices*: the device functions by symbol; *maps*: the tensor maps by name. Raises BuildError.
    """
    names, found = dict(arguments.names), []
    for node in _straight(host.body):
        if type(node).__name__ == "Call":
            name = node.args[0].value if node.args and type(node.args[0]).__name__ == "StringImm" else None
            if name is not None and name in devices:
                known = Arguments(arguments.buffers, names, arguments.pointers, ())
                found.append(_launch(devices[name], list(node.args[1:]), known, maps, f"{kernel}: {name}"))
        elif hash(node.var) not in names and _computable(node.value, names):
            names[hash(node.var)] = expression(node.value, names)
    if {launch.kernel for launch in found} != set(devices):
        raise BuildError(
            f"{kernel}: the program launches {len(found)} of its {len(devices)} device functions in every call; "
            "no launch may depend on a condition or a loop of the host's"
        )
    return tuple(found)


def _straight(node: Any) -> Iterator[Any]:
    """Yield the calls and the definitions of variables that every call of a function runs, in order."""
    kind = type(node).__name__
    if kind == "SeqStmt":
        for statement in node.seq:
            yield from _straight(statement)
    elif kind == "Evaluate":
        if type(node.value).__name__ == "Call":
            yield node.value
    elif kind not in ("For", "While", "IfThenElse"):
        if kind in ("Bind", "LetStmt"):
            yield node
        if hasattr(node, "body"):
            yield from _straight(node.body)


def _computable(value: Any, names: Mapping[int, Expression]) -> bool:
    """Tell whether *value* is made of what is known, and is no field of an argument."""
    try:
        expression(value, names)
    except BuildError:
        return False
    return True


def _launch(device: Any, args: list[Any], known: Arguments, maps: Mapping[str, TensorMap], where: str) -> Launch:
    """Return the launch of *device* with *args*: its parameters, and then what ``kernel_launch_params`` lists."""
    attrs, count = device.attrs, len(device.params)
    parameters: list[Parameter | TensorMap] = []
    for param, value in zip(device.params, args, strict=False):
        source = value.args[0] if type(value).__name__ == "Call" and value.op.name == "tirx.buffer_data" else value
        dtype = dtype_of(param)
        if is_symbol(source) and source.name in maps:
            parameters.append(maps[source.name])
        elif "handle" in dtype:
            place = _pointer(source, known)
            if not place:
                raise BuildError(
                    f"{where} has a parameter {param.name!r} that is not known to be an argument's data",
                    hint="give each buffer a name of its own; memory between launches must be an output",
                )
            parameters.append(Parameter("void *", place))
        elif dtype not in _CTYPES:
            raise BuildError(f"{where} has a parameter {param.name!r} of type {dtype}; allowed: {', '.join(_CTYPES)}")
        else:
            parameters.append(Parameter(_CTYPES[dtype], expression(value, known.names)))
    tags = [str(tag) for tag in attrs["tirx.kernel_launch_params"]]
    sizes = {tag: expression(v, known.names) for tag, v in zip(tags, args[count:], strict=False)}
    x, y, z = (sizes.get(f"threadIdx.{axis}", 1) for axis in "xyz")
    shared = sizes.get("tirx.use_dyn_shared_memory", 0)
    if not (isinstance(x, int) and isinstance(y, int) and isinstance(z, int) and isinstance(shared, int)):
        raise BuildError(f"{where} has blocks whose size depends on the call")
    width, height, depth = (int(size) for size in attrs["cluster_dims"]) if "cluster_dims" in attrs else (1, 1, 1)
    return Launch(
        kernel=str(attrs["global_symbol"]),
        grid=(sizes.get("blockIdx.x", 1), sizes.get("blockIdx.y", 1), sizes.get("blockIdx.z", 1)),
        block=(x, y, z),
        parameters=tuple(parameters),
        shared=shared,
        cluster=(width, height, depth),
        cooperative="use_cooperative_groups" in attrs,
        programmatic="has_cuda_pdl_sync" in attrs,
    )


def _pointer(value: Any, known: Arguments) -> Expression:
    """Return what a pointer stands for, or nothing if that cannot be told."""
    return is_symbol(value) and known.names.get(hash(value), known.pointers.get(value.name, ""))


def tensor_map(args: list[Any], known: Arguments, kernel: str) -> TensorMap:
    """Return the tensor map that a call of TileLang's asks the driver for. Raises BuildError.

    *args*: the function's name, the map, dtype, rank, address, then for each dim from the innermost its extent, its
    stride in bytes, the tile's extent and the step between elements, then interleave, swizzle, promotion and fill.
    """
    rank, address = int(args[3]), _pointer(args[4], known)
    rows = [args[5 + i * rank : 5 + (i + 1) * rank] for i in range(4)]
    dims, strides = ([expression(v, known.names) for v in row] for row in rows[:2])
    interleave, swizzle, promotion, fill = (int(v) for v in args[5 + 4 * rank :])
    plain = not interleave and not fill and all(is_constant(v) and int(v) == 1 for v in rows[3])
    tiled = args[0].value == "__tvm_tensormap_create_tiled"
    if not tiled or not plain or int(args[2]) not in _MAP_DTYPES or not address:
        raise BuildError(
            f"{kernel}: the program has a tensor map that is not a plain tile of an argument: {args[0].value}"
        )
    return TensorMap(
        dtype=_MAP_DTYPES[int(args[2])],
        address=str(address),
        dims=tuple(dims),
        strides=tuple(strides[1:]),
        box=tuple(int(v) for v in rows[2]),
        swizzle=_SWIZZLES[swizzle],
        promotion=_PROMOTIONS[promotion],
    )


def map_conditions(tensor_map: TensorMap) -> list[str]:
    """Return what the driver asks of a tensor map and only a call can tell, as C conditions."""
    dims = [f"{dim} > 0" for dim in tensor_map.dims if not isinstance(dim, int)]
    strides = [stride for stride in tensor_map.strides if not isinstance(stride, int)]
    return [*dims, *(f"ALIGNED({value}, 16)" for value in (tensor_map.address, *strides))]


# -- expressions -----------------------------------------------------------------------------------


def expression(value: Any, names: Mapping[int, Expression]) -> Expression:
    """Return *value*, an expression of TIR, in C, with its variables as *names* has them. Raises BuildError."""
    kind = type(value).__name__
    if is_constant(value):
        return int(value)
    if kind == "Var":
        if hash(value) not in names:
            raise BuildError(
                f"a launch needs {value.name!r}, which is neither an argument nor found in a shape or stride",
                hint="name it as the whole extent or stride of a buffer, or give its value",
            )
        named = names[hash(value)]
        return named if isinstance(named, int) or _ATOM.fullmatch(named) else f"({named})"
    if kind == "Cast":
        return expression(value.value, names)
    if kind in ("Min", "Max"):
        a, b = expression(value.a, names), expression(value.b, names)
        return f"({a} {'<' if kind == 'Min' else '>'} {b} ? {a} : {b})"
    if kind == "Select":
        condition, a, b = (expression(v, names) for v in (value.condition, value.true_value, value.false_value))
        return f"({condition} ? {a} : {b})"
    if kind in _OPERATORS:
        return f"({expression(value.a, names)} {_OPERATORS[kind]} {expression(value.b, names)})"
    call = _CALLS.get(value.op.name.rpartition(".")[2]) if kind == "Call" and hasattr(value.op, "name") else None
    if call is None:
        raise BuildError(f"a launch needs {value}, which cannot be computed on the host")
    return call.format(*(expression(arg, names) for arg in value.args))
