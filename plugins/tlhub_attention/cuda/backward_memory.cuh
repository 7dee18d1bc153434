/* What a block of attention's gradients has in shared memory on Hopper, and the producer that fills it. */

namespace backward {

using namespace tensor_cores;

constexpr int GROUP = 128, GROUPS = 2; /* threads, and consumers */

constexpr int round_up(int x, int to) { return (x + to - 1) / to * to; }

/* What a kernel is: Python's side of it is backward_plan.py. WIDE: one consumer has the sums of dv, the other those of
 * dk, of the same 64 keys; else each has both, of 64 keys of its own. PAIRED: a tile of keys is two blocks', a cluster.
 * Of dq a part is 64 queries by 64 channels. */
template <int BM_, bool WIDE_, bool PAIRED_> struct Plan {
  static constexpr bool WIDE = WIDE_, PAIRED = PAIRED_;
  static constexpr bool BY_QUERIES = BM_ == 128; /* whether dq is divided by queries, not by channels */
  static constexpr int BM = BM_, KEYS = WIDE ? 64 : 64 * GROUPS, BN = PAIRED ? 2 * KEYS : KEYS, STAGES = 2;
  static constexpr int THREADS = (GROUPS + 1) * GROUP;
  static constexpr int PRODUCER_REGISTERS = 24, CONSUMER_REGISTERS = 240;

  static constexpr int CHANNELS = WIDE ? round_up(D, 64) : BY_QUERIES ? 64 : 128; /* in shared memory */
  static constexpr int V_CHANNELS = round_up(D_V, 64);
  static constexpr int PARTS = WIDE ? CHANNELS / 64 : GROUPS, SUMS = PARTS * 64 * 64;
  static constexpr int STEPS = (D + 15) / 16, V_STEPS = (D_V + 15) / 16; /* products over channels */
  static constexpr int QUERY_BOX = BM * 128, KEY_BOX = KEYS * 128;       /* bytes */
  static constexpr int K_BYTES = CHANNELS / 64 * KEY_BOX, V_BYTES = V_CHANNELS / 64 * KEY_BOX;
  static constexpr int Q_BYTES = CHANNELS / 64 * QUERY_BOX, DOUT_BYTES = V_CHANNELS / 64 * QUERY_BOX;
  static constexpr int DS_BYTES = KEYS * BM * 2, PART_BYTES = 64 * 64 * 4, STATS_BYTES = 2 * BM * 4;
  static constexpr int HANDED = WIDE ? 1 : GROUPS; /* weights, or parts of dq */
  static constexpr int AT_V = K_BYTES, AT_Q = AT_V + V_BYTES, AT_DOUT = AT_Q + STAGES * Q_BYTES;
  static constexpr int AT_DS = AT_DOUT + STAGES * DOUT_BYTES, AT_PEER_DS = AT_DS + STAGES * DS_BYTES;
  static constexpr int AT_PEER_K = AT_PEER_DS + (PAIRED ? STAGES * DS_BYTES : 0);
  static constexpr int AT_HANDED = AT_PEER_K + (PAIRED ? K_BYTES : 0);
  static constexpr int AT_STATS = AT_HANDED + HANDED * PART_BYTES, AT_BARRIERS = AT_STATS + STAGES * STATS_BYTES;
  static constexpr int AT_TILE = AT_BARRIERS + 8 * (2 + 6 * STAGES), BYTES = AT_TILE + 64; /* of shared memory in all */

  static_assert(BM == 64 || BM == 128 && !WIDE, "dq is divided into parts of 64 x 64");
  static_assert(sizeof(Tile<Plan>) <= BYTES - AT_TILE - 4, "and the tile's number is after it");
  static_assert(D <= CHANNELS && V_CHANNELS <= (WIDE ? 256 : 128), "sums are kept in registers");
};

/* Addresses in shared memory; `full` barriers complete when bytes have arrived, `empty` when all have read them. */
template <class P> struct Shared {
  uint32_t base;

  __device__ __forceinline__ uint32_t k() const { return base; }
  __device__ __forceinline__ uint32_t v() const { return base + P::AT_V; }
  __device__ __forceinline__ uint32_t q(int stage) const { return base + P::AT_Q + stage * P::Q_BYTES; }
  __device__ __forceinline__ uint32_t dout(int stage) const { return base + P::AT_DOUT + stage * P::DOUT_BYTES; }
  __device__ __forceinline__ uint32_t ds(int stage) const { return base + P::AT_DS + stage * P::DS_BYTES; }
  __device__ __forceinline__ uint32_t peer_ds(int stage) const { return base + P::AT_PEER_DS + stage * P::DS_BYTES; }
  __device__ __forceinline__ uint32_t peer_k() const { return base + P::AT_PEER_K; }
  __device__ __forceinline__ uint32_t handed(int i = 0) const { return base + P::AT_HANDED + i * P::PART_BYTES; }
  __device__ __forceinline__ uint32_t stats(int stage) const { return base + P::AT_STATS + stage * P::STATS_BYTES; }
  __device__ __forceinline__ uint32_t number() const { return base + P::BYTES - 4; } /* of the tile, after it */
  __device__ __forceinline__ uint32_t k_full() const { return barrier(0); }
  __device__ __forceinline__ uint32_t v_full() const { return barrier(1); }
  __device__ __forceinline__ uint32_t q_full(int stage) const { return barrier(2 + stage); }
  __device__ __forceinline__ uint32_t q_empty(int stage) const { return barrier(2 + P::STAGES + stage); }
  __device__ __forceinline__ uint32_t dout_full(int stage) const { return barrier(2 + 2 * P::STAGES + stage); }
  __device__ __forceinline__ uint32_t dout_empty(int stage) const { return barrier(2 + 3 * P::STAGES + stage); }
  __device__ __forceinline__ uint32_t peer_full(int stage) const { return barrier(2 + 4 * P::STAGES + stage); }
  __device__ __forceinline__ uint32_t peer_empty(int stage) const { return barrier(2 + 5 * P::STAGES + stage); }

 private:
  __device__ __forceinline__ uint32_t barrier(int i) const { return base + P::AT_BARRIERS + 8 * i; }
};

/* -- the producer -------------------------------------------------------------------------------- */

/* Load bytes, a multiple of 16 from an address that is one, to shared memory; they count for the barrier. */
__device__ __forceinline__ void load_bytes(uint32_t to, const void *from, int bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}

/* Where rows begin in a tensor map: (y, w) of its dims (channel, y, head, w). They are from `row` on, of which a sequence
 * has `left`: where many lie end to end, only those are in the bounds of the map, whose y is of ROWS that end with them
 * and whose w is of what is before (ragged.py). */
struct Corner {
  int y, w;
};
template <int ROWS> __device__ __forceinline__ Corner corner(int row, int left, int batch) {
  if constexpr (!VARLEN) return {row, batch};
  int count = min(left, ROWS);
  return {ROWS - count, row + count};
}

/* Load boxes of an array of WIDTH channels. One that is beyond them, which nothing comes of, has those of the first. */
template <int WIDTH, int BOXES, int BYTES>
__device__ __forceinline__ void load(uint32_t to, const TensorMap &map, uint32_t full, const Corner &at, int head) {
#pragma unroll
  for (int i = 0; i < BOXES; ++i) {
    load_box(to + i * (BYTES / BOXES), map, full, i * 64 < WIDTH ? i * 64 : 0, at.y, head, at.w);
  }
}

template <class P>
__device__ __forceinline__ void produce(
    const TensorMap &map_q, const TensorMap &map_k, const TensorMap &map_v, const TensorMap &map_dout,
    const Gradients &g, const Scratch &scratch, const Tile<P> &t, Shared<P> shared, int rank) {
  constexpr int BOXES = P::CHANNELS / 64, V_BOXES = P::V_CHANNELS / 64;
  Ring<P::STAGES> ring;
  Step<P> step(g, t);
  int count = t.steps(g);
  auto keys = [&](int rank) {
    int first = t.key + rank * P::KEYS;
    return corner<P::KEYS>(t.span.key + first, t.span.keys - first, t.batch);
  };
#pragma unroll 1
  for (int i = 0; i < count; ++i, step.next(), ring.next()) {
    int first = step.tile * P::BM;
    Corner queries = corner<P::BM>(t.span.query + first, t.span.queries - first, t.batch);
    if (i == 0) {
      barrier_expect(shared.k_full(), P::PAIRED ? 2 * P::K_BYTES : P::K_BYTES);
      load<D, BOXES, P::K_BYTES>(shared.k(), map_k, shared.k_full(), keys(rank), t.kv_head);
      if (P::PAIRED) load<D, BOXES, P::K_BYTES>(shared.peer_k(), map_k, shared.k_full(), keys(rank ^ 1), t.kv_head);
    }
    uint32_t full = shared.q_full(ring.stage);
    barrier_wait(shared.q_empty(ring.stage), ring.phase ^ 1);
    barrier_expect(full, P::Q_BYTES + P::STATS_BYTES);
    load<D, BOXES, P::Q_BYTES>(shared.q(ring.stage), map_q, full, queries, step.head);
    load_bytes(shared.stats(ring.stage), scratch.stats + step.number() * (2 * P::BM), P::STATS_BYTES, full);
    if (i == 0) {
      barrier_expect(shared.v_full(), P::V_BYTES);
      load<D_V, V_BOXES, P::V_BYTES>(shared.v(), map_v, shared.v_full(), keys(rank), t.kv_head);
    }
    full = shared.dout_full(ring.stage);
    barrier_wait(shared.dout_empty(ring.stage), ring.phase ^ 1);
    barrier_expect(full, P::DOUT_BYTES);
    load<D_V, V_BOXES, P::DOUT_BYTES>(shared.dout(ring.stage), map_dout, full, queries, step.head);
  }
}

}  // namespace backward
