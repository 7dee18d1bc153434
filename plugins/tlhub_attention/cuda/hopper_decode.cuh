/* Decoding on Hopper (sm_90a), bound by reading keys and values once: bulk tensor copies, mma.sync, even shares.
 *
 * The query heads that share a kv head are packed: row r of its rows is query r / group, head r % group of the group.
 * A tile is ROWS of them, and a unit of work is a tile's block of BN keys and values. All units of a call, sequence by
 * sequence, tile by tile, are one line, of which each block takes an equal stretch, whatever the lengths are; so it has
 * the whole of some tiles, and parts of at most two more. What a part gives, a sum of values with the peak and the
 * total of its weights, goes to scratch memory, and a second kernel adds up the parts of a tile in their order. Results
 * repeat bit for bit.
 *
 * Where blocks and tiles can be dealt out so, there are several lines side by side, each with its own blocks. Tiles of
 * heads that lie beside each other in memory, or of the same head, are then read at the same time.
 *
 * In a block one warp keeps a ring of units filled, over the ends of tiles, so that the memory never idles. The others
 * share a unit: ROW_WARPS times 16 rows, and KEY_WARPS times BN / KEY_WARPS keys, of which each warp has a softmax of
 * its own until the tile ends.
 */

#include <type_traits>

namespace decode {

using namespace tensor_cores;
using hopper::column_of;
using hopper::hide;
using hopper::row_of;
using hopper::Softmax;

constexpr int BN = 64;                /* keys of a unit */
constexpr int BOX_BYTES = BN * 128;   /* of 64 channels */
constexpr int PARTS = BN / PART;      /* of a unit, that bulk copies bring: PART keys of a page, or all of them */
constexpr int K_BOXES = (D + 63) / 64, V_BOXES = (D_V + 63) / 64, STEPS = (D + 15) / 16, CHANNELS = (D_V + 15) / 16 * 16;

/* What a kernel is: Python's side of it is hopper_decode_plan.py. */
template <int ROWS_, int WARPS_, int STAGES_> struct Plan {
  static constexpr int ROWS = ROWS_, WARPS = WARPS_, STAGES = STAGES_;
  static constexpr int ROW_WARPS = ROWS / 16, KEY_WARPS = WARPS / ROW_WARPS, THREADS = 32 * (WARPS + 1);
  static constexpr int KEYS = BN / KEY_WARPS;       /* of a warp */
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

/* -- units --------------------------------------------------------------------------------------- */

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
    const TensorMap &map_k, const TensorMap &map_v, const Decode &call, Walk<P> &walk, Shared<P> shared) {
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

/* Load four matrices of 8 x 8, a register each; lane 8 i + j has the address of row j of matrix i. */
template <bool TRANSPOSED> __device__ __forceinline__ void load_matrices(uint32_t (&r)[4], uint32_t row) {
  if constexpr (TRANSPOSED) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(row)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(row)
                 : "memory");
  }
}

/* sum += a b, of 16 x 16 and 16 x 8. */
#define MULTIPLY(PTX)                                                                                          \
  asm("mma.sync.aligned.m16n8k16.row.col.f32." PTX "." PTX                                                     \
      ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                                   \
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])                                                 \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
__device__ __forceinline__ void multiply(float *sum, const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (std::is_same_v<T, __half>) {
    MULTIPLY("f16");
  } else {
    MULTIPLY("bf16");
  }
}
#undef MULTIPLY

/* Whether pairs of elements that begin at an even channel can be accessed at once. */
template <class E> __device__ __forceinline__ bool pairs(const E *p, const Strides &s) {
  bool even = (s.batch | s.position | s.head) % 2 == 0;
  return s.channel == 1 && even && reinterpret_cast<uintptr_t>(p) % (2 * sizeof(E)) == 0;
}

/* This thread's share of 16 rows of q, from `row` on, as an operand: two channels of two rows, and of 8 channels on. */
__device__ __forceinline__ void load_queries(
    uint32_t (&q)[STEPS][4], const Call &call, int b, int kv_head, int row, bool paired) {
  int lane = threadIdx.x % 32;
#pragma unroll
  for (int low = 0; low < 2; ++low) {
    int r = row + lane / 4 + 8 * low;
    Row at(call, kv_head, r);
    const T *from = call.q + call.of_q.at(b, at.query, at.head);
#pragma unroll
    for (int i = 0; i < 2 * STEPS; ++i) {
      uint32_t &pair = q[i / 2][i % 2 * 2 + low];
      pair = 0;
      if (8 * i >= D || r >= rows_of(call)) continue;
      int channel = 8 * i + lane % 4 * 2;
      if (paired) {
        pair = *reinterpret_cast<const uint32_t *>(from + channel);
      } else {
        T each[2] = {from[channel * call.of_q.channel], from[(channel + 1) * call.of_q.channel]};
        memcpy(&pair, each, 4);
      }
    }
  }
}

