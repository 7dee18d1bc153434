/* Tiles of sequences that lie end to end, for forward_hopper.cuh: blocks draw them, those that see most keys first.
 *
 * Where sequences begin is known on the device alone. A kernel of one block orders them by the keys that a tile of
 * theirs sees, and counts the tiles up to each; queries of no sequence are sequences without keys. In the kernel that
 * follows a warp of each block draws numbers of tiles, and hands the tiles to the producer and the consumers through
 * slots in shared memory.
 */

namespace hopper {

/* What the first kernel leaves for the second, in scratch memory. */
struct Order {
  const Call &call;
  int *scratch, most; /* `most`: tiles that there is room for */

  __device__ __forceinline__ int sequences() const { return call.batch + 2; }

  /* Tiles that were drawn, beyond two of each block, and tiles in all. */
  __device__ __forceinline__ int &drawn() const { return scratch[0]; }
  __device__ __forceinline__ int &count() const { return scratch[1]; }

  /* By a sequence's place in the order: itself, and the tiles up to its last. */
  __device__ __forceinline__ int4 &span(int rank) const { return reinterpret_cast<int4 *>(scratch)[1 + rank]; }
  __device__ __forceinline__ int &end(int rank) const { return scratch[4 + 4 * sequences() + rank]; }

  /* By a tile's number: that of the tile which its block had next. */
  __device__ __forceinline__ int &link(int number) const { return scratch[4 + 5 * sequences() + number]; }

  /* A tile by its number, by a warp; `rank` is of a sequence that is not after its own, and becomes that. */
  template <class P> __device__ __forceinline__ Tile tile(int number, int &rank) const {
    auto ends_beyond = [&](int i) { return i >= sequences() || end(i) > number; };
    uint32_t beyond;
    while (!(beyond = __ballot_sync(0xffffffff, ends_beyond(rank + int(threadIdx.x) % 32)))) rank += 32;
    rank += __ffs(beyond) - 1;
    if (rank > 0) number -= end(rank - 1);
    int4 s = span(rank);
    Tile t = {};
    t.span = {s.x, s.y, s.z, s.w};
    int down = (t.span.queries + P::BM - 1) / P::BM, section = min(call.heads, (2 * int(gridDim.x) + down - 1) / down);
    int top = number / (section * down) * section;
    t.place<P>(call, number % (section * down), top, min(section, call.heads - top), down);
    t.see<P>(call.of(t.span));
    return t;
  }
};

/* -- the first kernel ---------------------------------------------------------------------------- */

constexpr int BUCKETS = 1024; /* of sequences by their keys, and threads */

/* Longer ones have lower numbers, in steps of a 32nd. */
template <class P> __device__ __forceinline__ int bucket_of(const Call &call, const Span &s) {
  int keys = call.window > 0 ? min(s.keys, call.window + P::BM) : s.keys;
  return BUCKETS - 1 - ((__float_as_int(float(max(keys, 1))) >> 18) - (127 << 5));
}

/* The sum of what the threads up to this one have, or `most` if it is more; `all`: that of all threads. */
__device__ __forceinline__ int sum_up_to(int x, int most, int &all) {
  __shared__ int sums[32]; /* of warps */
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  auto within = [&](int y) {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      int before = __shfl_up_sync(0xffffffff, y, step);
      if (lane >= step) y = min(y + before, most);
    }
    return y;
  };
  x = within(x);
  if (lane == 31) sums[warp] = x;
  __syncthreads();
  int of_warps = within(sums[lane]), before = __shfl_sync(0xffffffff, of_warps, max(warp - 1, 0));
  all = __shfl_sync(0xffffffff, of_warps, 31);
  __syncthreads();
  return warp > 0 ? min(x + before, most) : x;
}

