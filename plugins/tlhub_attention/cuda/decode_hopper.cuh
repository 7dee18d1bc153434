/* Decoding on Hopper (sm_90a), bound by reading keys and values once: bulk tensor copies, mma.sync, even shares.
 *
 * In a block one warp keeps a ring of chunks (decode_units.cuh) filled, over the ends of tiles, so that the memory never
 * idles. The others share a unit by its chunks, and the rows of a tile 16 each; a warp has a softmax of its own until the
 * tile ends, and then the parts of a tile are added up (decode_parts.cuh), while another set of warps has the next tile.
 */

namespace decode {

using namespace tensor_cores;

/* Shared memory: the ring of chunks, what groups of warps add up, barriers. */
template <class P> struct Shared {
  static constexpr int AT_PLACES = P::STAGES * CHUNK_BYTES<P>, AT_BARRIERS = AT_PLACES + Place<P>::BYTES;
  static constexpr int BYTES = AT_BARRIERS + 24 * P::STAGES;
  uint32_t base;

  __device__ __forceinline__ uint32_t chunk(int stage) const { return base + stage * CHUNK_BYTES<P>; }
  __device__ __forceinline__ uint32_t full(int stage) const { return base + AT_BARRIERS + 8 * stage; }
  __device__ __forceinline__ uint32_t keys_read(int stage) const { return full(P::STAGES + stage); }
  __device__ __forceinline__ uint32_t values_read(int stage) const { return full(2 * P::STAGES + stage); }
};

/* -- the producer -------------------------------------------------------------------------------- */

/* Of a chunk, that bulk copies bring: PART keys of a page. */
template <class P> constexpr int PARTS = P::CHUNK / PART;

/* Where the bulk copies of a sequence's keys begin: by lane, for 32 parts at a time, the next 32 looked up ahead. */
template <class P> struct Lookup {
  const Decode &s;
  int b, group, page, row, page_ahead, row_ahead;

  __device__ __forceinline__ Lookup(const Decode &s, int b, int part) : s(s), b(b), group(part / 32) {
    if constexpr (PAGED) look(group, page, row), look(group + 1, page_ahead, row_ahead);
  }

  /* The page and the position in it, or the sequence and its position, of part `first` plus this lane's number. `first`
   * is a multiple of PARTS, and grows. */
  __device__ __forceinline__ int2 of(int first) {
    if constexpr (!PAGED) return {b, (first + int(threadIdx.x) % 32) * PART};
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
    page = held ? s.page_of(b, key) : 0, row = held ? key % s.page : 0;
  }
};

/* Load a box of positions of a tensor of five dims: 64 channels, the others of a head, position, head, sequence or page.
 * `once` tells that it is read once, and L2 is to give it up first: measured, memory is read 0.5% faster. */
__device__ __forceinline__ void load_positions(
    uint32_t to, const TensorMap &map, uint32_t barrier, int channel, int position, int head, int batch) {
  uint64_t once;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(once));
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(to),
      "l"(&map), "r"(barrier), "r"(channel), "r"(0), "r"(position), "r"(head), "r"(batch), "l"(once)
      : "memory");
}

/* Load a part of a chunk's keys, or values. */
template <class P, int N>
__device__ __forceinline__ void load_part(
    uint32_t to, const TensorMap &map, uint32_t barrier, int part, int2 place, int head) {
  to += part * PART * Layout<P, N>::POSITION;
#pragma unroll
  for (int i = 0; i < (Layout<P, N>::WHOLE ? 1 : Layout<P, N>::BOXES); ++i) {
    load_positions(to + i * Layout<P, N>::BOX, map, barrier, i * 64, place.y, head, place.x);
  }
}

