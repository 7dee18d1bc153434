/* The gradients of attention on Hopper's tensor cores (sm_90a): bulk tensor copies and warp-specialised wgmma.
 *
 * A block has a tile of BN keys of one key head. A thread of its producer fills a ring with tiles of BM queries, and of
 * dout, of every query head that shares the keys; two consumers, a warp group each, have 64 of the keys:
 *
 *     S' = K Q'           P' = 2**(S' - lse)      dV += P' dout
 *     dP' = V dout'       dS' = P' (dP' - delta)  dK += dS' Q       (' for transposed)
 *     dQ = dS K           into sums in float32
 *
 * P' and dS' stay in registers as operands; dS' goes to shared memory too, where both consumers have all of it for a
 * half of dQ each. Under way together are dP' and the exponentials, dV and dS', dK and dQ's way out: two more warps of
 * the producer's group add dQ to the sums by bulk copies. In what order blocks do so is left to chance, or where
 * results are to have the same bits on every call, given by a count of each part of the sums.
 *
 * Tiles that a mask hides are skipped, and only tiles that it cuts, or that have ends in them, are masked. Arrays lie
 * in shared memory in boxes of 64 channels; what is out of bounds arrives as zeros, and is not stored.
 *
 * The schedule is that of FlashAttention-3's backward pass (Shah et al., 2024), with dV beside dS'.
 */

