/* Decoding on Hopper (sm_90a), bound by reading keys and values once: bulk tensor copies, mma.sync, even shares.
 *
 * The query heads that share a kv head are packed: row r of its rows is query r / group, head r % group of the group.
 * A tile is ROWS of them, and a unit of work is a tile's block of BN keys and values. All units of a call, sequence by
 * sequence, tile by tile, are one line, of which each block takes an equal stretch, whatever the lengths are; so it has
 * the whole of some tiles, and parts of at most two more. What a part gives, a sum of values with the peak and the
 * total of its weights, goes to scratch memory, and a second kernel (decode_combine.cuh) adds up the parts of a tile in
 * their order. Results repeat bit for bit.
 *
 * Where blocks and tiles can be dealt out so, there are several lines side by side, each with its own blocks. Tiles of
 * heads that lie beside each other in memory, or of the same head, are then read at the same time.
 *
 * In a block one warp keeps a ring of units filled, over the ends of tiles, so that the memory never idles. The others
 * share a unit: ROW_WARPS times 16 rows, and KEY_WARPS times BN / KEY_WARPS keys, of which each warp has a softmax of
 * its own until the tile ends.
 */

namespace decode {

constexpr int BOX_BYTES = BN * 128; /* of 64 channels */
constexpr int PARTS = BN / PART;    /* of a unit, that bulk copies bring: PART keys of a page, or all of them */
constexpr int K_BOXES = (D + 63) / 64, V_BOXES = (D_V + 63) / 64;

/* What a kernel is: Python's side of it is decode_plan.py. */
template <int ROWS_, int WARPS_, int STAGES_> struct Plan {
  static constexpr int ROWS = ROWS_, WARPS = WARPS_, STAGES = STAGES_;
  static constexpr int ROW_WARPS = ROWS / 16, KEY_WARPS = WARPS / ROW_WARPS, THREADS = 32 * (WARPS + 1);
  static constexpr int KEYS = BN / KEY_WARPS;                        /* of a warp */
  static constexpr int SUMS = WARPS == 4 && CHANNELS <= 192 ? 2 : 1; /* of products, in turn, where warps are few */

  static constexpr int STAGE_BYTES = (K_BOXES + V_BOXES) * BOX_BYTES;
  static constexpr int SLOT_BYTES = 32 * 4 * (CHANNELS / 2 + 4); /* a warp's sums, peaks and totals */
  static constexpr int SLOTS = KEY_WARPS / 2;                    /* of warps with the same rows */
  static constexpr int AT_SLOTS = STAGES * STAGE_BYTES, AT_BARRIERS = AT_SLOTS + ROW_WARPS * SLOTS * SLOT_BYTES;
  static constexpr int BYTES = AT_BARRIERS + 16 * STAGES; /* of shared memory in all */
};

template <class P> struct Shared {
  uint32_t base;

  __device__ __forceinline__ uint32_t k(int stage) const { return base + stage * P::STAGE_BYTES; }
  __device__ __forceinline__ uint32_t v(int stage) const { return k(stage) + K_BOXES * BOX_BYTES; }
  __device__ __forceinline__ uint32_t full(int stage) const { return base + P::AT_BARRIERS + 8 * stage; }
  __device__ __forceinline__ uint32_t empty(int stage) const { return full(P::STAGES + stage); }
};

/* -- the producer -------------------------------------------------------------------------------- */

/* Where the bulk copies of a tile's keys begin: by lane, for 32 parts at a time, the next 32 looked up ahead. */
struct Lookup {
  const Sequence &s;
  int b, group, page, row, page_ahead, row_ahead;

  __device__ __forceinline__ Lookup(const Sequence &s, int b, int part) : s(s), b(b), group(part / 32) {
    if constexpr (PAGED) look(group, page, row), look(group + 1, page_ahead, row_ahead);
  }

  /* The page and the position in it, or the sequence and its position, of part `first` plus this lane's number. `first`
   * is a multiple of PARTS, and grows. */
  __device__ __forceinline__ int2 of(int first) {
    if constexpr (!PAGED) return {b, first * PART};
    if (first / 32 != group) {
      group = first / 32, page = page_ahead, row = row_ahead;
      look(group + 1, page_ahead, row_ahead);
    }
    int from = (first + int(threadIdx.x) % 32) % 32;
    return {__shfl_sync(0xffffffff, page, from), __shfl_sync(0xffffffff, row, from)};
  }

