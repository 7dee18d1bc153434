"""Root mean square normalisation over the last dim: y = x / sqrt(mean(x^2) + eps) * weight."""

from __future__ import annotations

from tlhub.hooks import hookimpl
from tlhub.specs import Arg, Dim, Kernel, Scalar, Schedule

TLHUB_API = 1
LANES = 16


@hookimpl
def tlhub_kernels():
    return [
        Kernel(
            name="xyz_rms_norm",
            revision=1,
            dims=(Dim("M"), Dim("N")),
            inputs=(Arg("x", ("M", "N")), Arg("weight", ("N",))),
            outputs=(Arg("y", ("M", "N")),),
            scalars=(Scalar("eps", default=1e-6),),
            dtypes=("float32",),
            patterns=(("M",), ("M", "N")),
            reference="tlhub_plugin_xyz:reference",
            tolerance="tlhub_plugin_xyz:tolerance",
            flops=lambda dims: 4.0 * dims["M"] * dims["N"],
        )
    ]


@hookimpl
def tlhub_schedules():
    where = {"kernel": "xyz_rms_norm", "kernel_revision": 1, "targets": ("cpu",), "symbolic": ("M", "N")}
    return [Schedule(name="rows", revision=1, toolchain="tvm", program="tlhub_plugin_xyz:rows", **where)]


def reference(problem, inputs, scalars):
    x = inputs["x"].astype("float64")
    square = (x * x).sum(-1, keepdims=True) / max(x.shape[-1], 1)
    return (x / (square + scalars["eps"]) ** 0.5 * inputs["weight"],)


def tolerance(problem, inputs, scalars, outputs):
    # N/16 + 15 additions of positive terms, halved by the root; six roundings besides, of 2^-24 each
    return (2.0**-24 * (inputs["x"].shape[-1] / (2 * LANES) + 14) * abs(outputs[0]),)


def rows(problem, config, arch):
    from tvm.script import tirx as T

    @T.prim_func
    def rms_norm(x: T.handle, weight: T.handle, y: T.handle, eps: T.float64):
        M, N = T.int64(), T.int64()
        X = T.match_buffer(x, (M, N), "float32", align=4, offset_factor=1)
        W = T.match_buffer(weight, (N,), "float32", align=4, offset_factor=1)
        Y = T.match_buffer(y, (M, N), "float32", align=4, offset_factor=1)
        for i in T.parallel(M):
            part = T.alloc_buffer((LANES,), "float32", scope="local")
            scale = T.alloc_buffer((1,), "float32", scope="local")
            for v in T.vectorized(LANES):
                part[v] = T.float32(0)
            for j in range(N // LANES):
                for v in T.vectorized(LANES):
                    part[v] += X[i, j * LANES + v] * X[i, j * LANES + v]
            scale[0] = T.float32(0)
            for v in range(LANES):
                scale[0] += part[v]
            for j in range(N % LANES):
                scale[0] += X[i, N - 1 - j] * X[i, N - 1 - j]
            scale[0] = T.float32(1) / T.sqrt(scale[0] / T.Cast("float32", N) + T.Cast("float32", eps))
            for j in range(N // LANES):
                for v in T.vectorized(LANES):
                    Y[i, j * LANES + v] = X[i, j * LANES + v] * scale[0] * W[j * LANES + v]
            for j in range(N % LANES):
                Y[i, N - 1 - j] = X[i, N - 1 - j] * scale[0] * W[N - 1 - j]

    return rms_norm
