/* Products of narrow types, and of float32 as tf32, on Hopper's tensor cores (sm_90a): bulk tensor copies,
 * warp-specialised wgmma, a persistent loop over tiles. wgmma takes these types only from rows along K, so all tiles
 * lie in rows of 128 bytes of K, and whatever the type, a product is 32 bytes deep.
 *
 * A block has a producer and one or two consumers, a warp group each. The producer's first thread keeps a ring of
 * STAGES stages in shared memory filled with tiles of A and B; the consumers multiply them out of it, 64 or 128 rows
 * each, or of a tile of 64 rows half of the columns each. A stage has two barriers: `full` completes when its bytes
 * have arrived, `empty` when those who read it are done. A cluster of two blocks, tiles below each other, shares B:
 * each loads a half of it for both. Or a cluster splits K: each block has the sums of its part, and adds up those of
 * all for a slice of the columns.
 *
 * The tensor core keeps about 14 bits of a sum of float8 products, and truncates those of tf32. Where sums are
 * PROMOTED, or the scales are of blocks, those of a stage are made in registers of their own, and added up in float32;
 * while one consumer does so the other has the tensor core, or the next product is made. The scales of blocks come with
 * a stage: another warp of the producer brings them.
 */

namespace product {

using namespace tensor_cores;

constexpr int GROUP = 128;                                                      /* threads */
constexpr int PRODUCER_REGISTERS = SCALES == OF_BLOCKS ? 56 : 40;              /* of a thread */
constexpr int BYTES = 128, DEPTH = BYTES / int(sizeof(A)), STEPS = BYTES / 32; /* of K in a stage */
constexpr int FETCHED = 32 * 1024; /* bytes of B that a block has L2 fetch */
[[maybe_unused]] constexpr int BLOCK = 128; /* columns that share a scale where scales are of blocks */

/* What a kernel is: Python's side of it is plan.py. */
template <int BM_, int BN_, int STAGES_, int SHARE_, int SPLIT_, int BAND_, int CHUNK_> struct Plan {
  static constexpr int BM = BM_, BN = BN_; /* of a tile */
  static constexpr int STAGES = STAGES_;
  static constexpr int SHARE = SHARE_; /* blocks below each other that share B: a cluster */
  static constexpr int SPLIT = SPLIT_; /* or blocks that have a part of K each of one tile */
  static constexpr int BAND = BAND_;   /* rows of clusters that are walked column by column, so that L2 is hit */

  static constexpr bool BESIDE = BM == 64 && BN > 128; /* consumers have columns beside each other, or else rows */
  static constexpr int CONSUMERS = BM == 64 && !BESIDE ? 1 : 2, THREADS = (CONSUMERS + 1) * GROUP;
  static constexpr int RESIDENT = CONSUMERS == 1 ? 2 : 1; /* blocks that a processor has room for */
  /* of a thread; a processor has 65536, and a launch takes the same for all, a multiple of 8 */
  static constexpr int ALL_REGISTERS = 65536 / GROUP / RESIDENT / (CONSUMERS + 1) / 8 * 8 * (CONSUMERS + 1);
  static constexpr int CONSUMER_REGISTERS = (ALL_REGISTERS - PRODUCER_REGISTERS) / CONSUMERS / 8 * 8;
  static constexpr int ROWS = BESIDE ? BM : BM / CONSUMERS, PIECES = ROWS / 64, COLUMNS = BESIDE ? BN / 2 : BN;
  /* registers have room for two products */
  static constexpr bool IN_PAIRS = PIECES == 1 && COLUMNS <= (CONSUMERS == 1 ? 64 : 128);
  static constexpr int AT_ONCE = PROMOTED && COLUMNS > 192 ? COLUMNS / 2 : COLUMNS; /* columns of a product */
  static constexpr int SLICE = COLUMNS / SPLIT;                                     /* columns that are finished */

  static constexpr int HALVES = GLU ? 2 : 1; /* gates and values are halves of a tile, and of what a consumer has of it */
  static constexpr int OUT = BN / HALVES;    /* columns of C of a tile */
  static constexpr int CHUNK = CHUNK_;       /* that a warp stages at once, in rows of at most 128 bytes */
  static constexpr int CHUNK_BYTES = 16 * CHUNK * int(sizeof(C));
  static constexpr int CHUNKS = SLICE / HALVES / CHUNK * PIECES; /* of a warp and a tile */
  static constexpr int BUFFERS = CHUNKS == 1 ? 1 : 2;

  /* columns that share a scale: tiles begin anywhere in a block, and values of gates not where a block does */
  static constexpr int SPAN = COLUMNS % 128 == 0 && !GLU ? 128 : COLUMNS % 64 == 0 ? 64 : 32;
  static constexpr int SCALE_BYTES = SCALES == OF_BLOCKS ? 4 * (BM + 8) : 0; /* of a stage: of rows, and of spans */
  static constexpr int COLUMN_BYTES = SCALES == OF_ROWS ? 4 * COLUMNS : 0; /* of a consumer: of its columns */

  static constexpr int A_BYTES = BM * BYTES, B_BYTES = BN * BYTES;
  static constexpr int AT_B = STAGES * A_BYTES, AT_STAGING = AT_B + STAGES * B_BYTES;
  static constexpr int AT_SCALES = AT_STAGING + 4 * CONSUMERS * BUFFERS * CHUNK_BYTES;
  static constexpr int AT_BARRIERS = AT_SCALES + STAGES * SCALE_BYTES + CONSUMERS * COLUMN_BYTES; /* `full`, `empty` */
  static constexpr int TOTAL = AT_BARRIERS + 8 * 2 * STAGES;                             /* bytes of shared memory */

  static_assert(BM % 64 == 0 && BM <= 256 && BN % (16 * SHARE) == 0 && BN <= 256, "boxes and instructions end there");
  static_assert(SLICE / HALVES % CHUNK == 0 && CHUNK * sizeof(C) <= 128, "whole chunks are staged, in swizzled rows");
  static_assert(SCALES != OF_BLOCKS || (BN / SPAN <= 8 && (!GLU || COLUMNS % 128 == 0)), "whole spans have one scale");
  static_assert(SPLIT == 1 || (SHARE == 1 && BM * BN * int(sizeof(Sum)) <= AT_STAGING), "sums take the place of the ring");
};

/* The product of two tiles, 64 rows and N columns, 32 bytes of K deep, added to `sum`; Python writes them
 * (products.py). */
template <int N> struct Product;

/* The tiles of a call in the order in which they are worked on, counted in clusters. */
template <class P> struct Tiles {
  int across, down, count, first, step, rank, from, to; /* stages of K, of each of the operands' parts */

  __device__ __forceinline__ explicit Tiles(const Call &call) {
    rank = P::SHARE * P::SPLIT > 1 ? cluster_rank() : 0;
    down = (call.m + P::BM * P::SHARE - 1) / (P::BM * P::SHARE);
    across = (call.n + P::OUT - 1) / P::OUT;
    count = down * across * call.batch;
    first = blockIdx.x / (P::SHARE * P::SPLIT);
    step = gridDim.x / (P::SHARE * P::SPLIT);
    int stages = (call.k + DEPTH - 1) / DEPTH, share = (stages + P::SPLIT - 1) / P::SPLIT;
    from = P::SPLIT > 1 ? min(rank * share, stages) : 0;
    to = P::SPLIT > 1 ? min(from + share, stages) : stages;
  }

  /* Where tile number i starts. */
  __device__ __forceinline__ void place(int i, int &m, int &n, int &batch) const {
    batch = i / (down * across);
    i -= batch * (down * across);
    int band = i / (P::BAND * across), top = band * P::BAND, height = min(P::BAND, down - top);
    i -= band * P::BAND * across;
    m = ((top + i % height) * P::SHARE + (P::SHARE > 1 ? rank : 0)) * P::BM;
    n = i / height * P::OUT;
  }
};

/* Addresses in shared memory. */
template <class P> struct Shared {
  uint32_t base;

  __device__ __forceinline__ uint32_t a(int stage) const { return base + stage * P::A_BYTES; }
  __device__ __forceinline__ uint32_t b(int stage) const { return base + P::AT_B + stage * P::B_BYTES; }
  __device__ __forceinline__ uint32_t staging(int warp) const {
    return base + P::AT_STAGING + warp * (P::BUFFERS * P::CHUNK_BYTES);
  }
  __device__ __forceinline__ uint32_t scales(int stage) const { return base + P::AT_SCALES + stage * P::SCALE_BYTES; }
  __device__ __forceinline__ uint32_t columns(int consumer) const {
    return base + P::AT_SCALES + consumer * P::COLUMN_BYTES;
  }
  __device__ __forceinline__ uint32_t full(int stage) const { return base + P::AT_BARRIERS + 8 * stage; }
  __device__ __forceinline__ uint32_t empty(int stage) const { return full(P::STAGES + stage); }
};

/* -- the producer -------------------------------------------------------------------------------- */

/* Of an operand in three parts, high, low, and high where finite, the products are those of A's part 2 and B's 1, of
 * A's 1 and B's 2, and of the high ones: the small products first. */
__device__ __forceinline__ int part_of_a(int turn) { return 2 - turn; }
__device__ __forceinline__ int part_of_b(int turn) { return turn == 2 ? 0 : 1 + turn; }

__device__ __forceinline__ void write_shared(uint32_t to, float x) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(x) : "memory");
}

