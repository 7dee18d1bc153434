/* Attention on the tensor cores of sm_80 and newer: mma.sync, and asynchronous copies two blocks of keys deep.
 *
 * A tile is QUERIES queries of one head, a block of threads the tile's; a warp has 16 or 32 of its rows, whose logits,
 * weights and sums stay in registers. Blocks of KEYS keys go through a ring of two stages in shared memory, from the
 * last that the tile sees to the first: one arrives while the warps compute the one before it,
 *
 *     S = Q K        the logits
 *     P = 2**(S - max)
 *     O = O * correction + P V
 *
 * and one barrier a block keeps them together. Where warps have 32 rows, what they read of shared memory, which bounds
 * them, serves twice the products. Several blocks of threads on an SM have their products beside others' exponentials.
 *
 * Only what a mask cuts of a warp is masked; what it hides of one is skipped. What is out of bounds arrives as zeros.
 *
 * The schedule is that of FlashAttention-2 (Dao, 2023), on the online softmax of Milakov and Gimelshein (2018).
 */

namespace forward {

using namespace accumulators;
using namespace tensor_cores;
using namespace warp_mma;

/* The same number, as one that nothing is known of: what is made of it is made where it is used, and takes no register
 * from block to block. */
template <class N> __device__ __forceinline__ N afresh(N x) {
  if constexpr (sizeof(N) == 8) {
    asm volatile("" : "+l"(x));
  } else {
    asm volatile("" : "+r"(x));
  }
  return x;
}

constexpr int round_up(int x, int to) { return (x + to - 1) / to * to; }

/* What a kernel is: Python's side of it is forward_plan.py. */
template <int QUERIES_, int KEYS_, int WARPS_> struct Plan {
  static constexpr int QUERIES = QUERIES_, KEYS = KEYS_, WARPS = WARPS_, THREADS = 32 * WARPS;
  static constexpr int ROWS = QUERIES / WARPS, SLABS = ROWS / 16; /* of a warp */
  static constexpr int CHANNELS = round_up(D_V, 16);              /* of v and o */
  static constexpr int STEPS = (D + 15) / 16;                     /* of the products of q and k */

  using Q = SharedTile<16 * STEPS>; /* and K */
  using V = SharedTile<CHANNELS>;
  static constexpr int Q_BYTES = Q::template BYTES<QUERIES>, K_BYTES = Q::template BYTES<KEYS>;
  static constexpr int STAGE = K_BYTES + V::template BYTES<KEYS>, BYTES = Q_BYTES + 2 * STAGE;

  /* Whether a warp has the registers to keep q, too. */
  static constexpr bool HELD = SLABS * (KEYS / 2 + CHANNELS / 2 + 4 * STEPS) <= 168;

  static __device__ __forceinline__ int tiles(int queries) { return (queries + QUERIES - 1) / QUERIES; }

  static_assert(QUERIES == 16 * SLABS * WARPS && KEYS % 16 == 0, "products are of 16 rows, and of 16 keys at a time");
};

/* A tile: its head, its first query, and the blocks of keys that it sees, from `first` up to `end`: one at least. Of
 * sequences end to end `span` is the tile's, in which queries and keys are counted. */
struct Tile {
  int batch, head, query, first, end;
  const T *k, *v; /* the head's */
  Span span;