namespace backward {

using namespace tensor_cores;

constexpr int GROUP = 128, GROUPS = 2; /* threads, and consumers */
constexpr int KEYS = 64 * GROUPS, KEY_BOX = KEYS * 128; /* of a tile; bytes of its boxes */

constexpr int round_up(int x, int to) { return (x + to - 1) / to * to; }

/* Load bytes, a multiple of 16 from an address that is one, to shared memory; they count for the barrier. */
__device__ __forceinline__ void load_bytes(uint32_t to, const void *from, int bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}

/* Add floats in shared memory, one by one, to those at an address that is a multiple of 16. */
__device__ __forceinline__ void add_bytes(float *to, uint32_t from, int bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to), "r"(from),
               "r"(bytes)
               : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

/* What a kernel is: Python's side of it is backward_plan.py. Of dq a consumer has 64 of the queries, or 64 of the
 * channels. */
template <int BM_> struct Plan {
  static constexpr int BM = BM_, BN = KEYS, STAGES = 2;
  static constexpr int THREADS = (GROUPS + 1) * GROUP;
  static constexpr int PRODUCER_REGISTERS = 24, CONSUMER_REGISTERS = 240;
  static constexpr bool BY_QUERIES = BM == 128; /* how dq is divided */
  static constexpr int PARTS = GROUPS, SUMS = PARTS * 64 * 64;

  static constexpr int CHANNELS = BY_QUERIES ? 64 : 128, V_CHANNELS = round_up(D_V, 64); /* in shared memory */
  static constexpr int STEPS = (D + 15) / 16, V_STEPS = (D_V + 15) / 16;                 /* products over channels */
  static constexpr int QUERY_BOX = BM * 128; /* bytes */
  static constexpr int K_BYTES = CHANNELS / 64 * KEY_BOX, V_BYTES = V_CHANNELS / 64 * KEY_BOX;
  static constexpr int Q_BYTES = CHANNELS / 64 * QUERY_BOX, DOUT_BYTES = V_CHANNELS / 64 * QUERY_BOX;
  static constexpr int DS_BYTES = BN * BM * 2, DQ_BYTES = 64 * 64 * 4, STATS_BYTES = 2 * BM * 4;
  static constexpr int AT_V = K_BYTES, AT_Q = AT_V + V_BYTES, AT_DOUT = AT_Q + STAGES * Q_BYTES;
  static constexpr int AT_DS = AT_DOUT + STAGES * DOUT_BYTES, AT_DQ = AT_DS + STAGES * DS_BYTES;
  static constexpr int AT_STATS = AT_DQ + GROUPS * DQ_BYTES, AT_BARRIERS = AT_STATS + STAGES * STATS_BYTES;
  static constexpr int BYTES = AT_BARRIERS + 8 * (2 + 4 * STAGES) + 8; /* of shared memory in all */

  static_assert(BM == 64 || BM == 128, "dq is divided into two parts of 64 x 64");
  static_assert(D <= CHANNELS && D_V <= 128, "sums are kept in registers");
};

/* Addresses in shared memory; `full` barriers complete when bytes have arrived, `empty` when all have read them. */
template <class P> struct Shared {
  uint32_t base;

  __device__ __forceinline__ uint32_t k() const { return base; }
  __device__ __forceinline__ uint32_t v() const { return base + P::AT_V; }
  __device__ __forceinline__ uint32_t q(int stage) const { return base + P::AT_Q + stage * P::Q_BYTES; }
  __device__ __forceinline__ uint32_t dout(int stage) const { return base + P::AT_DOUT + stage * P::DOUT_BYTES; }
  __device__ __forceinline__ uint32_t ds(int stage) const { return base + P::AT_DS + stage * P::DS_BYTES; }
  __device__ __forceinline__ uint32_t dq(int group) const { return base + P::AT_DQ + group * P::DQ_BYTES; }
  __device__ __forceinline__ uint32_t stats(int stage) const { return base + P::AT_STATS + stage * P::STATS_BYTES; }
  __device__ __forceinline__ uint32_t k_full() const { return barrier(0); }
  __device__ __forceinline__ uint32_t v_full() const { return barrier(1); }
  __device__ __forceinline__ uint32_t q_full(int stage) const { return barrier(2 + stage); }
  __device__ __forceinline__ uint32_t q_empty(int stage) const { return barrier(2 + P::STAGES + stage); }
  __device__ __forceinline__ uint32_t dout_full(int stage) const { return barrier(2 + 2 * P::STAGES + stage); }
  __device__ __forceinline__ uint32_t dout_empty(int stage) const { return barrier(2 + 3 * P::STAGES + stage); }

 private:
  __device__ __forceinline__ uint32_t barrier(int i) const { return base + P::AT_BARRIERS + 8 * i; }
};

/* -- the producer -------------------------------------------------------------------------------- */

template <int BOXES, int BYTES>
__device__ __forceinline__ void load(uint32_t to, const TensorMap &map, uint32_t full, int row, int head, int batch) {
#pragma unroll
  for (int i = 0; i < BOXES; ++i) load_box(to + i * (BYTES / BOXES), map, full, i * 64, row, head, batch);
}

template <class P>
__device__ __forceinline__ void produce(
    const TensorMap &map_q, const TensorMap &map_k, const TensorMap &map_v, const TensorMap &map_dout,
    const Gradients &g, const Scratch &scratch, const Tile<P> &t, Shared<P> shared) {
  constexpr int BOXES = P::CHANNELS / 64, V_BOXES = P::V_CHANNELS / 64;
  Ring<P::STAGES> ring;
  Step<P> step(g, t);
  int count = t.steps(g);
#pragma unroll 1
  for (int i = 0; i < count; ++i, step.next(), ring.next()) {
    if (i == 0) {
      barrier_expect(shared.k_full(), P::K_BYTES);
      load<BOXES, P::K_BYTES>(shared.k(), map_k, shared.k_full(), t.key, t.kv_head, t.batch);
    }
    uint32_t full = shared.q_full(ring.stage);
    barrier_wait(shared.q_empty(ring.stage), ring.phase ^ 1);
    barrier_expect(full, P::Q_BYTES + P::STATS_BYTES);
    load<BOXES, P::Q_BYTES>(shared.q(ring.stage), map_q, full, step.tile * P::BM, step.head, t.batch);
    load_bytes(shared.stats(ring.stage), scratch.stats + step.number() * (2 * P::BM), P::STATS_BYTES, full);
    if (i == 0) {
      barrier_expect(shared.v_full(), P::V_BYTES);
      load<V_BOXES, P::V_BYTES>(shared.v(), map_v, shared.v_full(), t.key, t.kv_head, t.batch);
    }
    full = shared.dout_full(ring.stage);
    barrier_wait(shared.dout_empty(ring.stage), ring.phase ^ 1);
    barrier_expect(full, P::DOUT_BYTES);
    load<V_BOXES, P::DOUT_BYTES>(shared.dout(ring.stage), map_dout, full, step.tile * P::BM, step.head, t.batch);
  }
}

/* -- dq ------------------------------------------------------------------------------------------ */

/* Named barriers: of the consumers, and between a consumer and the warp that hands its part of dq on. */
constexpr int ALL = 1, DQ_FULL = 2, DQ_EMPTY = 4;

template <int COUNT> __device__ __forceinline__ void meet(int barrier) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(COUNT) : "memory");
}
template <int COUNT> __device__ __forceinline__ void pass(int barrier) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "n"(COUNT) : "memory");
}