/* Do `use` for each box of the tile of B from column n of C on, or of this block's part of it: its place in the
 * tile, and its row of B. With GLU each consumer's columns are two boxes, gates and values. */
template <class P, class Use>
__device__ __forceinline__ void each_box_of_b(int n, int columns, int rank, Use use) {
  constexpr int BOXES = GLU ? 2 * (P::BN / P::COLUMNS) : P::SHARE, ROWS = P::BN / BOXES;
#pragma unroll
  for (int box = 0; box < BOXES; ++box) {
    int row = GLU ? n + box / 2 * ROWS + box % 2 * columns : n + box * ROWS;
    if (P::SHARE == 1 || box == rank) use(box * ROWS * BYTES, row);
  }
}

/* Fetch into L2 the first FETCHED bytes of B. It is done before what is ahead in the stream has ended: L2 is what
 * all agree on, so B may still be written. */
template <class P>
__device__ __forceinline__ void fetch_ahead(const TensorMap &map_b, const Tiles<P> &tiles, const Call &call) {
  int m, n, batch, end = min(tiles.to, tiles.from + FETCHED / P::B_BYTES);
  tiles.place(tiles.first, m, n, batch);
  for (int k = tiles.from * DEPTH; k < end * DEPTH; k += DEPTH) {
    each_box_of_b<P>(n, call.n, tiles.rank, [&](int, int row) {
      asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global.tile [%0, {%1, %2, %3}];" ::"l"(&map_b), "r"(k), "r"(row),
                   "r"(batch)
                   : "memory");
    });
  }
}

