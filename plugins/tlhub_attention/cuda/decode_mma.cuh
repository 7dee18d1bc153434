/* Decoding by mma.sync with asynchronous copies, for sm_80 and newer, bound by reading keys and values once.
 *
 * A warp has a chunk of each unit (decode_units.cuh), which it copies to a ring of its own some units before it computes
 * them, over the ends of tiles, so that the memory never idles; warps that have rows of the same tile share the copies.
 * The parts of a tile are added up at its end (decode_parts.cuh).
 */

namespace decode {

using tensor_cores::shared_address;
using tensor_cores::start_next;
using tensor_cores::wait_for_previous;

/* Shared memory: rings of chunks, one of each warp or of those that share them; what groups of warps add up. */
template <class P> struct Shared {
  static constexpr int STAGES = P::STAGES / P::CHUNKS; /* of a ring */
  static constexpr int AT_PLACES = P::STAGES * CHUNK_BYTES<P>, BYTES = AT_PLACES + Place<P>::BYTES;
};

/* A warp's copies of its chunks, unit by unit. */
template <class P> struct Fetch {
  const Place<P> &place;
  Walk<P> walk;
  Stretch t;
  bool left; /* whether there is a unit */
  int block;
  const T *row; /* by lane: a key of the unit's chunk, or its value in the other half of the lanes */
  bool held;    /* whether there is that key */

  __device__ __forceinline__ Fetch(const Walk<P> &walk, const Place<P> &place)
      : place(place), walk(walk), left(this->walk.next(t)), block(t.first) {
    look();
  }

  /* Start to copy the unit's chunk, and look up the next; keys that there are not, and channels, become zeros. */
  __device__ __forceinline__ void copy(uint32_t chunk) {
    if (left) {
      copy_rows<D, STEPS>(chunk, 0);
      copy_rows<D_V, CHANNELS / 16>(chunk + Layout<P, D>::BYTES, P::CHUNK);
      if (++block == t.end) left = walk.next(t), block = t.first;
      if (left) look();
    }
    commit_copies();
  }

 private:
  __device__ __forceinline__ void look() {
    int lane = threadIdx.x % 32, key = block * P::KEYS + place.chunk * P::CHUNK + lane % P::CHUNK;
    const Decode &s = walk.sequence;
    held = left && key < s.keys;
    row = !held ? s.k : lane < P::CHUNK ? s.key(walk.b, key, t.kv_head) : s.value(walk.b, key, t.kv_head);
  }

  /* EACH: of 32 pieces of 16 bytes, in whole rows of 2 EACH. */
  template <int N, int EACH> __device__ __forceinline__ void copy_rows(uint32_t to, int first) const {
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      if (P::ROW_WARPS > 1 && i % P::ROW_WARPS != place.group) continue;
      int at = i * 32 + threadIdx.x % 32, key = at / (2 * EACH), piece = at % (2 * EACH);
      const T *from = reinterpret_cast<const T *>(
          __shfl_sync(0xffffffff, reinterpret_cast<unsigned long long>(row), first + key));
      bool valid = __shfl_sync(0xffffffff, held, first + key) && piece < N / 8;
      copy_async(to + Layout<P, N>::at(key, piece), from + (valid ? piece * 8 : 0), valid);
    }
  }
};

template <class P> __device__ __forceinline__ void decode(void *scratch_memory, const Decode &call) {
  constexpr int STAGES = Shared<P>::STAGES;
  extern __shared__ __align__(1024) uint8_t memory[];
  int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
  Place<P> place(memory + Shared<P>::AT_PLACES, warp);
  Scratch<P> scratch{static_cast<Tagged *>(scratch_memory)};
  auto chunk = [&](int stage) {
    return shared_address(memory) + (place.chunk * STAGES + stage) * CHUNK_BYTES<P>;
  };
  Lines<P> lines(call);
  wait_for_previous();
  start_next();
  Walk<P> walk{Units<P>(call, lines)};
  Fetch<P> fetch(walk, place);
#pragma unroll
  for (int stage = 0; stage < STAGES - 1; ++stage) fetch.copy(chunk(stage));
  bool q_pairs = pairs(call.q, call.of_q), o_pairs = pairs(call.o, call.of_o);
  Logits logits(call);
  int now = 0; /* stage */
  for (Stretch t; walk.next(t);) {
    int row = t.row + place.group * 16, last = min(t.row + P::ROWS, rows_of(call)) - 1;
    uint32_t q[STEPS][4];
    load_queries(q, call, walk.b, t.kv_head, row, q_pairs);
    View view(walk.sequence, t.kv_head, t.row, last, row);
    Rows<P> rows(last - row + 1);
#pragma unroll 1
    for (int block = t.first; block < t.end; ++block) {
      wait_copies<STAGES - 2>();
      place.sync_chunk(); /* which is there, and the one before has been read */
      fetch.copy(chunk(now == 0 ? STAGES - 1 : now - 1));
      rows.attend(q, logits, view, block * P::KEYS + place.chunk * P::CHUNK, chunk(now), [] {});
      now = now == STAGES - 1 ? 0 : now + 1;
    }
    finish(rows, place, scratch, walk, t, row, o_pairs);
  }
}

}  // namespace decode

/* SHARED: the bytes of shared memory that a launch has; then the arguments of Plan. */
#define MMA_DECODE(SHARED, ROWS, ...)                                                                            \
  static_assert(decode::Shared<decode::Plan<ROWS, __VA_ARGS__>>::BYTES == SHARED,                                \
                "Plan.shared has another layout");                                                               \
  extern "C" __global__ void                                                                                     \
      __launch_bounds__(decode::Plan<ROWS, __VA_ARGS__>::THREADS, decode::Plan<ROWS, __VA_ARGS__>::BLOCKS)       \
      decode_##ROWS(void *scratch, DECODE_PARAMETERS) {                                                          \
    decode::decode<decode::Plan<ROWS, __VA_ARGS__>>(scratch, DECODE);                                            \
  }
