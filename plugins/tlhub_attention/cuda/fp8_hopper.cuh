/* Attention of 8-bit floats on Hopper's tensor cores (sm_90a): the schedule of forward_hopper.cuh, and parts of it, with
 * products of 32 channels or keys at a time.
 *
 * Those take tiles in shared memory along K alone. That is how keys lie for the logits, and values do not for the sum, so
 * a kernel ahead writes V across to scratch memory, channel by channel. It orders the keys there as a thread has their
 * weights, and so these are an operand as they are.
 *
 * Weights are e4m3, whose numbers from 2**-6 to 448 have four bits: they are computed 2**RAISE times as large, which
 * leaves room for peaks that move by SLACK. Their sum is of what they are before they are rounded.
 *
 * A tensor core cuts each of the products that it adds up 13 bits below the largest number there, the sum so far among
 * them. So a sum in it is of one block of keys, and the CUDA cores add it to those before. It is of a PART of the channels
 * at a time, in the same registers: the first is under way while peaks are found, others while weights are made, and the
 * last is added when the next block's logits are under way.
 */

namespace fp8 {

using namespace hopper;

template <int GROUPS_, int BN_, int TILES_, int BUFFERS_> struct Plan { /* as forward_hopper.cuh's */
  static constexpr int GROUPS = GROUPS_, BM = 64 * GROUPS, BN = BN_;
  static constexpr int TILES = TILES_, STAGES = 2, BUFFERS = BUFFERS_;
  static constexpr int THREADS = (GROUPS + 1) * GROUP;
  static constexpr int PRODUCER_REGISTERS = GROUPS == 3 ? 32 : 40, CONSUMER_REGISTERS = GROUPS == 3 ? 160 : 232;

  static constexpr int ROW = D <= 64 ? 64 : 128, BOXES = (D + ROW - 1) / ROW, STEPS = (D + 31) / 32; /* of q and k */
  static constexpr int CHANNELS = round_up(D_V, 32);                                                 /* of v and o */
  static constexpr int PART = CHANNELS <= 64 ? CHANNELS : CHANNELS <= 192 ? CHANNELS / 2 : 32; /* of a sum, at once */
  static constexpr int PARTS = CHANNELS / PART;
  static constexpr int CHUNK = sizeof(O) == 4 || CHANNELS % 64 != 0 ? 32 : 64;

  static constexpr int Q_BOX = BM * ROW, K_BOX = BN * ROW; /* bytes */
  static constexpr int Q_BYTES = BOXES * Q_BOX, K_BYTES = BOXES * K_BOX, V_BYTES = CHANNELS * BN;
  static constexpr int CHUNK_BYTES = 16 * CHUNK * int(sizeof(O));
  static constexpr int AT_K = TILES * Q_BYTES, AT_V = AT_K + STAGES * K_BYTES, AT_STAGING = AT_V + STAGES * V_BYTES;
  static constexpr int AT_BARRIERS = AT_STAGING + 4 * GROUPS * BUFFERS * CHUNK_BYTES;
  static constexpr int BYTES = AT_BARRIERS + 8 * (2 * TILES + 4 * STAGES);

  static_assert(BN % 32 == 0 && BN <= 256, "a product is of 32 keys at a time, and a box of at most 256");
};

/* The tiles of a call with factors. */
template <class P> struct ScaledTiles : Tiles<P> {
  const Scaled &scaled;

  __device__ __forceinline__ explicit ScaledTiles(const Scaled &call) : Tiles<P>(call), scaled(call) {}
  __device__ __forceinline__ const Scaled &of(const Tile &) const { return scaled; }
};

/* -- the producer -------------------------------------------------------------------------------- */

/* Copy so many bytes to shared memory; they count for the barrier. */
__device__ __forceinline__ void load_bytes(uint32_t to, const uint8_t *from, int bytes, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}

template <class P>
__device__ __forceinline__ void produce(
    const TensorMap &map_q, const TensorMap &map_k, const Values &values, const Call &call, Shared<P> shared) {
  Tiles<P> tiles(call);
  Ring<P::TILES> qs;
  Ring<P::STAGES> ks, vs;
  for (Tile t; tiles.next(t);) {
    auto load_k = [&](int block) {
      load<P::BOXES, P::ROW, P::K_BYTES>(shared.k(ks.stage), map_k, shared.k_full(ks.stage), shared.k_empty(ks.stage),
                                         ks.phase, block * P::BN, t.kv_head, t.batch);
      ks.next();
    };
    auto load_v = [&](int block) {
      barrier_wait(shared.v_empty(vs.stage), vs.phase ^ 1);
      barrier_expect(shared.v_full(vs.stage), P::V_BYTES);
      uint32_t place = (t.batch * call.kv_heads + t.kv_head) * values.places + block * P::BN;
      const uint8_t *from = values.across + uint64_t(place) * P::CHANNELS;
      load_bytes(shared.v(vs.stage), from, P::V_BYTES, shared.v_full(vs.stage));
      vs.next();
    };
    load_k(t.end - 1);
    load<P::BOXES, P::ROW, P::Q_BYTES>(shared.q(qs.stage), map_q, shared.q_full(qs.stage), shared.q_empty(qs.stage),
                                       qs.phase, t.query, t.head, t.batch);
    qs.next();
    for (int block = t.end - 1; block >= t.first; --block) {
      if (block > t.first) load_k(block - 1);
      load_v(block);
    }
  }
}

/* -- a consumer ---------------------------------------------------------------------------------- */

constexpr float RAISE = 7, SLACK = 1.75f; /* below 448 together */
constexpr float FAR = 1 << 27; /* a logit whose last place is so large that a weight may overflow by it */

/* Four weights, rounded to nearest even. */
__device__ __forceinline__ uint32_t pack_e4m3(float a, float b, float c, float d) {
  uint32_t packed;
  asm("{\n.reg .b16 low, high;\ncvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\nmov.b32 %0, {low, high};\n}"
      : "=r"(packed)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return packed;
}

/* Products of tiles of 64 rows and 32 columns of A: Python writes them for each N, as tensor_cores.py does.
 *
 *   QK<N>::add(sum, q, k, add)   both tiles in shared memory, by their descriptors
 *   PV<N>::add(sum, p, v, add)   p: four registers of four weights */
template <int N> struct QK;
template <int N> struct PV;

/* CAPPED: logits are finished before their maximum is taken; else a factor above 0 is part of the exponent. Rows that are
 * NaN then are computed again. */
template <class P, bool CAPPED>
__device__ __forceinline__ void consume(
    const TensorMap &map_o, const Scaled &call, bool direct, Shared<P> shared, int group) {
  Tiles<P> tiles(call);
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  Logits logits(call);
  float factor = 1, slope; /* of the tile's head; the slope before the factor */
  Ring<P::TILES> qs;
  Ring<P::STAGES> ks, vs;
  float s[P::BN / 2], part[P::PART / 2], sum[P::CHANNELS / 2] = {};
  uint32_t p[P::BN / 32][4];
  Softmax softmax;
  Tile t;
  int query, whole_begin, whole_end; /* this warp's first, and the keys that all of this consumer's see */
  bool pending = false; /* whether the last part of the block before is yet to be added to the sum */
  bool lost = false;

  auto release = [&](uint32_t empty) {
    if (lane == 0) barrier_arrive(empty);
  };
  auto next_tile = [&] {
    if (!tiles.next(t)) return false;
    int top = t.query + group * 64;
    query = top + warp * 16;
    whole_begin = call.seen(min(top + 63, call.queries - 1)).begin, whole_end = call.seen(top).end;
    softmax = Softmax();
    logits.factor = call.factor<CAPPED>(t.batch, t.head, t.kv_head);
    if (!CAPPED) factor = logits.factor;
    slope = call.slope(t.head) / factor;
    return true;
  };
  auto start_logits = [&] {
    barrier_wait(shared.q_full(qs.stage), qs.phase);
    barrier_wait(shared.k_full(ks.stage), ks.phase);
    await_turn(group);
    uint32_t q = shared.q(qs.stage) + group * 64 * P::ROW, k = shared.k(ks.stage);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < P::STEPS; ++step) {
      constexpr int IN_ROW = P::ROW / 32;
      int at_q = step / IN_ROW * P::Q_BOX + step % IN_ROW * 32, at_k = step / IN_ROW * P::K_BOX + step % IN_ROW * 32;
      QK<P::BN>::add(s, describe<P::ROW>(q + at_q), describe<P::ROW>(k + at_k), step > 0);
    }
    wgmma_commit();
  };
  auto start_part = [&](int i) {
    uint32_t v = shared.v(vs.stage);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < P::BN / 32; ++step) {
      PV<P::PART>::add(part, p[step], describe_across(v + (step * P::CHANNELS + i * P::PART) * 32), step > 0);
    }
    wgmma_commit();
  };
  auto add_part = [&](int i) {
#pragma unroll
    for (int j = 0; j < P::PART / 2; ++j) {
      float &x = sum[i * P::PART / 2 + j];
      x += part[j];
      asm volatile("" : "+f"(x)); /* before the next part, which is to have the same registers */
    }
  };
  auto start_sum = [&] { /* the part that is pending is added while the tensor core has logits to compute */
    if (pending) add_part(P::PARTS - 1);
    barrier_wait(shared.v_full(vs.stage), vs.phase);
    __syncwarp();
    start_part(0);
  };
  auto next_part = [&](int i) {
    wgmma_wait<0>(part);
    add_part(i - 1);
    start_part(i);
  };
  auto end_sum = [&] {
#pragma unroll
    for (int i = 2; i < P::PARTS; ++i) next_part(i);
    wgmma_wait<0>(part);
    release(shared.v_empty(vs.stage));
    vs.next();
    pending = true;
  };
  auto add_pending = [&] {
    add_part(P::PARTS - 1);
    pending = false;
  };
  auto find_peaks = [&](int block) { /* finishes logits; tells whether the sum is to be corrected */
    if (block == t.first) { /* the tile's last */
      release(shared.q_empty(qs.stage));
      qs.next();
    }
    if constexpr (CAPPED) {
#pragma unroll
      for (int j = 0; j < P::BN / 2; ++j) s[j] = logits.of(s[j]);
    }
    int begin = block * P::BN, column = begin + lane % 4 * 2; /* the first of this thread's */
    if constexpr (ALIBI) {
      int apart = call.place(query + lane / 4) - column;
      bias(s, slope, {apart, apart + 8});
    }
    constexpr int NEVER = 1 << 30;
    auto seen = [&](int row) { return call.seen(query + lane / 4 + row); };
    if (begin < whole_begin) hide(s, {seen(0).begin - column, seen(8).begin - column}, {NEVER, NEVER});
    if (begin + P::BN > whole_end) hide(s, {0, 0}, {seen(0).end - column, seen(8).end - column});
    float most[2];
    bool moved = __any_sync(0xffffffff, softmax.exceeds(s, factor, most, SLACK));
    if (moved) softmax.move(most, factor);
    return moved;
  };
  auto make_weights = [&] {
    softmax.make_weights(s, factor, RAISE);
    /* This always releases: the compiler cannot know it, and has the weights made before it waits for the sum. */
    if (!(softmax.total[0] + softmax.total[1] < 0)) release(shared.k_empty(ks.stage));
    ks.next();
  };
  auto pack_weights = [&] {
#pragma unroll
    for (int step = 0; step < P::BN / 32; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) { /* of row i % 2, the keys of i / 2 */
        const float *x = &s[16 * step + i / 2 * 8 + i % 2 * 2];
        p[step][i] = pack_e4m3(x[0], x[1], x[4], x[5]);
      }
    }
  };
  auto advance = [&](int block) { /* the logits of a block, and the sum with the weights of the one before */
    start_logits();
    start_sum();
    give_turn((group + 1) % P::GROUPS);
    wgmma_wait<1>(s);
    bool moved = find_peaks(block);
    if (P::PARTS > 1) next_part(1);
    make_weights();
    end_sum();
    return moved;
  };
  auto begin_tile = [&] {
    start_logits();
    give_turn((group + 1) % P::GROUPS);
    wgmma_wait<0>(s);
    find_peaks(t.end - 1);
    make_weights();
    pack_weights();
  };

  if (group == P::GROUPS - 1) give_turn(0);
  bool more = next_tile();
  if (more) begin_tile();
  while (more) {
#pragma unroll 1
    for (int block = t.end - 2; block >= t.first; --block) {
      if (advance(block)) {
        add_pending();
#pragma unroll
        for (int j = 0; j < P::CHANNELS / 2; ++j) sum[j] *= softmax.correction[row_of(j)];
      }
      pack_weights();
    }
    Tile done = t;
    Softmax of_done = softmax;
    of_done.peak[0] *= factor, of_done.peak[1] *= factor;
    int query_done = query;
    more = next_tile();
    auto finish_done = [&] {
      constexpr float LOWERED = 1.f / (1 << int(RAISE));
      float output = LOWERED * call.of_values.at(done.batch, done.kv_head), probe = 0;
      add_pending();
#pragma unroll
      for (int j = 0; j < P::CHANNELS / 2; ++j) sum[j] *= output, probe += sum[j];
      lost |= holds_infinities<T> && probe != probe; /* a weight that was rounded to 0 times one */
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        float &total = of_done.total[row], peak = of_done.peak[row];
        total = fabsf(peak) <= FAR || peak == -infinity() ? total * LOWERED : nan();
        lost |= total != total;
      }
      lost |= finish<P>(sum, of_done, 1.f, map_o, call, direct, shared.staging(group * 4 + warp), done, query_done);
#pragma unroll
      for (int j = 0; j < P::CHANNELS / 2; ++j) sum[j] = 0;
    };
    if (!CAPPED && P::TILES > 1 && more) { /* with a cap there are no registers for the logits of the next */
      advance(t.end - 1);
      pack_weights();
      finish_done();
    } else {
      start_sum();
      if (P::PARTS > 1) next_part(1);
      end_sum();
      finish_done();
      if (more) begin_tile();
    }
  }
  if (lane == 0) store_wait<0>();
  if (__any_sync(0xffffffff, lost)) mend(ScaledTiles<P>(call), group);
}