 private:
  __device__ __forceinline__ void look(int group, int &page, int &row) const {
    int key = (group * 32 + int(threadIdx.x) % 32) * PART;
    bool held = key < s.keys; /* entries after a sequence's end hold anything */
    page = held ? s.page_of(key) : 0, row = held ? key % s.page : 0;
  }
};

/* By a warp. */
template <class P>
__device__ __forceinline__ void produce(
    const TensorMap &map_k, const TensorMap &map_v, Walk<P> &walk, Shared<P> shared) {
  int lane = threadIdx.x % 32;
  Ring<P::STAGES> now;
  for (Stretch t; walk.next(t);) {
    Lookup lookup(walk.sequence, walk.b, t.first * PARTS);
#pragma unroll 1
    for (int block = t.first; block < t.end; ++block, now.next()) {
      int2 place = lookup.of(block * PARTS);
      int parts = max(0, min(PARTS, (walk.sequence.keys - block * BN + PART - 1) / PART)); /* that hold a key */
      uint32_t full = shared.full(now.stage), at = lane * (PART * 128);
      barrier_wait(shared.empty(now.stage), now.phase ^ 1);
      if (lane == 0) barrier_expect(full, parts * PART * 128 * (K_BOXES + V_BOXES));
      __syncwarp();
      if (lane < parts) {
#pragma unroll
        for (int i = 0; i < K_BOXES; ++i) {
          load_box(shared.k(now.stage) + i * BOX_BYTES + at, map_k, full, i * 64, place.y, t.kv_head, place.x);
        }
#pragma unroll
        for (int i = 0; i < V_BOXES; ++i) {
          load_box(shared.v(now.stage) + i * BOX_BYTES + at, map_v, full, i * 64, place.y, t.kv_head, place.x);
        }
      }
      __syncwarp();
    }
  }
}

/* -- a consumer ---------------------------------------------------------------------------------- */

/* All warps that have the same rows. */
template <class P> __device__ __forceinline__ void sync_rows(int row_warp) {
  asm volatile("bar.sync %0, %1;" ::"r"(1 + row_warp), "n"(32 * P::KEY_WARPS) : "memory");
}

template <class P>
__device__ __forceinline__ void consume(
    const Decode &call, Walk<P> &walk, Shared<P> shared, const Parts<P> &parts, float4 *slots, int warp) {
  int lane = threadIdx.x % 32, row_warp = warp / P::KEY_WARPS, key_warp = warp % P::KEY_WARPS;
  slots += row_warp * P::SLOTS * (P::SLOT_BYTES / 16);
  bool q_pairs = pairs(call.q, call.of_q), o_pairs = pairs(call.o, call.of_o);
  Logits logits(call);
  /* rows of matrices: 8 keys, and 8 on in the other half of the lanes (of K) or in every other 8 (of V); swizzled */
  uint32_t k_row = (lane / 16 * 8 + lane % 8) * 128 + ((lane / 8 % 2 ^ lane % 8) * 16);
  uint32_t v_row = (lane / 8 % 2 * 8 + lane % 8) * 128 + ((lane / 16 ^ lane % 8) * 16);
  Ring<P::STAGES> now;
  for (Stretch t; walk.next(t);) {
    const Sequence &s = walk.sequence;
    int row = t.row + row_warp * 16, last = min(t.row + P::ROWS, rows_of(call)) - 1;
    uint32_t q[STEPS][4];
    load_queries(q, call, walk.b, t.kv_head, row, q_pairs);
    Keys of_first = s.seen(Row(call, 0, t.row).query), of_last = s.seen(Row(call, 0, last).query), of_row[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) of_row[i] = s.seen(Row(call, 0, min(row + lane / 4 + 8 * i, last)).query);
    Rows<P> rows;
#pragma unroll 1
    for (int block = t.first; block < t.end; ++block, now.next()) {
      barrier_wait(shared.full(now.stage), now.phase);
      __syncwarp();
#pragma unroll 1
      for (int key = key_warp * P::KEYS; key < (key_warp + 1) * P::KEYS; key += 16) {
        float sums[P::SUMS][8] = {}, x[8]; /* products; logits, and then weights */
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
          uint32_t k[4];
          load_matrices<false>(k, shared.k(now.stage) + step / 4 * BOX_BYTES + key * 128 + (k_row ^ step % 4 * 32));
          multiply(&sums[step % P::SUMS][0], q[step], k[0], k[1]);
          multiply(&sums[step % P::SUMS][4], q[step], k[2], k[3]);
        }
#pragma unroll
        for (int j = 0; j < 8; ++j) x[j] = logits.of(P::SUMS == 1 ? sums[0][j] : sums[0][j] + sums[P::SUMS - 1][j]);
        uint32_t held[2] = {0xffffffff, 0xffffffff}; /* of two keys of v each: which any row sees */
        int begin = block * BN + key;
        if (begin < of_last.begin || begin + 16 > of_first.end) {
          int first = begin + lane % 4 * 2;
          int low[2] = {of_row[0].begin - first, of_row[1].begin - first};
          int high[2] = {of_row[0].end - first, of_row[1].end - first};
          hide(x, low, high);
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            auto seen = [&](int i) { return i >= of_first.begin && i < of_last.end; };
            held[j] = (seen(first + 8 * j) ? 0xffff : 0) | (seen(first + 8 * j + 1) ? 0xffff0000 : 0);
          }
        }
        if (rows.softmax.weigh(x, 1)) rows.scale(rows.softmax.correction);
        uint32_t p[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) p[j] = pack<T>(x[2 * j], x[2 * j + 1]);
#pragma unroll
        for (int channel = 0; channel < CHANNELS; channel += 16) {
          uint32_t v[4];
          load_matrices<true>(
              v, shared.v(now.stage) + channel / 64 * BOX_BYTES + key * 128 + (v_row ^ channel % 64 * 2));
          multiply(&rows.sum[channel / 2], p, v[0] & held[0], v[1] & held[1]);
          multiply(&rows.sum[channel / 2 + 4], p, v[2] & held[0], v[3] & held[1]);
        }
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(shared.empty(now.stage));
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      rows.softmax.total[i] += __shfl_xor_sync(0xffffffff, rows.softmax.total[i], 1);
      rows.softmax.total[i] += __shfl_xor_sync(0xffffffff, rows.softmax.total[i], 2);
    }
#pragma unroll
    for (int half = P::KEY_WARPS / 2; half > 0; half /= 2) {
      float4 *slot = slots + key_warp % half * (P::SLOT_BYTES / 16);
      sync_rows<P>(row_warp); /* all have read what is there */
      if (key_warp >= half && key_warp < 2 * half) rows.put(slot);
      sync_rows<P>(row_warp);
      if (key_warp < half) rows.add(slot);
    }
    if (key_warp > 0) continue;
    if (t.whole()) {
      rows.write(s, walk.b, t.kv_head, row, o_pairs);
    } else {
      rows.write_part(parts, parts.slot(blockIdx.x, t.begins), row - t.row + lane / 4);
    }
  }
}