template <class P> __device__ __forceinline__ void arrange(const Order &order) {
  __shared__ int places[BUCKETS];
  int thread = threadIdx.x, all;
  auto each = [&](auto f) {
    for (int i = thread; i < order.sequences(); i += BUCKETS) {
      Span span = order.call.span(i - 1);
      f(span, &places[bucket_of<P>(order.call, span)]);
    }
    __syncthreads();
  };
  places[thread] = 0;
  __syncthreads();
  each([](const Span &, int *place) { atomicAdd(place, 1); });
  int size = places[thread];
  places[thread] = sum_up_to(size, order.most, all) - size;
  __syncthreads();
  each([&](const Span &s, int *place) {
    int rank = atomicAdd(place, 1);
    order.span(rank) = {s.query, s.queries, s.key, s.keys};
    order.end(rank) = order.call.heads * ((s.queries + P::BM - 1) / P::BM);
  });
  int before = 0;
  for (int first = 0; first < order.sequences(); first += BUCKETS, before = min(before + all, order.most)) {
    int rank = first + thread;
    int up_to = sum_up_to(rank < order.sequences() ? order.end(rank) : 0, order.most, all);
    if (rank < order.sequences()) order.end(rank) = min(before + up_to, order.most);
  }
  if (thread == 0) order.drawn() = 0, order.count() = before;
}

/* -- the second ---------------------------------------------------------------------------------- */

/* A block's tiles, by the links that it has left. */
template <class P> struct Linked {
  Order order;
  int number = blockIdx.x, rank = 0;

  __device__ __forceinline__ Call of(const Tile &t) const { return order.call.of(t.span); }

  __device__ __forceinline__ bool next(Tile &t) {
    if (number >= order.count()) return false;
    t = order.tile<P>(number, rank);
    number = order.link(number);
    return true;
  }
};

constexpr int SLOTS = 3, SLOT_BYTES = 48; /* of shared memory, after Plan's: a tile and two barriers */
constexpr int BESIDE = SLOTS * SLOT_BYTES;

/* A block's tiles, as its warp that draws them hands them on: a tile stays in its slot until consumers are done with it.
 * ALONE: the producer's first thread asks, not a warp. */