/* By a warp. Keys of a chunk come as soon as there is room, ahead of its values: so that more is on its way. */
template <class P, class Walk>
__device__ __forceinline__ void produce(
    const TensorMap &map_k, const TensorMap &map_v, Walk &walk, Shared<P> shared) {
  int lane = threadIdx.x % 32;
  Ring<P::STAGES> now;
  for (Stretch t; walk.next(t);) {
    Lookup<P> lookup(walk.sequence, walk.b, t.first * P::CHUNKS * PARTS<P>);
#pragma unroll 1
    for (int chunk = t.first * P::CHUNKS; chunk < t.end * P::CHUNKS; ++chunk, now.next()) {
      int2 place = lookup.of(chunk * PARTS<P>);
      int parts = max(0, min(PARTS<P>, (walk.sequence.keys - chunk * P::CHUNK + PART - 1) / PART)); /* that hold a key */
      uint32_t full = shared.full(now.stage), to = shared.chunk(now.stage);
      barrier_wait(shared.keys_read(now.stage), now.phase ^ 1);
      __syncwarp();
      if (lane < parts) load_part<P, D>(to, map_k, full, lane, place, t.kv_head);
      __syncwarp();
      barrier_wait(shared.values_read(now.stage), now.phase ^ 1);
      __syncwarp(); /* a chunk without keys is full at once: were a lane to wait yet, it might miss a round */
      if (lane == 0) barrier_expect(full, parts * (CHUNK_BYTES<P> / PARTS<P>));
      if (lane < parts) load_part<P, D_V>(to + Layout<P, D>::BYTES, map_v, full, lane, place, t.kv_head);
      __syncwarp();
    }
  }
}

/* Have L2 fetch a box of positions. */
__device__ __forceinline__ void fetch_positions(const TensorMap &map, int channel, int position, int head, int batch) {
  asm volatile(
      "cp.async.bulk.prefetch.tensor.5d.L2.global [%0, {%1, %2, %3, %4, %5}];" ::"l"(&map), "r"(channel), "r"(0),
      "r"(position), "r"(head), "r"(batch)
      : "memory");
}
template <class P, int N> __device__ __forceinline__ void fetch_part(const TensorMap &map, int2 place, int head) {
#pragma unroll
  for (int i = 0; i < (Layout<P, N>::WHOLE ? 1 : Layout<P, N>::BOXES); ++i) {
    fetch_positions(map, i * 64, place.y, head, place.x);
  }
}

/* Have L2 fetch what this block reads first, by a warp, while the kernel before still runs: where sequences of one length
 * lie in no pages, so that it takes no search. That kernel may change lengths: they are read past the L1 cache, which would
 * keep them; and if they change, this was for nothing. */
template <class P>
__device__ __forceinline__ void foresee(
    const TensorMap &map_k, const TensorMap &map_v, const Decode &call, const Lines<P> &lines) {
  constexpr int MOST = 256; /* lengths that take no time to speak of */
  constexpr int AHEAD = (128 << 10) / (PART * (D + D_V) * int(sizeof(T))); /* parts, of so many bytes in all as L2 keeps */
  if (PAGED || call.window > 0 || call.batch > MOST) return;
  int lane = threadIdx.x % 32, length = __ldcg(call.lengths);
  bool same = true;
  for (int b = lane; b < call.batch; b += 32) same &= __ldcg(call.lengths + b * call.lengths_step) == length;
  if (!__all_sync(0xffffffff, same)) return;
  /* as Units and Walk find it */
  int keys = max(0, min(length, call.keys)), count = max(1, (keys + P::KEYS - 1) / P::KEYS);
  int total = call.batch * lines.line * count, sharing = min(int(gridDim.x) >> lines.beside, total);
  int block = lines.block();
  if (block >= sharing) return;
  int each = total / sharing, longer = total % sharing, own = each + (block < longer);
  int last = each * (block + 1) + min(block + 1, longer) - 1, tile = last / count;
  int end = last % count + 1, key = max(end - own, 0) * P::KEYS + lane * PART;
  if (lane < AHEAD && key < min(keys, end * P::KEYS)) {
    int kv_head = ((tile % lines.line << lines.beside) + lines.side()) / lines.down;
    fetch_part<P, D>(map_k, {tile / lines.line, key}, kv_head);
    fetch_part<P, D_V>(map_v, {tile / lines.line, key}, kv_head);
  }
}