template <class P>
__device__ __forceinline__ void produce(
    const TensorMap &map_a, const TensorMap &map_b, const Tiles<P> &tiles, Shared<P> shared, const Call &call) {
  Ring<P::STAGES> ring;
  int padded = (call.k + DEPTH - 1) / DEPTH * DEPTH;
  for (int i = tiles.first; i < tiles.count; i += tiles.step) {
    int m, n, batch;
    tiles.place(i, m, n, batch);
#pragma unroll 1
    for (int turn = 0; turn < PARTS; ++turn) {
      int at_a = PARTS > 1 ? part_of_a(turn) * padded : 0, at_b = PARTS > 1 ? part_of_b(turn) * padded : 0;
      for (int k = tiles.from * DEPTH; k < tiles.to * DEPTH; k += DEPTH) {
        uint32_t full = shared.full(ring.stage);
        barrier_wait(shared.empty(ring.stage), ring.phase ^ 1);
        barrier_expect(full, P::A_BYTES + P::B_BYTES);
        load_box(shared.a(ring.stage), map_a, full, at_a + k, m, batch);
        each_box_of_b<P>(n, call.n, tiles.rank, [&](int place, int row) {
          uint32_t to = shared.b(ring.stage) + place;
          if constexpr (P::SHARE > 1) {
            load_box_to((1 << P::SHARE) - 1, to, map_b, full, at_b + k, row, batch);
          } else {
            load_box(to, map_b, full, at_b + k, row, batch);
          }
        });
        ring.next();
      }
    }
  }
}

/* A column of the tile of B from column n of C on, as a column of B. */
template <class P> __device__ __forceinline__ int column_of(int column, int n, int columns) {
  n += column / P::COLUMNS * (P::COLUMNS / P::HALVES), column %= P::COLUMNS;
  return GLU && column >= P::COLUMNS / 2 ? columns + n + column - P::COLUMNS / 2 : n + column;
}

/* Bring the scales of blocks, by a warp: those of BATCH stages are on their way at a time. */
template <class P>
__device__ __forceinline__ void bring_scales(const Tiles<P> &tiles, Shared<P> shared, const Call &call, int lane) {
  constexpr int BATCH = 256 / P::BM, ROWS = P::BM / 32, SPANS = P::BN / P::SPAN;
  Ring<P::STAGES> ring;
  for (int i = tiles.first; i < tiles.count; i += tiles.step) {
    int m, n, batch;
    tiles.place(i, m, n, batch);
    int column = min(column_of<P>(min(lane, SPANS - 1) * P::SPAN, n, call.n), P::HALVES * call.n - 1);
#pragma unroll 1
    for (int first = tiles.from; first < tiles.to; first += BATCH) {
      float rows[BATCH][ROWS], columns[BATCH];
#pragma unroll
      for (int j = 0; j < BATCH; ++j) {
        int block = min(first + j, tiles.to - 1);
#pragma unroll
        for (int r = 0; r < ROWS; ++r) rows[j][r] = call.of_a.of(min(m + lane + 32 * r, call.m - 1), block);
        columns[j] = call.of_b.of(column / BLOCK, block);
      }
#pragma unroll
      for (int j = 0; j < BATCH; ++j) {
        if (first + j < tiles.to) {
          barrier_wait(shared.empty(ring.stage), ring.phase ^ 1);
          uint32_t to = shared.scales(ring.stage) + 4 * lane;
#pragma unroll
          for (int r = 0; r < ROWS; ++r) write_shared(to + 128 * r, rows[j][r]);
          if (lane < SPANS) write_shared(to + 4 * P::BM, columns[j]);
          __syncwarp();
          if (lane == 0) barrier_arrive(shared.full(ring.stage));
          ring.next();
        }
      }
    }
  }
}

