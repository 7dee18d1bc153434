"""Programs for tests: what a plugin's author writes, good and bad. Workers import this module."""

from __future__ import annotations

import os
import subprocess
import sys
import time


def add(problem, config, arch):
    """c = alpha * (a + b) with every stride, in parallel over rows."""
    from tvm.script import tirx as T

    @T.prim_func
    def program(a: T.handle, b: T.handle, c: T.handle, alpha: T.float64):
        B = T.int64()
        M = T.int64()
        N = T.int64()
        a0 = T.int64()
        a1 = T.int64()
        a2 = T.int64()
        b0 = T.int64()
        b1 = T.int64()
        b2 = T.int64()
        c0 = T.int64()
        c1 = T.int64()
        c2 = T.int64()
        A = T.match_buffer(a, (B, M, N), "float32", strides=(a0, a1, a2), align=4, offset_factor=1)
        D = T.match_buffer(b, (B, M, N), "float32", strides=(b0, b1, b2), align=4, offset_factor=1)
        C = T.match_buffer(c, (B, M, N), "float32", strides=(c0, c1, c2), align=4, offset_factor=1)
        for m in T.parallel(M):
            for k in range(B):
                for n in range(N):
                    C[k, m, n] = T.Cast("float32", alpha) * (A[k, m, n] + D[k, m, n])

    return program


def claims(problem, config, arch):
    """c = a + b over compact rows of 64, vectorised, with buffers that claim data aligned to 64 bytes."""
    from tvm.script import tirx as T

    @T.prim_func
    def program(a: T.handle, b: T.handle, c: T.handle, alpha: T.float64):
        B = T.int64()
        M = T.int64()
        A = T.match_buffer(a, (B, M, 64), "float32", align=64)
        D = T.match_buffer(b, (B, M, 64), "float32", align=64)
        C = T.match_buffer(c, (B, M, 64), "float32", align=64)
        for k in range(B):
            for m in range(M):
                for n in T.vectorized(64):
                    C[k, m, n] = T.Cast("float32", alpha) * (A[k, m, n] + D[k, m, n])

    return program


def helped(problem, config, arch):
    """A module of an entry and a private function that it calls with pointers."""
    from tvm.script import ir as I
    from tvm.script import tirx as T

    @I.ir_module
    class Module:
        @T.prim_func(private=True)
        def row(a: T.handle("float32"), b: T.handle("float32"), c: T.handle("float32"), n: T.int64, alpha: T.float32):
            A = T.decl_buffer((n,), "float32", data=a)
            D = T.decl_buffer((n,), "float32", data=b)
            C = T.decl_buffer((n,), "float32", data=c)
            for i in range(n):
                C[i] = alpha * (A[i] + D[i])

        @T.prim_func
        def program(a: T.handle, b: T.handle, c: T.handle, alpha: T.float64):
            T.func_attr({"global_symbol": "program"})
            B = T.int64()
            M = T.int64()
            N = T.int64()
            A = T.match_buffer(a, (B, M, N), "float32", align=4, offset_factor=1)
            D = T.match_buffer(b, (B, M, N), "float32", align=4, offset_factor=1)
            C = T.match_buffer(c, (B, M, N), "float32", align=4, offset_factor=1)
            Module.row(A.data, D.data, C.data, B * M * N, T.Cast("float32", alpha))

    return Module


def te(problem, config, arch):
    """The same as a TE program, for fixed extents."""
    from tvm import te as t
    from tvm import tirx

    shape = [e for _, e in problem.dims]
    a, b = t.placeholder(shape, name="a"), t.placeholder(shape, name="b")
    alpha = tirx.Var("alpha", "float64")
    c = t.compute(shape, lambda i, j, k: (a[i, j, k] + b[i, j, k]) * alpha.astype("float32"), name="c")
    return t.create_prim_func([a, b, c, alpha])


