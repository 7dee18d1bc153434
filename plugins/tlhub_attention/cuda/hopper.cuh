/* Attention on Hopper's tensor cores (sm_90a): bulk tensor copies, warp-specialised wgmma, a persistent loop over tiles.
 *
 * A tile is BM queries of one head. A block has a producer and GROUPS consumers, a warp group each; a consumer has 64
 * queries of the tile. The producer's first thread fills rings of blocks of BN keys, K and V apart, from the last block
 * that the tile sees to the first. For each the consumers compute
 *
 *     S = Q K        the logits, in registers
 *     P = 2**(S - max)
 *     O = O * correction + P V
 *
 * with P left in registers as an operand. The product of the next S and that of this P and V are under way together,
 * and P of the next is computed during the latter. Consumers take turns at starting products, so that one has the
 * tensor cores while another has the exponentials. The next tile's blocks arrive during the end of this tile.
 *
 * Only blocks that a mask cuts are masked; a hidden block is skipped. Q and K lie in shared memory in boxes of 64
 * channels, V in boxes of 64 or 32; what is out of bounds arrives as zeros, and is not stored. o is staged 16 rows of a
 * warp at a time, and leaves as bulk tensor copies, or element by element where it is not aligned for them.
 *
 * The schedule is that of FlashAttention-3 (Shah et al., 2024), on the online softmax of Milakov and Gimelshein (2018).
 */

