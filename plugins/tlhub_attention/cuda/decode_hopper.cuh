/* Decoding on Hopper (sm_90a), bound by reading keys and values once: bulk tensor copies, mma.sync, even shares.
 *
 * In a block one warp keeps a ring of chunks (decode_units.cuh) filled, over the ends of tiles, so that the memory never
 * idles. The others share a unit by its chunks, and the rows of a tile 16 each; a warp has a softmax of its own until the
 * tile ends, and then the parts of a tile are added up (decode_parts.cuh).
 */

namespace decode {

using namespace tensor_cores;

/* Shared memory: the ring of chunks, what groups of warps add up, barriers. */
template <class P> struct Shared {
  static constexpr int AT_PLACES = P::STAGES * CHUNK_BYTES, AT_BARRIERS = AT_PLACES + Place<P>::BYTES;
  static constexpr int BYTES = AT_BARRIERS + 16 * P::STAGES;
  uint32_t base;

  __device__ __forceinline__ uint32_t chunk(int stage) const { return base + stage * CHUNK_BYTES; }
  __device__ __forceinline__ uint32_t full(int stage) const { return base + AT_BARRIERS + 8 * stage; }
  __device__ __forceinline__ uint32_t empty(int stage) const { return full(P::STAGES + stage); }
};

/* -- the producer -------------------------------------------------------------------------------- */

constexpr int PARTS = CHUNK / PART; /* of a chunk, that bulk copies bring: PART keys of a page, or all of them */

/* Where the bulk copies of a sequence's keys begin: by lane, for 32 parts at a time, the next 32 looked up ahead. */
struct Lookup {
  const Decode &s;
  int b, group, page, row, page_ahead, row_ahead;

  __device__ __forceinline__ Lookup(const Decode &s, int b, int part) : s(s), b(b), group(part / 32) {
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
    page = held ? s.page_of(b, key) : 0, row = held ? key % s.page : 0;
  }
};

/* Load a box of positions of a tensor of five dims: 64 channels, the others of a head, position, head, sequence or page. */
__device__ __forceinline__ void load_positions(
    uint32_t to, const TensorMap &map, uint32_t barrier, int channel, int position, int head, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(to),
      "l"(&map), "r"(barrier), "r"(channel), "r"(0), "r"(position), "r"(head), "r"(batch)
      : "memory");
}

/* Load a part of a chunk's keys, or values. */
template <int N>
__device__ __forceinline__ void load_part(
    uint32_t to, const TensorMap &map, uint32_t barrier, int part, int2 place, int head) {
  to += part * PART * Layout<N>::POSITION;
#pragma unroll
  for (int i = 0; i < (Layout<N>::WHOLE ? 1 : Layout<N>::BOXES); ++i) {
    load_positions(to + i * Layout<N>::BOX, map, barrier, i * 64, place.y, head, place.x);
  }
}

/* By a warp. */
template <class P>
__device__ __forceinline__ void produce(
    const TensorMap &map_k, const TensorMap &map_v, Walk<P> &walk, Shared<P> shared) {
  int lane = threadIdx.x % 32;
  Ring<P::STAGES> now;
  for (Stretch t; walk.next(t);) {
    Lookup lookup(walk.sequence, walk.b, t.first * P::CHUNKS * PARTS);
#pragma unroll 1
    for (int chunk = t.first * P::CHUNKS; chunk < t.end * P::CHUNKS; ++chunk, now.next()) {
      int2 place = lookup.of(chunk * PARTS);
      int parts = max(0, min(PARTS, (walk.sequence.keys - chunk * CHUNK + PART - 1) / PART)); /* that hold a key */
      uint32_t full = shared.full(now.stage), to = shared.chunk(now.stage);
      barrier_wait(shared.empty(now.stage), now.phase ^ 1);
      if (lane == 0) barrier_expect(full, parts * (CHUNK_BYTES / PARTS));
      __syncwarp();
      if (lane < parts) {
        load_part<D>(to, map_k, full, lane, place, t.kv_head);
        load_part<D_V>(to + Layout<D>::BYTES, map_v, full, lane, place, t.kv_head);
      }
      __syncwarp();
    }
  }
}

/* -- a consumer ---------------------------------------------------------------------------------- */

template <class P>
__device__ __forceinline__ void consume(
    Walk<P> &walk, Shared<P> shared, const Scratch<P> &scratch, const Place<P> &place) {
  const Decode &call = walk.units.call;
  int lane = threadIdx.x % 32;
  bool q_pairs = pairs(call.q, call.of_q), o_pairs = pairs(call.o, call.of_o);
  Logits logits(call);
  Ring<P::STAGES> now;
  now.skip(place.chunk);
  for (Stretch t; walk.next(t);) {
    int row = t.row + place.group * 16, last = min(t.row + P::ROWS, rows_of(call)) - 1;
    uint32_t q[STEPS][4];
    load_queries(q, call, walk.b, t.kv_head, row, q_pairs);
    View view(walk.sequence, t.kv_head, t.row, last, row);
    Rows<P> rows(last - row + 1);
#pragma unroll 1
    for (int block = t.first; block < t.end; ++block, now.skip(P::CHUNKS)) {
      barrier_wait(shared.full(now.stage), now.phase);
      __syncwarp();
      rows.attend(q, logits, view, block * P::KEYS + place.chunk * CHUNK, shared.chunk(now.stage));
      __syncwarp();
      if (lane == 0) barrier_arrive(shared.empty(now.stage));
    }
    finish(rows, place, scratch, walk, t, row, o_pairs);
  }
}

/* Warps of a block that load: one, or where registers are dealt out anew its group. */
template <class P> constexpr int LOADING = P::WARPS == 8 ? 4 : 1;
template <class P> constexpr int THREADS = P::THREADS + 32 * LOADING<P>;

/* -- the kernel ---------------------------------------------------------------------------------- */

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
      barrier_init(shared.empty(stage), P::ROW_WARPS);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  wait_for_previous();
  start_next();
  Walk<P> walk{Units<P>(call)};
  if (warp >= P::WARPS) {
    if constexpr (LOADING<P> == 4) give_registers<40>();
    if (warp == P::WARPS) produce<P>(map_k, map_v, walk, shared);
  } else {
    if constexpr (LOADING<P> == 4) take_registers<232>();
    consume<P>(walk, shared, Scratch<P>{static_cast<Tagged *>(scratch)}, Place<P>(memory + Shared<P>::AT_PLACES, warp));
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