/* -- a consumer ---------------------------------------------------------------------------------- */

/* As Rows::attend, by wgmma: a set's warps, which have 16 of 64 rows each, attend to a chunk of 64 keys. */
template <class P, class F>
__device__ __forceinline__ void attend_wide(
    Rows<P> &rows, const uint32_t (&q)[STEPS][4], const Logits &logits, const View &view, const Place<P> &place, int key,
    uint32_t chunk, F keys_read) {
  using K = Layout<P, D>;
  using V = Layout<P, D_V>;
  float x[P::CHUNK / 2];
  uint32_t p[P::CHUNK / 16][4], v = chunk + K::BYTES;
  static_assert(P::WARPS == 4 && P::ROW_WARPS == 4, "a warpgroup has the rows of a tile");
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < STEPS; ++step) {
    FromRegisters<P::CHUNK>::add(x, q[step], describe<128>(chunk + step / 4 * K::BOX + step % 4 * 32), step > 0);
  }
  wgmma_commit();
  wgmma_wait<0>(x);
  keys_read();
  if (rows.weigh(x, p, logits, view, key)) { /* values that no row sees may be NaN, and become zeros */
    int i = threadIdx.x % P::THREADS, position = i % P::CHUNK;
    if (!view.any(key + position)) {
      for (int at = i / P::CHUNK * 16; at < V::BOXES * 128; at += P::THREADS / P::CHUNK * 16) {
        uint32_t to = v + at / 128 * V::BOX + position * 128 + at % 128;
        asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(to), "r"(0) : "memory");
      }
    }
    fence_copies();
    place.sync_chunk();
  }
#pragma unroll
  for (int i = 0; i < P::CHUNK / 4; ++i) asm volatile("" : "+r"(p[i / 4][i % 4])); /* they are made before the fence */
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < P::CHUNK / 16; ++step) {
    FromRegisters<CHANNELS, true>::add(rows.sum, p[step], describe<128, V::BOX>(v + step * 16 * 128), 1);
  }
  wgmma_commit();
  wgmma_wait<0>(rows.sum);
}

/* By a warp; finish(rows, t, row) when it has attended to a stretch. */
template <class P, class Walk, class Finish>
__device__ __forceinline__ void consume(
    const Decode &call, Walk &walk, Shared<P> shared, const Place<P> &place, Finish finish) {
  int lane = threadIdx.x % 32, number = 0;
  bool q_pairs = pairs(call.q, call.of_q);
  Logits logits(call);
  Ring<P::STAGES> now;
  now.skip(place.chunk);
  for (Stretch t; __any_sync(0xffffffff, walk.next(t)); ++number) { /* the compiler is told that warps agree */
    if (P::TURNS > 1 && number % P::TURNS != place.turn) {
      now.skip((t.end - t.first) * P::CHUNKS);
      continue;
    }
    int row = t.row + place.group * 16, last = min(t.row + P::ROWS, rows_of(call)) - 1;
    uint32_t q[STEPS][4];
    load_queries(q, call, walk.b, t.kv_head, row, q_pairs);
    View view(walk.sequence, t.kv_head, t.row, last, row);
    Rows<P> rows(last - row + 1);
    if (number > 0) place.wait_for_turn();
    if constexpr (P::WIDE) t.first = __shfl_sync(0xffffffff, t.first, 0), t.end = __shfl_sync(0xffffffff, t.end, 0);
#pragma unroll 1
    for (int block = t.first; block < t.end; ++block, now.skip(P::CHUNKS)) {
      barrier_wait(shared.full(now.stage), now.phase);
      __syncwarp();
      int key = block * P::KEYS + place.chunk * P::CHUNK;
      auto tell = [lane](uint32_t read) {
        __syncwarp();
        if (lane == 0) barrier_arrive(read);
      };
      auto keys_read = [&] { tell(shared.keys_read(now.stage)); };
      if constexpr (P::WIDE) {
        attend_wide(rows, q, logits, view, place, key, shared.chunk(now.stage), keys_read);
      } else {
        rows.attend(q, logits, view, key, shared.chunk(now.stage), keys_read);
      }
      tell(shared.values_read(now.stage));
    }
    if (walk.left > 0) place.end_turn();
    finish(rows, t, row);
  }
}

