/* GEMM of a few rows on Hopper (sm_90a): skinny.cuh with bulk tensor copies and wgmma.
 *
 * wgmma multiplies 64 x TOKENS tiles: the 64 are columns of op(B), TOKENS the rows of A. A block is ROWS / 64 warp
 * groups that multiply, and one more warp whose first thread keeps the ring filled.
 */

namespace skinny {

/* SHARED: the bytes of shared memory that a launch has. */
template <int SHARED, int TOKENS, int ROWS, int SPLIT, int STAGES>
__device__ __forceinline__ void multiply_few(const TensorMap &map_a, const TensorMap &map_b, const Call &call) {
  using Weights = Operand<TRANS_B, ROWS, 1>;
  using Half = Operand<TRANS_B, ROWS / HALVES, 1>; /* gates or values; without GLU all of them */
  using Tokens = Operand<true, TOKENS, 1>;
  using Product = FromShared<TOKENS, !TRANS_B, false>;
  constexpr int ROW = BK * int(sizeof(A)), GROUPS = ROWS / 64, BYTES = (ROWS + TOKENS) * ROW; /* of a stage */
  static_assert(!GLU || TRANS_B, "gates and values are rows along K");
  static_assert(SHARED >= STAGES * (BYTES + 16) && SHARED >= SUMS<TOKENS, ROWS>, "Tile.shared has another layout");
  extern __shared__ __align__(1024) unsigned char memory[];
  float *sums = reinterpret_cast<float *>(memory); /* [TOKENS][PITCH<ROWS>], once the ring is done */
  uint32_t ring = shared_address(memory), barriers = ring + STAGES * BYTES;
  auto full = [&](int stage) { return barriers + 8 * stage; };
  auto empty = [&](int stage) { return barriers + 8 * (STAGES + stage); };

  Share<ROWS, SPLIT, BK> share(call);
  int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < STAGES; ++stage) {
      barrier_init(full(stage), 1);
      barrier_init(empty(stage), 4 * GROUPS);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  wait_for_previous();
  start_next();

  Ring<STAGES> now;
  if (warp == 4 * GROUPS) {
    if (lane == 0) {
      for (int tile = 0; tile < share.count; ++tile, now.next()) {
        uint32_t to = ring + now.stage * BYTES, k = (share.begin + tile) * BK;
        barrier_wait(empty(now.stage), now.phase ^ 1);
        barrier_expect(full(now.stage), BYTES);
#pragma unroll
        for (int half = 0; half < HALVES; ++half) {
          Half::load(to + half * (ROWS / HALVES * ROW), map_b, full(now.stage), share.first + half * call.n, k,
                     share.batch, 0, 0);
        }
        Tokens::load(to + ROWS * ROW, map_a, full(now.stage), 0, k, share.batch, 0, 0);
      }
    }
    __syncwarp();
    __syncthreads(); /* as the other warps do */
  } else {
    int group = warp / 4;
    float sum[TOKENS / 2] = {};
    for (int tile = 0, last = 0; tile < share.count; ++tile, last = now.stage, now.next()) {
      barrier_wait(full(now.stage), now.phase);
      uint32_t from = ring + now.stage * BYTES;
      uint64_t weights = Weights::describe(from + Weights::offset(group * 64, 0));
      uint64_t tokens = Tokens::describe(from + ROWS * ROW);
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < BK / 16; ++step) {
        Product::add(sum, weights + Weights::offset(0, step) / 16, tokens + Tokens::offset(0, step) / 16, true);
      }
      wgmma_commit();
      wgmma_wait<1>(); /* the tile before is done with */
      if (tile > 0 && lane == 0) barrier_arrive(empty(last));
    }
    wgmma_wait<0>();
    __syncthreads(); /* nobody reads the ring any more */
#pragma unroll
    for (int i = 0; i < TOKENS / 2; ++i) {
      int m = i / 4 * 8 + lane % 4 * 2 + i % 2, n = warp * 16 + lane / 4 + i / 2 % 2 * 8;
      sums[m * PITCH<ROWS> + n] = sum[i];
    }
  }
  finish<TOKENS, ROWS, SPLIT, 1>(call, sums, share);
}

}  // namespace skinny

#define SKINNY_HOPPER(SHARED, TOKENS, ROWS, SPLIT, STAGES)                                               \
  extern "C" __global__ void __launch_bounds__(2 * ROWS + 32)                                            \
      skinny_##TOKENS(const __grid_constant__ skinny::TensorMap map_a,                                   \
                      const __grid_constant__ skinny::TensorMap map_b, CALL_PARAMETERS) {                \
    skinny::multiply_few<SHARED, TOKENS, ROWS, SPLIT, STAGES>(map_a, map_b, CALL);                       \
  }
