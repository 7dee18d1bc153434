/* Products of narrow types, and of float32 as tf32, on Hopper's tensor cores (sm_90a): bulk tensor copies, warp-specialised
 * wgmma, a persistent loop over tiles. wgmma takes these types only from rows along K, so all tiles lie in rows of 128
 * bytes of K, and whatever the type, a product is 32 bytes deep.
 *
 * A block has a producer and one or two consumers, a warp group each. The producer's first thread keeps a ring of STAGES
 * stages in shared memory filled with tiles of A and B; the consumers multiply them out of it, 64 or 128 rows each. A
 * stage has two barriers: `full` completes when its bytes have arrived, `empty` when those who read it are done. A cluster
 * of two blocks, tiles below each other, shares B: each loads a half of it for both.
 *
 * The tensor core keeps about 14 bits of a sum of float8 products, and truncates those of tf32. Where sums are PROMOTED, or
 * the scales are of blocks, those of a stage are made in registers of their own, and added up in float32; while one consumer
 * does so the other has the tensor core.
 */

namespace product {

using namespace tensor_cores;

constexpr int GROUP = 128;                                               /* threads */
constexpr int PRODUCER_REGISTERS = 40, CONSUMER_REGISTERS = 232;         /* of a thread */
constexpr int BYTES = 128, DEPTH = BYTES / int(sizeof(A)), STEPS = BYTES / 32; /* of K in a stage */
[[maybe_unused]] constexpr int BLOCK = 128; /* columns that share a scale where scales are of blocks */

/* What a kernel is: Python's side of it is plan.py. */
template <int BM_, int BN_, int STAGES_, int SHARE_, int BAND_, int CHUNK_> struct Plan {
  static constexpr int BM = BM_, BN = BN_; /* of a tile */
  static constexpr int STAGES = STAGES_;
  static constexpr int SHARE = SHARE_; /* blocks below each other that share B: a cluster */
  static constexpr int BAND = BAND_;   /* rows of clusters that are walked column by column, so that L2 is hit */

  static constexpr int CONSUMERS = BM == 64 ? 1 : 2, ROWS = BM / CONSUMERS, PIECES = ROWS / 64;
  static constexpr int THREADS = (CONSUMERS + 1) * GROUP;

  static constexpr int OUT = GLU ? BN / 2 : BN; /* columns of C of a tile */
  static constexpr int CHUNK = CHUNK_;          /* that a warp stages at once, in rows of at most 128 bytes */
  static constexpr int CHUNK_BYTES = 16 * CHUNK * int(sizeof(C));
  static constexpr int CHUNKS = OUT / CHUNK * PIECES; /* of a warp and a tile */
  static constexpr int BUFFERS = CHUNKS == 1 ? 1 : 2;

  static constexpr int A_BYTES = BM * BYTES, B_BYTES = BN * BYTES;
  static constexpr int AT_B = STAGES * A_BYTES, AT_STAGING = AT_B + STAGES * B_BYTES;
  static constexpr int AT_BARRIERS = AT_STAGING + 4 * CONSUMERS * BUFFERS * CHUNK_BYTES; /* `full`, and `empty` */
  static constexpr int TOTAL = AT_BARRIERS + 8 * 2 * STAGES;                             /* bytes of shared memory */

  static_assert(BM % 64 == 0 && BM <= 256 && BN % (16 * SHARE) == 0 && BN <= 256, "boxes and instructions end there");
  static_assert(OUT % CHUNK == 0 && CHUNK * sizeof(C) <= 128, "whole chunks are staged, in rows that are swizzled");
};

/* The product of two tiles, 64 rows and N columns, 32 bytes of K deep, added to `sum`; Python writes them (products.py). */
template <int N> struct Product;

/* The tiles of a call in the order in which they are worked on, counted in clusters. */
template <class P> struct Tiles {
  int across, down, count, first, step, rank, stages;

  __device__ __forceinline__ explicit Tiles(const Call &call) {
    rank = P::SHARE > 1 ? cluster_rank() : 0;
    down = (call.m + P::BM * P::SHARE - 1) / (P::BM * P::SHARE);
    across = (call.n + P::OUT - 1) / P::OUT;
    count = down * across * call.batch;
    first = blockIdx.x / P::SHARE;
    step = gridDim.x / P::SHARE;
    stages = (call.k + DEPTH - 1) / DEPTH; /* of a part */
  }

  /* Where tile number i starts. */
  __device__ __forceinline__ void place(int i, int &m, int &n, int &batch) const {
    batch = i / (down * across);
    i -= batch * (down * across);
    int band = i / (P::BAND * across), top = band * P::BAND, height = min(P::BAND, down - top);
    i -= band * P::BAND * across;
    m = ((top + i % height) * P::SHARE + rank) * P::BM;
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
  __device__ __forceinline__ uint32_t full(int stage) const { return base + P::AT_BARRIERS + 8 * stage; }
  __device__ __forceinline__ uint32_t empty(int stage) const { return full(P::STAGES + stage); }
};

/* -- the producer -------------------------------------------------------------------------------- */

/* Of an operand in three parts, high, low, and high where finite, the products are those of A's part 2 and B's 1, of A's 1
 * and B's 2, and of the high ones: the small products first. */
__device__ __forceinline__ int part_of_a(int turn) { return 2 - turn; }
__device__ __forceinline__ int part_of_b(int turn) { return turn == 2 ? 0 : 1 + turn; }

/* Load the tile of B from column n of C on, or this block's part of it; with GLU it is two parts, gates and values. */
template <class P>
__device__ __forceinline__ void load_b(
    uint32_t to, const TensorMap &map, uint32_t full, int k, int n, int batch, int columns, int rank) {
  constexpr int PARTS_OF_B = GLU ? 2 : P::SHARE, ROWS = P::BN / PARTS_OF_B;
#pragma unroll
  for (int part = 0; part < PARTS_OF_B; ++part) {
    int row = n + part * (GLU ? columns : ROWS);
    if constexpr (P::SHARE > 1) {
      if (part == rank) load_box_to((1 << P::SHARE) - 1, to + part * ROWS * BYTES, map, full, k, row, batch);
    } else {
      load_box(to + part * ROWS * BYTES, map, full, k, row, batch);
    }
  }
}

template <class P>
__device__ __forceinline__ void produce(
    const TensorMap &map_a, const TensorMap &map_b, const Tiles<P> &tiles, Shared<P> shared, int columns) {
  Ring<P::STAGES> ring;
  int padded = tiles.stages * DEPTH;
  for (int i = tiles.first; i < tiles.count; i += tiles.step) {
    int m, n, batch;
    tiles.place(i, m, n, batch);
#pragma unroll 1
    for (int turn = 0; turn < PARTS; ++turn) {
      int at_a = PARTS > 1 ? part_of_a(turn) * padded : 0, at_b = PARTS > 1 ? part_of_b(turn) * padded : 0;
      for (int k = 0; k < padded; k += DEPTH) {
        uint32_t full = shared.full(ring.stage);
        barrier_wait(shared.empty(ring.stage), ring.phase ^ 1);
        barrier_expect(full, P::A_BYTES + P::B_BYTES);
        load_box(shared.a(ring.stage), map_a, full, at_a + k, m, batch);
        load_b<P>(shared.b(ring.stage), map_b, full, at_b + k, n, batch, columns, tiles.rank);
        ring.next();
      }
    }
  }
}

/* -- a consumer ---------------------------------------------------------------------------------- */

/* Sums of 64 x N: two of row lane / 4, two of the row 8 below, for each 8 columns. */
template <class P> using Sums = Sum[P::PIECES][P::BN / 2];

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
__device__ __forceinline__ void start(Sum (&sum)[P::BN / 2], uint64_t a, uint64_t b, bool add) {
#pragma unroll
  for (int step = 0; step < STEPS; ++step) Product<P::BN>::add(sum, a + 32 * step / 16, b + 32 * step / 16, add || step > 0);
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
  static constexpr int SPANS = (P::BN + 63) / 64; /* columns that share a scale come in 64s */
  static_assert(SCALES != OF_BLOCKS || !GLU || P::BN % 128 == 0, "gates and values are whole spans");
  float rows[P::PIECES][2], columns[SPANS];

  /* `m`, `n`: of this warp's first element. */
  __device__ __forceinline__ void load(const Call &call, int m, int n, int block, int lane) {
#pragma unroll
    for (int piece = 0; piece < P::PIECES; ++piece) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        rows[piece][half] = call.of_a.of(min(m + 64 * piece + 8 * half + lane / 4, call.m - 1), block);
      }
    }
#pragma unroll
    for (int span = 0; span < SPANS; ++span) {
      int column = GLU && span >= SPANS / 2 ? call.n + n + 64 * (span - SPANS / 2) : n + 64 * span;
      columns[span] = call.of_b.of(min(column, (GLU ? 2 : 1) * call.n - 1) / BLOCK, block);
    }
  }
};

