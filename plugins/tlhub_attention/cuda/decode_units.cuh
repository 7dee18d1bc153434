/* How the work of a decoding is dealt out: units of keys, of tiles of rows, to the blocks of a grid (decode_hopper.cuh). */

namespace decode {

constexpr int BN = 64; /* keys of a unit */

/* The blocks of keys that the queries of a sequence see any of: one at least. */
struct Blocks {
  int first, count;

  __device__ __forceinline__ explicit Blocks(const Sequence &s)
      : first(s.seen(0).begin / BN), count(max(1, (s.seen(s.queries - 1).end + BN - 1) / BN - first)) {}
};

/* The units of a call, as a warp reckons them: each lane has a run of sequences. */
struct Units {
  const Decode &call;
  int down;          /* tiles of a kv head */
  int beside, line;  /* lines; tiles of a sequence in each */
  int run;           /* sequences of a lane */
  int before, total; /* units of the lanes before this one, and of all, in a line */
  int sharing;       /* blocks of a line that have any */

  __device__ __forceinline__ Units(const Decode &call, int rows)
      : call(call), down((call.heads / call.kv_heads * call.queries + rows - 1) / rows), run((call.batch + 31) / 32) {
    int lane = threadIdx.x % 32, tiles = call.kv_heads * down, all = tiles | gridDim.x, mine = 0;
    beside = all & -all; /* the largest power of 2 that divides both */
    line = tiles / beside;
    for (int b = lane * run; b < min((lane + 1) * run, call.batch); ++b) mine += of(b);
    int through = sum_to(mine);
    before = through - mine;
    total = __shfl_sync(0xffffffff, through, 31);
    sharing = min(int(gridDim.x) / beside, total);
  }

  /* The first unit of a line's block, and the first of its blocks all of whose units come after `unit`. */
  __device__ __forceinline__ int share(int block) const {
    int place = min(block, sharing);
    return place * (total / sharing) + min(place, total % sharing);
  }
  __device__ __forceinline__ int block_after(int unit) const {
    int each = total / sharing, longer = total % sharing, left = unit + 1 - longer * (each + 1);
    return left <= 0 ? unit / (each + 1) + 1 : longer + (left + each - 1) / each;
  }

  /* A unit by its number: its sequence, and its number there. */
  struct Place {
    int b, at;
  };

  __device__ __forceinline__ Place find(int unit) const {
    int lane = threadIdx.x % 32, owner = 31 - __clz(__ballot_sync(0xffffffff, before <= unit));
    int at = unit - __shfl_sync(0xffffffff, before, owner);
    if (run == 1) return {owner, at};
    for (int first = owner * run;; first += 32) {
      int b = first + lane, through = sum_to(b < min((owner + 1) * run, call.batch) ? of(b) : 0);
      unsigned after = __ballot_sync(0xffffffff, at < through);
      int found = after ? __ffs(after) - 1 : 32, skipped = __shfl_sync(0xffffffff, through, max(found - 1, 0));
      if (found > 0) at -= skipped;
      if (after) return {first + found, at};
    }
  }

 private:
  __device__ __forceinline__ int of(int b) const { return Blocks(call.sequence(b)).count * line; }

  /* The sum of x over the lanes up to this one. */
  static __device__ __forceinline__ int sum_to(int x) {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      int other = __shfl_up_sync(0xffffffff, x, step);
      if (int(threadIdx.x % 32) >= step) x += other;
    }
    return x;
  }
};

/* Some of a tile's units: blocks of keys from `first` up to `end`. */
struct Stretch {
  int kv_head, row, first, end; /* the tile's first row */
  bool begins, ends;            /* with the tile */

  __device__ __forceinline__ bool whole() const { return begins && ends; }
};

/* The stretches of a block, one after the other; of one tile each. */
template <class P> struct Walk {
  const Decode &call;
  int down, beside, line; /* as Units has them */
  int left;               /* units */
  int b, tile, at;        /* of the next unit: the sequence, its tile in the line, and the tile's unit */
  Sequence sequence;
  Blocks blocks;

  __device__ __forceinline__ Walk(const Decode &call, const Units &units)
      : Walk(call, units, units.share(blockIdx.x / units.beside), units.share(blockIdx.x / units.beside + 1)) {}

  /* Take the next stretch; false if there is none. */
  __device__ __forceinline__ bool next(Stretch &t) {
    if (left == 0) return false;
    if (at == blocks.count) at = 0, ++tile;
    if (tile == line) tile = 0, sequence = call.sequence(++b), blocks = Blocks(sequence);
    int number = tile * beside + blockIdx.x % beside, count = min(blocks.count - at, left);
    t.kv_head = number / down, t.row = number % down * P::ROWS;
    t.first = blocks.first + at, t.end = t.first + count;
    t.begins = at == 0, t.ends = at + count == blocks.count;
    at += count, left -= count;
    return true;
  }

 private:
  __device__ __forceinline__ Walk(const Decode &call, const Units &units, int first, int end)
      : Walk(call, units, end - first, end > first ? units.find(first) : Units::Place{0, 0}) {}

  __device__ __forceinline__ Walk(const Decode &call, const Units &units, int left, Units::Place place)
      : call(call), down(units.down), beside(units.beside), line(units.line), left(left), b(place.b),
        sequence(call.sequence(b)), blocks(sequence) {
    tile = place.at / blocks.count, at = place.at % blocks.count;
  }
};

/* The parts of tiles in scratch memory, two a block: of the tile that begins in a block before, and of the one that
 * ends in a block after. */
template <class P> struct Parts {
  float *sums;    /* [2 blocks][ROWS][D_V] */
  float2 *states; /* [2 blocks][ROWS]: peaks in base 2, and totals */

  __device__ __forceinline__ explicit Parts(void *memory)
      : sums(static_cast<float *>(memory)), states(reinterpret_cast<float2 *>(sums + 2 * gridDim.x * P::ROWS * D_V)) {}

  static __device__ __forceinline__ int slot(int block, bool begins) { return 2 * block + begins; }
  __device__ __forceinline__ float *sum(int slot, int row) const { return sums + (slot * P::ROWS + row) * D_V; }
  __device__ __forceinline__ float2 &state(int slot, int row) const { return states[slot * P::ROWS + row]; }
};

/* A row of a kv head's: its query, and its head. */
struct Row {
  int query, head;

  __device__ __forceinline__ Row(const Call &call, int kv_head, int row) {
    int group = call.heads / call.kv_heads;
    query = row / group, head = kv_head * group + row % group;
  }
};

__device__ __forceinline__ int rows_of(const Call &call) { return call.heads / call.kv_heads * call.queries; }

}  // namespace decode