  /* The call that the tile is of. */
  __device__ __forceinline__ Call of(const Call &call) const {
    if constexpr (VARLEN) return call.of(span);
    return call;
  }
};

/* The tile number `at`. Heads go in sections of about SECTION tiles, so that their keys and values stay in the L2
 * cache. Under a causal mask a section has the longest tiles of all its heads first. */
template <class P> __device__ __forceinline__ Tile tile(const Call &call, int at) {
  constexpr int SECTION = 512;
  int down = P::tiles(call.queries), section = (SECTION + down - 1) / down;
  int top = at / (section * down) * section, heads = min(section, call.heads * (VARLEN ? 1 : call.batch) - top);
  at -= top * down;
  int head = top + (call.causal() ? at % heads : at / down);
  int row = call.causal() ? down - 1 - at / heads : at % down;
  Tile t;
  t.batch = head / call.heads, t.head = head % call.heads;
  int kv_head = t.head / (call.heads / call.kv_heads);
  t.k = call.k + call.of_k.at(t.batch, 0, kv_head), t.v = call.v + call.of_v.at(t.batch, 0, kv_head);
  t.query = row * P::QUERIES;
  int last = min(t.query + P::QUERIES, call.queries) - 1;
  t.first = call.seen(t.query).begin / P::KEYS;
  t.end = max(t.first + 1, (call.seen(last).end + P::KEYS - 1) / P::KEYS);
  return t;
}

/* Of sequences end to end, find the tile number `at`, by a warp; false if it is none. Sequence n has the numbers from
 * slot(n) on, of each head: enough for its tiles whatever its first query is. */
template <class P> __device__ __forceinline__ bool find(Tile &t, const Call &call, int at) {
  int lane = threadIdx.x % 32, sequence = -1, wanted = at / call.heads;
  auto slot = [&](int n) { return n < 0 ? 0 : call.start(n) / P::QUERIES + n + 1; };
  for (int count = call.batch + 2; count > 1;) { /* it is one of so many from `sequence` on */
    int step = (count + 31) / 32;
    bool reached = lane * step < count && slot(sequence + lane * step) <= wanted;
    int skipped = (__popc(__ballot_sync(0xffffffff, reached)) - 1) * step;
    sequence += skipped, count = min(step, count - skipped);
  }
  Span span = call.span(sequence);
  at -= slot(sequence) * call.heads;
  if (at < 0 || at >= P::tiles(span.queries) * call.heads) return false; /* below 0 where starts decrease */
  t = tile<P>(call.of(span), at), t.span = span;
  return true;
}

/* Turn a 4 x 4 matrix that four lanes have a column each of: register i of a lane goes to lane i. */
__device__ __forceinline__ void turn(uint32_t (&r)[4], int lane) {
#pragma unroll
  for (int bit = 1; bit < 4; bit *= 2) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & bit) continue;
      uint32_t &low = r[i], &high = r[i + bit];
      uint32_t got = __shfl_xor_sync(0xffffffff, lane & bit ? low : high, bit);
      (lane & bit ? low : high) = got;
    }
  }
}

/* -- a warp ---------------------------------------------------------------------------------------- */

/* A warp's rows of a tile. FINISHED: logits are finished before their maximum is taken; else scale is above 0, and is
 * part of the exponent. */
