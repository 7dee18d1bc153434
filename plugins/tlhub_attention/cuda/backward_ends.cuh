/* What is before and after the products of attention's gradients, by tiles of BM queries of a head. */

namespace backward {

constexpr int ENDS = 256; /* threads */

/* A tile of queries: its head, and the first. */
template <class P> struct Place {
  int batch, head, query;

  __device__ __forceinline__ explicit Place(const Call &call) {
    int down = (call.queries + P::BM - 1) / P::BM, at = int(blockIdx.x) / down;
    batch = at / call.heads, head = at % call.heads, query = int(blockIdx.x) % down * P::BM;
  }
};

/* Eight channels of a row, side by side where it is `whole` 16 bytes. */
__device__ __forceinline__ void read_eight(float (&x)[8], const T *from, index_t step, bool whole) {
  T eight[8];
  if (whole) {
    *reinterpret_cast<uint4 *>(eight) = *reinterpret_cast<const uint4 *>(from);
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) eight[i] = from[i * step];
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] = to_float(eight[i]);
}

/* Write the stats of a tile, and set its sums, and its turns, to 0. `whole`: 16 bytes of rows of o are aligned, as
 * those of dout are. */
template <class P> __device__ __forceinline__ void begin(const Gradients &g, const Scratch &scratch, bool whole) {
  constexpr int LANES = D_V > 64 ? 16 : D_V > 32 ? 8 : D_V > 16 ? 4 : D_V > 8 ? 2 : 1;
  const Call &call = g.call;
  Place<P> at(call);
  int lane = threadIdx.x % LANES;
  float *stats = scratch.stats + index_t(blockIdx.x) * (2 * P::BM);
#pragma unroll
  for (int row = threadIdx.x / LANES; row < P::BM; row += ENDS / LANES) {
    int i = at.query + row;
    float x[8] = {}, y[8] = {}, delta = 0;
    if (i < call.queries && lane * 8 < D_V) {
      index_t step = call.of_o.channel;
      read_eight(x, call.o + call.of_o.at(at.batch, i, at.head) + lane * 8 * step, step, whole);
      read_eight(y, g.dout + g.of_dout.at(at.batch, i, at.head) + lane * 8, 1, true);
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) delta = fmaf(x[j], y[j], delta);
#pragma unroll
    for (int step = LANES / 2; step > 0; step /= 2) delta += __shfl_xor_sync(0xffffffff, delta, step);
    if (lane == 0) {
      float base = i < call.queries ? g.base(at.batch, at.head, i) : -infinity();
      stats[row] = base == -infinity() ? infinity() : base; /* so that weights are 0 where no key is seen */
      stats[P::BM + row] = delta;
    }
  }
  float4 *sums = reinterpret_cast<float4 *>(scratch.sums + index_t(blockIdx.x) * (GROUPS * 64 * 64));
#pragma unroll
  for (int i = 0; i < GROUPS * 64 * 64 / 4; i += ENDS) sums[i + threadIdx.x] = make_float4(0, 0, 0, 0);
  if (DETERMINISTIC && threadIdx.x < GROUPS) scratch.turns[index_t(blockIdx.x) * GROUPS + threadIdx.x] = 0;
  if (blockIdx.x == 0 && threadIdx.x == 0) *scratch.lost = false, *scratch.begun = 0;
}

/* Write a tile of dq from its sums; `whole`: 16 bytes of its rows are aligned. */
template <class P> __device__ __forceinline__ void end(const Gradients &g, const Scratch &scratch, bool whole) {
  constexpr int PITCH = P::CHANNELS + 8; /* elements of a row */
  __shared__ __align__(16) T rows[P::BM][PITCH];
  const Call &call = g.call;
  Place<P> at(call);
  int group = threadIdx.x / GROUP, lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const float4 *sums = reinterpret_cast<const float4 *>(
      scratch.sums + (index_t(blockIdx.x) * GROUPS + group) * (64 * 64)) + threadIdx.x % GROUP;
  int row = (P::BY_QUERIES ? group * 64 : 0) + warp * 16 + lane / 4, column = P::BY_QUERIES ? 0 : group * 64;
  float factor = float(call.scale), probe = 0;
  float4 x[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] = sums[i * GROUP];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    uint32_t upper = pack<T>(x[i].x * factor, x[i].y * factor), lower = pack<T>(x[i].z * factor, x[i].w * factor);
    probe += x[i].x + x[i].y + x[i].z + x[i].w;
    *reinterpret_cast<uint32_t *>(&rows[row][column + 8 * i + lane % 4 * 2]) = upper;
    *reinterpret_cast<uint32_t *>(&rows[row + 8][column + 8 * i + lane % 4 * 2]) = lower;
  }
  if (call.causal() && probe != probe) *scratch.lost = true;
  __syncthreads();
  constexpr int EIGHTS = (D + 7) / 8;
#pragma unroll 4
  for (int i = threadIdx.x; i < P::BM * EIGHTS; i += ENDS) {
    int down = i / EIGHTS, channel = i % EIGHTS * 8;
    if (at.query + down >= call.queries) break;
    T *to = g.dq + g.of_dq.at(at.batch, at.query + down, at.head) + channel * g.of_dq.channel;
    if (whole) {
      *reinterpret_cast<uint4 *>(to) = *reinterpret_cast<const uint4 *>(&rows[down][channel]);
    } else {
      for (int j = 0; j < 8; ++j) to[j * g.of_dq.channel] = rows[down][channel + j];
    }
  }
}

}  // namespace backward

#define BACKWARD_ENDS(BEGIN, END, QUERIES)                                                                             \
  extern "C" __global__ void __launch_bounds__(backward::ENDS) BEGIN(                                                  \
      int whole, float *sums, float *stats, int *counts, GRADIENT_PARAMETERS) {                                        \
    tensor_cores::wait_for_previous();                                                                                 \
    tensor_cores::start_next();                                                                                        \
    backward::begin<backward::Plan<QUERIES>>(GRADIENTS, backward::Scratch(sums, stats, counts), whole);                \
  }                                                                                                                    \
  extern "C" __global__ void __launch_bounds__(backward::ENDS) END(                                                    \
      int whole, float *sums, float *stats, int *counts, GRADIENT_PARAMETERS) {                                        \
    tensor_cores::wait_for_previous();                                                                                 \
    tensor_cores::start_next();                                                                                        \
    backward::end<backward::Plan<QUERIES>>(GRADIENTS, backward::Scratch(sums, stats, counts), whole);                  \
  }