namespace hopper {

using namespace tensor_cores;

constexpr int GROUP = 128; /* threads */

constexpr int round_up(int x, int to) { return (x + to - 1) / to * to; }

/* What a kernel is: Python's side of it is hopper_plan.py. */
template <int GROUPS_, int BN_, int STAGES_, int BUFFERS_> struct Plan {
  static constexpr int GROUPS = GROUPS_, BM = 64 * GROUPS, BN = BN_;
  static constexpr int STAGES = STAGES_;   /* of each ring */
  static constexpr int BUFFERS = BUFFERS_; /* chunks of o that a warp stages */
  static constexpr int THREADS = (GROUPS + 1) * GROUP;
  /* registers of a thread; at the launch all have the same */
  static constexpr int PRODUCER_REGISTERS = GROUPS == 3 ? 32 : 24, CONSUMER_REGISTERS = GROUPS == 3 ? 160 : 240;

  static constexpr int CHANNELS = round_up(D_V, 32);              /* of v and o */
  static constexpr int V_WIDTH = CHANNELS % 64 == 0 ? 64 : 32;    /* of a box */
  static constexpr int BOXES = (D + 63) / 64, STEPS = (D + 15) / 16; /* of q and k: boxes, and products */
  static constexpr int CHUNK = sizeof(O) == 4 ? 32 : V_WIDTH;     /* channels of o that are staged at once */

  static constexpr int Q_BOX = BM * 128, K_BOX = BN * 128, V_BOX = BN * V_WIDTH * 2; /* bytes */
  static constexpr int Q_BYTES = BOXES * Q_BOX, K_BYTES = BOXES * K_BOX, V_BYTES = CHANNELS / V_WIDTH * V_BOX;
  static constexpr int CHUNK_BYTES = 16 * CHUNK * int(sizeof(O));
  static constexpr int AT_K = Q_BYTES, AT_V = AT_K + STAGES * K_BYTES, AT_STAGING = AT_V + STAGES * V_BYTES;
  static constexpr int AT_BARRIERS = AT_STAGING + 4 * GROUPS * BUFFERS * CHUNK_BYTES;
  static constexpr int BYTES = AT_BARRIERS + 8 * (2 + 4 * STAGES); /* of shared memory in all */

  static_assert(BN % 16 == 0 && BN <= 256, "a product is of 16 keys at a time, and a box of at most 256");
};

/* Addresses in shared memory; `full` barriers complete when bytes have arrived, `empty` when all have read them. */
template <class P> struct Shared {
  uint32_t base;

  __device__ __forceinline__ uint32_t q() const { return base; }
  __device__ __forceinline__ uint32_t k(int stage) const { return base + P::AT_K + stage * P::K_BYTES; }
  __device__ __forceinline__ uint32_t v(int stage) const { return base + P::AT_V + stage * P::V_BYTES; }
  __device__ __forceinline__ uint32_t staging(int warp) const {
    return base + P::AT_STAGING + warp * (P::BUFFERS * P::CHUNK_BYTES);
  }
  __device__ __forceinline__ uint32_t barrier(int i) const { return base + P::AT_BARRIERS + 8 * i; }
  __device__ __forceinline__ uint32_t q_full() const { return barrier(0); }
  __device__ __forceinline__ uint32_t q_empty() const { return barrier(1); }
  __device__ __forceinline__ uint32_t k_full(int stage) const { return barrier(2 + stage); }
  __device__ __forceinline__ uint32_t k_empty(int stage) const { return barrier(2 + P::STAGES + stage); }
  __device__ __forceinline__ uint32_t v_full(int stage) const { return barrier(2 + 2 * P::STAGES + stage); }
  __device__ __forceinline__ uint32_t v_empty(int stage) const { return barrier(2 + 3 * P::STAGES + stage); }
};

/* -- tiles --------------------------------------------------------------------------------------- */

/* A tile: its head, its first query, and the blocks of keys that it sees, from `first` up to `end`: one at least. */
struct Tile {
  int batch, head, kv_head, query, first, end;
};

/* The tiles of a block, in order. Heads go in sections whose keys and values stay in the L2 cache; within a section a
 * causal mask has the longest tiles first, of all heads; and every other wave is dealt out backwards, which evens out
 * what blocks get. */
template <class P> struct Tiles {
  const Call &call;
  int section, down, count;

  __device__ __forceinline__ Tiles(const Call &call, int section)
      : call(call), section(section), down((call.queries + P::BM - 1) / P::BM),
        count(down * call.heads * call.batch) {}

  /* The number of this block's tile in a wave, `count` or more if there is none. */
  __device__ __forceinline__ int number(int wave) const {
    int at = wave % 2 && call.causal() ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
    return wave * gridDim.x + at;
  }

  __device__ __forceinline__ int waves() const { return (count + gridDim.x - 1) / gridDim.x; }

  __device__ __forceinline__ Tile place(int i) const {
    int of_section = section * down, top = i / of_section * section;
    int heads = min(section, call.heads * call.batch - top), rest = i % of_section;
    int head = top + (call.causal() ? rest % heads : rest / down);
    int row = call.causal() ? down - 1 - rest / heads : rest % down;
    Tile t;
    t.batch = head / call.heads, t.head = head % call.heads;
    t.kv_head = t.head / (call.heads / call.kv_heads);
    t.query = row * P::BM;
    int last = min(t.query + P::BM, call.queries) - 1;
    t.first = call.seen(t.query).begin / P::BN;
    t.end = max(t.first + 1, (call.seen(last).end + P::BN - 1) / P::BN);
    return t;
  }
};

/* -- the producer -------------------------------------------------------------------------------- */

/* Wait for a stage, and load boxes of `rows` rows, `width` channels each. */
template <int BOXES, int WIDTH, int BYTES>
__device__ __forceinline__ void load(
    uint32_t to, const TensorMap &map, uint32_t full, uint32_t empty, uint32_t phase, int row, int head, int batch) {
  barrier_wait(empty, phase ^ 1);
  barrier_expect(full, BYTES);
#pragma unroll
  for (int i = 0; i < BOXES; ++i) load_box(to + i * (BYTES / BOXES), map, full, i * WIDTH, row, head, batch);
}

template <class P>
__device__ __forceinline__ void produce(
    const TensorMap &map_q, const TensorMap &map_k, const TensorMap &map_v, const Tiles<P> &tiles, Shared<P> shared) {
  Ring<P::STAGES> ks, vs;
  uint32_t q_phase = 0;
  for (int wave = 0; wave < tiles.waves(); ++wave) {
    int i = tiles.number(wave);
    if (i >= tiles.count) break;
    Tile t = tiles.place(i);
    auto load_k = [&](int block) {
      load<P::BOXES, 64, P::K_BYTES>(shared.k(ks.stage), map_k, shared.k_full(ks.stage), shared.k_empty(ks.stage),
                                     ks.phase, block * P::BN, t.kv_head, t.batch);
      ks.next();
    };
    auto load_v = [&](int block) {
      load<P::CHANNELS / P::V_WIDTH, P::V_WIDTH, P::V_BYTES>(
          shared.v(vs.stage), map_v, shared.v_full(vs.stage), shared.v_empty(vs.stage), vs.phase, block * P::BN,
          t.kv_head, t.batch);
      vs.next();
    };
    load_k(t.end - 1);
    load<P::BOXES, 64, P::Q_BYTES>(
        shared.q(), map_q, shared.q_full(), shared.q_empty(), q_phase, t.query, t.head, t.batch);
    q_phase ^= 1;
    for (int block = t.end - 1; block >= t.first; --block) {
      if (block > t.first) load_k(block - 1);
      load_v(block);
    }
  }
}

/* -- a consumer ---------------------------------------------------------------------------------- */

/* Consumers take turns by named barriers: one waits for its own, and the one before it arrives there. */
__device__ __forceinline__ void await_turn(int group) {
  asm volatile("bar.sync %0, %1;" ::"r"(1 + group), "n"(2 * GROUP) : "memory");
}
__device__ __forceinline__ void give_turn(int group) {
  asm volatile("bar.arrive %0, %1;" ::"r"(1 + group), "n"(2 * GROUP) : "memory");
}

/* A thread has two rows of an accumulator: of each 8 columns two floats of row lane / 4, two of the row 8 below. */
__device__ constexpr int row_of(int i) { return i / 2 % 2; }
__device__ constexpr int column_of(int i) { return i / 4 * 8 + i % 2; }

/* The running maximum and sum of a thread's two rows; the sum is this thread's part. */
struct Softmax {
  float peak[2] = {-infinity(), -infinity()}, total[2] = {};

