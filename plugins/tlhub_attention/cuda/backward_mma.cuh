/* The gradients of attention on the tensor cores of sm_80 and newer: asynchronous copies and products by warps.
 *
 * A block has a tile of BN keys of one key head, whose dk and dv it adds up in registers, and goes over the tiles of BM
 * queries, and of dout, of every query head that shares the keys, copied a step ahead where there is room:
 *
 *     S' = K Q'           P' = 2**(S' - lse)      dV += P' dout
 *     dP' = V dout'       dS' = P' (dP' - delta)  dK += dS' Q       (' for transposed)
 *     dQ = dS K           added to sums in float32
 *
 * Two warps share a strip of keys: for S' and dP' each has half of the queries, for dK and dV half of the channels; P'
 * and dS' go from the ones to the others through shared memory. dQ is divided among all warps. In what order blocks add
 * it to the sums is left to chance, or where results are to have the same bits on every call, given by a count.
 *
 * Tiles that a mask hides are skipped, and only tiles that it cuts, or that have ends in them, are masked. What is out
 * of bounds is zeros in shared memory, and is not stored.
 */

namespace backward {

constexpr int round_up(int x, int to) { return (x + to - 1) / to * to; }

/* What a kernel is: Python's side of it is mma/backward_plan.py. A warp has STRIP keys. */
template <int BM_, int BN_, int STRIP_, int STAGES_> struct Plan {
  static constexpr int BM = BM_, BN = BN_, STRIP = STRIP_, STAGES = STAGES_;
  static constexpr int WARPS = BN / STRIP * 2, THREADS = WARPS * 32;
  static constexpr int WIDTH = D > 64 || D_V > 64 ? 128 : 64; /* channels in shared memory are multiples of it */
  static constexpr int CHANNELS = round_up(D, WIDTH), V_CHANNELS = round_up(D_V, WIDTH);
  static constexpr int STEPS = (D + 15) / 16, V_STEPS = (D_V + 15) / 16; /* products over channels */
  static constexpr int HALF = BM / 2;                                    /* queries of a warp */
  static constexpr int UNROLL = WIDTH > 64 ? 2 : 4;                      /* measured, and by what registers there are */
  static constexpr int ACROSS = WARPS / (BM / 32), SLICE = CHANNELS / ACROSS; /* of dq a warp has 32 x SLICE */
  static constexpr int PARTS = 1, SUMS = BM * CHANNELS;

  using OfK = SharedTile<CHANNELS>;
  using OfV = SharedTile<V_CHANNELS>;
  using OfPairs = SharedTile<BM>; /* of keys and queries */
  static constexpr int AT_V = OfK::template BYTES<BN>, AT_Q = AT_V + OfV::template BYTES<BN>;
  static constexpr int Q_BYTES = OfK::template BYTES<BM>, DOUT_BYTES = OfV::template BYTES<BM>;
  static constexpr int STATS_BYTES = 2 * BM * 4;
  static constexpr int AT_DOUT = AT_Q + STAGES * Q_BYTES, AT_P = AT_DOUT + STAGES * DOUT_BYTES;
  static constexpr int AT_DS = AT_P + OfPairs::template BYTES<BN>, AT_STATS = AT_DS + OfPairs::template BYTES<BN>;
  static constexpr int AT_KEPT = AT_STATS + STAGES * STATS_BYTES, BYTES = AT_KEPT + 640; /* of shared memory in all */

  static_assert(STRIP % 16 == 0 && HALF % 16 == 0 && SLICE % 16 == 0, "tiles are whole operands");
};

/* -- the sums of dq ------------------------------------------------------------------------------------ */

/* Where a thread's four sums from i on are: side by side where they can be added at once, else a warp's are. */
#if __CUDA_ARCH__ >= 900
constexpr bool BY_FOUR = true;
#else
constexpr bool BY_FOUR = false;
#endif

template <int THREADS> __device__ __forceinline__ int place_of(int i) {
  return BY_FOUR ? (i / 4 * THREADS + threadIdx.x) * 4 + i % 4 : i * THREADS + threadIdx.x;
}

template <int THREADS> __device__ __forceinline__ void add_four(float *sums, int i, const float *x) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(sums + place_of<THREADS>(i)),
               "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3])
               : "memory");
#else
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    float *to = sums + place_of<THREADS>(i + j);
    asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(to), "f"(x[j]) : "memory");
  }
#endif
}

