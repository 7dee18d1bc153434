"""TVM programs for GPUs, for tests: c = alpha a, M x N, right and wrong. Workers import this module."""

from __future__ import annotations


def _parts(shape, unnamed=False):
    """Return the function c = alpha a over *shape* with any strides, without a schedule."""
    from tvm import tirx
    from tvm.script.ir_builder import IRBuilder
    from tvm.tirx.script.builder import ir as T

    with IRBuilder() as builder:
        with T.prim_func(s_tir=True):
            T.func_name("scale")
            T.func_attr({"global_symbol": "scale"})
            handles = [T.arg(name, T.handle()) for name in "ac"]
            alpha = T.arg("alpha", T.float64())
            arrays = []
            for name, handle in zip("ac", handles, strict=True):
                strides = [tirx.Var(f"{name}{axis}", "int64") for axis in range(2)]
                arrays.append(T.match_buffer(handle, shape, "float32", strides=strides, align=4, offset_factor=1))
                if not unnamed:
                    IRBuilder.name(name, arrays[-1])
            with T.grid(*shape) as loops, T.sblock("scale"):
                i, j = T.axis.remap("SS", list(loops))
                T.buffer_store(arrays[1], arrays[0][i, j] * T.Cast("float32", alpha), [i, j])
    return builder.get()


def _symbols():
    from tvm import tirx

    return [tirx.Var(name, "int64") for name in "mn"]


def _bound(function, threads=64):
    """Return the function with its rows on blocks and its columns on threads, as a module."""
    import tvm

    schedule = tvm.s_tir.Schedule(tvm.IRModule({"main": function}))
    i, j = schedule.get_loops(schedule.get_sblock("scale"))
    outer, inner = schedule.split(j, [None, threads])
    for loop, tag in ((i, "blockIdx.y"), (outer, "blockIdx.x"), (inner, "threadIdx.x")):
        schedule.bind(loop, tag)
    return schedule.mod


def scale(problem, config, arch):
    return _bound(_parts(_symbols()))


def unnamed(problem, config, arch):
    return _bound(_parts(_symbols(), unnamed=True))


def compact(problem, config, arch):
    """Written as TE, for rows without gaps of data that TVM may take for aligned."""
    from tvm import te, tirx

    shape = _symbols()
    a, alpha = te.placeholder(shape, name="a"), tirx.Var("alpha", "float64")
    function = te.create_prim_func(
        [a, te.compute(shape, lambda i, j: a[i, j] * alpha.astype("float32"), name="scale"), alpha]
    )
    return _bound(function.with_attr("global_symbol", "scale"))


def unscheduled(problem, config, arch):
    return _parts(_symbols())


def square(problem, config, arch):
    return _bound(_parts([_symbols()[0]] * 2))