/* -- the kernels --------------------------------------------------------------------------------- */

/* One call, as forward_hopper.cuh's. */
template <class P, bool CAPPED>
__device__ __forceinline__ void attend(
    const TensorMap &map_q, const TensorMap &map_k, const Values &values, const TensorMap &map_o, bool direct,
    const Scaled &call) {
  extern __shared__ __align__(1024) uint8_t memory[];
  Shared<P> shared{shared_address(memory)};
  if (threadIdx.x == P::GROUPS * GROUP) prefetch(map_q), prefetch(map_k), prefetch(map_o);
  if (threadIdx.x == 0) {
    constexpr int READERS = 4 * P::GROUPS; /* warps */
    for (int tile = 0; tile < P::TILES; ++tile) {
      barrier_init(shared.q_full(tile), 1);
      barrier_init(shared.q_empty(tile), READERS);
    }
    for (int stage = 0; stage < P::STAGES; ++stage) {
      barrier_init(shared.k_full(stage), 1);
      barrier_init(shared.k_empty(stage), READERS);
      barrier_init(shared.v_full(stage), 1);
      barrier_init(shared.v_empty(stage), READERS);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  wait_for_previous();
  start_next();

  int group = __shfl_sync(0xffffffff, threadIdx.x / GROUP, 0);
  if (group == P::GROUPS) {
    give_registers<P::PRODUCER_REGISTERS>();
    if (threadIdx.x == P::GROUPS * GROUP) fp8::produce<P>(map_q, map_k, values, call, shared);
    __syncwarp();
  } else {
    take_registers<P::CONSUMER_REGISTERS>();
    fp8::consume<P, CAPPED>(map_o, call, direct, shared, group);
  }
}

}  // namespace fp8

/* SHARED: the bytes of shared memory that a launch has; then the arguments of Plan. */
#define FP8(NAME, SHARED, CAPPED, ...)                                                                        \
  static_assert(fp8::Plan<__VA_ARGS__>::BYTES == SHARED, "Plan.shared has another layout");                   \
  extern "C" __global__ void __launch_bounds__(fp8::Plan<__VA_ARGS__>::THREADS, 1) NAME(                      \
      const __grid_constant__ hopper::TensorMap map_q, const __grid_constant__ hopper::TensorMap map_k,       \
      const __grid_constant__ hopper::TensorMap map_o, int direct, uint8_t *across, uint32_t places,          \
      SCALED_PARAMETERS) {                                                                                    \
    using Plan = fp8::Plan<__VA_ARGS__>;                                                                      \
    fp8::attend<Plan, CAPPED>(map_q, map_k, {across, places}, map_o, direct, SCALED_CALL);                    \
  }
