"""Programs of toolchain cuda for tests: what a plugin's author writes, good and bad. Workers import this module."""

from __future__ import annotations

from dataclasses import replace

from tlhub.build.program import Branch, CudaProgram, Launch, Parameter, TensorMap

# -- c = alpha * a + b, in one launch --------------------------------------------------------------

AXPY = """
extern "C" __global__ void axpy(float *c, const float *a, const float *b, float alpha, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) c[i] = alpha * a[i] + b[i];
}
"""

AXPY_LAUNCH = Launch(
    "axpy",
    grid=("CEIL_DIV(N, 256)", 1, 1),
    block=(256, 1, 1),
    parameters=(
        Parameter("float *", "DATA(c)"),
        Parameter("const float *", "DATA(a)"),
        Parameter("const float *", "DATA(b)"),
        Parameter("float", "alpha"),
        Parameter("int", "N"),
    ),
)


def axpy(problem, config, arch):
    """Arrays without gaps. The config changes the source, the launch and the flags."""
    fields = {"strides": {"a": "compact", "b": "compact", "c": "compact"}, **config}
    launch = replace(AXPY_LAUNCH, **fields.pop("launch", {}))
    return CudaProgram(fields.pop("source", AXPY), (Branch((launch,)),), **fields)


def two(problem, config, arch):
    """Two launches, of which the second has one block a row and element."""
    return CudaProgram(AXPY, (Branch((AXPY_LAUNCH, replace(AXPY_LAUNCH, grid=(1, "N", 1)))),))


def broken(problem, config, arch):
    return axpy(problem, {"source": 'extern "C" __global__ void axpy() { no such thing; }'}, arch)


def mangled(problem, config, arch):
    return axpy(problem, {"source": AXPY.replace('extern "C"', "")}, arch)


def longer(problem, config, arch):
    return axpy(problem, {"source": AXPY.replace("int n", "long long n")}, arch)


def other(problem, config, arch):
    return axpy(problem, {"source": AXPY.replace("axpy", "saxpy")}, arch)


def greedy(problem, config, arch):
    """All shared memory of a block, and what the kernel declares itself."""
    source = AXPY.replace("int i", "__shared__ float s[256]; s[threadIdx.x] = n; __syncthreads(); n = s[5]; int i")
    return axpy(problem, {"source": source, "launch": {"shared": 227 << 10}}, arch)


def unknown_strides(problem, config, arch):
    return axpy(problem, {"strides": {"q": "compact"}}, arch)


def no_program(problem, config, arch):
    return AXPY


def warns(problem, config, arch):
    """An unused variable, and registers that do not fit."""
    source = """
extern "C" __global__ void __launch_bounds__(1024) axpy(float *c, const float *a, const float *b, float alpha, int n) {
  int unused;
  float v[128];
#pragma unroll
  for (int i = 0; i < 128; ++i) v[i] = a[i * n + threadIdx.x];
#pragma unroll
  for (int k = 0; k < 128; ++k) c[k * n + threadIdx.x] = v[(k * 7) % 128] * v[127 - k] * alpha + v[(k * 3) % 128];
}
"""
    return axpy(problem, {"source": source}, arch)


# -- c = alpha * a, by tensor map where the rows allow it ------------------------------------------

SCALE = """
struct alignas(64) Map { unsigned long long opaque[16]; };

static __device__ unsigned shared_address(const void *p) { return (unsigned)__cvta_generic_to_shared(p); }

// a tile of 8 rows of 32 comes through the tensor memory accelerator: out of bounds it is zero
extern "C" __global__ void scale_tiles(const __grid_constant__ Map a, float *c, long long stride, float alpha, int m,
                                       int n) {
  extern __shared__ __align__(128) float tile[];
  __shared__ unsigned long long barrier;
  unsigned to = shared_address(tile), at = shared_address(&barrier);
  int x = blockIdx.x * 32, y = blockIdx.y * 8;
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared.b64 [%0], 1; fence.mbarrier_init.release.cluster;" ::"r"(at) : "memory");
  }
  __syncthreads();
  asm volatile("griddepcontrol.wait;" ::: "memory");
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], 1024;" ::"r"(at) : "memory");
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
        ::"r"(to), "l"(&a), "r"(x), "r"(y), "r"(at) : "memory");
  }
  asm volatile("{ .reg .pred p; again: mbarrier.try_wait.parity.shared.b64 p, [%0], 0; @!p bra again; }" ::"r"(at)
               : "memory");
  int i = y + threadIdx.x / 32, j = x + threadIdx.x % 32;
  if (i < m && j < n) c[i * stride + j] = alpha * tile[threadIdx.x];
}

extern "C" __global__ void scale_plain(const float *a, long long row, long long column, float *c, long long stride,
                                       float alpha, long long n) {
  for (long long j = threadIdx.x; j < n; j += blockDim.x) {
    c[blockIdx.x * stride + j] = alpha * a[blockIdx.x * row + j * column];
  }
}
"""