template <class P, bool FINISHED> struct Rows {
  const Call &call;
  const Tile &t; /* in shared memory */
  Logits logits;
  float slope;
  uint32_t queries; /* the address of the tile's */
  uint32_t held[P::HELD ? P::STEPS : 1][P::SLABS][4];
  Softmax softmax[P::SLABS];
  float sum[P::SLABS][P::CHANNELS / 2] = {};

  __device__ __forceinline__ Rows(const Call &call, const Tile &t, uint32_t queries)
      : call(call), t(t), logits(call), slope(call.slope(t.head)), queries(queries) {}

  /* The first row. */
  __device__ __forceinline__ int query() const { return t.query + afresh(threadIdx.x) / 32 * P::ROWS; }

  /* Whether one of the rows sees a key of a block; and whether each sees all of them. */
  __device__ __forceinline__ bool sees_any(int block) const {
    Call mine = t.of(call);
    int first = query(), last = min(first + P::ROWS, mine.queries) - 1;
    return first <= last && block * P::KEYS < mine.seen(last).end && (block + 1) * P::KEYS > mine.seen(first).begin;
  }
  __device__ __forceinline__ bool sees_whole(int block) const {
    Call mine = t.of(call);
    int first = query(), last = min(first + P::ROWS, mine.queries) - 1;
    return block * P::KEYS >= mine.seen(last).begin && (block + 1) * P::KEYS <= mine.seen(first).end;
  }

  __device__ __forceinline__ float factor() const { return FINISHED ? 1.f : logits.factor; }

  /* The address of what this lane loads of the queries. */
  __device__ __forceinline__ uint32_t row() const {
    unsigned thread = afresh(threadIdx.x);
    return queries + P::Q::place(thread / 32 * P::ROWS + thread % 16, thread / 16 % 2);
  }

  /* Load 16 channels of the queries as operands. */
  __device__ __forceinline__ void load_queries(uint32_t (&a)[P::SLABS][4], uint32_t row, int step) const {
#pragma unroll
    for (int slab = 0; slab < P::SLABS; ++slab) {
      load_matrices(a[slab], P::Q::along(row, 2 * step) + slab * 16 * P::Q::PITCH);
    }
  }

  /* Keep the queries in registers, where there is room. */
  __device__ __forceinline__ void hold() {
    if constexpr (P::HELD) {
      uint32_t mine = row();
#pragma unroll
      for (int step = 0; step < P::STEPS; ++step) load_queries(held[step], mine, step);
    }
  }

  /* Take a block of keys, of which one at least is seen. */
  __device__ __forceinline__ void take(int block, uint32_t keys, uint32_t values) {
    float s[P::SLABS][P::KEYS / 2] = {};
    multiply_keys(s, keys);
    finish_logits(s, block);
    weigh(s);
    add_values(s, values);
  }

  __device__ __forceinline__ void multiply_keys(float (&s)[P::SLABS][P::KEYS / 2], uint32_t keys) const {
    unsigned lane = afresh(threadIdx.x) % 32;
    uint32_t query = P::HELD ? 0 : row(), key = keys + P::Q::place(lane / 16 * 8 + lane % 8, lane / 8 % 2);
#pragma unroll
    for (int step = 0; step < P::STEPS; ++step) {
      uint32_t loaded[P::SLABS][4];
      if constexpr (!P::HELD) load_queries(loaded, query, step);
      const auto &a = P::HELD ? held[P::HELD ? step : 0] : loaded;
#pragma unroll
      for (int n = 0; n < P::KEYS / 16; ++n) {
        uint32_t b[4];
        load_matrices(b, P::Q::along(key, 2 * step) + n * 16 * P::Q::PITCH);
#pragma unroll
        for (int slab = 0; slab < P::SLABS; ++slab) {
          multiply<T>(&s[slab][8 * n], a[slab], b[0], b[1]);
          multiply<T>(&s[slab][8 * n + 4], a[slab], b[2], b[3]);
        }
      }
    }
  }

  /* Make logits of products, -inf where a key is hidden. */
  __device__ __forceinline__ void finish_logits(float (&s)[P::SLABS][P::KEYS / 2], int block) const {
    Call mine = t.of(call);
    bool cut = !sees_whole(block);
    int begin = block * P::KEYS, lane = afresh(threadIdx.x) % 32, query = this->query();
#pragma unroll
    for (int slab = 0; slab < P::SLABS; ++slab) {
      if constexpr (FINISHED) {
        int apart = mine.place(query) - begin + slab * 16 + lane / 4 - lane % 4 * 2;
#pragma unroll
        for (int j = 0; j < P::KEYS / 2; ++j) {
          s[slab][j] = logits.of(s[slab][j], slope, apart + 8 * row_of(j) - column_of(j));
        }
      }
      if (cut) {
        int low[2], high[2];
#pragma unroll
        for (int row = 0; row < 2; ++row) {
          Keys seen = mine.seen(query + slab * 16 + lane / 4 + 8 * row);
          low[row] = seen.begin - begin - lane % 4 * 2, high[row] = seen.end - begin - lane % 4 * 2;
        }
        hide(s[slab], low, high);
      }
    }
  }

  /* Make weights of logits, those of all slabs side by side, and correct the sums where peaks move. */
  __device__ __forceinline__ void weigh(float (&s)[P::SLABS][P::KEYS / 2]) {
    float most[P::SLABS][2];
    bool moved = false;
#pragma unroll
    for (int slab = 0; slab < P::SLABS; ++slab) moved |= softmax[slab].exceeds(s[slab], factor(), most[slab]);
    if (__any_sync(0xffffffff, moved)) {
#pragma unroll
      for (int slab = 0; slab < P::SLABS; ++slab) {
        softmax[slab].move(most[slab], factor());
#pragma unroll
        for (int j = 0; j < P::CHANNELS / 2; ++j) sum[slab][j] *= softmax[slab].correction[row_of(j)];
      }
    }
#pragma unroll
    for (int slab = 0; slab < P::SLABS; ++slab) softmax[slab].make_weights(s[slab], factor());
  }

  __device__ __forceinline__ void add_values(const float (&s)[P::SLABS][P::KEYS / 2], uint32_t values) {
    unsigned lane = afresh(threadIdx.x) % 32;
    uint32_t value = values + P::V::place(lane % 16, lane / 16);
#pragma unroll
    for (int step = 0; step < P::KEYS / 16; ++step) {
      uint32_t weights[P::SLABS][4];
#pragma unroll
      for (int slab = 0; slab < P::SLABS; ++slab) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          weights[slab][i] = pack<T>(s[slab][8 * step + 2 * i], s[slab][8 * step + 2 * i + 1]);
        }
      }
#pragma unroll
      for (int n = 0; n < P::CHANNELS / 16; ++n) {
        uint32_t b[4];
        load_matrices<true>(b, P::V::along(value, 2 * n) + step * 16 * P::V::PITCH);
#pragma unroll
        for (int slab = 0; slab < P::SLABS; ++slab) {
          multiply<T>(&sum[slab][8 * n], weights[slab], b[0], b[1]);
          multiply<T>(&sum[slab][8 * n + 4], weights[slab], b[2], b[3]);
        }
      }
    }
  }

  /* Divide the rows by their sums and store them; `whole`: 16 bytes at a time. Then compute those again that
   * have a NaN that they need not, as rows.cuh does. */
  __device__ __forceinline__ void store(bool whole) {
    int query = this->query(), lane = threadIdx.x % 32;
    Call mine = t.of(call);
    unsigned lost = 0;
#pragma unroll
    for (int slab = 0; slab < P::SLABS; ++slab) {
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        int down = slab * 16 + lane / 4 + 8 * row, i = query + down;
        float total = softmax[slab].total[row], probe = 0;
        total += __shfl_xor_sync(0xffffffff, total, 1);
        total += __shfl_xor_sync(0xffffffff, total, 2);
        float inverse = total == 0 ? 0.f : 1 / total;
#pragma unroll
        for (int j = 2 * row; j < P::CHANNELS / 2; j += 4) {
          sum[slab][j] *= inverse, sum[slab][j + 1] *= inverse;
          probe += sum[slab][j] + sum[slab][j + 1];
        }
        bool real = i < mine.queries;
        if (real && probe != probe && total == total) lost |= 1u << down;
        if (real && lane % 4 == 0) {
          mine.put_lse(t.batch, t.head, i, (softmax[slab].base(row, factor()) + log2f(total)) * LN2);
        }
        store_row(sum[slab], row, mine.o + mine.of_o.at(t.batch, i, t.head), real, whole, lane);
      }
    }
    lost = __reduce_or_sync(0xffffffff, lost);
    __syncwarp();
    for (; lost; lost &= lost - 1) attend_row(mine, t.batch, t.head, query + __ffs(lost) - 1);
  }

  /* Store one of a lane's two rows of a slab, with the lanes that have its other channels, if it is `real`. */
  __device__ __forceinline__ void store_row(
      const float (&row_sum)[P::CHANNELS / 2], int row, O *o, bool real, bool whole, int lane) const {
    constexpr int EIGHTS = P::CHANNELS / 8;
#pragma unroll
    for (int eight = 0; eight < EIGHTS; eight += 4) {
      uint32_t packed[4] = {};
#pragma unroll
      for (int i = 0; i < 4 && eight + i < EIGHTS; ++i) {
        const float *pair = row_sum + 4 * (eight + i) + 2 * row;
        int channel = 8 * (eight + i) + lane % 4 * 2;
        if constexpr (sizeof(O) == 2) {
          packed[i] = pack<O>(pair[0], pair[1]);
        } else if (real && channel < D_V) {
          if (whole) {
            *reinterpret_cast<float2 *>(o + channel) = {pair[0], pair[1]};
          } else {
            o[channel * call.of_o.channel] = pair[0], o[(channel + 1) * call.of_o.channel] = pair[1];
          }
        }
      }
      if constexpr (sizeof(O) == 2) {
        turn(packed, lane);
        int channel = 8 * (eight + lane % 4);
        if (!real || channel >= D_V) continue;
        if (whole) {
          *reinterpret_cast<uint4 *>(o + channel) = {packed[0], packed[1], packed[2], packed[3]};
        } else {
          O each[8];
          memcpy(each, packed, 16);
#pragma unroll
          for (int i = 0; i < 8; ++i) o[(channel + i) * call.of_o.channel] = each[i];
        }
      }
    }
  }
};

