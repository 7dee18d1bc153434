/* quantize: the scale of each block of x, and its elements divided by it. A team of threads has a block, and reads it
 * twice: for its largest magnitude, and then, from a cache, to divide. One scale for all of x takes two launches.
 *
 * Its Python side (quantize_program.py) writes ahead of this text, with index_t:
 *
 *     using X = __half; using Q = __nv_fp8_e4m3; using Scale = float;
 *     constexpr float LARGEST = 448;                    of Q
 *     constexpr bool GIVEN = false;                     the scales are an input
 *     constexpr int DOWN = 1, ALONG = 128, TEAM = 32;   elements of a block, 0 for all of them; threads of a team
 */

constexpr int THREADS = 256;

/* Scales as they are stored: a float, or UE8M0, the power of two that is not below it. */
__device__ __forceinline__ float to_scale(float x) { return x; }
__device__ __forceinline__ float to_scale(uint8_t x) {
  return __uint_as_float(x == 0 ? 0x00400000 : x == 255 ? 0x7fffffff : uint32_t(x) << 23);
}
template <class T> __device__ __forceinline__ T from_float(float x);
template <> __device__ __forceinline__ float from_float(float x) { return x; }
template <> __device__ __forceinline__ uint8_t from_float(float x) {
  uint32_t bits = __float_as_uint(x), exponent = bits >> 23;
  return static_cast<uint8_t>(isfinite(x) ? exponent + ((bits & 0x7fffff) != 0) : 255);
}

struct Call {
  const X *x;
  index_t x_row, x_column;
  Q *q;
  index_t q_row, q_column;
  Scale *scale;
  index_t scale_row, scale_column;
  index_t rows, columns;
  uint32_t *largest; /* of each block of the launch before, where one scale is for all */
};

#define CALL_PARAMETERS                                                                                       \
  const X *x, index_t x_row, index_t x_column, Q *q, index_t q_row, index_t q_column, Scale *scale,           \
      index_t scale_row, index_t scale_column, index_t rows, index_t columns, uint32_t *largest
#define CALL \
  Call { x, x_row, x_column, q, q_row, q_column, scale, scale_row, scale_column, rows, columns, largest }

/* Four neighbours in a row, at once where they lie side by side and aligned. */
template <class T> struct alignas(4 * sizeof(T)) Quad {
  T at[4];
};

struct Block { /* of x: rows and columns from `row` and `column` on */
  index_t row, column, rows, columns;
};

/* Call f(row, column, count) for what member `of` a team of `team` has of a block: up to four neighbours at a time. */
template <class F> __device__ __forceinline__ void each(const Block &block, index_t of, index_t team, F f) {
  index_t quads = (block.columns + 3) / 4;
  for (index_t i = of; i < block.rows * quads; i += team) {
    index_t row = i / quads, column = i % quads * 4;
    f(block.row + row, block.column + column, static_cast<int>(min(index_t(4), block.columns - column)));
  }
}

template <bool WHOLE> __device__ __forceinline__ Quad<X> load(const Call &call, index_t row, index_t column, int count) {
  const X *from = call.x + row * call.x_row + column * call.x_column;
  if (WHOLE && count == 4) return *reinterpret_cast<const Quad<X> *>(from);
  Quad<X> quad = {};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (i < count) quad.at[i] = from[i * call.x_column];
  }
  return quad;
}

/* The largest magnitude that a thread meets, as bits: those of a NaN are above those of an infinity. */
template <bool WHOLE>
__device__ __forceinline__ uint32_t largest_of(const Call &call, const Block &block, index_t of, index_t team) {
  uint32_t most = 0;
  each(block, of, team, [&](index_t row, index_t column, int count) {
    Quad<X> quad = load<WHOLE>(call, row, column, count);
#pragma unroll
    for (int i = 0; i < 4; ++i) most = max(most, __float_as_uint(to<float>(quad.at[i])) & 0x7fffffff);
  });
  return most;
}

