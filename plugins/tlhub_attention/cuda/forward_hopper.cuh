/* Attention on Hopper's tensor cores (sm_90a): bulk tensor copies, warp-specialised wgmma, persistent blocks.
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

using namespace accumulators;
using namespace tensor_cores;

constexpr int GROUP = 128; /* threads */

constexpr int round_up(int x, int to) { return (x + to - 1) / to * to; }

/* What a kernel is: Python's side of it is hopper_plan.py. */
template <int GROUPS_, int BN_, int TILES_, int BUFFERS_> struct Plan {
  static constexpr int GROUPS = GROUPS_, BM = 64 * GROUPS, BN = BN_;
  static constexpr int TILES = TILES_;     /* whose q there is room for; of two the second begins as the first ends */
  static constexpr int STAGES = 2;         /* of the rings of K and V */
  static constexpr int BUFFERS = BUFFERS_; /* chunks of o that a warp stages */
  static constexpr int THREADS = (GROUPS + 1) * GROUP;
  /* registers of a thread; at the launch all have the same */
  static constexpr int PRODUCER_REGISTERS = GROUPS == 3 ? 32 : 40;
  static constexpr int CONSUMER_REGISTERS = GROUPS == 3 ? 160 : 232;

  static constexpr int CHANNELS = round_up(D_V, 32);              /* of v and o */
  static constexpr int V_WIDTH = CHANNELS % 64 == 0 ? 64 : 32;    /* of a box */
  static constexpr int BOXES = (D + 63) / 64, STEPS = (D + 15) / 16; /* of q and k: boxes, and products */
  static constexpr int CHUNK = sizeof(O) == 4 ? 32 : V_WIDTH;     /* channels of o that are staged at once */

  static constexpr int Q_BOX = BM * 128, K_BOX = BN * 128, V_BOX = BN * V_WIDTH * 2; /* bytes */
  static constexpr int Q_BYTES = BOXES * Q_BOX, K_BYTES = BOXES * K_BOX, V_BYTES = CHANNELS / V_WIDTH * V_BOX;
  static constexpr int CHUNK_BYTES = 16 * CHUNK * int(sizeof(O));
  static constexpr int AT_K = TILES * Q_BYTES, AT_V = AT_K + STAGES * K_BYTES, AT_STAGING = AT_V + STAGES * V_BYTES;
  static constexpr int AT_BARRIERS = AT_STAGING + 4 * GROUPS * BUFFERS * CHUNK_BYTES;
  static constexpr int BYTES = AT_BARRIERS + 8 * (2 * TILES + 4 * STAGES); /* of shared memory in all */

  static_assert(BN % 16 == 0 && BN <= 256, "a product is of 16 keys at a time, and a box of at most 256");
};

/* Addresses in shared memory; `full` barriers complete when bytes have arrived, `empty` when all have read them. */
template <class P> struct Shared {
  uint32_t base;

  __device__ __forceinline__ uint32_t q(int tile) const { return base + tile * P::Q_BYTES; }
  __device__ __forceinline__ uint32_t k(int stage) const { return base + P::AT_K + stage * P::K_BYTES; }
  __device__ __forceinline__ uint32_t v(int stage) const { return base + P::AT_V + stage * P::V_BYTES; }
  __device__ __forceinline__ uint32_t staging(int warp) const {
    return base + P::AT_STAGING + warp * (P::BUFFERS * P::CHUNK_BYTES);
  }
  __device__ __forceinline__ uint32_t q_full(int tile) const { return barrier(tile); }
  __device__ __forceinline__ uint32_t q_empty(int tile) const { return barrier(P::TILES + tile); }
  __device__ __forceinline__ uint32_t k_full(int stage) const { return barrier(2 * P::TILES + stage); }
  __device__ __forceinline__ uint32_t k_empty(int stage) const { return k_full(P::STAGES + stage); }
  __device__ __forceinline__ uint32_t v_full(int stage) const { return k_full(2 * P::STAGES + stage); }
  __device__ __forceinline__ uint32_t v_empty(int stage) const { return k_full(3 * P::STAGES + stage); }

 private:
  __device__ __forceinline__ uint32_t barrier(int i) const { return base + P::AT_BARRIERS + 8 * i; }
};

/* -- tiles --------------------------------------------------------------------------------------- */

/* A tile: its head, its first query, and the blocks of keys that it sees, from `first` up to `end`: one at least.
 * VARLEN: of a sequence, from whose first query and key these are counted. */