/* total = A B over the stages of a tile, the sums of a stage and 64 rows at a time; `m`, `n`: of this warp's first
 * element. */
template <class P>
__device__ __forceinline__ void multiply_promoted(
    Sums<P> &total, Ring<P::STAGES> &ring, Shared<P> shared, const Tiles<P> &tiles, const Call &call, int top, int m,
    int n, int lane) {
  BlockScales<P> scales, next; /* those of the next block are on their way while this one is multiplied */
  if (SCALES == OF_BLOCKS && tiles.stages > 0) next.load(call, m, n, 0, lane);
#pragma unroll 1
  for (int block = 0; block < tiles.stages * PARTS; ++block) {
    if constexpr (SCALES == OF_BLOCKS) {
      scales = next;
      next.load(call, m, n, min(block + 1, tiles.stages - 1), lane);
    }
    barrier_wait(shared.full(ring.stage), ring.phase);
    uint64_t a = describe<BYTES>(shared.a(ring.stage) + top * BYTES), b = describe<BYTES>(shared.b(ring.stage));
#pragma unroll
    for (int piece = 0; piece < P::PIECES; ++piece) {
      Sum sum[P::BN / 2];
      wgmma_fence();
      start<P>(sum, a + 64 * piece * BYTES / 16, b, false);
      wgmma_commit();
      wgmma_wait<0>();
      settle(sum);
      if (piece == P::PIECES - 1) release<P>(shared, ring.stage, lane);
#pragma unroll
      for (int i = 0; i < P::BN / 2; ++i) {
        if constexpr (SCALES == OF_BLOCKS) {
          total[piece][i] = fmaf(sum[i], scales.rows[piece][i / 2 % 2] * scales.columns[i / 32], total[piece][i]);
        } else {
          total[piece][i] += sum[i];
        }
      }
    }
    ring.next();
  }
}