template <int THREADS> __device__ __forceinline__ void read_four(const float *sums, int i, float *x) {
  if constexpr (BY_FOUR) {
    float4 four = *reinterpret_cast<const float4 *>(sums + place_of<THREADS>(i));
    x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
  } else {
#pragma unroll
    for (int j = 0; j < 4; ++j) x[j] = sums[place_of<THREADS>(i + j)];
  }
}

/* Add a tile's part to the sums: where the order is given, after the blocks of the keys after these, which all have
 * begun before, so that they do end. */
template <class P, int NS>
__device__ __forceinline__ void hand_on(
    const Scratch &scratch, const Step<P> &step, const float (&dq)[2][NS]) {
  float *sums = scratch.sums + step.number() * P::SUMS;
  int *turn = scratch.turns + step.number();
  if constexpr (DETERMINISTIC) {
    if (threadIdx.x == 0) await_count(turn, step.turn());
    __syncthreads();
  }
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int i = 0; i < NS; i += 4) add_four<P::THREADS>(sums, m * NS + i, dq[m] + i);
  }
  if constexpr (DETERMINISTIC) {
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) add_count(turn);
  }
}

/* Write a tile of dq from its sums; `whole`: 16 bytes of its rows are aligned. */
template <class P> __device__ __forceinline__ void end(const Gradients &all, const Scratch &scratch, bool whole) {
  __shared__ __align__(128) uint8_t memory[P::Q_BYTES];
  Place<P> at(all.call);
  Gradients g = all.of(at.span);
  const Call &call = g.call;
  int warp = threadIdx.x / 32;
  const float *sums = scratch.sums + index_t(blockIdx.x) * P::SUMS;
  float dq[2][P::SLICE / 2];
  uint32_t tile = shared_address(memory);
#pragma unroll
  for (int i = 0; i < P::SLICE; i += 4) read_four<P::THREADS>(sums, i, dq[i / (P::SLICE / 2)] + i % (P::SLICE / 2));
  float probe = put_sums<typename P::OfK>(
      tile, warp / P::ACROSS * 32, warp % P::ACROSS * P::SLICE, dq, float(call.scale));
  if (!is_finite(probe)) *scratch.lost = true;
  __syncthreads();
  store_rows<typename P::OfK, P::BM, D, P::THREADS>(
      tile, g.dq + g.of_dq.at(at.batch, at.query, at.head), g.of_dq.position, g.of_dq.channel,
      call.queries - at.query, whole);
}

/* -- the products -------------------------------------------------------------------------------------- */

/* Pairs of a warp's keys and queries, from `key` and from `query` on, whose `stats` are at that address; logits fall
 * with the distance of a pair. */
template <int BM> struct Pairs {
  const Call &call;
  const Logits &logits;
  int key, query;
  float fall;
  uint32_t stats;

  /* From products and dP to weights and dS. CUT: some pairs are hidden, or none; CAPPED: there is a soft cap. */
  template <bool CUT, bool CAPPED, int MS, int NS>
  __device__ __forceinline__ void differentiate(float (&s)[MS][NS], float (&dp)[MS][NS]) const {
    int lane = fresh_lane(), j = key + lane / 4, i = query + lane % 4 * 2; /* this lane's first */
    float behind = float(j - call.place(i));
    uint32_t of_lane = stats + lane % 4 * 8;
#pragma unroll
    for (int m = 0; m < MS; ++m) {
      Bounds seen(call, j + 16 * m, i);
#pragma unroll
      for (int n = 0; n < NS; n += 4) {
        float2 base = load_pair(of_lane + n * 8), delta = load_pair(of_lane + BM * 4 + n * 8);
#pragma unroll
        for (int l = n; l < n + 4; ++l) {
          float from = l % 2 ? base.y : base.x, slope = 1, weight, apart = 0;
          if constexpr (ALIBI) apart = float(column_of(l) - 16 * m - 8 * row_of(l)) - behind;
          if constexpr (CAPPED) {
            Logit logit(logits, s[m][l], fall, apart);
            weight = exp2_fast(logit.value - from), slope = logit.slope;
          } else {
            if constexpr (ALIBI) from = fmaf(fall, fabsf(apart), from);
            weight = exp2_fast(fmaf(s[m][l], logits.factor, -from));
          }
          bool hidden = CUT && seen.hide(l);
          s[m][l] = hidden ? 0.f : weight;
          dp[m][l] = hidden ? 0.f : weight * (dp[m][l] - (l % 2 ? delta.y : delta.x)) * slope;
        }
      }
    }
  }
};