/* A warp: add a consumer's parts of dq to the sums. Where the order is given, a part takes its turn after those of the
 * keys after these, whose blocks all have begun before, so that they do end. */
template <class P>
__device__ __forceinline__ void hand_on(
    const Gradients &g, const Scratch &scratch, const Tile<P> &t, Shared<P> shared, int group) {
  bool first = threadIdx.x % 32 == 0;
  int count = t.steps(g);
  Step<P> step(g, t);
  if (count > 0) pass<GROUP + 32>(DQ_EMPTY + group);
#pragma unroll 1
  for (int i = 0; i < count; ++i, step.next()) {
    index_t part = step.number() * GROUPS + group;
    meet<GROUP + 32>(DQ_FULL + group);
    if (first) {
      float *to = scratch.sums + part * (64 * 64);
      if constexpr (DETERMINISTIC) {
        await_count(scratch.turns + part, step.turn());
        add_bytes(to, shared.dq(group), P::DQ_BYTES);
        store_wait_whole();
        add_count(scratch.turns + part);
      } else {
        add_bytes(to, shared.dq(group), P::DQ_BYTES);
        store_wait<0>();
      }
    }
    __syncwarp();
    if (i + 1 < count) pass<GROUP + 32>(DQ_EMPTY + group);
  }
  if (first) store_wait_whole();
}

/* -- a consumer ---------------------------------------------------------------------------------- */

__device__ __forceinline__ void store_four(uint32_t to, float a, float b, float c, float d) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}

template <bool VALUE> struct Constant {
  static constexpr bool value = VALUE;
};

/* Have operands whole before products begin. */
template <int N> __device__ __forceinline__ void settle(uint32_t (&x)[N][4]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+r"(x[i][0]), "+r"(x[i][1]), "+r"(x[i][2]), "+r"(x[i][3]));
}

/* Let numbers be any: what a product puts there does not depend on what was. */
template <int N> __device__ __forceinline__ void forget(float (&x)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "=f"(x[i]));
}

/* Where a lane's part of a matrix of 16 rows and 16 columns goes, in a box of 64 columns of 2 bytes. */
__device__ __forceinline__ uint32_t place(uint32_t box, int row, int column, int lane) {
  int at = (row + lane % 16) * 128 + (column + lane / 16 * 8) * 2;
  return box + (at ^ (at >> 3 & 112));
}

struct Rows { /* of an array: `count` from `row` on */
  int row, count, head, batch;
};

/* Write a warp's 16 rows, of sums that are multiplied by `factor`, to boxes, and from there to an array of WIDTH
 * channels; tell whether there is a NaN in this thread's. */
template <int WIDTH, int N>
__device__ __forceinline__ bool put_rows(
    float (&sum)[N], float factor, uint32_t to, const TensorMap &map, bool direct, T *array, const Strides &of,
    const Rows &rows) {
  int lane = threadIdx.x % 32;
  float probe = 0;
#pragma unroll
  for (int i = 0; i < N; ++i) sum[i] *= factor, probe += sum[i];
#pragma unroll
  for (int i = 0; i < N; i += 8) {
    uint32_t packed[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) packed[j] = pack<T>(sum[i + 2 * j], sum[i + 2 * j + 1]);
    store_matrix(place(to + i / 32 * KEY_BOX, 0, 2 * i % 64, lane), packed);
  }
  fence_copies();
  __syncwarp();
  if (!direct) {
#pragma unroll
    for (int i = 0; i < (WIDTH + 63) / 64; ++i) {
      if (lane == 0) store_box(map, to + i * KEY_BOX, 64 * i, rows.row, rows.head, rows.batch);
    }
  } else {
#pragma unroll 1
    for (int i = lane; i < rows.count * WIDTH; i += 32) {
      int down = i / WIDTH, channel = i % WIDTH, at = down * 128 + channel % 64 * 2;
      uint32_t from = to + channel / 64 * KEY_BOX + (at ^ (at >> 3 & 112));
      array[of.at(rows.batch, rows.row + down, rows.head) + channel * of.channel] =
          *reinterpret_cast<const T *>(__cvta_shared_to_generic(from));
    }
  }
  return probe != probe;
}