/* -- a consumer ---------------------------------------------------------------------------------- */

/* Sums of 64 x N: two of row lane / 4, two of the row 8 below, for each 8 columns. */
template <class P> using Sums = Sum[P::PIECES][P::COLUMNS / 2];

/* This warp is done with a stage: tell the blocks that load into it. */
template <class P> __device__ __forceinline__ void release(Shared<P> shared, int stage, int lane) {
  if constexpr (P::SHARE > 1) {
    if (lane < P::SHARE) barrier_arrive_there(address_in(shared.empty(stage), lane));
  } else {
    if (lane == 0) barrier_arrive(shared.empty(stage));
  }
}

/* Start the products of a stage for 64 rows of A, added to `sum`, or put there. */
template <class P>
__device__ __forceinline__ void start(Sum (&sum)[P::AT_ONCE / 2], uint64_t a, uint64_t b, bool add) {
#pragma unroll
  for (int step = 0; step < STEPS; ++step) {
    Product<P::AT_ONCE>::add(sum, a + 32 * step / 16, b + 32 * step / 16, add || step > 0);
  }
}

/* Nothing is done with sums before here. */
template <int N> __device__ __forceinline__ void settle(float (&sum)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(sum[i])::"memory");
}
template <int N> __device__ __forceinline__ void settle(int (&sum)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+r"(sum[i])::"memory");
}

/* The scales of a thread's rows and columns for one block of K. */
template <class P> struct BlockScales {
  float rows[P::PIECES][2], columns[P::COLUMNS / P::SPAN];

  /* `top`, `left`: this lane's first row, and the consumer's first column, of the tile. */
  __device__ __forceinline__ void read(uint32_t from, int top, int left) {
#pragma unroll
    for (int i = 0; i < 2 * P::PIECES; ++i) read_shared(rows[i / 2][i % 2], from + 4 * (top + 32 * i - i % 2 * 24));
#pragma unroll
    for (int i = 0; i < P::COLUMNS / P::SPAN; ++i) read_shared(columns[i], from + 4 * (P::BM + left / P::SPAN + i));
  }

  static __device__ __forceinline__ void read_shared(float &x, uint32_t from) {
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(from) : "memory");
  }
};

/* Add the sums of a product, from `column` on, to those of a piece. */
template <class P>
__device__ __forceinline__ void add_product(
    Sum (&total)[P::COLUMNS / 2], const Sum (&sum)[P::AT_ONCE / 2], const BlockScales<P> &scales, int piece,
    int column) {
#pragma unroll
  for (int i = 0; i < P::AT_ONCE / 2; ++i) {
    Sum &to = total[column / 2 + i];
    if constexpr (SCALES == OF_BLOCKS) {
      to = fmaf(sum[i], scales.rows[piece][i / 2 % 2] * scales.columns[(column + 2 * i) / P::SPAN], to);
    } else {
      to += sum[i];
    }
  }
}

/* total = A B over the stages of a tile, the sums of a stage, of 64 rows and as many columns as registers allow, at
 * a time; `top`, `left`: the consumer's part of the tile. */
template <class P>
__device__ __forceinline__ void multiply_promoted(
    Sums<P> &total, Ring<P::STAGES> &ring, Shared<P> shared, const Tiles<P> &tiles, int top, int left, int lane) {
  int row = top + threadIdx.x / 32 % 4 * 16 + lane / 4;
#pragma unroll 1
  for (int block = 0; block < (tiles.to - tiles.from) * PARTS; ++block) {
    barrier_wait(shared.full(ring.stage), ring.phase);
    uint64_t a = describe<BYTES>(shared.a(ring.stage) + top * BYTES);
    uint64_t b = describe<BYTES>(shared.b(ring.stage) + left * BYTES);
    BlockScales<P> scales;
#pragma unroll
    for (int piece = 0; piece < P::PIECES; ++piece) {
#pragma unroll
      for (int column = 0; column < P::COLUMNS; column += P::AT_ONCE) {
        Sum sum[P::AT_ONCE / 2];
        wgmma_fence();
        start<P>(sum, a + 64 * piece * BYTES / 16, b + column * BYTES / 16, false);
        wgmma_commit();
        if (SCALES == OF_BLOCKS && piece + column == 0) scales.read(shared.scales(ring.stage), row, left);
        wgmma_wait<0>();
        settle(sum);
        if (piece == P::PIECES - 1 && column + P::AT_ONCE == P::COLUMNS) release<P>(shared, ring.stage, lane);
        add_product<P>(total[piece], sum, scales, piece, column);
      }
    }
    ring.next();
  }
}

