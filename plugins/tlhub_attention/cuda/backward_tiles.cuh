/* The tiles that attention's gradients are computed by, in what order, and what their kernels share in scratch memory.
 *
 * A plan P of a kernel has tiles of P::BM queries and of P::BN keys; of each of the former's dq P::PARTS parts, of
 * P::SUMS floats in all.
 */

namespace backward {

/* Scratch memory, by tiles of BM queries of each head. `sums`: of dq, in parts that blocks add to one after another, in
 * the order of their registers. `stats`: of each query what its exponents are relative to, and then delta. `lost`:
 * whether a gradient is not finite, so that rows are to be computed anew. `begun`: how many blocks have; `turns`: how
 * many have added to each part of the sums. */
struct Scratch {
  float *sums, *stats;
  int *lost, *begun, *turns;

  __device__ __forceinline__ Scratch(float *sums, float *stats, int *counts)
      : sums(sums), stats(stats), lost(counts), begun(counts + 1), turns(counts + 2) {}
};

/* VARLEN: what number the first tile of a sequence has, among those of a head, so that none has two: it need not have
 * all those up to the next one's. And how many numbers there are. */
template <int SIZE> __device__ __forceinline__ int first_tile(int start, int n) { return start / SIZE + n + 1; }
template <int SIZE> __device__ __forceinline__ int tiles_of(const Call &call, int positions) {
  return VARLEN ? positions / SIZE + call.batch + 2 : (positions + SIZE - 1) / SIZE;
}

/* A block's keys, from `key` on, and the tiles of queries that see some, from `first` up to `end`, in every head of the
 * group; those from `whole` up to `whole_end` see all. Of a head come first the keys that most queries see under a
 * causal mask; where the order is given the last keys, to which queries come first. */
template <class P> struct Tile {
  int batch, kv_head, key, first, end, whole, whole_end;
  int down, top; /* tiles of queries of a head, and the number of the sequence's first */
  Span span;     /* VARLEN: the sequence, that positions are of */

  __device__ __forceinline__ Tile(const Gradients &g, int number) {
    int across = tiles_of<P::BN>(g.call, g.call.keys), head = number / across;
    batch = head / g.call.kv_heads, kv_head = head % g.call.kv_heads;
    int tile = DETERMINISTIC ? across - 1 - number % across : number % across;
    down = tiles_of<P::BM>(g.call, g.call.queries), top = 0, span = {};
    if constexpr (VARLEN) {
      auto first_of = [&](int n) { return first_tile<P::BN>(n < 0 ? 0 : g.call.start_kv(n), n); };
      int n = last_that(g.call, [&](int n) { return first_of(n) <= tile; });
      span = span_by_keys(g.call, n), tile -= first_of(n), top = first_tile<P::BM>(span.query, n);
    }
    key = tile * P::BN;
    Call call = g.of(span).call;
    Queries seen = seen_by(call, key, min(key + P::BN, call.keys) - 1);
    bool some = key < call.keys && seen.begin < seen.end; /* VARLEN: there are tiles without keys */
    first = seen.begin / P::BM, end = some ? (seen.end + P::BM - 1) / P::BM : first;
    whole = (seen_by(call, key + P::BN - 1, key).begin + P::BM - 1) / P::BM;
    whole_end = key + P::BN > call.keys ? 0 : seen_by(call, key, key).end / P::BM;
  }

  __device__ __forceinline__ int steps(const Gradients &g) const { return g.group() * (end - first); }
};

/* A step of a block: a query head, a tile of its queries, and the tile's number among those of all heads. */
template <class P> struct Step {
  int head, tile;
  const Tile<P> &t;
  const Gradients &g;

  __device__ __forceinline__ Step(const Gradients &g, const Tile<P> &t)
      : head(t.kv_head * g.group()), tile(t.first), t(t), g(g) {}

  __device__ __forceinline__ void next() {
    if (++tile == t.end) tile = t.first, ++head;
  }
  __device__ __forceinline__ index_t number() const {
    return (index_t(t.batch) * g.call.heads + head) * t.down + t.top + tile;
  }
  /* How many blocks add to the sums before this one, where the order is given: those of the keys after its. */
  __device__ __forceinline__ int turn() const {
    Call call = g.of(t.span).call;
    int last = call.seen(min((tile + 1) * P::BM, call.queries) - 1).end - 1;
    return last / P::BN - t.key / P::BN;
  }
};

/* -- what a thread has --------------------------------------------------------------------------- */

/* A thread has two rows of an accumulator: of each 8 columns two floats of row lane / 4, two of the row 8 below. */
__device__ constexpr int row_of(int i) { return i / 2 % 2; }
__device__ constexpr int column_of(int i) { return i / 4 * 8 + i % 2; }

__device__ __forceinline__ float2 load_pair(uint32_t from) {
  float2 pair;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(pair.x), "=f"(pair.y) : "r"(from));
  return pair;
}

/* The columns that a thread's two rows see, from `low` up to `high`, of logits by keys: its first row is key j, and its
 * first column query i. */
struct Bounds {
  int low[2], high[2];

  __device__ __forceinline__ Bounds(const Call &call, int j, int i) {
#pragma unroll
    for (int row = 0; row < 2; ++row, j += 8) {
      Queries queries = seen_by(call, j, j);
      low[row] = queries.begin - i, high[row] = j < call.keys ? queries.end - i : low[row];
    }
  }
  __device__ __forceinline__ bool hide(int i) const {
    return column_of(i) < low[row_of(i)] || column_of(i) >= high[row_of(i)];
  }
};

/* -- turns --------------------------------------------------------------------------------------- */

/* Wait until a count in memory has come to a number, for any access to what those who counted wrote; and count. */
__device__ __forceinline__ void await_count(const int *count, int number) {
  int got;
  do {
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(got) : "l"(count) : "memory");
  } while (got < number);
}
__device__ __forceinline__ void add_count(int *count) {
  asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(count) : "memory");
}

}  // namespace backward
