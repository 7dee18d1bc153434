"""Toolchain tvm for NVIDIA GPUs: a scheduled PrimFunc to CUDA C++ and its launches, without nvcc and without a GPU."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from typing import Any

from tlhub.build.frontends import arguments, launches
from tlhub.build.program import Branch, DeviceProgram
from tlhub.errors import BuildError
from tlhub.specs import Problem, Signature

_SYMBOL = "tlhub_program"
_SOURCE = "program.cu"
_VECTOR = 16


def translate(
    function: Any,
    helpers: Mapping[Any, Any],
    problem: Problem,
    signature: Signature,
    options: Mapping[str, str],
    folder: str,
) -> DeviceProgram:
    """Lower *function*, whose loops are bound to blocks and threads, and write ``program.cu`` to *folder*.

    *helpers*: private functions that it calls, by GlobalVar. Raises BuildError.
    """
    import tvm

    kernel = problem.kernel
    bound = arguments.bind(function, signature, kernel, {}, _VECTOR)
    target = tvm.target.Target({key: options[key] for key in ("kind", "arch")}, host="c")
    module = tvm.IRModule({tvm.ir.GlobalVar(_SYMBOL): function.with_attr("global_symbol", _SYMBOL), **helpers})
    module = tvm.tirx.transform.BindTarget(target)(module)
    lower, _, finish_device = tvm.tirx.get_default_tir_pipeline(target)
    # the function of that name hides its module
    split = importlib.import_module("tvm.tirx.build").split_host_device_mods
    host, by_target = split(lower(module))
    if len(by_target) != 1:
        raise BuildError(f"{kernel}: the program has no loop that is bound to blocks or threads of a GPU")
    ((_, device),) = by_target.items()
    devices = {str(f.attrs["global_symbol"]): f for f in device.functions.values() if "global_symbol" in f.attrs}
    branch = Branch(launches.read(host[_SYMBOL], devices, bound, {}, kernel), when=" && ".join(bound.conditions))
    with open(os.path.join(folder, _SOURCE), "w", encoding="utf-8") as file:
        file.write(_source(finish_device()(device), target))
    return DeviceProgram(
        code=_SOURCE,
        symbol="tlhub_program",
        buffers=bound.buffers,
        source=_SOURCE,
        toolchain={},
        branches=(branch,),
        flags=("-diag-suppress", "177,1046"),  # of names without a use, and of digits that a constant loses
    )


def _source(device: Any, target: Any) -> str:
    """Return the CUDA C++ of the device functions. What would compile it here is told to leave it alone."""
    import tvm

    tvm.register_global_func("tvm_callback_cuda_compile", lambda code: code, override=True)
    return str(tvm.get_global_func("target.build.cuda")(device, target).inspect_source())