/* Likewise with the products of two stages on their way at a time: the sums of the first are added up while the second
 * is made. */
template <class P>
__device__ __forceinline__ void multiply_in_pairs(
    Sums<P> &total, Ring<P::STAGES> &ring, Shared<P> shared, const Tiles<P> &tiles, int top, int left, int lane) {
  int row = top + threadIdx.x / 32 % 4 * 16 + lane / 4, count = (tiles.to - tiles.from) * PARTS;
  Ring<P::STAGES> ahead = ring;
  Sum sums[2][P::COLUMNS / 2];
  auto begin = [&](Sum(&sum)[P::COLUMNS / 2]) {
    barrier_wait(shared.full(ahead.stage), ahead.phase);
    wgmma_fence();
    start<P>(sum, describe<BYTES>(shared.a(ahead.stage) + top * BYTES),
             describe<BYTES>(shared.b(ahead.stage) + left * BYTES), false);
    wgmma_commit();
    ahead.next();
  };
  auto add = [&](Sum(&sum)[P::COLUMNS / 2]) {
    BlockScales<P> scales;
    if (SCALES == OF_BLOCKS) scales.read(shared.scales(ring.stage), row, left);
    settle(sum);
    release<P>(shared, ring.stage, lane);
    add_product<P>(total[0], sum, scales, 0, 0);
    ring.next();
  };
#pragma unroll 1
  for (int pair = 0; pair < count / 2; ++pair) {
    begin(sums[0]), begin(sums[1]);
    wgmma_wait<1>();
    add(sums[0]);
    wgmma_wait<0>();
    add(sums[1]);
  }
  if (count % 2) {
    begin(sums[0]);
    wgmma_wait<0>();
    add(sums[0]);
  }
}

/* sum = A B, kept in the tensor core's registers. While one stage is multiplied the next is waited for: a stage is
 * released when the one after it has been started. */
template <class P>
__device__ __forceinline__ void multiply(
    Sums<P> &sum, Ring<P::STAGES> &ring, Shared<P> shared, const Tiles<P> &tiles, int top, int left, int lane) {
  int last = -1;
#pragma unroll 1
  for (int block = 0; block < (tiles.to - tiles.from) * PARTS; ++block) {
    barrier_wait(shared.full(ring.stage), ring.phase);
    uint64_t a = describe<BYTES>(shared.a(ring.stage) + top * BYTES);
    uint64_t b = describe<BYTES>(shared.b(ring.stage) + left * BYTES);
    wgmma_fence();
#pragma unroll
    for (int piece = 0; piece < P::PIECES; ++piece) start<P>(sum[piece], a + 64 * piece * BYTES / 16, b, true);
    wgmma_commit();
    wgmma_wait<1>();
    if (last >= 0) release<P>(shared, last, lane);
    last = ring.stage;
    ring.next();
  }
  wgmma_wait<0>();
#pragma unroll
  for (int piece = 0; piece < P::PIECES; ++piece) settle(sum[piece]);
  if (last >= 0) release<P>(shared, last, lane);
}

/* What a consumer finishes of a tile. */
template <class P> using Slice = Sum[P::PIECES][P::SLICE / 2];

/* sum = the sums of all blocks of the cluster, for this block's slice of the columns. Each puts its own where the
 * ring was, four numbers of a thread beside those of the others, and all add them up in the same order. */
template <class P>
__device__ __forceinline__ void add_up(
    Slice<P> &sum, const Sums<P> &part, Shared<P> shared, int consumer, int rank) {
  constexpr int FOUR = GROUP * 16, FOURS = P::COLUMNS / 8; /* of 64 rows */
  uint32_t place = shared.base + consumer * (P::PIECES * FOURS * FOUR) + threadIdx.x % GROUP * 16;
  if constexpr (P::CONSUMERS > 1) { /* the other may still read the ring */
    asm volatile("bar.sync 1, %0;" ::"n"(P::CONSUMERS * GROUP) : "memory");
  }
#pragma unroll
  for (int piece = 0; piece < P::PIECES; ++piece) {
#pragma unroll
    for (int i = 0; i < FOURS; ++i) {
      uint32_t v[4];
      memcpy(v, part[piece] + 4 * i, 16);
      asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(place + (piece * FOURS + i) * FOUR), "r"(v[0]),
                   "r"(v[1]), "r"(v[2]), "r"(v[3])
                   : "memory");
    }
  }
  cluster_arrive(), cluster_wait();
  constexpr int WIDTH = FOURS / P::SPLIT / P::HALVES; /* of a slice, and with GLU of its gates or values */
