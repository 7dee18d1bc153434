"""Toolchain tvm: a PrimFunc, or an IRModule with one, to an object file or CUDA C++, with apache-tvm 0.25 to 0.27.

A program may be written in TIR, made by ``te.create_prim_func`` or scheduled with ``s_tir``.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from tlhub.build.check import object_symbols
from tlhub.build.frontends import arguments, present, tvm_cuda
from tlhub.build.program import ANY, COMPACT, Buffer, DeviceProgram
from tlhub.errors import BuildError
from tlhub.specs import Problem, Signature

_SYMBOL = "tlhub_program"
_PIPELINE = "tlhub"
_HOOKS = {"__TVMBackendParallelLaunch", "__TVMBackendAllocWorkspace", "__TVMBackendFreeWorkspace"}
_CALLS = {"TVMFFIErrorSetRaisedFromCStr", "TVMFFIErrorSetRaisedFromCStrParts"}


def prepare() -> None:
    """Import TVM, and no more of it than is needed: that is most of what a first build costs.

    Torch is hidden, for TVM and tvm-ffi would import it (a second), and the parts of TVM that compile whole
    models are loaded when a program first uses them (another). Raises BuildError if there is no TVM.
    """
    present("tvm")
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    sys.meta_path.insert(0, _Deferred())
    try:
        import tvm.s_tir  # noqa: F401 - it registers the pipeline that is used below
    except (ImportError, OSError) as error:
        raise BuildError(
            f"apache-tvm cannot be imported: {error}", hint='pip install --force-reinstall "tlhub-core[tvm]"'
        ) from None


class _Deferred:
    """An import finder that makes some packages load when an attribute of theirs is first asked for."""

    _names = ("tvm.relax", "tvm.runtime.disco", "tvm.s_tir.dlight", "tvm.s_tir.meta_schedule")

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in self._names:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = importlib.util.LazyLoader(spec.loader)
        return spec


def translate(
    program: Callable[[Problem, Mapping[str, Any], str], Any],
    problem: Problem,
    signature: Signature,
    config: Mapping[str, Any],
    arch: str,
    options: Mapping[str, str],
    folder: str,
) -> DeviceProgram:
    """Compile what *program* returns for *arch* and write ``program.o`` and ``program.tir`` to *folder*.

    For a GPU (``kind`` of *options* is ``cuda``) it is ``program.cu``. *options* are fields of a tvm Target
    (``mcpu``, ``mtriple``, ``mattr``, ``arch``). Raises BuildError.
    """
    import tvm

    function, helpers = _entry(program(problem, config, arch), problem.kernel)
    if options.get("kind") == "cuda":
        made = tvm_cuda.translate(function, helpers, problem, signature, options, folder)
        return replace(made, toolchain=identity())
    names = [t.name for t in (*signature.inputs, *signature.outputs)]
    arrays = arguments.arrays(function, signature, problem.kernel)
    buffers = tuple(_buffer(name, array) for name, array in zip(names, arrays, strict=True))
    function = function.with_attr("global_symbol", _SYMBOL)
    target = tvm.target.Target({"kind": "llvm", **_fields(options)})
    tvm.tirx.register_tir_pipeline(_PIPELINE, lambda: _pipeline(target, len(buffers)))
    module = tvm.IRModule({tvm.ir.GlobalVar(_SYMBOL): function, **helpers})
    compiled = tvm.tirx.build(module, target=target, pipeline=_PIPELINE)
    compiled.write_to_file(os.path.join(folder, "program.o"), "o")
    _check_object(os.path.join(folder, "program.o"), problem.kernel)
    with open(os.path.join(folder, "program.tir"), "w", encoding="utf-8") as file:
        file.write(module.script() + "\n")
    return DeviceProgram(
        code="program.o",
        symbol=f"__tvm_ffi_{_SYMBOL}",
        buffers=buffers,
        source="program.tir",
        toolchain=identity(),
    )


def identity() -> dict[str, str]:
    """Return the versions of what compiles."""
    import tvm

    return {"apache-tvm": tvm.__version__, "llvm": str(tvm.target.codegen.llvm_version_major())}


def _fields(options: Mapping[str, str]) -> dict[str, Any]:
    """Return the options as a tvm Target has them: ``mattr`` is a list there."""
    fields: dict[str, Any] = dict(options)
    if fields.get("mattr"):
        fields["mattr"] = fields["mattr"].split(",")
    return {k: v for k, v in fields.items() if v}


def _entry(made: Any, kernel: str) -> tuple[Any, dict[Any, Any]]:
    """Return the entry of what a program returned, and the private functions that it calls, by GlobalVar."""
    import tvm

    functions = dict(made.functions.items()) if isinstance(made, tvm.IRModule) else {None: made}
    entries = [v for v, f in functions.items() if len(functions) == 1 or "global_symbol" in (f.attrs or {})]
    if len(entries) != 1 or any(not isinstance(f, tvm.tirx.PrimFunc) for f in functions.values()):
        raise BuildError(
            f"{kernel}: a program of toolchain 'tvm' returns a PrimFunc, or an IRModule of PrimFuncs of which one has "
            f"a global_symbol; this one returned {type(made).__name__} with {len(entries)} such among {len(functions)}"
        )
    entry = functions.pop(entries[0])
    return entry, functions


def _buffer(name: str, buffer: Any) -> Buffer:
    """Return the buffer (a tirx.Buffer, from TVM 0.27 on a tirx.BufferType) as the host shim needs it."""
    fixed = tuple(int(s) if arguments.is_constant(s) else None for s in buffer.strides)
    strides: str | tuple[int | None, ...] = COMPACT
    if fixed:
        strides = ANY if all(s is None for s in fixed) else fixed
    return Buffer(name, str(buffer.dtype), len(buffer.shape), strides)


# -- alignment -------------------------------------------------------------------------------------


def _pipeline(target: Any, arrays: int) -> tuple[Any, Any, Any]:
    """Return TVM's default pipeline, with no claim on the alignment of arguments left at its end."""
    import tvm

    lower, finish_host, finish_device = tvm.tirx.get_default_tir_pipeline(target)

    def lower_claims(module: Any, _: Any) -> Any:
        module = lower(module)
        entry = module.get_global_var(_SYMBOL)
        made = {v: _believe_items(f, arrays) if v.same_as(entry) else f for v, f in module.functions.items()}
        return tvm.IRModule(made, attrs=module.attrs)

    return tvm.transform.module_pass(lower_claims, opt_level=0, name="tlhub"), finish_host, finish_device