/* CAPPED: with and without a soft cap. */
template <class P, bool CAPPED>
__device__ __forceinline__ void consume(
    const TensorMap &map_dk, const TensorMap &map_dv, bool direct, const Gradients &g, const Scratch &scratch,
    const Tile<P> &t, Shared<P> shared, int group) {
  constexpr int BM = P::BM;
  const Call &call = g.call;
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  Logits logits(call);
  Ring<P::STAGES> ring, ahead; /* of this step, and of the logits of the next */
  int count = t.steps(g), tile = t.first, key = t.key + group * 64 + warp * 16; /* this warp's first */
  float s[BM / 2], dp[BM / 2], dq[32], dk[P::CHANNELS / 2] = {}, dv[P::V_CHANNELS / 2] = {};
  uint32_t p[BM / 16][4], ds[BM / 16][4];

  auto release = [&](uint32_t empty) {
    if (lane == 0) barrier_arrive(empty);
  };
  auto start_logits = [&] {
    barrier_wait(shared.q_full(ahead.stage), ahead.phase);
    __syncwarp();
    uint32_t k = shared.k() + group * 64 * 128, q = shared.q(ahead.stage);
    forget(s);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < P::STEPS; ++i) {
      uint64_t a = describe<128>(k + i / 4 * KEY_BOX + i % 4 * 32);
      FromShared<BM>::add(s, a, describe<128>(q + i / 4 * P::QUERY_BOX + i % 4 * 32), i > 0);
    }
    wgmma_commit();
    ahead.next();
  };
  auto start_dp = [&] {
    uint32_t v = shared.v() + group * 64 * 128, dout = shared.dout(ring.stage);
    forget(dp);
    barrier_wait(shared.dout_full(ring.stage), ring.phase);
    __syncwarp();
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < P::V_STEPS; ++i) {
      uint64_t a = describe<128>(v + i / 4 * KEY_BOX + i % 4 * 32);
      FromShared<BM>::add(dp, a, describe<128>(dout + i / 4 * P::QUERY_BOX + i % 4 * 32), i > 0);
    }
    wgmma_commit();
  };
  auto is_cut = [&] { return tile < t.whole || tile >= t.whole_end; };
  auto bounds = [&] { return Bounds(call, key + lane / 4, tile * BM + lane % 4 * 2); };
  auto hide = [&](float(&x)[BM / 2]) {
    Bounds seen = bounds();
#pragma unroll
    for (int i = 0; i < BM / 2; ++i) x[i] = seen.hide(i) ? 0.f : x[i];
  };
  auto weigh = [&] { /* from products to weights, packed, and in s these times the slope of the cap */
    uint32_t stats = shared.stats(ring.stage) + lane % 4 * 8;
    if constexpr (CAPPED) {
      Bounds seen = bounds();
#pragma unroll
      for (int i = 0; i < BM / 2; i += 2) {
        float2 base = load_pair(stats + i / 4 * 32);
        Logit one(logits, s[i]), other(logits, s[i + 1]);
        float weight = seen.hide(i) ? 0.f : exp2_fast(one.value - base.x);
        float next = seen.hide(i + 1) ? 0.f : exp2_fast(other.value - base.y);
        s[i] = weight * one.slope, s[i + 1] = next * other.slope, p[i / 8][i / 2 % 4] = pack<T>(weight, next);
      }
    } else {
#pragma unroll
      for (int i = 0; i < BM / 2; i += 4) {
        float2 base = load_pair(stats + i * 8);
#pragma unroll
        for (int j = i; j < i + 4; ++j) s[j] = exp2_fast(fmaf(s[j], logits.factor, j % 2 ? -base.y : -base.x));
      }
      if (is_cut()) hide(s);
#pragma unroll
      for (int j = 0; j < BM / 4; ++j) p[j / 4][j % 4] = pack<T>(s[2 * j], s[2 * j + 1]);
    }
  };
  auto differentiate = [&] { /* from weights and dP to dS, packed, and in shared memory */
    uint32_t stats = shared.stats(ring.stage) + BM * 4 + lane % 4 * 8, to = shared.ds(ring.stage);
#pragma unroll
    for (int i = 0; i < BM / 2; i += 4) {
      float2 delta = load_pair(stats + i * 8);
#pragma unroll
      for (int j = i; j < i + 4; ++j) dp[j] = s[j] * (dp[j] - (j % 2 ? delta.y : delta.x));
    }
    if (is_cut()) hide(dp);
#pragma unroll
    for (int i = 0; i < BM / 16; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) ds[i][j] = pack<T>(dp[8 * i + 2 * j], dp[8 * i + 2 * j + 1]);
      store_matrix(place(to + i / 4 * KEY_BOX, group * 64 + warp * 16, i % 4 * 16, lane), ds[i]);
    }
    fence_copies();
  };
  auto start_dv = [&] {
    settle(p);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < BM / 16; ++i) {
      uint64_t b = describe<128, P::QUERY_BOX>(shared.dout(ring.stage) + i * 16 * 128);
      FromRegisters<P::V_CHANNELS, true>::add(dv, p[i], b, true);
    }
    wgmma_commit();
  };
  auto start_dq = [&] {
    uint32_t a = shared.ds(ring.stage) + (P::BY_QUERIES ? group * KEY_BOX : 0);
    uint32_t b = shared.k() + (P::BY_QUERIES ? 0 : group * KEY_BOX);
    forget(dq);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < P::BN / 16; ++i) {
      FromShared<64, true, true>::add(dq, describe<128>(a + i * 16 * 128), describe<128>(b + i * 16 * 128), i > 0);
    }
    wgmma_commit();
  };
  auto start_dk = [&] {
#pragma unroll
    for (int i = 0; i < BM / 16; ++i) {
      uint64_t b = describe<128, P::QUERY_BOX>(shared.q(ring.stage) + i * 16 * 128);
      FromRegisters<P::CHANNELS, true>::add(dk, ds[i], b, true);
    }
    wgmma_commit();
  };
  auto put_dq = [&] {
    meet<GROUP + 32>(DQ_EMPTY + group);
    uint32_t to = shared.dq(group) + threadIdx.x % GROUP * 16;
#pragma unroll
    for (int i = 0; i < 32; i += 4) store_four(to + i / 4 * (GROUP * 16), dq[i], dq[i + 1], dq[i + 2], dq[i + 3]);
    fence_copies();
    pass<GROUP + 32>(DQ_FULL + group);
  };

  auto advance = [&](auto more) { /* a step whose logits are there, and the logits of the next */
    if constexpr (CAPPED) { /* ordered by what registers there are beside the cap's */
      weigh();
      start_dp();
    } else {
      start_dp();
      weigh();
    }
    start_dv();
    wgmma_wait<1>(dp);
    differentiate();
    meet<GROUPS * GROUP>(ALL);
    start_dq();
    start_dk();
    wgmma_wait<1>(dq); /* and dv */
    release(shared.dout_empty(ring.stage));
    if constexpr (CAPPED && decltype(more)::value) start_logits();
    put_dq();
    wgmma_wait<0>(dk);
    release(shared.q_empty(ring.stage));
    if constexpr (!CAPPED && decltype(more)::value) start_logits();
    if constexpr (decltype(more)::value) wgmma_wait<0>(s);
    ring.next();
    if (++tile == t.end) tile = t.first;
  };

  if (count > 0) {
    barrier_wait(shared.k_full(), 0);
    barrier_wait(shared.v_full(), 0);
    start_logits();
    wgmma_wait<0>(s);
#pragma unroll 1
    for (int i = 1; i < count; ++i) advance(Constant<true>());
    advance(Constant<false>());
    wgmma_wait<0>(dv);
  }
  meet<GROUPS * GROUP>(ALL); /* until nobody reads keys and values, whose places dk and dv take */
  Rows rows{key, min(16, call.keys - key), t.kv_head, t.batch};
  if (rows.count > 0) {
    uint32_t at = (group * 64 + warp * 16) * 128;
    bool lost = put_rows<D>(dk, float(call.scale), shared.k() + at, map_dk, direct, g.dk, g.of_dk, rows);
    lost |= put_rows<D_V>(dv, 1.f, shared.v() + at, map_dv, direct, g.dv, g.of_dv, rows);
    if (call.causal() && lost) *scratch.lost = true;
    if (lane == 0) store_wait<0>();
  }
}