/* What a block does, in shared memory, for registers are few. */
template <class P> struct Kept {
  Tile<P> tile;
  Gradients gradients; /* VARLEN: those of the tile's sequence */
};

/* A tile of keys. `whole`: bit 0 for dk, bit 1 for dv, whether 16 bytes of its rows are aligned. */
template <class P>
__device__ __forceinline__ void attend_backward(const Gradients &all, const Scratch &scratch, int whole) {
  using OfK = typename P::OfK;
  using OfV = typename P::OfV;
  using OfPairs = typename P::OfPairs;
  constexpr int BM = P::BM, BN = P::BN, THREADS = P::THREADS, MS = P::STRIP / 16;
  extern __shared__ __align__(1024) uint8_t memory[];
  wait_for_previous();
  start_next();
  Kept<P> &kept = *reinterpret_cast<Kept<P> *>(memory + P::AT_KEPT);
  if (threadIdx.x == 0) {
    kept.tile = Tile<P>(all, DETERMINISTIC ? atomicAdd(scratch.begun, 1) : int(blockIdx.x));
    if constexpr (VARLEN) kept.gradients = all.of(kept.tile.span);
  }
  __syncthreads();
  const std::conditional_t<VARLEN, const Tile<P> &, Tile<P>> t = kept.tile;
  const Gradients &g = VARLEN ? kept.gradients : all;
  const Call &call = g.call;
  int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
  int strip = warp / 2 * P::STRIP, side = warp % 2; /* its first key, and its half */
  uint32_t k = shared_address(memory), v = k + P::AT_V, p = k + P::AT_P, ds = k + P::AT_DS;
  Logits logits(call);
  float dk[MS][P::CHANNELS / 4] = {}, dv[MS][P::V_CHANNELS / 4] = {};
  Step<P> step(g, t);
  int count = t.steps(g);

  auto fetch = [&](const Step<P> &ahead, int stage) {
    int query = ahead.tile * BM, rows = call.queries - query;
    const T *q = call.q + call.of_q.at(t.batch, query, ahead.head);
    const T *dout = g.dout + g.of_dout.at(t.batch, query, ahead.head);
    OfK::template copy<BM, D, THREADS>(k + P::AT_Q + stage * P::Q_BYTES, q, call.of_q.position, rows, threadIdx.x);
    OfV::template copy<BM, D_V, THREADS>(
        k + P::AT_DOUT + stage * P::DOUT_BYTES, dout, g.of_dout.position, rows, threadIdx.x);
    if (threadIdx.x < P::STATS_BYTES / 16) {
      uint32_t to = k + P::AT_STATS + stage * P::STATS_BYTES + threadIdx.x * 16;
      copy_async(to, scratch.stats + ahead.number() * (2 * BM) + threadIdx.x * 4, true);
    }
    commit_copies();
  };

  if (count > 0) {
    const T *from_k = call.k + call.of_k.at(t.batch, t.key, t.kv_head);
    const T *from_v = call.v + call.of_v.at(t.batch, t.key, t.kv_head);
    OfK::template copy<BN, D, THREADS>(k, from_k, call.of_k.position, call.keys - t.key, threadIdx.x);
    OfV::template copy<BN, D_V, THREADS>(v, from_v, call.of_v.position, call.keys - t.key, threadIdx.x);
    fetch(step, 0);
  }
#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    int stage = i % P::STAGES;
    uint32_t q = k + P::AT_Q + stage * P::Q_BYTES, dout = k + P::AT_DOUT + stage * P::DOUT_BYTES;
    uint32_t stats = k + P::AT_STATS + stage * P::STATS_BYTES + side * P::HALF * 4;
    wait_copies<0>();
    __syncthreads();
    if (P::STAGES > 1 && i + 1 < count) {
      Step<P> ahead = step;
      ahead.next();
      fetch(ahead, (i + 1) % P::STAGES);
    }

    float s[MS][P::HALF / 2] = {}, dp[MS][P::HALF / 2] = {};
    add_product<OfK, false, P::STEPS, P::UNROLL>(s, from_tile<OfK>(k, strip), q, side * P::HALF);
    add_product<OfV, false, P::V_STEPS, P::UNROLL>(dp, from_tile<OfV>(v, strip), dout, side * P::HALF);
    Pairs<BM> pairs{call, logits, t.key + strip, step.tile * BM + side * P::HALF, call.slope(step.head), stats};
    if (logits.capped) {
      pairs.differentiate<true, true>(s, dp);
    } else if (step.tile < t.whole || step.tile >= t.whole_end) {
      pairs.differentiate<true, false>(s, dp);
    } else {
      pairs.differentiate<false, false>(s, dp);
    }
    uint32_t weights[MS][P::HALF / 4], slopes[MS][P::HALF / 4];
    pack_sums(weights, s), pack_sums(slopes, dp);
    put<OfPairs>(p, strip, side * P::HALF, weights);
    put<OfPairs>(ds, strip, side * P::HALF, slopes);

    constexpr int STEPS = P::HALF / 16;
    int mine = side * P::HALF, other = P::HALF - mine;
    int at_v = side * (P::V_CHANNELS / 2), at_k = side * (P::CHANNELS / 2);
    add_product<OfV, true, STEPS, P::UNROLL>(dv, from_sums(weights), dout + mine * OfV::PITCH, at_v);
    add_product<OfK, true, STEPS, P::UNROLL>(dk, from_sums(slopes), q + mine * OfK::PITCH, at_k);
    __syncthreads();
    add_product<OfV, true, STEPS, P::UNROLL>(dv, from_tile<OfPairs>(p, strip, other), dout + other * OfV::PITCH, at_v);
    add_product<OfK, true, STEPS, P::UNROLL>(dk, from_tile<OfPairs>(ds, strip, other), q + other * OfK::PITCH, at_k);
    float dq[2][P::SLICE / 2] = {};
    add_product<OfK, true, BN / 16, P::UNROLL>(
        dq, from_tile<OfPairs, true>(ds, 0, warp / P::ACROSS * 32), k, warp % P::ACROSS * P::SLICE);
    hand_on<P>(scratch, step, dq);
    step.next();
    if (P::STAGES == 1 && i + 1 < count) {
      __syncthreads();
      fetch(step, 0);
    }
  }
  __syncthreads(); /* until nobody reads keys and values, whose places dk and dv take */
  float probe = put_sums<OfK>(k, strip, side * (P::CHANNELS / 2), dk, float(call.scale));
  probe += put_sums<OfV>(v, strip, side * (P::V_CHANNELS / 2), dv);
  if (!is_finite(probe)) *scratch.lost = true;
  __syncthreads();
  int rows = call.keys - t.key;
  store_rows<OfK, BN, D, THREADS>(
      k, g.dk + g.of_dk.at(t.batch, t.key, t.kv_head), g.of_dk.position, g.of_dk.channel, rows, whole & 1);
  store_rows<OfV, BN, D_V, THREADS>(
      v, g.dv + g.of_dv.at(t.batch, t.key, t.kv_head), g.of_dv.position, g.of_dv.channel, rows, whole & 2);
}

}  // namespace backward