/* The rows of a tile that a warp has, with its sums over some of the keys. */
template <class P> struct Rows {
  Softmax softmax;
  float sum[CHANNELS / 2];

  __device__ __forceinline__ Rows() : sum{} {}

  /* Multiply what a row has by a factor. */
  __device__ __forceinline__ void scale(const float (&by)[2]) {
#pragma unroll
    for (int j = 0; j < CHANNELS / 2; ++j) sum[j] *= by[row_of(j)];
  }

  /* Put everything in a slot of shared memory, 16 bytes of each lane side by side. */
  __device__ __forceinline__ void put(float4 *slot) const {
    slot += threadIdx.x % 32;
    *slot = {softmax.peak[0], softmax.peak[1], softmax.total[0], softmax.total[1]};
#pragma unroll
    for (int j = 0; j < CHANNELS / 2; j += 4) slot[(1 + j / 4) * 32] = {sum[j], sum[j + 1], sum[j + 2], sum[j + 3]};
  }

  /* Add what another warp has put in a slot. */
  __device__ __forceinline__ void add(const float4 *slot) {
    slot += threadIdx.x % 32;
    float4 state = *slot;
    float peaks[2] = {state.x, state.y}, totals[2] = {state.z, state.w}, mine[2], others[2];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      float peak = fmaxf(softmax.peak[row], peaks[row]), base = peak == -infinity() ? 0.f : peak;
      mine[row] = exp2_fast(softmax.peak[row] - base), others[row] = exp2_fast(peaks[row] - base);
      softmax.peak[row] = peak;
      softmax.total[row] = softmax.total[row] * mine[row] + totals[row] * others[row];
    }
#pragma unroll
    for (int j = 0; j < CHANNELS / 2; j += 4) {
      float4 v = slot[(1 + j / 4) * 32];
      sum[j] = sum[j] * mine[0] + v.x * others[0], sum[j + 1] = sum[j + 1] * mine[0] + v.y * others[0];
      sum[j + 2] = sum[j + 2] * mine[1] + v.z * others[1], sum[j + 3] = sum[j + 3] * mine[1] + v.w * others[1];
    }
  }

  /* Write a part of a tile: this thread's rows are `row` and the one 8 below. */
  __device__ __forceinline__ void write_part(const Parts<P> &parts, int slot, int row) const {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < CHANNELS / 2; j += 2) {
      int channel = column_of(j) + lane % 4 * 2, r = row + 8 * row_of(j);
      if (channel < D_V) *reinterpret_cast<float2 *>(parts.sum(slot, r) + channel) = {sum[j], sum[j + 1]};
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (lane % 4 == 0) parts.state(slot, row + 8 * i) = {softmax.peak[i], softmax.total[i]};
    }
  }

  /* Write rows of o and of lse, from `row` of the kv head on; then again those in which a hidden NaN may be. */
  __device__ __forceinline__ void write(const Sequence &s, int b, int kv_head, int row, bool paired) {
    int lane = threadIdx.x % 32;
    unsigned lost = 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      int r = row + lane / 4 + 8 * i;
      if (r >= rows_of(s)) continue;
      Row at(s, kv_head, r);
      O *o = s.o + s.of_o.at(b, at.query, at.head);
      float total = softmax.total[i], inverse = total == 0 ? 0.f : 1 / total, probe = 0;
#pragma unroll
      for (int j = 2 * i; j < CHANNELS / 2; j += 4) {
        int channel = column_of(j) + lane % 4 * 2;
        if (channel >= D_V) continue;
        float x = sum[j] * inverse, y = sum[j + 1] * inverse;
        probe += x + y;
        if (!paired) {
          o[channel * s.of_o.channel] = from_float<O>(x), o[(channel + 1) * s.of_o.channel] = from_float<O>(y);
        } else if constexpr (sizeof(O) == 2) {
          *reinterpret_cast<uint32_t *>(o + channel) = pack<O>(x, y);
        } else {
          *reinterpret_cast<float2 *>(o + channel) = {x, y};
        }
      }
      if (lane % 4 == 0) s.put_lse(b, at.head, at.query, (softmax.base(i, 1) + log2f(total)) * LN2);
      if (s.causal() && probe != probe && total == total) lost |= 1u << (lane / 4 + 8 * i);
    }
    lost = __reduce_or_sync(0xffffffff, lost);
    if (s.queries > 1) {
      __syncwarp();
      for (; lost; lost &= lost - 1) {
        Row at(s, kv_head, row + __ffs(lost) - 1);
        attend_row(s, b, at.head, at.query);
      }
    }
  }
};

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
    produce<P>(map_k, map_v, call, walk, shared);
  } else {
    consume<P>(call, walk, shared, Parts<P>(scratch), reinterpret_cast<float4 *>(memory + P::AT_SLOTS), warp);
  }
}

constexpr int SLOTS = 4; /* rows that a block of this kernel adds up at once, each by two warps */