  /* What is subtracted from exponents: the maximum, or 0 where no key has been seen. */
  static __device__ __forceinline__ float base(float peak, float factor) {
    return peak == -infinity() ? 0.f : peak * factor;
  }

  /* Make weights of logits, and return what sums so far are multiplied by. */
  template <int N> __device__ __forceinline__ void weigh(float (&s)[N], float factor, float (&correction)[2]) {
    float subtract[2];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      float most = peak[row];
#pragma unroll
      for (int i = 0; i < N; ++i) {
        if (row_of(i) == row) most = fmaxf(most, s[i]);
      }
      most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, 1));
      most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, 2));
      subtract[row] = base(most, factor);
      correction[row] = exp2_fast(fmaf(peak[row], factor, -subtract[row]));
      peak[row] = most;
      total[row] *= correction[row];
    }
#pragma unroll
    for (int i = 0; i < N; ++i) {
      s[i] = exp2_fast(fmaf(s[i], factor, -subtract[row_of(i)]));
      total[row_of(i)] += s[i];
    }
  }
};

/* What of a block of keys this thread's two rows see: the columns from `low` up to `high`, counted from its first. */
template <int N> __device__ __forceinline__ void hide(float (&s)[N], const int (&low)[2], const int (&high)[2]) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    int row = row_of(i);
    if (column_of(i) < low[row] || column_of(i) >= high[row]) s[i] = -infinity();
  }
}

/* Write a warp's 16 rows of a chunk to shared memory, row by row, swizzled by the width of a row. */
template <class P> __device__ __forceinline__ void stage_chunk(uint32_t to, const float *sum, int lane) {
  constexpr int WIDTH = P::CHUNK * int(sizeof(O)), SWIZZLE = WIDTH - 16;
  auto place = [&](int row, int column) {
    int at = row * WIDTH + column * int(sizeof(O));
    return to + (at ^ (at >> 3 & SWIZZLE));
  };
#pragma unroll
  for (int i = 0; i < P::CHUNK / 2; i += 8) {
    if constexpr (sizeof(O) == 2) {
      uint32_t packed[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) packed[j] = pack<O>(sum[i + 2 * j], sum[i + 2 * j + 1]);
      store_matrix(place(lane % 16, 2 * i + lane / 16 * 8), packed);
    } else {
#pragma unroll
      for (int j = 0; j < 8; j += 2) {
        asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(
                         place(lane / 4 + row_of(j) * 8, 2 * i + j / 4 * 8 + lane % 4 * 2)),
                     "f"(sum[i + j]), "f"(sum[i + j + 1])
                     : "memory");
      }
    }
  }
}

/* Write a staged chunk to o element by element. */
template <class P>
__device__ __forceinline__ void write_chunk(
    uint32_t from, const Call &call, const Tile &t, int query, int channel, int lane) {
  constexpr int WIDTH = P::CHUNK * int(sizeof(O)), SWIZZLE = WIDTH - 16;
#pragma unroll 1
  for (int i = lane; i < 16 * P::CHUNK; i += 32) {
    int row = query + i / P::CHUNK, column = channel + i % P::CHUNK, at = i * int(sizeof(O));
    if (row < call.queries && column < D_V) {
      call.o[call.of_o.at(t.batch, row, t.head) + column * call.of_o.channel] =
          *reinterpret_cast<const O *>(__cvta_shared_to_generic(from + (at ^ (at >> 3 & SWIZZLE))));
    }
  }
}

