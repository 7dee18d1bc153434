"""TileLang programs for tests: what a plugin's author writes, good and bad. Workers import this module.

Most are of c = alpha a, M x N, in tiles of 64 x 64.
"""
# no "from __future__ import annotations": TileLang reads the annotations of its functions as values

import tilelang.language as T

from tlhub.build.program import TileFunction, TileProgram


def compact(problem, config, arch):
    """Rows of 256 without gaps, through a shared tile that is loaded by tensor map where there are any."""
    m = T.dynamic("m")

    @T.prim_func
    def scale(a: T.Tensor((m, 256), "float32"), c: T.Tensor((m, 256), "float32"), alpha: T.float32):
        with T.Kernel(4, T.ceildiv(m, 64), threads=128) as (x, y):
            tile = T.alloc_shared((64, 64), "float32")
            T.copy(a[y * 64 : y * 64 + 64, x * 64 : x * 64 + 64], tile, prefer_instruction=config.get("load"))
            for i, j in T.Parallel(64, 64):
                c[y * 64 + i, x * 64 + j] = tile[i, j] * alpha

    return scale


def _scale(m, n, a_type, c_type, alpha_type=T.float64):
    """Elements one by one."""

    @T.prim_func
    def scale(a: a_type, c: c_type, alpha: alpha_type):
        with T.Kernel(T.ceildiv(n, 64), T.ceildiv(m, 64), threads=128) as (x, y):
            for i, j in T.Parallel(64, 64):
                c[y * 64 + i, x * 64 + j] = a[y * 64 + i, x * 64 + j] * T.cast(alpha, "float32")

    return scale


def _symbols(names):
    return [T.dynamic(name) for name in names.split()]


def strided(problem, config, arch):
    """Any strides; a symbol and a buffer share a name."""
    m, n, a0, a1, c0, c1 = _symbols("m n a a1 c0 c1")
    a = T.StridedTensor((m, n), (a0, a1), "float32")
    return _scale(m, n, a, T.StridedTensor((m, n), (c0, c1), "float32"))


def branches(problem, config, arch):
    """Rows that are a multiple of 4 apart, in vectors and in two launches; else any strides."""
    m, n = _symbols("m n")

    @T.prim_func
    def vectors(a: T.handle, c: T.handle, alpha: T.float32, quads: T.int32, row: T.int64):
        A = T.match_buffer(a, (m, quads * 4), "float32", strides=(row * 4, 1))
        C = T.match_buffer(c, (m, quads * 4), "float32")
        with T.Kernel(m, threads=32) as y:
            for j in T.Parallel(128):
                C[y, j] = A[y, j]
        with T.Kernel(m, threads=64) as y:
            for j in T.Parallel(128):
                C[y, j] *= alpha

    values = {"quads": "N / 4", "row": "STRIDE(a, 0) / 4"}
    first = TileFunction(vectors, "N == 128 && ALIGNED(STRIDE(a, 0), 4)", values, {"tl.disable_warp_specialized": True})
    return TileProgram((first, TileFunction(strided(problem, config, arch))), ("-DTOLD=1",))


def waits(problem, config, arch):
    """A cluster of two blocks that waits for what is ahead in the stream."""
    m = T.dynamic("m")

    @T.prim_func
    def scale(a: T.Tensor((m, 256), "float32"), c: T.Tensor((m, 256), "float32"), alpha: T.float32):
        with T.Kernel(4, m, threads=64, cluster_dims=(2, 1, 1)) as (x, y):
            T.pdl_sync()
            for j in T.Parallel(64):
                c[y, x * 64 + j] = a[y, x * 64 + j] * alpha

    return scale


# -- wrong ones ------------------------------------------------------------------------------------


def nothing(problem, config, arch):
    return 7


def none(problem, config, arch):
    return TileProgram(())


def too_few(problem, config, arch):
    m, n = _symbols("m n")

    @T.prim_func
    def scale(a: T.Tensor((m, n), "float32"), c: T.Tensor((m, n), "float32")):
        with T.Kernel(m, threads=32) as y:
            c[y, 0] = a[y, 0]

    return scale


def wrong_dtype(problem, config, arch):
    m, n = _symbols("m n")
    return _scale(m, n, T.Tensor((m, n), "float16"), T.Tensor((m, n), "float32"))


def wrong_extent(problem, config, arch):
    m, n = _symbols("m n")
    return _scale(m, n, T.Tensor((m, 128), "float32"), T.Tensor((m, n), "float32"))


def wrong_scalar(problem, config, arch):
    m, n = _symbols("m n")
    return _scale(m, n, T.Tensor((m, n), "float32"), T.Tensor((m, n), "float32"), T.float16)


def square(problem, config, arch):
    m = T.dynamic("m")
    return _scale(m, m, T.Tensor((m, m), "float32"), T.Tensor((m, m), "float32"))


def one_stride(problem, config, arch):
    m, n, row = _symbols("m n row")
    return _scale(m, n, T.StridedTensor((m, n), (row, 1), "float32"), T.StridedTensor((m, n), (row, 1), "float32"))


def raises(problem, config, arch):
    raise RuntimeError("no tile of this size")