def scheduled(problem, config, arch):
    """The TE program with an s_tir schedule, returned as a module: vectorised and parallel, with a scratch stage."""
    import tvm
    from tvm import te as t
    from tvm import tirx

    shape = [e for _, e in problem.dims]
    a, b = t.placeholder(shape, name="a"), t.placeholder(shape, name="b")
    alpha = tirx.Var("alpha", "float64")
    s = t.compute(shape, lambda i, j, k: a[i, j, k] + b[i, j, k], name="s")
    c = t.compute(shape, lambda i, j, k: s[i, j, k] * alpha.astype("float32"), name="c")
    schedule = tvm.s_tir.Schedule(tvm.IRModule({"main": t.create_prim_func([a, b, c, alpha])}))
    loops = schedule.get_loops(schedule.get_sblock("c"))
    schedule.parallel(loops[1])
    _, inner = schedule.split(loops[-1], [None, 8])
    schedule.vectorize(inner)
    return schedule.mod


def bits(problem, config, arch):
    """c = a as integers of the same width: a copy that declares another storage dtype."""
    from tvm.script import tirx as T

    dtype = {"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float16": "float16"}[problem.dtype]
    size = 1 if dtype == "uint8" else 2

    @T.prim_func
    def program(a: T.handle, c: T.handle):
        N = T.int64()
        a0 = T.int64()
        c0 = T.int64()
        A = T.match_buffer(a, (N,), dtype, strides=(a0,), align=size, offset_factor=1)
        C = T.match_buffer(c, (N,), dtype, strides=(c0,), align=size, offset_factor=1)
        for n in range(N):
            C[n] = A[n]

    return program


def moments(problem, config, arch):
    """Two outputs and an integer: the sum of each row (in scratch memory first), and the count plus shift."""
    from tvm.script import tirx as T

    @T.prim_func
    def program(a: T.handle, total: T.handle, count: T.handle, scale: T.float64, shift: T.int64):
        M = T.int64()
        N = T.int64()
        a0 = T.int64()
        a1 = T.int64()
        A = T.match_buffer(a, (M, N), "float64", strides=(a0, a1), align=8, offset_factor=1)
        S = T.match_buffer(total, (M,), "float64", align=8, offset_factor=1)
        C = T.match_buffer(count, (M,), "int64", align=8, offset_factor=1)
        W = T.alloc_buffer((M, N), "float64")
        for m in T.parallel(M):
            for n in range(N):
                W[m, n] = A[m, n] * scale
        for m in T.parallel(M):
            S[m] = 0.0
            C[m] = N + shift
            for n in range(N):
                S[m] = S[m] + W[m, n]

    return program


def fails_inside(problem, config, arch):
    """A task that fails while others run."""
    from tvm.script import tirx as T

    @T.prim_func
    def program(a: T.handle, b: T.handle, c: T.handle, alpha: T.float64):
        B = T.int64()
        M = T.int64()
        N = T.int64()
        A = T.match_buffer(a, (B, M, N), "float32", align=4, offset_factor=1)
        D = T.match_buffer(b, (B, M, N), "float32", align=4, offset_factor=1)
        C = T.match_buffer(c, (B, M, N), "float32", align=4, offset_factor=1)
        for m in T.parallel(M):
            assert A[0, m, 0] < T.float32(100), "row too large"
            C[0, m, 0] = A[0, m, 0] + D[0, m, 0]

    return program


def unit_rows(problem, config, arch):
    """The last stride is taken to be 1, the others are free."""
    from tvm.script import tirx as T

    @T.prim_func
    def program(a: T.handle, b: T.handle, c: T.handle, alpha: T.float64):
        B = T.int64()
        M = T.int64()
        N = T.int64()
        a0 = T.int64()
        a1 = T.int64()
        A = T.match_buffer(a, (B, M, N), "float32", strides=(a0, a1, T.int64(1)), align=4, offset_factor=1)
        D = T.match_buffer(b, (B, M, N), "float32", align=4, offset_factor=1)
        C = T.match_buffer(c, (B, M, N), "float32", align=4, offset_factor=1)
        for k in range(B):
            for m in range(M):
                for n in range(N):
                    C[k, m, n] = T.Cast("float32", alpha) * (A[k, m, n] + D[k, m, n])

    return program