/* What a warp has of a row: four channels of each 128 a lane. */
struct Sum {
  static constexpr int COUNT = (D_V + 127) / 128;
  float peak, total;
  float4 of[COUNT];

  static __device__ __forceinline__ Sum none() { return {-infinity(), 0, {}}; }

  template <class F> static __device__ __forceinline__ void each(F f) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      int channel = (int(threadIdx.x) % 32 + 32 * i) * 4;
      if (D_V % 128 == 0 || channel < D_V) f(i, channel);
    }
  }

  __device__ __forceinline__ float base() const { return peak == -infinity() ? 0.f : peak; }

  /* Add N of them. */
  template <int N> __device__ __forceinline__ void add(const Sum (&more)[N]) {
    float before = peak;
#pragma unroll
    for (int j = 0; j < N; ++j) peak = fmaxf(peak, more[j].peak);
    float kept = exp2_fast(before - base());
    total *= kept;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) of[i] = {of[i].x * kept, of[i].y * kept, of[i].z * kept, of[i].w * kept};
#pragma unroll
    for (int j = 0; j < N; ++j) {
      float factor = exp2_fast(more[j].peak - base());
      total = fmaf(more[j].total, factor, total);
#pragma unroll
      for (int i = 0; i < COUNT; ++i) {
        of[i].x = fmaf(more[j].of[i].x, factor, of[i].x), of[i].y = fmaf(more[j].of[i].y, factor, of[i].y);
        of[i].z = fmaf(more[j].of[i].z, factor, of[i].z), of[i].w = fmaf(more[j].of[i].w, factor, of[i].w);
      }
    }
  }
};

/* Add up the parts of the tile that begins in block blockIdx.x and ends after it, if there is one. */
template <class P> __device__ __forceinline__ void combine(void *scratch, const Decode &call) {
  constexpr int AT_ONCE = 8 / Sum::COUNT; /* parts that a warp loads together */
  __shared__ Sum halves[SLOTS][32];
  int lane = threadIdx.x % 32, slot = threadIdx.x / 32 % SLOTS, half = threadIdx.x / 32 / SLOTS;
  start_next();
  /* lengths are complete, for the kernel before has waited for them with all its blocks before this one started */
  Units units(call, P::ROWS);
  int block = blockIdx.x / units.beside, side = blockIdx.x % units.beside;
  int first = units.share(block), end = units.share(block + 1);
  bool any = end > first;
  int b = 0, kv_head = 0, tile_row = 0, parts_end = 0;
  if (any) {
    Units::Place place = units.find(end - 1);
    int count = Blocks(call.sequence(place.b)).count, at = place.at % count;
    int tile = place.at / count * units.beside + side, tile_end = end + (count - 1 - at);
    b = place.b, kv_head = tile / units.down, tile_row = tile % units.down * P::ROWS;
    any = tile_end > end && end - 1 - at >= first;
    parts_end = units.block_after(tile_end - 1);
  }
  wait_for_previous();
  if (!any) return;
  Sequence s = call.sequence(b);
  Parts<P> parts(scratch);
  int rows = min(P::ROWS, rows_of(call) - tile_row);
  for (int top = blockIdx.y * SLOTS; top < rows; top += gridDim.y * SLOTS) {
    int i = min(top + slot, rows - 1);
    Sum sum = Sum::none();
    for (int from = block + half; from < parts_end; from += 2 * AT_ONCE) {
      Sum more[AT_ONCE];
#pragma unroll
      for (int j = 0; j < AT_ONCE; ++j) {
        int part = from + 2 * j;
        more[j] = Sum::none();
        if (part >= parts_end) continue;
        int at = parts.slot(part * units.beside + side, part == block);
        float2 state = parts.state(at, i);
        more[j].peak = state.x, more[j].total = state.y;
        Sum::each([&](int k, int d) { more[j].of[k] = *reinterpret_cast<const float4 *>(parts.sum(at, i) + d); });
      }
      sum.add(more);
    }
    __syncthreads(); /* the halves of the rows before have been read */
    if (half > 0) halves[slot][lane] = sum;
    __syncthreads();
    if (half > 0 || top + slot >= rows) continue;
    Sum other[1] = {halves[slot][lane]};
    sum.add(other);
    Row at(call, kv_head, tile_row + i);
    O *o = call.o + call.of_o.at(b, at.query, at.head);
    float inverse = sum.total == 0 ? 0.f : 1 / sum.total, probe = 0;
    Sum::each([&](int k, int d) {
      const float x[4] = {sum.of[k].x, sum.of[k].y, sum.of[k].z, sum.of[k].w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        o[(d + j) * call.of_o.channel] = from_float<O>(x[j] * inverse);
        probe += x[j] * inverse;
      }
    });
    if (lane == 0) call.put_lse(b, at.head, at.query, (sum.base() + log2f(sum.total)) * LN2);
    bool lost = __any_sync(0xffffffff, probe != probe) && sum.total == sum.total;
    if (lost && call.causal() && call.queries > 1) attend_row(s, b, at.head, at.query);
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