/* -- the kernel ------------------------------------------------------------------------------------ */

/* A tile, by a block of threads. `whole`: o can be stored 16 bytes at a time. Twice the positions, and the tiles, are
 * ints. */
template <class P, bool FINISHED> __device__ __forceinline__ void attend(const Call &call, bool whole) {
  extern __shared__ __align__(128) uint8_t memory[];
  __shared__ Tile t; /* where it takes no registers */
  uint32_t queries = shared_address(memory), ring = queries + P::Q_BYTES;
  if constexpr (VARLEN) {
    __shared__ bool found;
    if (threadIdx.x < 32) found = find<P>(t, call, blockIdx.x);
    __syncthreads();
    if (!found) return;
  } else {
    if (threadIdx.x == 0) t = tile<P>(call, blockIdx.x);
    __syncthreads();
  }
  auto stage = [&](int block) { return ring + block % 2 * P::STAGE; };
  auto load = [&](int block, int keys) { /* of which there are so many */
    unsigned thread = afresh(threadIdx.x);
    index_t k_step = afresh(call.of_k.position), v_step = afresh(call.of_v.position), begin = block * P::KEYS;
    uint32_t to = stage(block);
    P::Q::template copy<P::KEYS, D, P::THREADS>(to, t.k + begin * k_step, k_step, keys, thread);
    P::V::template copy<P::KEYS, D_V, P::THREADS>(to + P::K_BYTES, t.v + begin * v_step, v_step, keys, thread);
    commit_copies();
  };
  Call mine = t.of(call);
  P::Q::template copy<P::QUERIES, D, P::THREADS>(
      queries, mine.q + mine.of_q.at(t.batch, t.query, t.head), mine.of_q.position, mine.queries - t.query,
      threadIdx.x);
  load(t.end - 1, mine.keys - (t.end - 1) * P::KEYS);

  Rows<P, FINISHED> rows(call, t, queries);
  wait_copies<0>();
  __syncthreads();
  rows.hold();
#pragma unroll 1
  for (int block = t.end - 1; block >= t.first; --block) {
    wait_copies<0>();
    __syncthreads(); /* of all warps: it has arrived for them, and they have left the stage that is filled next */
    if (block > t.first) load(block - 1, INT_MAX);
    if (rows.sees_any(block)) rows.take(block, stage(block), stage(block) + P::K_BYTES);
  }
  rows.store(whole);
}

}  // namespace forward

/* SHARED: the bytes of shared memory that a launch has; BLOCKS: what an SM is to have at once; then the arguments of
 * Plan. */
#define FORWARD_MMA(NAME, SHARED, BLOCKS, FINISHED, ...)                                                       \
  static_assert(forward::Plan<__VA_ARGS__>::BYTES == SHARED, "Plan.shared has another layout");                \
  extern "C" __global__ void __launch_bounds__(forward::Plan<__VA_ARGS__>::THREADS, BLOCKS)                    \
      NAME(int whole, CALL_PARAMETERS) {                                                                       \
    forward::attend<forward::Plan<__VA_ARGS__>, FINISHED>(CALL, whole);                                        \
  }