_OUTPUT = (Parameter("float *", "DATA(c)"), Parameter("int64_t", "STRIDE(c, 0)"), Parameter("float", "alpha"))

SCALE_TILES = Launch(
    "scale_tiles",
    grid=("2 * CEIL_DIV(N, 64)", "CEIL_DIV(M, 8)", 1),
    block=(256, 1, 1),
    parameters=(
        TensorMap(
            "float32",
            address="DATA(a)",
            dims=("N", "M"),
            strides=("STRIDE(a, 0) * 4",),
            box=(32, 8),
            swizzle=0,
        ),
        *_OUTPUT,
        Parameter("int", "M"),
        Parameter("int", "N"),
    ),
    shared=100 << 10,
    cluster=(2, 1, 1),
    programmatic=True,
)

SCALE_PLAIN = Launch(
    "scale_plain",
    grid=("M", 1, 1),
    block=(128, 1, 1),
    parameters=(
        Parameter("const float *", "DATA(a)"),
        Parameter("long long", "STRIDE(a, 0)"),
        Parameter("long long", "STRIDE(a, 1)"),
        *_OUTPUT,
        Parameter("int64_t", "N"),
    ),
)

ROWS_ALIGNED = "STRIDE(a, 1) == 1 && ALIGNED(DATA(a), 16) && ALIGNED(STRIDE(a, 0), 4) && STRIDE(a, 0) > 0"


def scale(problem, config, arch):
    """A branch with a tensor map, one for any strides that are not negative; rows of c without gaps."""
    branches = (Branch((SCALE_TILES,), ROWS_ALIGNED), Branch((SCALE_PLAIN,), "STRIDE(a, 0) >= 0 && STRIDE(a, 1) >= 0"))
    return CudaProgram(SCALE, branches, strides={"c": (None, 1)})


# -- s = sums of the rows of a, in two launches with scratch memory --------------------------------

SUM = """
// block b of SMS adds up its share of each row, in order
extern "C" __global__ void parts(const float *a, long long row, float *part, int m, int n, unsigned blocks) {
  for (int i = threadIdx.x; i < m; i += blockDim.x) {
    float s = 0;
    for (int j = blockIdx.x; j < n; j += blocks) s += a[i * row + j];
    part[i * blocks + blockIdx.x] = s;
  }
}

extern "C" __global__ void whole(const float *part, long long row, float *s, int m, int blocks) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= m) return;
  float t = 0;
  for (int j = 0; j < blocks; ++j) t += part[i * row + j];
  s[i] = t;
}
"""

_MANY = "CEIL_DIV(M, 128)"


def sums(problem, config, arch):
    """Long rows in shares with ``4 * SMS * M`` bytes of scratch memory, short ones at once."""
    parts = Launch(
        "parts",
        ("SMS", 1, 1),
        (128, 1, 1),
        (
            Parameter("const float *", "DATA(a)"),
            Parameter("int64_t", "STRIDE(a, 0)"),
            Parameter("float *", "WORKSPACE"),
            Parameter("int", "M"),
            Parameter("int", "N"),
            Parameter("unsigned", "SMS"),
        ),
        cooperative=True,
    )
    whole = Launch(
        "whole",
        (_MANY, 1, 1),
        (128, 1, 1),
        (
            Parameter("const float *", "WORKSPACE"),
            Parameter("int64_t", "SMS"),
            Parameter("float *", "DATA(s)"),
            Parameter("int", "M"),
            Parameter("int32_t", "SMS"),
        ),
    )
    short = replace(
        whole,
        parameters=(
            Parameter("const float *", "DATA(a)"),
            Parameter("int64_t", "STRIDE(a, 0)"),
            *whole.parameters[2:4],
            Parameter("int", "N"),
        ),
    )
    branches = (Branch((parts, whole), "long_rows", workspace="4 * room"), Branch((short,)))
    values = {"long_rows": "N > 32", "room": "SMS * M", "unused": "room / 0"}
    return CudaProgram(SUM, branches, strides={"a": (None, 1), "s": "compact"}, values=values)
