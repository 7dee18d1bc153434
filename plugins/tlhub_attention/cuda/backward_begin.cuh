/* What is before the products of attention's gradients, by tiles of queries of a head. */

namespace backward {

constexpr int ENDS = 256; /* threads */

/* A tile of queries: its head, and the first. VARLEN: there may be none. */
template <class P> struct Place {
  int batch, head, query;
  Span span; /* VARLEN: the sequence, that positions are of */

  __device__ __forceinline__ explicit Place(const Call &call) {
    int down = tiles_of<P::BM>(call, call.queries), at = int(blockIdx.x) / down, tile = int(blockIdx.x) % down;
    batch = at / call.heads, head = at % call.heads, span = {};
    if constexpr (VARLEN) {
      auto first_of = [&](int n) { return first_tile<P::BM>(n < 0 ? 0 : call.start(n), n); };
      int n = last_that(call, [&](int n) { return first_of(n) <= tile; });
      span = call.span(n), tile -= first_of(n);
    }
    query = tile * P::BM;
  }
};

/* Whether starts of keys decrease somewhere, which no caller's may: told to all threads of a block. */
__device__ __forceinline__ bool decrease(const Call &call) {
  bool here = false;
  for (int n = threadIdx.x; n < call.batch; n += ENDS) here |= call.start_kv(n) > call.start_kv(n + 1);
  return __syncthreads_or(here);
}

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
template <class P> __device__ __forceinline__ void begin(const Gradients &all, const Scratch &scratch, bool whole) {
  constexpr int LANES = D_V > 128 ? 32 : D_V > 64 ? 16 : D_V > 32 ? 8 : D_V > 16 ? 4 : D_V > 8 ? 2 : 1;
  Place<P> at(all.call);
  Gradients g = all.of(at.span);
  const Call &call = g.call;
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
  float4 *sums = reinterpret_cast<float4 *>(scratch.sums + index_t(blockIdx.x) * P::SUMS);
#pragma unroll
  for (int i = 0; i < P::SUMS / 4; i += ENDS) sums[i + threadIdx.x] = make_float4(0, 0, 0, 0);
  if constexpr (DETERMINISTIC) {
    int taken = VARLEN && decrease(all.call) ? 0x40000000 : 0; /* so many that nobody waits for whom there may not be */
    if (threadIdx.x < P::PARTS) scratch.turns[index_t(blockIdx.x) * P::PARTS + threadIdx.x] = taken;
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) *scratch.lost = false, *scratch.begun = 0;
}

}  // namespace backward