/* Divide a warp's 16 rows by their sums and store them, from `query` on. */
template <class P>
__device__ __forceinline__ void finish(
    float (&sum)[P::CHANNELS / 2], Softmax &softmax, float factor, const TensorMap &map_o, const Call &call,
    bool direct, uint32_t staging, const Tile &t, int query) {
  int lane = threadIdx.x % 32;
  bool lost = false; /* a hidden key's NaN may be in a sum */
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    int i = query + lane / 4 + 8 * row;
    float &total = softmax.total[row];
    total += __shfl_xor_sync(0xffffffff, total, 1);
    total += __shfl_xor_sync(0xffffffff, total, 2);
    float inverse = 1 / total, probe = 0;
#pragma unroll
    for (int j = 0; j < P::CHANNELS / 2; ++j) {
      if (row_of(j) != row) continue;
      sum[j] = total == 0 ? 0.f : sum[j] * inverse;
      probe += sum[j];
    }
    lost |= call.causal() && i < call.queries && probe != probe && total == total;
    if (lane % 4 == 0 && i < call.queries) {
      call.put_lse(t.batch, t.head, i, (Softmax::base(softmax.peak[row], factor) + log2f(total)) * LN2);
    }
  }
  if (__any_sync(0xffffffff, lost)) {
    int last = min(query + 16, call.queries);
#pragma unroll 1
    for (int i = query; i < last; ++i) attend_row(call, t.batch, t.head, i);
    return;
  }
#pragma unroll
  for (int channel = 0; channel < P::CHANNELS; channel += P::CHUNK) {
    uint32_t chunk = staging + channel / P::CHUNK % P::BUFFERS * P::CHUNK_BYTES;
    if (lane == 0) store_wait<P::BUFFERS - 1>(); /* until the buffer is free */
    __syncwarp();
    stage_chunk<P>(chunk, &sum[channel / 2], lane);
    if (direct) {
      __syncwarp();
      write_chunk<P>(chunk, call, t, query, channel, lane);
    } else {
      fence_copies();
      __syncwarp();
      if (lane == 0) store_box(map_o, chunk, channel, query, t.head, t.batch);
    }
  }
}

/* CAPPED: logits are finished before their maximum is taken; else scale is above 0, and is part of the exponent. */
template <class P, bool CAPPED>
__device__ __forceinline__ void consume(
    const TensorMap &map_o, const Call &call, bool direct, const Tiles<P> &tiles, Shared<P> shared, int group) {
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  uint32_t staging = shared.staging(group * 4 + warp);
  uint32_t queries = shared.q() + group * 64 * 128;
  Logits logits(call);
  float factor = CAPPED ? 1.f : logits.factor;
  Ring<P::STAGES> ks, vs;
  uint32_t q_phase = 0;
  if (group == P::GROUPS - 1) give_turn(0);
  auto release = [&](uint32_t empty) {
    if (lane == 0) barrier_arrive(empty);
  };
  for (int wave = 0; wave < tiles.waves(); ++wave) {
    int i = tiles.number(wave);
    if (i >= tiles.count) break;
    Tile t = tiles.place(i);
    int query = t.query + group * 64 + warp * 16; /* this warp's first */
    float sum[P::CHANNELS / 2];
    Softmax softmax;
    int top = t.query + group * 64; /* whole_begin up to whole_end is what all of this consumer's queries see */
    int whole_begin = call.seen(min(top + 63, call.queries - 1)).begin, whole_end = call.seen(top).end;
    float s[P::BN / 2], correction[2];
    uint32_t p[P::BN / 16][4];

    auto start_logits = [&] {
      barrier_wait(shared.k_full(ks.stage), ks.phase);
      await_turn(group);
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < P::STEPS; ++step) {
        uint64_t a = describe<128>(queries + step / 4 * P::Q_BOX + step % 4 * 32);
        uint64_t b = describe<128>(shared.k(ks.stage) + step / 4 * P::K_BOX + step % 4 * 32);
        FromShared<P::BN>::add(s, a, b, step > 0);
      }
      wgmma_commit();
    };
    auto start_sum = [&](bool add) {
      barrier_wait(shared.v_full(vs.stage), vs.phase);
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < P::BN / 16; ++step) {
        uint64_t b = describe<P::V_WIDTH * 2, P::V_BOX>(shared.v(vs.stage) + step * 16 * P::V_WIDTH * 2);
        FromRegisters<P::CHANNELS>::add(sum, p[step], b, add || step > 0);
      }
      wgmma_commit();
    };
    auto end_logits = [&](int block) { /* from products to weights */
      if constexpr (CAPPED) {
#pragma unroll
        for (int j = 0; j < P::BN / 2; ++j) s[j] = logits.of(s[j]);
      }
      int begin = block * P::BN;
      if (begin < whole_begin || begin + P::BN > whole_end) {
        int low[2], high[2];
#pragma unroll
        for (int row = 0; row < 2; ++row) {
          Keys seen = call.seen(query + lane / 4 + 8 * row);
          low[row] = seen.begin - begin - lane % 4 * 2, high[row] = seen.end - begin - lane % 4 * 2;
        }
        hide(s, low, high);
      }
      softmax.weigh(s, factor, correction);
      /* This always releases: the compiler cannot know it, and has the weights made before it waits for the sum. */
      if (!(softmax.total[0] + softmax.total[1] < 0)) release(shared.k_empty(ks.stage));
      ks.next();
    };
    auto pack_weights = [&] {
#pragma unroll
      for (int j = 0; j < P::BN / 4; ++j) p[j / 4][j % 4] = pack<T>(s[2 * j], s[2 * j + 1]);
    };

    barrier_wait(shared.q_full(), q_phase);
    q_phase ^= 1;
    start_logits();
    give_turn((group + 1) % P::GROUPS);
    wgmma_wait<0>(s);
    if (t.end - 1 == t.first) release(shared.q_empty());
    end_logits(t.end - 1);
    pack_weights();