#pragma unroll
  for (int source = 0; source < P::SPLIT; ++source) {
    uint32_t there = address_in(place, source);
#pragma unroll
    for (int piece = 0; piece < P::PIECES; ++piece) {
#pragma unroll
      for (int i = 0; i < FOURS / P::SPLIT; ++i) {
        int four = piece * FOURS + i / WIDTH * (FOURS / P::HALVES) + rank * WIDTH + i % WIDTH;
        uint32_t v[4];
        asm volatile("ld.shared::cluster.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
                     : "r"(there + four * FOUR)
                     : "memory");
        Sum more[4];
        memcpy(more, v, 16);
#pragma unroll
        for (int j = 0; j < 4; ++j) sum[piece][4 * i + j] = source > 0 ? sum[piece][4 * i + j] + more[j] : more[j];
      }
    }
  }
}

/* Where scales are of rows, those of a thread's own, and those of its consumer's columns, which it loads for all, to
 * share in time: 0 beyond the last. */
template <class P> struct RowScales {
  static constexpr int OWN = (P::COLUMNS + GROUP - 1) / GROUP;
  float rows[P::PIECES][2], columns[OWN];

  /* `m`, `n`: where the tile starts; `top`, `left`: the consumer's part of it. */
  __device__ __forceinline__ void load(const Call &call, int m, int n, int top, int left) {
    int thread = threadIdx.x % GROUP, row = m + top + thread / 32 * 16 + thread % 32 / 4;
#pragma unroll
    for (int i = 0; i < 2 * P::PIECES; ++i) {
      rows[i / 2][i % 2] = call.of_a.of(min(row + 32 * i - i % 2 * 24, call.m - 1));
    }
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
      int column = thread + i * GROUP, of_b = column_of<P>(left + column, n, call.n);
      columns[i] = column < P::COLUMNS && of_b < P::HALVES * call.n ? call.of_b.of(of_b) : 0.f;
    }
  }

  __device__ __forceinline__ void share(uint32_t to, int consumer) const {
    int thread = threadIdx.x % GROUP;
    asm volatile("bar.sync %0, %1;" ::"r"(2 + consumer), "n"(GROUP) : "memory"); /* the last tile's have been read */
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
      if (thread + i * GROUP < P::COLUMNS) write_shared(to + 4 * (thread + i * GROUP), columns[i]);
    }
    asm volatile("bar.sync %0, %1;" ::"r"(2 + consumer), "n"(GROUP) : "memory");
  }
};

/* Write a pair of neighbours to shared memory. */
__device__ __forceinline__ void put_pair(uint32_t to, C low, C high) {
  C pair[2] = {low, high};
  if constexpr (sizeof(C) == 4) {
    uint2 bits;
    memcpy(&bits, pair, 8);
    asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(to), "r"(bits.x), "r"(bits.y) : "memory");
  } else if constexpr (sizeof(C) == 2) {
    uint32_t bits;
    memcpy(&bits, pair, 4);
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(bits) : "memory");
  } else {
    uint16_t bits;
    memcpy(&bits, pair, 2);
    asm volatile("st.shared.b16 [%0], %1;" ::"r"(to), "h"(bits) : "memory");
  }
}

__device__ __forceinline__ float2 read_pair(uint32_t from) {
  float2 x;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(from) : "memory");
  return x;
}

/* x, as if it were new: products with it are then made where they are used, not kept in registers that sums need. */
__device__ __forceinline__ index_t anew(index_t x) {
  asm volatile("" : "+l"(x));
  return x;
}

/* Write a warp's 16 rows of a chunk to shared memory, finished, row by row, swizzled by the width of a row. Some
 * scales are read at a time: each would wait for what is written before it. */
