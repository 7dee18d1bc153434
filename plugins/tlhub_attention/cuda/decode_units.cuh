/* How the work of a decoding is dealt out: units of keys, of tiles of rows, to the blocks of a grid.
 *
 * The query heads that share a kv head are packed: row r of its rows is query r / group, head r % group of the group. A
 * tile is ROWS of them, and a unit of work is a tile's block of KEYS keys and values, in chunks. All units of a call,
 * sequence by sequence, tile by tile, are one line, of which each block takes an equal stretch, whatever the lengths are;
 * so it has the whole of some tiles, and parts of at most two more.
 *
 * Where blocks and tiles can be dealt out so, there are several lines side by side, each with its own blocks. Tiles of
 * heads that lie beside each other in memory, or of the same head, are then read at the same time.
 */

namespace decode {

/* What a kernel is: Python's side of it is decode_plan.py. */
template <int ROWS_, int WARPS_, int STAGES_, int BLOCKS_, int TURNS_, int CHUNK_> struct Plan {
  static constexpr int ROWS = ROWS_, WARPS = WARPS_, STAGES = STAGES_, BLOCKS = BLOCKS_;
  static constexpr int TURNS = TURNS_;       /* sets of warps, which have tiles by turns */
  static constexpr int THREADS = 32 * WARPS; /* of a set */
  static constexpr int CHUNK = CHUNK_;       /* keys that a warp multiplies at once */
  static constexpr bool WIDE = CHUNK == 64;  /* by wgmma */
  static constexpr int ROW_WARPS = ROWS / 16, CHUNKS = WARPS / ROW_WARPS, KEYS = CHUNKS * CHUNK;
  static_assert(STAGES % CHUNKS == 0, "a stage is of the same warps each time: none of them runs ahead of its barrier");
};

/* The blocks of keys that the queries of a sequence see any of: one at least. */
template <class P> struct Blocks {
  int first, count;

  __device__ __forceinline__ explicit Blocks(const Decode &s)
      : first(s.seen(0).begin / P::KEYS),
        count(max(1, (s.seen(s.queries - 1).end + P::KEYS - 1) / P::KEYS - first)) {}
};

/* The lines that a call's units are dealt out in, whatever the lengths. */
template <class P> struct Lines {
  int down;         /* tiles of a head */
  int beside, line; /* lines, as a power of 2; tiles of a sequence in each */

  __device__ __forceinline__ explicit Lines(const Decode &call)
      : down((call.heads / call.kv_heads * call.queries + P::ROWS - 1) / P::ROWS) {
    int tiles = call.kv_heads * down;
    beside = __ffs(tiles | gridDim.x) - 1; /* the largest power of 2 that divides both */
    line = tiles >> beside;
  }

  /* This block's number in its line, and that of the line; the number in the grid of a block of the line. */
  __device__ __forceinline__ int block() const { return blockIdx.x >> beside; }
  __device__ __forceinline__ int side() const { return blockIdx.x & ((1 << beside) - 1); }
  __device__ __forceinline__ int in_grid(int block) const { return (block << beside) + side(); }
};

/* The units of a call, as a warp reckons them: each lane has a run of sequences. */
template <class P> struct Units : Lines<P> {
  using Lines<P>::beside, Lines<P>::line;
  const Decode &call;
  int run;           /* sequences of a lane */
  int before, total; /* units of the lanes before this one, and of all, in a line */
  int sharing;       /* blocks of a line that have any */

  __device__ __forceinline__ Units(const Decode &call, const Lines<P> &lines)
      : Lines<P>(lines), call(call), run((call.batch + 31) / 32) {
    int lane = threadIdx.x % 32, mine = 0;
    for (int b = lane * run; b < min((lane + 1) * run, call.batch); ++b) mine += of(b);
    int through = sum_to(mine);
    before = through - mine;
    total = __shfl_sync(0xffffffff, through, 31);
    sharing = min(int(gridDim.x) >> beside, total);
  }

  /* The first unit of a line's block, and the block that has a unit. */
  __device__ __forceinline__ int share(int block) const {
    int place = min(block, sharing);
    return place * (total / sharing) + min(place, total % sharing);
  }
  __device__ __forceinline__ int block_of(int unit) const {
    int each = total / sharing, longer = total % sharing, left = unit - longer * (each + 1);
    return left < 0 ? unit / (each + 1) : longer + left / each;
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
  __device__ __forceinline__ int of(int b) const { return Blocks<P>(call.sequence(b)).count * line; }

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
};

/* The stretches of a block, of one tile each, from the last to the first: so the block after this one has a part of a tile
 * early, and this block needs that of the one before late. */
template <class P> struct Walk {
  const Units<P> units;
  int left;          /* units */
  int b, tile, unit; /* of the last unit: the sequence, its tile in the line, and the number after its own there */
  Decode sequence;
  Blocks<P> blocks;

  __device__ __forceinline__ explicit Walk(const Units<P> &units)
      : Walk(units, units.share(units.block()), units.share(units.block() + 1)) {}

  /* Take the next stretch; false if there is none. */
  __device__ __forceinline__ bool next(Stretch &t) {
    if (left == 0) return false;
    if (unit == 0) {
      if (tile == 0) tile = units.line, sequence = units.call.sequence(--b), blocks = Blocks<P>(sequence);
      --tile, unit = blocks.count;
    }
    int number = (tile << units.beside) + units.side(), count = min(unit, left);
    t.kv_head = number / units.down, t.row = number % units.down * P::ROWS;
    t.ends = unit == blocks.count;
    unit -= count, left -= count;
    t.first = blocks.first + unit, t.end = t.first + count;
    t.begins = unit == 0;
    return true;
  }

  /* The block of the line in which the tile of the stretch that was taken last begins. */
  __device__ __forceinline__ int first_sharer() const {
    return units.block_of(units.share(units.block()) + left - unit);
  }

 private:
  __device__ __forceinline__ Walk(const Units<P> &units, int first, int end)
      : Walk(units, end - first, end > first ? units.find(end - 1) : typename Units<P>::Place{0, 0}) {}

  __device__ __forceinline__ Walk(const Units<P> &units, int left, typename Units<P>::Place place)
      : units(units), left(left), b(place.b), sequence(units.call.sequence(b)), blocks(sequence) {
    tile = place.at / blocks.count, unit = place.at % blocks.count + 1;
  }
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