/* SHARED: the bytes of shared memory that a launch has; the rest is a Plan. */
#define BACKWARD(SHARED, BM, BN, STRIP, STAGES)                                                                        \
  using Planned = backward::Plan<BM, BN, STRIP, STAGES>;                                                               \
  static_assert(sizeof(backward::Kept<Planned>) <= Planned::BYTES - Planned::AT_KEPT, "what is kept has room");        \
  static_assert(Planned::BYTES == SHARED, "Plan.shared has another layout");                                           \
  extern "C" __global__ void __launch_bounds__(backward::ENDS) begin_mma(                                              \
      int whole, float *sums, float *stats, int *counts, GRADIENT_PARAMETERS) {                                        \
    tensor_cores::wait_for_previous();                                                                                 \
    tensor_cores::start_next();                                                                                        \
    backward::begin<Planned>(GRADIENTS, backward::Scratch(sums, stats, counts), whole);                                \
  }                                                                                                                    \
  extern "C" __global__ void __launch_bounds__(Planned::THREADS, 1) backward_mma(                                      \
      int whole, float *sums, float *stats, int *counts, GRADIENT_PARAMETERS) {                                        \
    backward::attend_backward<Planned>(GRADIENTS, backward::Scratch(sums, stats, counts), whole);                      \
  }                                                                                                                    \
  extern "C" __global__ void __launch_bounds__(Planned::THREADS) end_mma(                                              \
      int whole, float *sums, float *stats, int *counts, GRADIENT_PARAMETERS) {                                        \
    tensor_cores::wait_for_previous();                                                                                 \
    tensor_cores::start_next();                                                                                        \
    backward::end<Planned>(GRADIENTS, backward::Scratch(sums, stats, counts), whole);                                  \
  }