/* -- the kernel ---------------------------------------------------------------------------------- */

/* A tile of keys. `direct`: dk or dv has no tensor map, and map_dk and map_dv are any. */
template <class P, bool CAPPED>
__device__ __forceinline__ void attend_backward(
    const TensorMap &map_q, const TensorMap &map_k, const TensorMap &map_v, const TensorMap &map_dout,
    const TensorMap &map_dk, const TensorMap &map_dv, bool direct, const Scratch &scratch, const Gradients &g) {
  extern __shared__ __align__(1024) uint8_t memory[];
  Shared<P> shared{shared_address(memory)};
  int *number = reinterpret_cast<int *>(memory + P::BYTES - 8); /* of the tile */
  if (threadIdx.x == GROUPS * GROUP) {
    prefetch(map_q), prefetch(map_k), prefetch(map_v), prefetch(map_dout), prefetch(map_dk), prefetch(map_dv);
  }
  if (threadIdx.x == 0) {
    constexpr int READERS = 4 * GROUPS; /* warps */
    barrier_init(shared.k_full(), 1), barrier_init(shared.v_full(), 1);
    for (int stage = 0; stage < P::STAGES; ++stage) {
      barrier_init(shared.q_full(stage), 1), barrier_init(shared.dout_full(stage), 1);
      barrier_init(shared.q_empty(stage), READERS), barrier_init(shared.dout_empty(stage), READERS);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  wait_for_previous();
  start_next();
  if (threadIdx.x == 0) *number = DETERMINISTIC ? atomicAdd(scratch.begun, 1) : int(blockIdx.x);
  __syncthreads();
  Tile<P> t(g, *number);

  int group = __shfl_sync(0xffffffff, threadIdx.x / GROUP, 0);
  if (group == GROUPS) {
    give_registers<P::PRODUCER_REGISTERS>();
    int warp = __shfl_sync(0xffffffff, threadIdx.x / 32 % 4, 0);
    if (warp < GROUPS) {
      hand_on<P>(g, scratch, t, shared, warp);
    } else if (threadIdx.x == GROUPS * GROUP + 96) {
      produce<P>(map_q, map_k, map_v, map_dout, g, scratch, t, shared);
    }
    __syncwarp();
  } else {
    take_registers<P::CONSUMER_REGISTERS>();
    consume<P, CAPPED>(map_dk, map_dv, direct, g, scratch, t, shared, group);
  }
}

}  // namespace backward

/* SHARED: the bytes of shared memory that a launch has; QUERIES: of a tile. */
#define BACKWARD(NAME, SHARED, CAPPED, QUERIES)                                                                        \
  static_assert(backward::Plan<QUERIES>::BYTES == SHARED, "Plan.shared has another layout");                           \
  extern "C" __global__ void __launch_bounds__(backward::Plan<QUERIES>::THREADS, 1) NAME(                              \
      const __grid_constant__ backward::TensorMap map_q, const __grid_constant__ backward::TensorMap map_k,            \
      const __grid_constant__ backward::TensorMap map_v, const __grid_constant__ backward::TensorMap map_dout,         \
      const __grid_constant__ backward::TensorMap map_dk, const __grid_constant__ backward::TensorMap map_dv,          \
      int direct, float *sums, float *stats, int *counts, GRADIENT_PARAMETERS) {                                       \
    backward::attend_backward<backward::Plan<QUERIES>, CAPPED>(                                                        \
        map_q, map_k, map_v, map_dout, map_dk, map_dv, direct, backward::Scratch(sums, stats, counts), GRADIENTS);     \
  }