/* -- the kernels --------------------------------------------------------------------------------- */

template <class P>
__device__ __forceinline__ void decode(
    const TensorMap &map_k, const TensorMap &map_v, void *scratch, const Decode &call) {
  extern __shared__ __align__(1024) uint8_t memory[];
  Shared<P> shared{shared_address(memory)};
  int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
  if (threadIdx.x == 0) {
    prefetch(map_k), prefetch(map_v);
    for (int stage = 0; stage < P::STAGES; ++stage) {
      barrier_init(shared.full(stage), 1);
      barrier_init(shared.empty(stage), P::WARPS);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  wait_for_previous();
  start_next();
  Walk<P> walk(call, Units(call, P::ROWS));
  if (warp == P::WARPS) {
    produce<P>(map_k, map_v, walk, shared);
  } else {
    consume<P>(call, walk, shared, Parts<P>(scratch), reinterpret_cast<float4 *>(memory + P::AT_SLOTS), warp);
  }
}

}  // namespace decode

/* SHARED: the bytes of shared memory that a launch has; then the arguments of Plan. */
#define HOPPER_DECODE(SHARED, ROWS, ...)                                                                        \
  static_assert(decode::Plan<ROWS, __VA_ARGS__>::BYTES == SHARED, "Plan.shared has another layout");            \
  extern "C" __global__ void __launch_bounds__(decode::Plan<ROWS, __VA_ARGS__>::THREADS, 1) decode_##ROWS(      \
      const __grid_constant__ decode::TensorMap map_k, const __grid_constant__ decode::TensorMap map_v,         \
      void *scratch, DECODE_PARAMETERS) {                                                                       \
    decode::decode<decode::Plan<ROWS, __VA_ARGS__>>(map_k, map_v, scratch, DECODE);                             \
  }                                                                                                             \
  extern "C" __global__ void __launch_bounds__(64 * decode::SLOTS, 3)                                           \
      combine_##ROWS(void *scratch, DECODE_PARAMETERS) {                                                        \
    decode::combine<decode::Plan<ROWS, __VA_ARGS__>>(scratch, DECODE);                                          \
  }