struct Tile {
  int batch, head, kv_head, query, first, end;
  Span span;
  uint32_t slot; /* VARLEN, in a consumer: where it is in shared memory, besides */

  /* Where its queries and keys begin in their arrays. */
  __device__ __forceinline__ int queries_at() const { return VARLEN ? span.query : 0; }
  __device__ __forceinline__ int keys_at() const { return VARLEN ? span.key : 0; }

  /* Be number `at` of the tiles of `heads` heads, `down` each: under a causal mask the longest of all heads first. */
  template <class P>
  __device__ __forceinline__ void place(const Call &call, int at, int top, int heads, int down) {
    head = top + (call.causal() ? at % heads : at / down);
    query = (call.causal() ? down - 1 - at / heads : at % down) * P::BM;
  }

  /* Have the blocks of keys that the tile sees, in the call of its sequence or all. */
  template <class P> __device__ __forceinline__ void see(const Call &one) {
    int last = min(query + P::BM, one.queries) - 1;
    first = one.seen(query).begin / P::BN;
    end = max(first + 1, (one.seen(last).end + P::BN - 1) / P::BN);
  }
};

/* The tiles of a block, one after the other. Heads go in sections of two waves of tiles or more, so that their keys and
 * values stay in the L2 cache. Under a causal mask a section has the longest tiles of all its heads first, and every
 * other wave of it is dealt out backwards, which evens out what blocks get. */