/* sum = A B, kept in the tensor core's registers. While one stage is multiplied the next is waited for: a stage is released
 * when the one after it has been started. */
template <class P>
__device__ __forceinline__ void multiply(
    Sums<P> &sum, Ring<P::STAGES> &ring, Shared<P> shared, const Tiles<P> &tiles, int top, int lane) {
  int last = -1;
#pragma unroll 1
  for (int block = 0; block < tiles.stages * PARTS; ++block) {
    barrier_wait(shared.full(ring.stage), ring.phase);
    uint64_t a = describe<BYTES>(shared.a(ring.stage) + top * BYTES), b = describe<BYTES>(shared.b(ring.stage));
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

/* x, as if it were new: products with it are then made where they are used, not kept in registers that sums need. */
__device__ __forceinline__ index_t anew(index_t x) {
  asm volatile("" : "+l"(x));
  return x;
}

/* Write a warp's 16 rows of a chunk to shared memory, finished, row by row, swizzled by the width of a row. */
template <class P>
__device__ __forceinline__ void stage_chunk(
    uint32_t chunk, const Sum *sum, const Call &call, const float (&scales)[2], int batch, int m, int n, int lane) {
  constexpr int WIDTH = P::CHUNK * int(sizeof(C)), SWIZZLE = WIDTH - 16;
  int row = m + lane / 4, column = n + lane % 4 * 2; /* this lane's first */
  Real alpha = static_cast<Real>(call.alpha), out_scale = static_cast<Real>(call.out_scale);
  auto linear = [&](int half, int c, bool inside, Sum total) { /* c: a column of B */
    Real x = alpha * Real(total);
    if constexpr (SCALES == OF_ROWS) x *= Real(scales[half] * (inside ? call.of_b.of(c) : 0.f));
    if constexpr (BIAS) x += inside ? to<Real>(call.bias[c * anew(call.of_bias)]) : Real(0);
    return x;
  };
  auto element = [&](int half, int right, const Sum *total) {
    int r = row + 8 * half, c = column + right;
    bool inside = r < call.m && c < call.n;
    Real x = activate<ACTIVATION>(linear(half, c, inside, *total));
    if constexpr (GLU) x *= linear(half, c + call.n, inside, total[P::BN / 4]);
    if constexpr (RESIDUAL) x += inside ? to<Real>(call.residual[call.of_residual.at(batch, r, c)]) : Real(0);
    return to<C>(x * out_scale);
  };
#pragma unroll
  for (int eight = 0; eight < P::CHUNK / 8; ++eight) {
    if constexpr (BIAS || RESIDUAL) __syncwarp(); /* or loads for all columns would start here, and take registers */
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Sum *pair = sum + 4 * eight + 2 * half;
      int at = (lane / 4 + 8 * half) * WIDTH + (8 * eight + lane % 4 * 2) * int(sizeof(C));
      put_pair(chunk + (at ^ (at >> 3 & SWIZZLE)), element(half, 8 * eight, pair), element(half, 8 * eight + 1, pair + 1));
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

/* Finish a consumer's rows, from row m and column n of C on, and store them. */
template <class P>
__device__ __forceinline__ void finish(
    const Sums<P> &sum, const TensorMap &map_c, const Call &call, bool direct, uint32_t staging, int batch, int m,
    int n) {
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
#pragma unroll
  for (int piece = 0; piece < P::PIECES; ++piece) {
    int row = m + piece * 64 + warp * 16;
    float scales[2] = {};
    if constexpr (SCALES == OF_ROWS) {
#pragma unroll
      for (int half = 0; half < 2; ++half) scales[half] = call.of_a.of(min(row + lane / 4 + 8 * half, call.m - 1));
    }
#pragma unroll
    for (int column = 0; column < P::OUT; column += P::CHUNK) {
      int number = piece * (P::OUT / P::CHUNK) + column / P::CHUNK;
      uint32_t chunk = staging + number % P::BUFFERS * P::CHUNK_BYTES;
      if (lane == 0) { /* until the buffer is free: of an odd number of chunks the last is in the first buffer, too */
        if (number == 0 && P::CHUNKS % 2) {
          store_wait<0>();
        } else {
          store_wait<P::BUFFERS - 1>();
        }
      }
      __syncwarp();
      stage_chunk<P>(chunk, &sum[piece][column / 2], call, scales, batch, row, n + column, lane);
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
  int lane = threadIdx.x % 32, top = consumer * P::ROWS;
  uint32_t staging = shared.staging(threadIdx.x / 32);
  Ring<P::STAGES> ring;
  for (int i = tiles.first; i < tiles.count; i += tiles.step) {
    Sums<P> sum = {};
    int m, n, batch;
    tiles.place(i, m, n, batch);
    if constexpr (PROMOTED) {
      multiply_promoted<P>(sum, ring, shared, tiles, call, top, m + top + threadIdx.x / 32 % 4 * 16, n, lane);
    } else {
      multiply<P>(sum, ring, shared, tiles, top, lane);
    }
    finish<P>(sum, map_c, call, direct, staging, batch, m + top, n);
  }
  if (lane == 0) store_wait<0>();
}

/* -- the kernel ---------------------------------------------------------------------------------- */

/* One call, by as many blocks as fit. `direct`: C has no tensor map, and map_c is any. */
template <class P>
__device__ __forceinline__ void run(
    const TensorMap &map_a, const TensorMap &map_b, const TensorMap &map_c, bool direct, const Call &call) {
  extern __shared__ __align__(1024) uint8_t memory[];
  Shared<P> shared{shared_address(memory)};
  Tiles<P> tiles(call);
  constexpr int PRODUCER = P::CONSUMERS * GROUP; /* its first thread */
  if (threadIdx.x == PRODUCER) prefetch(map_a), prefetch(map_b), prefetch(map_c);
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < P::STAGES; ++stage) {
      barrier_init(shared.full(stage), 1);
      barrier_init(shared.empty(stage), 4 * P::CONSUMERS * P::SHARE);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if constexpr (P::SHARE > 1) cluster_arrive(), cluster_wait(); /* the other loads into this ring, and arrives there */
  wait_for_previous();
  start_next();

  int group = __shfl_sync(0xffffffff, threadIdx.x / GROUP, 0);
  if (group == P::CONSUMERS) {
    if constexpr (P::CONSUMERS > 1) give_registers<PRODUCER_REGISTERS>();
    if (threadIdx.x == PRODUCER) produce<P>(map_a, map_b, tiles, shared, call.n);
    __syncwarp();
  } else {
    if constexpr (P::CONSUMERS > 1) take_registers<CONSUMER_REGISTERS>();
    consume<P>(map_c, call, direct, tiles, shared, group);
  }
  /* no block leaves while another may still arrive at its barriers */
  if constexpr (P::SHARE > 1) cluster_arrive(), cluster_wait();
}

}  // namespace product

/* SHARED: the bytes of shared memory that a launch has; then the arguments of Plan. */
#define PRODUCT(NAME, SHARED, ...)                                                                              \
  static_assert(product::Plan<__VA_ARGS__>::TOTAL == SHARED, "Plan.shared has another layout");                 \
  extern "C" __global__ void __launch_bounds__(product::Plan<__VA_ARGS__>::THREADS, 1) NAME(                    \
      const __grid_constant__ product::TensorMap map_a, const __grid_constant__ product::TensorMap map_b,       \
      const __grid_constant__ product::TensorMap map_c, int direct, CALL_PARAMETERS) {                          \
    product::run<product::Plan<__VA_ARGS__>>(map_a, map_b, map_c, direct, CALL);                                \
  }