/* Warps of a block that compute; and that load: one, or where registers are dealt out anew its group. */
template <class P> constexpr int COMPUTING = P::TURNS * P::WARPS;
template <class P> constexpr int LOADING = COMPUTING<P> == 8 ? 4 : 1;
template <class P> constexpr int THREADS = 32 * (COMPUTING<P> + LOADING<P>);

/* -- the kernel ---------------------------------------------------------------------------------- */

template <class P>
__device__ __forceinline__ void begin(const TensorMap &map_k, const TensorMap &map_v, Shared<P> shared) {
  if (threadIdx.x == 0) {
    prefetch(map_k), prefetch(map_v);
    for (int stage = 0; stage < P::STAGES; ++stage) {
      barrier_init(shared.full(stage), 1);
      barrier_init(shared.keys_read(stage), P::ROW_WARPS);
      barrier_init(shared.values_read(stage), P::ROW_WARPS);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
}

template <class P>
__device__ __forceinline__ void decode(
    const TensorMap &map_k, const TensorMap &map_v, void *scratch, const Decode &call) {
  extern __shared__ __align__(1024) uint8_t memory[];
  Shared<P> shared{shared_address(memory)};
  int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
  begin(map_k, map_v, shared);
  Lines<P> lines(call);
  if (warp >= COMPUTING<P>) {
    if constexpr (LOADING<P> == 4) {
      give_registers<40>();
      if (warp == COMPUTING<P> + 1) foresee<P>(map_k, map_v, call, lines); /* it has nothing else to do */
      if (warp > COMPUTING<P>) return;
    }
    wait_for_previous();
    start_next();
    Walk<P> walk{Units<P>(call, lines)};
    produce<P>(map_k, map_v, walk, shared);
  } else {
    if constexpr (LOADING<P> == 4) take_registers<232>();
    wait_for_previous();
    start_next();
    Walk<P> walk{Units<P>(call, lines)};
    Place<P> place(memory + Shared<P>::AT_PLACES, warp);
    Scratch<P> parts{static_cast<Tagged *>(scratch)};
    bool paired = pairs(call.o, call.of_o);
    consume<P>(call, walk, shared, place, [&](Rows<P> &rows, const Stretch &t, int row) {
      finish(rows, place, parts, walk, t, row, paired);
    });
  }
}

}  // namespace decode

/* SHARED: the bytes of shared memory that a launch has; then the arguments of Plan. */
#define HOPPER_DECODE(SHARED, ROWS, ...)                                                                         \
  static_assert(decode::Shared<decode::Plan<ROWS, __VA_ARGS__>>::BYTES == SHARED,                                \
                "Plan.shared has another layout");                                                               \
  extern "C" __global__ void                                                                                     \
      __launch_bounds__(decode::THREADS<decode::Plan<ROWS, __VA_ARGS__>>, decode::Plan<ROWS, __VA_ARGS__>::BLOCKS) \
      decode_##ROWS(const __grid_constant__ decode::TensorMap map_k,                                             \
                    const __grid_constant__ decode::TensorMap map_v, void *scratch, DECODE_PARAMETERS) {         \
    decode::decode<decode::Plan<ROWS, __VA_ARGS__>>(map_k, map_v, scratch, DECODE);                              \
  }