template <class P> struct Tiles {
  const Call &call;
  int size, left; /* tiles of a section, and from this one on */
  int at, step;   /* the block's tile in it, and how far on its next is */

  __device__ __forceinline__ explicit Tiles(const Call &call)
      : call(call), size((2 * gridDim.x + down() - 1) / down() * down()), left(count()) {
    enter(blockIdx.x);
  }

  /* The call that a tile is of. */
  __device__ __forceinline__ const Call &of(const Tile &) const { return call; }

  /* Every warp knows all of them: there is nothing to share. */
  __device__ __forceinline__ void begin() const {}
  __device__ __forceinline__ void draw() const {}
  __device__ __forceinline__ const Tile &recall(const Tile &t) const { return t; }
  __device__ __forceinline__ void release(const Tile &) const {}
  __device__ __forceinline__ Tiles alone() const { return *this; }
  __device__ __forceinline__ Tiles again() const { return Tiles(call); }

  /* Go on to the next tile; false if there is none. Where that lies is left to `take`, for it needs divisions. */
  __device__ __forceinline__ bool advance() {
    int blocks = gridDim.x;
    for (;;) {
      at += step, step = 2 * blocks - step;
      if (at < min(size, left)) return true;
      left -= size;
      if (left <= 0) return false;
      enter((blockIdx.x + blocks - (count() - left) % blocks) % blocks);
    }
  }
  __device__ __forceinline__ void take(Tile &t) const {
    int top = (count() - left) / down();
    t = {};
    t.place<P>(call, at, top, min(size, left) / down(), down());
    t.batch = t.head / call.heads, t.head %= call.heads;
    t.kv_head = t.head / (call.heads / call.kv_heads);
    t.see<P>(call);
  }

  __device__ __forceinline__ bool next(Tile &t) {
    bool more = advance();
    if (more) take(t);
    return more;
  }

 private:
  /* The tiles of a head, and of all. */
  __device__ __forceinline__ int down() const { return (call.queries + P::BM - 1) / P::BM; }
  __device__ __forceinline__ int count() const { return down() * call.heads * call.batch; }

  /* Stand before a section, of whose first wave the block has the tile at `place`. */
  __device__ __forceinline__ void enter(int place) {
    step = call.causal() ? 2 * place + 1 : gridDim.x;
    at = place - step;
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

template <class P, class TILES>
__device__ __forceinline__ void produce(
    const TensorMap &map_q, const TensorMap &map_k, const TensorMap &map_v, TILES tiles, Shared<P> shared) {
  Ring<P::TILES> qs;
  Ring<P::STAGES> ks, vs;
  auto load_q = [&](const Tile &t) {
    load<P::BOXES, 64, P::Q_BYTES>(shared.q(qs.stage), map_q, shared.q_full(qs.stage), shared.q_empty(qs.stage),
                                   qs.phase, t.queries_at() + t.query, t.head, t.batch);
    qs.next();
  };
  constexpr bool AHEAD = P::TILES > 1; /* q is loaded a tile early */
  Tile t, after;
  bool more = tiles.next(t);
  if (AHEAD && more) load_q(t);
  for (; more; t = after) {
    auto load_k = [&](int block) {
      load<P::BOXES, 64, P::K_BYTES>(shared.k(ks.stage), map_k, shared.k_full(ks.stage), shared.k_empty(ks.stage),
                                     ks.phase, t.keys_at() + block * P::BN, t.kv_head, t.batch);
      ks.next();
    };
    auto load_v = [&](int block) {
      load<P::CHANNELS / P::V_WIDTH, P::V_WIDTH, P::V_BYTES>(
          shared.v(vs.stage), map_v, shared.v_full(vs.stage), shared.v_empty(vs.stage), vs.phase,
          t.keys_at() + block * P::BN, t.kv_head, t.batch);
      vs.next();
    };
    load_k(t.end - 1);
    if (!AHEAD) load_q(t);
    for (int block = t.end - 1; block >= t.first; --block) {
      if (block > t.first) load_k(block - 1);
      load_v(block);
      if (block == t.end - 1) { /* by now there is room */
        more = tiles.next(after);
        if (AHEAD && more) load_q(after);
      }
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

/* The descriptor of a tile so many bytes on, of one in the same memory: without a carry, which a sum of 64 bits has. */
__device__ __forceinline__ uint64_t onward(uint64_t tile, int bytes) {
  return tile >> 32 << 32 | uint32_t(uint32_t(tile) + bytes / 16);
}

/* Take from products what a slope does for each key between this thread's two rows and a block of keys; `apart`: how
 * many there are up to its first. */
template <int N> __device__ __forceinline__ void bias(float (&s)[N], float slope, const int (&apart)[2]) {
  float from[2] = {float(apart[0]), float(apart[1])};
#pragma unroll
  for (int i = 0; i < N; ++i) s[i] = fmaf(-slope, fabsf(from[row_of(i)] - float(column_of(i))), s[i]);
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

/* Write a staged chunk to o piece by piece: an element, or 16 bytes where o has room for them side by side. */
template <class P, class PIECE>
__device__ __forceinline__ void write_chunk(
    uint32_t from, const Call &call, const Tile &t, int query, int channel, int lane) {
  constexpr int WIDTH = P::CHUNK * int(sizeof(O)), SWIZZLE = WIDTH - 16, SOME = sizeof(PIECE) / sizeof(O);
#pragma unroll 1
  for (int i = lane * SOME; i < 16 * P::CHUNK; i += 32 * SOME) {
    int row = query + i / P::CHUNK, column = channel + i % P::CHUNK, at = i * int(sizeof(O));
    if (row < call.queries && column < D_V) {
      O *to = call.o + (call.of_o.at(t.batch, row, t.head) + column * call.of_o.channel);
      *reinterpret_cast<PIECE *>(to) =
          *reinterpret_cast<const PIECE *>(__cvta_shared_to_generic(from + (at ^ (at >> 3 & SWIZZLE))));
    }
  }
}

/* Divide a warp's 16 rows by their sums, and store them from `query` on; tell whether one has a NaN that it need not. */
template <class P>
__device__ __forceinline__ bool finish(
    float (&sum)[P::CHANNELS / 2], Softmax softmax, float factor, const TensorMap &map_o, const Call &call,
    bool direct, uint32_t staging, const Tile &t, int query) {
  int lane = threadIdx.x % 32;
  bool lost = false;
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    int i = query + lane / 4 + 8 * row;
    float &total = softmax.total[row];
    total += __shfl_xor_sync(0xffffffff, total, 1);
    total += __shfl_xor_sync(0xffffffff, total, 2);
    float inverse = total == 0 ? 0.f : 1 / total, probe = 0;
#pragma unroll
    for (int j = 0; j < P::CHANNELS / 2; ++j) {
      if (row_of(j) != row) continue;
      sum[j] *= inverse;
      probe += sum[j];
    }
    lost |= i < call.queries && probe != probe && total == total;
    if (lane % 4 == 0 && i < call.queries) {
      call.put_lse(t.batch, t.head, i, (softmax.base(row, factor) + log2f(total)) * LN2);
    }
  }
  bool cut = VARLEN && __any_sync(0xffffffff, query + 16 > call.queries); /* the rows after are another sequence's */
#pragma unroll
  for (int channel = 0; channel < P::CHANNELS; channel += P::CHUNK) {
    uint32_t chunk = staging + channel / P::CHUNK % P::BUFFERS * P::CHUNK_BYTES;
    if (lane == 0) { /* until the buffer is free: of an odd number of chunks the last is in the first buffer, too */
      if (channel == 0) {
        store_wait<0>();
      } else {
        store_wait<P::BUFFERS - 1>();
      }
    }
    __syncwarp();
    stage_chunk<P>(chunk, &sum[channel / 2], lane);
    if (direct) {
      __syncwarp();
      write_chunk<P, O>(chunk, call, t, query, channel, lane);
    } else if (cut) {
      __syncwarp();
      write_chunk<P, uint4>(chunk, call, t, query, channel, lane);
    } else {
      fence_copies();
      __syncwarp();
      if (lane == 0) store_box(map_o, chunk, channel, t.queries_at() + query, t.head, t.batch);
    }
  }
  return lost;
}

/* Compute a consumer's rows that hold a NaN again, as rows.cuh does; `tiles`: its block's. */
template <class TILES> __device__ __forceinline__ void mend(TILES tiles, int group) {
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  if (lane == 0) store_wait_whole();
  __syncwarp();
  for (Tile t; tiles.next(t);) {
    const auto &one = tiles.of(t);
    int query = t.query + group * 64 + warp * 16, end = min(query + 16, one.queries);
    for (int i = query; i < end; ++i) {
      const O *o = one.o + one.of_o.at(t.batch, i, t.head);
      float probe = 0;
      for (int d = lane; d < D_V; d += 32) probe += to_float(o[d * one.of_o.channel]);
      if (__any_sync(0xffffffff, probe != probe)) attend_row(one, t.batch, t.head, i);
    }
  }
}

/* CAPPED: logits are finished before their maximum is taken; else scale is above 0, and is part of the exponent. */
template <class P, bool CAPPED, class TILES>
__device__ __forceinline__ void consume(
    const TensorMap &map_o, const Call &call, bool direct, TILES &tiles, Shared<P> shared, int group) {
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  Logits logits(call);
  float factor = CAPPED ? 1.f : logits.factor, slope; /* of the tile's head, before the factor */
  Ring<P::TILES> qs;
  Ring<P::STAGES> ks, vs;
  float s[P::BN / 2], sum[P::CHANNELS / 2];
  uint32_t p[P::BN / 16][4];
  Softmax softmax;
  Tile t;
  int query, whole_begin, whole_end; /* this warp's first, and the keys that all of this consumer's see */
  bool lost = false;

  auto release = [&](uint32_t empty) {
    if (lane == 0) barrier_arrive(empty);
  };
  auto next_tile = [&] {
    tiles.take(t);
    const Call &one = tiles.of(t);
    int top = t.query + group * 64;
    query = top + warp * 16;
    whole_begin = one.seen(min(top + 63, one.queries - 1)).begin, whole_end = one.seen(top).end;
    slope = call.slope(t.head) / factor;
    softmax = Softmax();
  };
  auto start_logits = [&] {
    barrier_wait(shared.q_full(qs.stage), qs.phase);
    barrier_wait(shared.k_full(ks.stage), ks.phase);
    await_turn(group);
    uint64_t q = describe<128>(shared.q(qs.stage) + group * 64 * 128), k = describe<128>(shared.k(ks.stage));
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < P::STEPS; ++step) {
      uint64_t a = onward(q, step / 4 * P::Q_BOX + step % 4 * 32);
      uint64_t b = onward(k, step / 4 * P::K_BOX + step % 4 * 32);
      FromShared<P::BN>::add(s, a, b, step > 0);
    }
    wgmma_commit();
  };
  auto start_sum = [&](bool add) {
    barrier_wait(shared.v_full(vs.stage), vs.phase);
    __syncwarp();
    uint64_t v = describe<P::V_WIDTH * 2, P::V_BOX>(shared.v(vs.stage));
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < P::BN / 16; ++step) {
      uint64_t b = onward(v, step * 16 * P::V_WIDTH * 2);
      FromRegisters<P::CHANNELS, true>::add(sum, p[step], b, add || step > 0);
    }
    wgmma_commit();
  };
  auto end_logits = [&](int block) { /* from products to weights; tells whether the sum is to be corrected */
    if (block == t.first) { /* the tile's last */
      release(shared.q_empty(qs.stage));
      qs.next();
    }
    if constexpr (CAPPED) {
#pragma unroll
      for (int j = 0; j < P::BN / 2; ++j) s[j] = logits.of(s[j]);
    }
    int begin = block * P::BN;
    if constexpr (ALIBI) {
      int apart = tiles.of(t).place(query + lane / 4) - begin - lane % 4 * 2;
      bias(s, slope, {apart, apart + 8});
    }
    if (begin < whole_begin || begin + P::BN > whole_end) {
      const Call &one = tiles.of(t);
      int low[2], high[2];
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        Keys seen = one.seen(query + lane / 4 + 8 * row);
        low[row] = seen.begin - begin - lane % 4 * 2, high[row] = seen.end - begin - lane % 4 * 2;
      }
      hide(s, low, high);
    }
    bool moved = softmax.weigh(s, factor);
    /* This always releases: the compiler cannot know it, and has the weights made before it waits for the sum. */
    if (!(softmax.total[0] + softmax.total[1] < 0)) release(shared.k_empty(ks.stage));
    ks.next();
    return moved;
  };
  auto end_sum = [&] {
    wgmma_wait<0>(sum);
    release(shared.v_empty(vs.stage));
    vs.next();
  };
  auto pack_weights = [&] {
#pragma unroll
    for (int j = 0; j < P::BN / 4; ++j) p[j / 4][j % 4] = pack<T>(s[2 * j], s[2 * j + 1]);
  };
  auto start_tile = [&](auto products) {
    if (CAPPED) next_tile(); /* whose registers are short beside products */
    products();
    give_turn((group + 1) % P::GROUPS);
    if (!CAPPED) next_tile();
  };
  auto begin_tile = [&] {
    start_tile(start_logits);
    wgmma_wait<0>(s);
    end_logits(t.end - 1);
    pack_weights();
  };

  if (group == P::GROUPS - 1) give_turn(0);
  bool more = tiles.advance();
  if (more) begin_tile();
  while (more) {
#pragma unroll 1
    for (int block = t.end - 2; block >= t.first; --block) {
      start_logits();
      start_sum(block < t.end - 2);
      give_turn((group + 1) % P::GROUPS);
      wgmma_wait<1>(s);
      bool moved = end_logits(block);
      end_sum();
      if (moved) {
#pragma unroll
        for (int j = 0; j < P::CHANNELS / 2; ++j) sum[j] *= softmax.correction[row_of(j)];
      }
      pack_weights();
    }
    bool several = t.end - 1 > t.first;
    Tile done = t;
    Softmax of_done = softmax;
    int query_done = query;
    more = tiles.advance();
    auto finish_done = [&] {
      const Tile &whole = tiles.recall(done);
      lost |= finish<P>(sum, of_done, factor, map_o, tiles.of(whole), direct, shared.staging(group * 4 + warp), whole,
                        query_done);
      tiles.release(done);
    };
    if (P::TILES > 1 && more) {
      start_tile([&] { start_logits(), start_sum(several); });
      wgmma_wait<1>(s);
      end_logits(t.end - 1);
      end_sum();
      finish_done();
      pack_weights();
    } else {
      start_sum(several);
      end_sum();
      finish_done();
      if (more) begin_tile();
    }
  }
  if (lane == 0) store_wait<0>();
  if (__any_sync(0xffffffff, lost)) mend(tiles.again(), group);
}

/* -- the kernel ---------------------------------------------------------------------------------- */

/* One call, by as many blocks as fit. `direct`: o has no tensor map, and map_o is any. Twice the positions, and the
 * tiles with a wave past the last, are ints. */
template <class P, bool CAPPED, class TILES>
__device__ __forceinline__ void attend(
    const TensorMap &map_q, const TensorMap &map_k, const TensorMap &map_v, const TensorMap &map_o, bool direct,
    const Call &call, TILES tiles, Shared<P> shared) {
  if (threadIdx.x == P::GROUPS * GROUP) prefetch(map_q), prefetch(map_k), prefetch(map_v), prefetch(map_o);
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
    tiles.begin();
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  wait_for_previous();
  start_next();

  int group = __shfl_sync(0xffffffff, threadIdx.x / GROUP, 0);
  if (group == P::GROUPS) {
    give_registers<P::PRODUCER_REGISTERS>();
    if (threadIdx.x == P::GROUPS * GROUP) produce<P>(map_q, map_k, map_v, tiles.alone(), shared);
    if (threadIdx.x / 32 == P::GROUPS * 4 + 1) tiles.draw();
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
      int direct, CALL_PARAMETERS) {                                                                          \
    using Plan = hopper::Plan<__VA_ARGS__>;                                                                   \
    Call call = CALL;                                                                                         \
    extern __shared__ __align__(1024) uint8_t memory[];                                                       \
    hopper::attend<Plan, CAPPED>(map_q, map_k, map_v, map_o, direct, call, hopper::Tiles<Plan>(call),         \
                                 hopper::Shared<Plan>{hopper::shared_address(memory)});                       \
  }