#pragma unroll 1
    for (int block = t.end - 2; block >= t.first; --block) {
      start_logits();
      start_sum(block < t.end - 2);
      give_turn((group + 1) % P::GROUPS);
      wgmma_wait<1>(s);
      if (block == t.first) release(shared.q_empty());
      end_logits(block);
      wgmma_wait<0>(sum);
      release(shared.v_empty(vs.stage));
      vs.next();
#pragma unroll
      for (int j = 0; j < P::CHANNELS / 2; ++j) sum[j] *= correction[row_of(j)];
      pack_weights();
    }
    start_sum(t.end - 1 > t.first);
    wgmma_wait<0>(sum);
    release(shared.v_empty(vs.stage));
    vs.next();
    finish<P>(sum, softmax, factor, map_o, call, direct, staging, t, query);
  }
  if (lane == 0) store_wait<0>();
}

/* -- the kernel ---------------------------------------------------------------------------------- */

/* One call, by as many blocks as fit. `direct`: o has no tensor map, and map_o is any. Twice the positions, and the
 * tiles with a wave past the last, are ints. */
template <class P, bool CAPPED>
__device__ __forceinline__ void attend(
    const TensorMap &map_q, const TensorMap &map_k, const TensorMap &map_v, const TensorMap &map_o, bool direct,
    int section, const Call &call) {
  extern __shared__ __align__(1024) uint8_t memory[];
  Shared<P> shared{shared_address(memory)};
  Tiles<P> tiles(call, section);
  if (threadIdx.x == P::GROUPS * GROUP) prefetch(map_q), prefetch(map_k), prefetch(map_v), prefetch(map_o);
  if (threadIdx.x == 0) {
    constexpr int READERS = 4 * P::GROUPS; /* warps */
    barrier_init(shared.q_full(), 1);
    barrier_init(shared.q_empty(), READERS);
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
    if (threadIdx.x == P::GROUPS * GROUP) produce<P>(map_q, map_k, map_v, tiles, shared);
    __syncwarp();
  } else {
    take_registers<P::CONSUMER_REGISTERS>();
    consume<P, CAPPED>(map_o, call, direct, tiles, shared, group);
  }
}

}  // namespace hopper

/* SHARED: the bytes of shared memory that a launch has; then the arguments of Plan. */
#define HOPPER(NAME, SHARED, CAPPED, ...)                                                                     \
  static_assert(hopper::Plan<__VA_ARGS__>::BYTES == SHARED, "Plan.shared has another layout");                \
  extern "C" __global__ void __launch_bounds__(hopper::Plan<__VA_ARGS__>::THREADS, 1) NAME(                   \
      const __grid_constant__ hopper::TensorMap map_q, const __grid_constant__ hopper::TensorMap map_k,       \
      const __grid_constant__ hopper::TensorMap map_v, const __grid_constant__ hopper::TensorMap map_o,       \
      int direct, int section, CALL_PARAMETERS) {                                                             \
    hopper::attend<hopper::Plan<__VA_ARGS__>, CAPPED>(map_q, map_k, map_v, map_o, direct, section, CALL);      \
  }