/* The largest of a team, for each of its threads. */
template <int TEAM_> __device__ __forceinline__ uint32_t largest_in_team(uint32_t most) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) most = max(most, __shfl_xor_sync(0xffffffff, most, step));
  if constexpr (TEAM_ > 32) {
    __shared__ uint32_t of_warp[TEAM_ / 32];
    __syncthreads();
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = most;
    __syncthreads();
#pragma unroll
    for (int warp = 0; warp < TEAM_ / 32; ++warp) most = max(most, of_warp[warp]);
  }
  return most;
}

/* The scale for a largest magnitude. */
__device__ __forceinline__ Scale scale_of(uint32_t most) {
  float scale = __fdiv_rn(__uint_as_float(most), LARGEST);
  return from_float<Scale>(scale < 1.17549435e-38f ? 1.f : scale);
}

/* Divide what this thread has of a block. */
template <bool WHOLE>
__device__ __forceinline__ void divide(const Call &call, const Block &block, index_t of, index_t team, float scale) {
  each(block, of, team, [&](index_t row, index_t column, int count) {
    Quad<X> quad = load<WHOLE>(call, row, column, count);
    Quad<Q> narrow;
#pragma unroll
    for (int i = 0; i < 4; ++i) narrow.at[i] = to<Q>(__fdiv_rn(to<float>(quad.at[i]), scale));
    Q *place = call.q + row * call.q_row + column * call.q_column;
    if (WHOLE && count == 4) {
      *reinterpret_cast<Quad<Q> *>(place) = narrow;
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (i < count) place[i * call.q_column] = narrow.at[i];
      }
    }
  });
}

/* A team for each block of x. */
template <bool WHOLE> __device__ __forceinline__ void quantize(const Call &call) {
  index_t along = ALONG ? (call.columns + ALONG - 1) / ALONG : 1, down = (call.rows + DOWN - 1) / DOWN;
  constexpr int TEAMS = THREADS / TEAM;
  for (index_t i = blockIdx.x * index_t(TEAMS) + threadIdx.x / TEAM; i < down * along; i += index_t(gridDim.x) * TEAMS) {
    index_t row = i / along * DOWN, column = i % along * ALONG;
    index_t width = ALONG ? min(index_t(ALONG), call.columns - column) : call.columns;
    Block block = {row, column, min(index_t(DOWN), call.rows - row), width};
    Scale *place = call.scale + i / along * call.scale_row + i % along * call.scale_column;
    int of = threadIdx.x % TEAM;
    if constexpr (!GIVEN) {
      Scale scale = scale_of(largest_in_team<TEAM>(largest_of<WHOLE>(call, block, of, TEAM)));
      if (of == 0) *place = scale;
      divide<WHOLE>(call, block, of, TEAM, to_scale(scale));
    } else {
      divide<WHOLE>(call, block, of, TEAM, to_scale(*place));
    }
  }
}

/* The largest magnitude that each block of the grid meets, for quantize_all. */
template <bool WHOLE> __device__ __forceinline__ void find_largest(const Call &call) {
  index_t of = blockIdx.x * index_t(THREADS) + threadIdx.x, team = index_t(gridDim.x) * THREADS;
  uint32_t most = largest_in_team<THREADS>(largest_of<WHOLE>(call, {0, 0, call.rows, call.columns}, of, team));
  if (threadIdx.x == 0) call.largest[blockIdx.x] = most;
}

template <bool WHOLE> __device__ __forceinline__ void quantize_all(const Call &call) {
  index_t of = blockIdx.x * index_t(THREADS) + threadIdx.x, team = index_t(gridDim.x) * THREADS;
  Scale scale;
  if constexpr (!GIVEN) {
    uint32_t most = 0;
    for (int i = threadIdx.x; i < gridDim.x; i += THREADS) most = max(most, call.largest[i]);
    scale = scale_of(largest_in_team<THREADS>(most));
    if (of == 0) *call.scale = scale;
  } else {
    scale = *call.scale;
  }
  divide<WHOLE>(call, {0, 0, call.rows, call.columns}, of, team, to_scale(scale));
}

#define QUANTIZE(NAME)                                                                                              \
  extern "C" __global__ void __launch_bounds__(THREADS) NAME##_whole(CALL_PARAMETERS) { NAME<true>(CALL); }         \
  extern "C" __global__ void __launch_bounds__(THREADS) NAME##_any(CALL_PARAMETERS) { NAME<false>(CALL); }