template <class P>
__device__ __forceinline__ void stage_chunk(
    uint32_t chunk, const Sum *sum, const Call &call, const float (&rows)[2], uint32_t columns, int batch, int m, int n,
    int lane) {
  constexpr int WIDTH = P::CHUNK * int(sizeof(C)), SWIZZLE = WIDTH - 16;
  constexpr int EIGHTS = P::CHUNK / 8, SOME = EIGHTS < 4 ? EIGHTS : 4;
  int row = m + lane / 4, column = n + lane % 4 * 2; /* this lane's first */
  int at = lane / 4 * WIDTH + lane % 4 * 2 * int(sizeof(C));
  uint32_t first = chunk + (at ^ (at >> 3 & SWIZZLE));
  float2 scales[SOME] = {}, of_values[SOME] = {};
  [[maybe_unused]] Real alpha = static_cast<Real>(call.alpha), out_scale = static_cast<Real>(call.out_scale);
  auto linear = [&](int half, int c, bool inside, Sum total, float scale) { /* c: a column of B */
    Real x = Real(total);
    if constexpr (SCALES == NO_SCALES) x *= alpha; /* which products with scales do not have */
    if constexpr (SCALES == OF_ROWS) x *= Real(rows[half] * scale);
    if constexpr (BIAS) x += inside ? to<Real>(call.bias[c * anew(call.of_bias)]) : Real(0);
    return x;
  };
  auto element = [&](int half, int right, const Sum *total, float scale, float scale_of_value) {
    int r = row + 8 * half, c = column + right;
    bool inside = r < call.m && c < call.n;
    Real x = activate<ACTIVATION>(linear(half, c, inside, *total, scale));
    if constexpr (GLU) x *= linear(half, c + call.n, inside, total[P::SLICE / 4], scale_of_value);
    if constexpr (RESIDUAL) x += inside ? to<Real>(call.residual[call.of_residual.at(batch, r, c)]) : Real(0);
    return to<C>(x * out_scale);
  };
#pragma unroll
  for (int eight = 0; eight < EIGHTS; ++eight) {
    if constexpr (BIAS || RESIDUAL) __syncwarp(); /* or loads for all columns would start here, and take registers */
#pragma unroll
    for (int i = 0; SCALES == OF_ROWS && eight % SOME == 0 && i < SOME; ++i) {
      uint32_t from = columns + 4 * (8 * (eight + i) + lane % 4 * 2);
      scales[i] = read_pair(from);
      if constexpr (GLU) of_values[i] = read_pair(from + 4 * (P::COLUMNS / 2));
    }
    float2 scale = scales[eight % SOME], of_value = of_values[eight % SOME];
#pragma unroll
    for (int half = 0; half < 2; ++half) { /* rows 8 below are swizzled alike */
      const Sum *pair = sum + 4 * eight + 2 * half;
      put_pair((first ^ 8 * eight * int(sizeof(C))) + 8 * half * WIDTH,
               element(half, 8 * eight, pair, scale.x, of_value.x),
               element(half, 8 * eight + 1, pair + 1, scale.y, of_value.y));
    }
  }
}

/* Write a staged chunk to C element by element. */
template <class P>
__device__ __forceinline__ void write_chunk(uint32_t from, const Call &call, int batch, int m, int n, int lane) {
  constexpr int WIDTH = P::CHUNK * int(sizeof(C)), SWIZZLE = WIDTH - 16;
#pragma unroll 1
  for (int i = lane; i < 16 * P::CHUNK; i += 32) {
    int row = i / P::CHUNK, column = i % P::CHUNK, at = i * int(sizeof(C));
    if (m + row < call.m && n + column < call.n) {
      call.c[call.of_c.at(batch, m + row, n + column)] =
          *reinterpret_cast<const C *>(__cvta_shared_to_generic(from + (at ^ (at >> 3 & SWIZZLE))));
    }
  }
}

/* Finish what a consumer has, from row m and column n of C on, and store it; `columns`: the first one's scale. */
template <class P>
__device__ __forceinline__ void finish(
    const Slice<P> &sum, const TensorMap &map_c, const Call &call, bool direct, const RowScales<P> &scales,
    uint32_t columns, uint32_t staging, int batch, int m, int n) {
  constexpr int COLUMNS = P::SLICE / P::HALVES;
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
#pragma unroll
  for (int piece = 0; piece < P::PIECES; ++piece) {
    int row = m + piece * 64 + warp * 16;
#pragma unroll
    for (int column = 0; column < COLUMNS; column += P::CHUNK) {
      int number = piece * (COLUMNS / P::CHUNK) + column / P::CHUNK;
      uint32_t chunk = staging + number % P::BUFFERS * P::CHUNK_BYTES;
      if (lane == 0) { /* until the buffer is free: of an odd number of chunks the last is in the first buffer, too */
        if (number == 0 && P::CHUNKS % 2) {
          store_wait<0>();
        } else {
          store_wait<P::BUFFERS - 1>();
        }
      }
      __syncwarp();
      stage_chunk<P>(chunk, &sum[piece][column / 2], call, scales.rows[piece], columns + 4 * column, batch, row,
                     n + column, lane);
      if (direct) {
        __syncwarp();
        write_chunk<P>(chunk, call, batch, row, n + column, lane);
        __syncwarp();
      } else {
        fence_copies();
        __syncwarp();
        if (lane == 0) store_box(map_c, chunk, n + column, row, batch);
      }
    }
  }
}