template <class P, bool ALONE = false> struct Drawn {
  Order order;
  uint32_t base;
  Ring<SLOTS> slots = {};

  __device__ __forceinline__ void begin() const {
    for (uint32_t slot = base; slot < base + BESIDE; slot += SLOT_BYTES) {
      barrier_init(full(slot), 1);
      barrier_init(empty(slot), 4 * P::GROUPS + 1); /* warps of consumers, and the producer's */
    }
  }

  __device__ __forceinline__ Drawn<P, true> alone() const { return {order, base}; }

  /* Go on to the next tile; false if there is none. */
  __device__ __forceinline__ bool advance() {
    barrier_wait(full(slot()), slots.phase);
    if (!ALONE) __syncwarp();
    int head = read(slot()).x;
    return (ALONE ? head : same(head)) >= 0;
  }
  __device__ __forceinline__ void take(Tile &t) {
    t.slot = slot();
    t = recall(t);
    if (ALONE) barrier_arrive(empty(t.slot)); /* it is in registers */
    slots.next();
  }

  __device__ __forceinline__ bool next(Tile &t) {
    bool more = advance();
    if (more) take(t);
    return more;
  }

  /* A tile whole, of which only the slot is known; and the call of its sequence. */
  __device__ __forceinline__ Tile recall(const Tile &t) const {
    int4 place = read(t.slot), s = read(t.slot + 16);
    if (!ALONE) place = same(place), s = same(s);
    int kv_head = place.x / (order.call.heads / order.call.kv_heads);
    return {0, place.x, kv_head, place.y, place.z, place.w, {s.x, s.y, s.z, s.w}, t.slot};
  }
  __device__ __forceinline__ Call of(const Tile &t) const { return order.call.of(recall(t).span); }

  /* Be done with a tile, by a consumer's warp. */
  __device__ __forceinline__ void release(const Tile &t) const {
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(empty(t.slot));
  }

  /* Draw tiles as there is room for them, by a warp: the first two of a block are given, and even out. */
  __device__ __forceinline__ void draw() {
    int lane = threadIdx.x % 32, blocks = gridDim.x, block = blockIdx.x, count = order.count();
    int number = block, rank = 0;
    for (int turn = 0; turn == 0 || number < count; ++turn, slots.next()) {
      barrier_wait(empty(slot()), slots.phase ^ 1);
      if (turn > 0) {
        int next = 2 * blocks - 1 - block;
        if (turn > 1) next = __shfl_sync(0xffffffff, lane == 0 ? 2 * blocks + atomicAdd(&order.drawn(), 1) : 0, 0);
        if (lane == 0) order.link(number) = next;
        number = next;
      }
      Tile t = {};
      t.head = -1;
      if (number < count) t = order.tile<P>(number, rank);
      if (lane == 0) {
        write(slot(), t.head, t.query, t.first, t.end);
        write(slot() + 16, t.span.query, t.span.queries, t.span.key, t.span.keys);
        barrier_arrive(full(slot()));
      }
    }
  }

  __device__ __forceinline__ Linked<P> again() const { return {order}; }

 private:
  __device__ __forceinline__ uint32_t slot() const { return base + slots.stage * SLOT_BYTES; }
  static __device__ __forceinline__ uint32_t full(uint32_t slot) { return slot + 32; }
  static __device__ __forceinline__ uint32_t empty(uint32_t slot) { return slot + 40; }
  static __device__ __forceinline__ int4 read(uint32_t address) {
    int4 x;
    asm volatile("ld.shared.v4.s32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "r"(address)
                 : "memory");
    return x;
  }
  /* Tell the compiler that a warp has the same. */
  static __device__ __forceinline__ int same(int x) { return __shfl_sync(0xffffffff, x, 0); }
  static __device__ __forceinline__ int4 same(int4 x) { return {same(x.x), same(x.y), same(x.z), same(x.w)}; }
  static __device__ __forceinline__ void write(uint32_t address, int x, int y, int z, int w) {
    asm volatile("st.shared.v4.s32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
  }
};

}  // namespace hopper

/* Two kernels, ARRANGE and NAME. SHARED: the bytes of shared memory that a launch of NAME has; then the arguments of
 * Plan. */
#define HOPPER_SEQUENCES(ARRANGE, NAME, SHARED, CAPPED, ...)                                                    \
  static_assert(hopper::Plan<__VA_ARGS__>::BYTES + hopper::BESIDE == SHARED,                               \
                "Plan.shared has another layout");                                                              \
  extern "C" __global__ void __launch_bounds__(hopper::BUCKETS, 1) ARRANGE(int *scratch, int most, CALL_PARAMETERS) { \
    tensor_cores::wait_for_previous();                                                                          \
    tensor_cores::start_next();                                                                                 \
    Call call = CALL;                                                                                           \
    hopper::arrange<hopper::Plan<__VA_ARGS__>>({call, scratch, most});                                           \
  }                                                                                                             \
  extern "C" __global__ void __launch_bounds__(hopper::Plan<__VA_ARGS__>::THREADS, 1) NAME(                     \
      const __grid_constant__ hopper::TensorMap map_q, const __grid_constant__ hopper::TensorMap map_k,         \
      const __grid_constant__ hopper::TensorMap map_v, const __grid_constant__ hopper::TensorMap map_o,         \
      int direct, int *scratch, int most, CALL_PARAMETERS) {                                                    \
    using Plan = hopper::Plan<__VA_ARGS__>;                                                                     \
    Call call = CALL;                                                                                           \
    extern __shared__ __align__(1024) uint8_t memory[];                                                         \
    hopper::Shared<Plan> shared{hopper::shared_address(memory)};                                                \
    hopper::Drawn<Plan> tiles{{call, scratch, most}, shared.base + Plan::BYTES};                               \
    hopper::attend<Plan, CAPPED>(map_q, map_k, map_v, map_o, direct, call, tiles, shared);                      \
  }