def _believe_items(function: Any, arrays: int) -> Any:
    """Lower what the function claims of each argument's alignment to the item size.

    Buffers claim 64 bytes unless told otherwise, and vector code believes it: an array that starts
    elsewhere, as most do, would kill the process. Raises BuildError if a claim is not where it should be.
    """
    import tvm

    count = 0

    def walk(stmt: Any) -> Any:
        nonlocal count
        if isinstance(stmt, tvm.tirx.SeqStmt):
            return tvm.tirx.SeqStmt([walk(s) for s in stmt.seq])
        if not isinstance(stmt, tvm.tirx.AttrStmt):
            return stmt
        value = stmt.value
        if stmt.attr_key == "storage_alignment":
            count += 1
            value = tvm.tirx.IntImm("int32", min(int(value), _item_bytes(stmt.node)))
        return tvm.tirx.AttrStmt(stmt.node, stmt.attr_key, value, walk(stmt.body))

    body = walk(function.body)
    if count != arrays:
        raise BuildError(
            f"the program has {arrays} array arguments, and TVM states the alignment of {count}: "
            "this version of apache-tvm is not one that tlhub knows"
        )
    return function.with_body(body)


def _item_bytes(pointer: Any) -> int:
    """Return the item size of what a pointer variable points to."""
    kind = getattr(pointer, "type_annotation", None) or pointer.ty
    match = re.search(r"\d+", str(getattr(kind, "element_type", kind).dtype))
    return max(1, int(match[0]) // 8) if match else 1


def _check_object(path: str, kernel: str) -> None:
    """Refuse object code that calls what only TVM's runtime has."""
    with open(path, "rb") as file:
        symbols = object_symbols(file.read())
    for name, defined in symbols.items():
        hook = name.startswith("__TVMBackend") and name not in _HOOKS
        call = name.startswith("TVM") and not defined and name not in _CALLS
        if hook or call or name.startswith("__tvm_ffi__library_ctx"):
            raise BuildError(
                f"{kernel}: the program calls {name.lstrip('_')}, which only TVM's runtime has; "
                "packed functions, barriers and device calls cannot be part of a CPU program"
            )
