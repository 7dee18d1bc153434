"""The mma.sync programs of gemm in TileLang: tiles through shared memory, several stages in flight where copies can be.

One binary for every size and stride. A call whose operands are aligned to 16 bytes takes a function of the large tile,
or of the small one where large tiles are too few for the device; every other call loads element by element.
"""
# no "from __future__ import annotations": TileLang reads the annotations of its functions as values

from collections.abc import Callable, Mapping
from math import pi
from typing import Any

import tilelang.language as T

from tlhub.build.program import Expression, TileFunction, TileProgram
from tlhub.specs import DTYPES, Problem

_GROUP = 8
"""Rows of tiles that are walked column by column, so that blocks that run at one time share operands in L2."""

_MOST = 2**31 - 2**10
"""The largest extent: the first and the last row of its last tile have an int32."""

_PASSES = {
    "tl.disable_wgmma": True,
    "tl.disable_warp_specialized": True,
    "tl.disable_thread_storage_sync": True,  # the function below places every barrier itself
}


def program(problem: Problem, config: Mapping[str, Any], arch: str) -> TileProgram:
    """Return the functions for *problem*; the knobs of *config* are described in ``tlhub_gemm.tilelang_mma``."""
    large, small = ((config[f"{size}_m"], config[f"{size}_n"]) for size in ("large", "small"))
    depth, stages = config["k"], config["stages"]
    small_enough = " && ".join(f"{dim} <= {_MOST}" for dim in "MNK")
    aligned = " && ".join(
        dict.fromkeys([small_enough, *_vectors(problem, "a"), *_vectors(problem, "b"), *_pairs(problem)])
    )
    enough = f"CEIL_DIV(M, {large[0]}) * CEIL_DIV(N, {large[1]}) * B >= SMS"

    def function(tile: tuple[int, int], stages: int, threads: int, blocks: int, fast: bool, when: str) -> TileFunction:
        made = _gemm(problem, *tile, depth, stages, threads, blocks, fast)
        return TileFunction(made, when, _values(*tile, depth), _PASSES)

    return TileProgram(
        (
            function(large, stages, config["threads"], config["blocks"], True, f"{aligned} && {enough}"),
            function(small, stages, 128, 1, True, aligned),
            function(small, 1, 128, 1, False, small_enough),
        )
    )


# -- what a call must be for vectors ---------------------------------------------------------------


def _vectors(problem: Problem, name: str) -> list[str]:
    """Return the conditions under which a or b, contiguous along its last dim, is loaded 8 elements at a time."""
    last = ("M" if problem.option["trans_a"] else "K") if name == "a" else ("K" if problem.option["trans_b"] else "N")
    return [f"ALIGNED({value}, 8)" for value in (last, f"STRIDE({name}, 0)", f"STRIDE({name}, 1)")]


def _pairs(problem: Problem) -> list[str]:
    """Return the conditions under which c, contiguous along its last dim, is stored 2 elements at a time."""
    item = _item(dict(problem.dtypes)["c"])
    return [f"ALIGNED({value}, 2)" for value in ("N", "STRIDE(c, 0)", "STRIDE(c, 1)")] + [
        f"ALIGNED(DATA(c), {2 * item})"
    ]


def _values(bm: int, bn: int, bk: int) -> dict[str, Expression]:
    """Return the values of the integer parameters: extents and strides in vectors and pairs, and numbers of tiles."""
    steps = {f"{x}{axis}": f"STRIDE({x}, {axis}) / {2 if x == 'c' else 8}" for x in "abc" for axis in (0, 1)}
    return {
        "m8": "M / 8",
        "n8": "N / 8",
        "k8": "K / 8",
        "n2": "N / 2",
        **steps,
        "rows": f"CEIL_DIV(M, {bm})",
        "columns": f"CEIL_DIV(N, {bn})",
        "steps": f"CEIL_DIV(K, {bk})",
    }


# -- the function ----------------------------------------------------------------------------------