template <class P>
__device__ __forceinline__ void consume(
    const TensorMap &map_c, const Call &call, bool direct, const Tiles<P> &tiles, Shared<P> shared, int consumer) {
  int lane = threadIdx.x % 32;
  int top = P::BESIDE ? 0 : consumer * P::ROWS, left = P::BESIDE ? consumer * P::COLUMNS : 0; /* of the tile */
  uint32_t staging = shared.staging(threadIdx.x / 32), columns = shared.columns(consumer);
  Ring<P::STAGES> ring;
  for (int i = tiles.first; i < tiles.count; i += tiles.step) {
    Sums<P> sum = {};
    RowScales<P> scales;
    int m, n, batch;
    tiles.place(i, m, n, batch);
    if constexpr (SCALES == OF_ROWS) scales.load(call, m, n, top, left);
    m += top, n += left / P::HALVES;
    if constexpr (PROMOTED && P::IN_PAIRS) {
      multiply_in_pairs<P>(sum, ring, shared, tiles, top, left, lane);
    } else if constexpr (PROMOTED) {
      multiply_promoted<P>(sum, ring, shared, tiles, top, left, lane);
    } else {
      multiply<P>(sum, ring, shared, tiles, top, left, lane);
    }
    if constexpr (SCALES == OF_ROWS) scales.share(columns, consumer);
    if constexpr (P::SPLIT > 1) {
      constexpr int COLUMNS = P::SLICE / P::HALVES;
      Slice<P> slice;
      add_up<P>(slice, sum, shared, consumer, tiles.rank);
      finish<P>(slice, map_c, call, direct, scales, columns + 4 * tiles.rank * COLUMNS, staging, batch, m,
                n + tiles.rank * COLUMNS);
    } else {
      finish<P>(sum, map_c, call, direct, scales, columns, staging, batch, m, n);
    }
  }
  if (lane == 0) store_wait<0>();
}

/* -- the kernel ---------------------------------------------------------------------------------- */

/* One call, by as many blocks as fit, or where K is split a cluster for each tile. `direct`: C has no tensor map,
 * and map_c is any. */
template <class P>
__device__ __forceinline__ void run(
    const TensorMap &map_a, const TensorMap &map_b, const TensorMap &map_c, bool direct, const Call &call) {
  extern __shared__ __align__(1024) uint8_t memory[];
  Shared<P> shared{shared_address(memory)};
  Tiles<P> tiles(call);
  constexpr int PRODUCER = P::CONSUMERS * GROUP; /* its first thread */
  if (threadIdx.x == PRODUCER) {
    prefetch(map_a), prefetch(map_b), prefetch(map_c);
    fetch_ahead(map_b, tiles, call);
  }
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < P::STAGES; ++stage) {
      barrier_init(shared.full(stage), SCALES == OF_BLOCKS ? 2 : 1);
      barrier_init(shared.empty(stage), 4 * P::CONSUMERS * P::SHARE);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if constexpr (P::SHARE > 1) cluster_arrive(), cluster_wait(); /* the other loads into this ring, and arrives there */
  wait_for_previous();

  int group = __shfl_sync(0xffffffff, threadIdx.x / GROUP, 0);
  if (group == P::CONSUMERS) {
    give_registers<PRODUCER_REGISTERS>();
    int warp = __shfl_sync(0xffffffff, threadIdx.x / 32 % 4, 0), lane = threadIdx.x % 32;
    if (threadIdx.x == PRODUCER) {
      produce<P>(map_a, map_b, tiles, shared, call);
      start_next(); /* not before: what it fetches ahead would be in the way of these loads */
    }
    if (SCALES == OF_BLOCKS && warp == 1) bring_scales<P>(tiles, shared, call, lane);
    __syncwarp();
    if constexpr (P::SPLIT > 1) cluster_arrive(), cluster_wait(); /* as the consumers do when they add up */
  } else {
    take_registers<P::CONSUMER_REGISTERS>();
    consume<P>(map_c, call, direct, tiles, shared, group);
  }
  /* no block leaves while another may still arrive at its barriers, or read its sums */
  if constexpr (P::SHARE * P::SPLIT > 1) cluster_arrive(), cluster_wait();
}

}  // namespace product

/* SHARED: the bytes of shared memory that a launch has; then the arguments of Plan. */
#define PRODUCT(NAME, SHARED, ...)                                                                                     \
  static_assert(product::Plan<__VA_ARGS__>::TOTAL == SHARED, "Plan.shared has another layout");                        \
  extern "C" __global__ void                                                                                           \
      __launch_bounds__(product::Plan<__VA_ARGS__>::THREADS, product::Plan<__VA_ARGS__>::RESIDENT) NAME(               \
          const __grid_constant__ product::TensorMap map_a, const __grid_constant__ product::TensorMap map_b,          \
          const __grid_constant__ product::TensorMap map_c, int direct, CALL_PARAMETERS) {                             \
    product::run<product::Plan<__VA_ARGS__>>(map_a, map_b, map_c, direct, CALL);                                       \
  }