# -- programs that are wrong ------------------------------------------------------------------------


def raises(problem, config, arch):
    print("on its way")
    raise RuntimeError("no tile of this size")


def raises_with_hint(problem, config, arch):
    from tlhub.errors import ArgumentError

    raise ArgumentError("no such tile", hint="tile=8")


def aborts(problem, config, arch):
    print("about to abort", flush=True)
    os.abort()


def exits(problem, config, arch):
    sys.exit("no licence")


def vanishes(problem, config, arch):
    os._exit(0)


def none(problem, config, arch):
    return None


def hangs(problem, config, arch):
    litter = "import tempfile, time\nwhile True:\n    tempfile.mkdtemp()\n    time.sleep(1e-4)"
    child = subprocess.Popen([sys.executable, "-c", litter])
    with open(config["pids"], "w") as file:
        file.write(f"{os.getpid()} {child.pid}")
    print("asleep", flush=True)
    time.sleep(600)


def hogs(problem, config, arch):
    return bytearray(1 << 40)


def prints(problem, config, arch):
    os.write(1, b'{"built": "not this"}\n')
    print("and this", file=sys.stderr)
    return add(problem, config, arch)


def no_torch(problem, config, arch):
    if sys.modules.get("torch") is not None:
        raise RuntimeError("torch was imported")
    return add(problem, config, arch)


def nothing(problem, config, arch):
    return 3


def two(problem, config, arch):
    import tvm

    return tvm.IRModule({"x": add(problem, config, arch), "y": add(problem, config, arch)})


def calls_out(problem, config, arch):
    from tvm.script import tirx as T

    @T.prim_func
    def program(a: T.handle, b: T.handle, c: T.handle, alpha: T.float64):
        B = T.int64()
        M = T.int64()
        N = T.int64()
        A = T.match_buffer(a, (B, M, N), "float32")
        D = T.match_buffer(b, (B, M, N), "float32")
        C = T.match_buffer(c, (B, M, N), "float32")
        T.evaluate(T.call_packed("somebody.else", A[0, 0, 0]))
        C[0, 0, 0] = D[0, 0, 0]

    return program


def wrong_scalar(problem, config, arch):
    from tvm.script import tirx as T

    @T.prim_func
    def program(a: T.handle, b: T.handle, c: T.handle, alpha: T.float32):
        B = T.int64()
        M = T.int64()
        N = T.int64()
        A = T.match_buffer(a, (B, M, N), "float32")
        D = T.match_buffer(b, (B, M, N), "float32")
        C = T.match_buffer(c, (B, M, N), "float32")
        C[0, 0, 0] = alpha * A[0, 0, 0] + D[0, 0, 0]

    return program


def wrong_dtype(problem, config, arch):
    from tvm.script import tirx as T

    @T.prim_func
    def program(a: T.handle, b: T.handle, c: T.handle, alpha: T.float64):
        B = T.int64()
        M = T.int64()
        N = T.int64()
        A = T.match_buffer(a, (B, M, N), "float32")
        D = T.match_buffer(b, (B, M, N), "int32")
        C = T.match_buffer(c, (B, M, N), "float32")
        C[0, 0, 0] = A[0, 0, 0] + T.Cast("float32", D[0, 0, 0])

    return program


def no_array(problem, config, arch):
    from tvm.script import tirx as T

    @T.prim_func
    def program(a: T.int64, b: T.handle, c: T.handle, alpha: T.float64):
        M = T.int64()
        D = T.match_buffer(b, (M,), "float32")
        C = T.match_buffer(c, (M,), "float32")
        C[0] = D[0]

    return program


def wrong_rank(problem, config, arch):
    from tvm.script import tirx as T

    @T.prim_func
    def program(a: T.handle, b: T.handle, c: T.handle, alpha: T.float64):
        M = T.int64()
        N = T.int64()
        A = T.match_buffer(a, (M, N), "float32")
        D = T.match_buffer(b, (M, N), "float32")
        C = T.match_buffer(c, (M, N), "float32")
        C[0, 0] = A[0, 0] + D[0, 0]

    return program