def _gemm(problem: Problem, bm: int, bn: int, bk: int, stages: int, threads: int, blocks: int, fast: bool) -> Any:
    """Return a prim_func with tiles of *bm* x *bn* x *bk* by *threads*, for operands in vectors (*fast*) or any.

    *blocks*: how many share the registers of an SM. With more than one of *stages* loads are asynchronous and run
    ahead of the products; with one, a tile waits in registers. What is out of bounds is loaded as zero and not stored.
    """
    option, dtypes = problem.option, dict(problem.dtypes)
    dtype, out, accum = dtypes["a"], dtypes["c"], str(option["accum"])
    trans_a, trans_b = bool(option["trans_a"]), bool(option["trans_b"])
    bias_type, residual_type = (T.handle if option[name] else None for name in ("bias", "residual"))
    act = _ACTIVATIONS[str(option["epilogue"])]
    batch, m, n, k = (T.dynamic(name) for name in ("batch", "m", "n", "k"))
    a_tile, b_tile = ((bk, bm) if trans_a else (bm, bk)), ((bn, bk) if trans_b else (bk, bn))

    @T.prim_func
    def gemm(
        a: T.handle,
        b: T.handle,
        bias: bias_type,  # type: ignore[valid-type]
        residual: residual_type,  # type: ignore[valid-type]
        c: T.handle,
        alpha: T.float64,
        out_scale: T.float64,
        m8: T.int32,
        n8: T.int32,
        k8: T.int32,
        n2: T.int32,
        a0: T.int64,
        a1: T.int64,
        b0: T.int64,
        b1: T.int64,
        c0: T.int64,
        c1: T.int64,
        rows: T.int32,
        columns: T.int32,
        steps: T.int32,
    ) -> None:
        width = n2 * 2 if fast else n
        if fast:
            A = T.match_buffer(
                a, (batch, k, m8 * 8) if trans_a else (batch, m, k8 * 8), dtype, strides=(a0 * 8, a1 * 8, 1)
            )
            B = T.match_buffer(
                b, (batch, n, k8 * 8) if trans_b else (batch, k, n8 * 8), dtype, strides=(b0 * 8, b1 * 8, 1)
            )
            C = T.match_buffer(c, (batch, m, width), out, strides=(c0 * 2, c1 * 2, 1), align=_item(out))
        else:
            A = T.match_buffer(a, (batch, k, m) if trans_a else (batch, m, k), dtype, strides=_any("a"))
            B = T.match_buffer(b, (batch, n, k) if trans_b else (batch, k, n), dtype, strides=_any("b"))
            C = T.match_buffer(c, (batch, m, width), out, strides=_any("c"))
        if option["bias"]:
            Bias = T.match_buffer(bias, (width,), out, strides=_any("bias")[:1])
        if option["residual"]:
            Residual = T.match_buffer(residual, (batch, m, width), out, strides=_any("residual"))
        with T.Kernel(rows * columns * batch, threads=threads) as block:
            As = T.alloc_shared((stages, *a_tile), dtype)
            Bs = T.alloc_shared((stages, *b_tile), dtype)
            total = T.alloc_fragment((bm, bn), accum)
            x = total if accum == "float32" else T.alloc_fragment((bm, bn), "float32")
            T.annotate_min_blocks_per_sm(blocks)
            z = T.alloc_var("int32", init=T.truncdiv(block, rows * columns))
            tile = T.alloc_var("int32", init=T.truncmod(block, rows * columns))
            first = T.alloc_var("int32", init=T.truncdiv(tile, _GROUP * columns) * _GROUP)
            group = T.alloc_var("int32", init=T.min(rows - first, _GROUP))
            row = T.alloc_var("int32", init=first + T.truncmod(tile - first * columns, group))
            column = T.alloc_var("int32", init=T.truncdiv(tile - first * columns, group))
            T.clear(total)
            if stages > 1:
                for s in T.unroll(stages - 1):
                    T.async_copy(_tile(A, z, row * bm, s * bk, a_tile, trans_a), As[s, :, :])
                    T.async_copy(_tile(B, z, column * bn, s * bk, b_tile, not trans_b), Bs[s, :, :])
                for s in T.serial(steps):
                    T.ptx_wait_group(2 * (stages - 2))
                    T.sync_threads()
                    ahead = s + (stages - 1)
                    T.async_copy(_tile(A, z, row * bm, ahead * bk, a_tile, trans_a), As[ahead % stages, :, :])
                    T.async_copy(_tile(B, z, column * bn, ahead * bk, b_tile, not trans_b), Bs[ahead % stages, :, :])
                    T.gemm(As[s % stages, :, :], Bs[s % stages, :, :], total, transpose_A=trans_a, transpose_B=trans_b)
            else:
                a_next = T.alloc_fragment(a_tile, dtype)
                b_next = T.alloc_fragment(b_tile, dtype)
                T.copy(_tile(A, z, row * bm, 0, a_tile, trans_a), a_next)
                T.copy(_tile(B, z, column * bn, 0, b_tile, not trans_b), b_next)
                for s in T.serial(steps):
                    T.copy(a_next, As[0, :, :])
                    T.copy(b_next, Bs[0, :, :])
                    T.sync_threads()
                    T.copy(_tile(A, z, row * bm, (s + 1) * bk, a_tile, trans_a), a_next)
                    T.copy(_tile(B, z, column * bn, (s + 1) * bk, b_tile, not trans_b), b_next)
                    T.gemm(As[0, :, :], Bs[0, :, :], total, transpose_A=trans_a, transpose_B=trans_b)
                    T.sync_threads()
            if accum != "float32":
                T.copy(total, x)
            for i, j in T.Parallel(bm, bn):
                x[i, j] *= T.cast(alpha, "float32")
                if option["bias"]:
                    x[i, j] += T.cast(Bias[column * bn + j], "float32")
                x[i, j] = act(x[i, j])
                if option["residual"]:
                    x[i, j] += T.cast(Residual[z, row * bm + i, column * bn + j], "float32")
                x[i, j] *= T.cast(out_scale, "float32")
            T.copy(x, C[z, row * bm : row * bm + bm, column * bn : column * bn + bn])

    return gemm


def _tile(array: Any, z: Any, outer: Any, along: Any, tile: tuple[int, int], swapped: bool) -> Any:
    """Return a tile of a or b from *outer* in its own dim and from *along* in K, which comes first if *swapped*."""
    first, second = (along, outer) if swapped else (outer, along)
    return array[z, first : first + tile[0], second : second + tile[1]]


def _sigmoid(x: Any) -> Any:
    decay = T.exp(-T.abs(x))
    return T.if_then_else(x < 0, decay, 1.0) / (1.0 + decay)


_ACTIVATIONS: Mapping[str, Callable[[Any], Any]] = {
    # of a NaN all are NaN; an infinite x times a weight of 0 is too
    "none": lambda x: x,
    "relu": lambda x: T.if_then_else(x < 0, 0.0, x),
    "silu": lambda x: x * _sigmoid(x),
    "gelu": lambda x: x * (0.5 + 0.5 * T.erf(x * 0.5**0.5)),
    "gelu_tanh": lambda x: x * _sigmoid((8 / pi) ** 0.5 * (x + 0.044715 * x * x * x)),
}


def _item(dtype: str) -> int:
    return DTYPES[dtype][1] // 8


def _any(name: str) -> tuple[Any, ...]:
    """Return symbols for the strides of an array of 3 dims."""
    return tuple(T.dynamic(f"{name}_{axis}", "int64") for axis in range(3))
