/* GEMM on Hopper's tensor cores (sm_90a): bulk tensor copies, warp-specialised wgmma, a persistent loop over tiles.
 *
 * A block has one producer and two consumers, a warp group each. The producer's first thread keeps a ring of STAGES
 * stages in shared memory filled with tiles of A and B, BK deep, and the consumers multiply them out of it. A stage has
 * two barriers: `full` completes when its bytes have arrived, `empty` when those who read it are done. The main loop
 * synchronises by these alone, and the ring runs on from tile to tile: the first stages of the next tile arrive during
 * the epilogue of this one.
 *
 *   cooperative: both consumers work on one tile, half of its rows each. The largest tiles, the least traffic.
 *   ping-pong:   each consumer has a whole tile; while one is in its epilogue the other has the tensor cores.
 *
 * A cluster is two blocks that share B (two tiles below each other) or A (beside each other): each loads a half of what
 * they share, for both. Or it is SPLIT blocks that share one tile, a part of K each, for problems of few tiles; they
 * add up their parts through each other's shared memory, always in the same order.
 *
 * Tiles of an operand lie in shared memory in rows of 128 or 64 bytes, swizzled as the tensor map has it: along K if it
 * is stored so, else along M or N; wgmma takes both. What is out of bounds arrives as zeros, and is not stored. With GLU
 * a tile of B is a half of gates and a half of the values that belong to them, so that a thread has the sums of both. The
 * epilogue leaves through shared memory (staging.cuh).
 */

namespace hopper {

using namespace tensor_cores;

constexpr int GROUP = 128; /* threads */
constexpr int THREADS = 3 * GROUP;
constexpr int PRODUCER_REGISTERS = 40, CONSUMER_REGISTERS = 232; /* of a thread; at the launch all have 168 */

enum Scheme { COOPERATIVE, PINGPONG };

/* What a kernel is: Python's side of it is hopper_plan.py. */
template <Scheme SCHEME_, int BM_, int BN_, int STAGES_, int SHARE_A_, int SHARE_B_, int SPLIT_, int BAND_, int CHUNK_>
struct Plan {
  static constexpr Scheme SCHEME = SCHEME_;
  static constexpr int BM = BM_, BN = BN_; /* of a tile */
  static constexpr int STAGES = STAGES_;
  static constexpr int SHARE_A = SHARE_A_; /* blocks beside each other that share A */
  static constexpr int SHARE_B = SHARE_B_; /* or below each other, and share B */
  static constexpr int SPLIT = SPLIT_;     /* blocks that share a tile, a part of K each */
  static constexpr int BAND = BAND_;       /* rows of clusters that are walked column by column, so that L2 is hit */

  static constexpr int SHARE = SHARE_A * SHARE_B, CLUSTER = SHARE * SPLIT;
  static constexpr int ROWS = SCHEME == COOPERATIVE ? BM / 2 : BM; /* of a consumer */
  static constexpr int READERS = SCHEME == COOPERATIVE ? 8 : 4;    /* warps that read a stage */
  static constexpr int OUT = BN / HALVES;                          /* columns of C of a tile */
  static constexpr int COLUMNS = BN / SPLIT;                       /* of sums, that a block finishes */

  static constexpr int CHUNK = CHUNK_; /* columns that a warp stages at once, in rows of at most 128 bytes */
  static constexpr int CHUNK_BYTES = staging::Chunk<C, CHUNK>::BYTES;
  static constexpr int CHUNKS = COLUMNS / HALVES / CHUNK * (ROWS / 64); /* of a warp and a tile */
  static constexpr int BUFFERS = CHUNKS == 1 ? 1 : 2;                   /* one chunk is written while another leaves */

  static constexpr int A_BYTES = BM * BK * int(sizeof(A)), B_BYTES = BN * BK * int(sizeof(B));
  static constexpr int AT_B = STAGES * A_BYTES, AT_STAGING = AT_B + STAGES * B_BYTES;
  static constexpr int AT_RECEIVED = AT_STAGING + 8 * BUFFERS * CHUNK_BYTES;
  static constexpr int RECEIVED = (SPLIT - 1) * BM * COLUMNS * int(sizeof(Sum)); /* bytes, from the others of a split */
  static constexpr int AT_BARRIERS = AT_RECEIVED + RECEIVED;                     /* `full`, `empty`, and `received` */
  static constexpr int BYTES = AT_BARRIERS + 8 * (2 * STAGES + 1);               /* of shared memory in all */

  static_assert(ROWS % 64 == 0 && COLUMNS % 16 == 0, "a consumer multiplies 64 rows and 16 columns at a time");
  static_assert(!GLU || BN % 128 == 0, "gates and values are whole boxes");
  static_assert(SHARE_A == 1 || SHARE_B == 1, "one operand is shared");
  static_assert(SPLIT == 1 || SCHEME == COOPERATIVE, "a block that splits a tile has one tile");
};

/* -- tiles --------------------------------------------------------------------------------------- */

template <class P> using OperandA = Operand<!TRANS_A, P::BM, P::SHARE_A>;
template <class P> using OperandB = Operand<TRANS_B, P::BN, P::SHARE_B>;
template <class P> using HalfOfB = Operand<TRANS_B, P::OUT, P::SHARE_B>; /* gates or values; without GLU all of it */

/* The tiles of a call in the order in which they are worked on, counted in clusters, and what of them is this block's:
 * which of those that share, which part of K, from where, and how many stages a tile is. */
template <class P> struct Tiles {
  int across, down, count, first, step;
  int share, split, k_begin, blocks;

  __device__ __forceinline__ explicit Tiles(const Call &call) {
    int rank = P::CLUSTER > 1 ? cluster_rank() : 0;
    share = P::SPLIT > 1 ? rank % P::SHARE : rank;
    split = P::SPLIT > 1 ? rank / P::SHARE : 0;
    down = (int(call.m) + P::BM * P::SHARE_B - 1) / (P::BM * P::SHARE_B);
    across = (int(call.n) + P::OUT * P::SHARE_A - 1) / (P::OUT * P::SHARE_A);
    count = down * across * int(call.batch);
    first = blockIdx.x / P::CLUSTER;
    step = gridDim.x / P::CLUSTER;
    int all = (int(call.k) + BK - 1) / BK;
    int begin = P::SPLIT > 1 ? all * split / P::SPLIT : 0, end = P::SPLIT > 1 ? all * (split + 1) / P::SPLIT : all;
    k_begin = begin * BK;
    blocks = end - begin;
  }

  /* Where tile number i starts. */
  __device__ __forceinline__ void place(int i, int &m, int &n, int &batch) const {
    batch = i / (down * across);
    i -= batch * (down * across);
    int band = i / (P::BAND * across), top = band * P::BAND, height = min(P::BAND, down - top);
    i -= band * P::BAND * across;
    n = i / height, m = top + i % height;
    m = (m * P::SHARE_B + (P::SHARE_B > 1 ? share : 0)) * P::BM;
    n = (n * P::SHARE_A + (P::SHARE_A > 1 ? share : 0)) * P::OUT;
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
  __device__ __forceinline__ uint32_t received() const { return full(2 * P::STAGES); }
};

/* -- the producer -------------------------------------------------------------------------------- */

template <class P>
__device__ __forceinline__ void produce(
    const TensorMap &map_a, const TensorMap &map_b, const Tiles<P> &tiles, Shared<P> shared, int columns) {
  Ring<P::STAGES> ring;
  int blocks = ((1 << P::SHARE) - 1) << tiles.split * P::SHARE;
  for (int i = tiles.first; i < tiles.count; i += tiles.step) {
    int m, n, batch;
    tiles.place(i, m, n, batch);
    for (int block = 0, k = tiles.k_begin; block < tiles.blocks; ++block, k += BK) {
      uint32_t full = shared.full(ring.stage);
      barrier_wait(shared.empty(ring.stage), ring.phase ^ 1);
      barrier_expect(full, P::A_BYTES + P::B_BYTES);
      OperandA<P>::load(shared.a(ring.stage), map_a, full, m, k, batch, P::SHARE_A > 1 ? tiles.share : 0, blocks);
#pragma unroll
      for (int half = 0; half < HALVES; ++half) {
        HalfOfB<P>::load(shared.b(ring.stage) + half * (P::B_BYTES / HALVES), map_b, full, n + half * columns, k, batch,
                         P::SHARE_B > 1 ? tiles.share : 0, blocks);
      }
      ring.next();
    }
  }
}

/* -- a consumer ---------------------------------------------------------------------------------- */

/* Consumers take turns by named barriers: one waits for its own, and the other arrives there. */
__device__ __forceinline__ void await_turn(int consumer) {
  asm volatile("bar.sync %0, %1;" ::"r"(1 + consumer), "n"(2 * GROUP) : "memory");
}
__device__ __forceinline__ void give_turn(int consumer) {
  asm volatile("bar.arrive %0, %1;" ::"r"(1 + consumer), "n"(2 * GROUP) : "memory");
}

/* An accumulator of 64 x N: two floats of row lane / 4, two of the row 8 below, for each 8 columns. */
template <class P> using Accumulator = float[P::ROWS / 64][P::BN / 2];
template <class P> using Finished = float[P::ROWS / 64][P::COLUMNS / 2];

/* This warp is done with a stage: tell the blocks that load into it. */
template <class P> __device__ __forceinline__ void release(Shared<P> shared, int stage, int split, int lane) {
  if constexpr (P::SHARE > 1) {
    if (lane < P::SHARE) barrier_arrive_there(address_in(shared.empty(stage), split * P::SHARE + lane));
  } else {
    if (lane == 0) barrier_arrive(shared.empty(stage));
  }
}

/* sum = A B over the stages of a tile, at least one. While one stage is multiplied the next is waited for: a stage is
 * released when the one after it has been started. Consumers that ping-pong take turns, since a barrier tells only the
 * last two rounds of the ring apart. */
template <class P>
__device__ __forceinline__ void multiply(
    Accumulator<P> &sum, Ring<P::STAGES> &ring, Shared<P> shared, const Tiles<P> &tiles, int consumer, int lane) {
  constexpr bool TURNS = P::SCHEME == PINGPONG;
  int top = TURNS ? 0 : consumer * P::ROWS;
  if constexpr (TURNS) await_turn(consumer);
  auto start = [&](bool add) {
    barrier_wait(shared.full(ring.stage), ring.phase);
    uint64_t a = OperandA<P>::describe(shared.a(ring.stage) + OperandA<P>::offset(top, 0));
    uint64_t b = OperandB<P>::describe(shared.b(ring.stage));
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < BK / 16; ++step) {
#pragma unroll
      for (int piece = 0; piece < P::ROWS / 64; ++piece) {
        FromShared<P::BN, TRANS_A, !TRANS_B>::add(sum[piece], a + OperandA<P>::offset(64 * piece, step) / 16,
                          b + OperandB<P>::offset(0, step) / 16, add || step > 0);
      }
    }
    wgmma_commit();
  };
  start(false);
  int last = ring.stage;
  ring.next();
#pragma unroll 1
  for (int block = 1; block < tiles.blocks; ++block) {
    start(true);
    wgmma_wait<1>();
    release<P>(shared, last, tiles.split, lane);
    last = ring.stage;
    ring.next();
  }
  if constexpr (TURNS) give_turn(1 - consumer);
  wgmma_wait<0>();
  release<P>(shared, last, tiles.split, lane);
}

/* Add up what the blocks that split a tile have, each block its own columns: it sends what it has of the others'. With GLU
 * those are as many of the gates as of the values. */
template <class P>
__device__ __forceinline__ void add_up(
    Finished<P> &total, const Accumulator<P> &sum, Shared<P> shared, const Tiles<P> &tiles) {
  constexpr int PIECES = P::ROWS / 64, QUADS = P::COLUMNS / 8, SIDE = QUADS / HALVES;
  auto slot = [&](int other, int piece, int quad) { /* four floats of each thread */
    return shared.base + P::AT_RECEIVED + (((other * PIECES + piece) * QUADS + quad) * 2 * GROUP + threadIdx.x) * 16;
  };
  if constexpr (P::SHARE == 1) cluster_wait(); /* all have their barriers ready */
#pragma unroll
  for (int part = 0; part < P::SPLIT; ++part) {
    int rank = part * P::SHARE + tiles.share;
    uint32_t to = address_in(slot(tiles.split - (tiles.split > part), 0, 0), rank);
    uint32_t barrier = address_in(shared.received(), rank);
#pragma unroll
    for (int piece = 0; piece < PIECES; ++piece) {
#pragma unroll
      for (int quad = 0; quad < QUADS; ++quad) {
        const float *mine = &sum[piece][4 * (quad / SIDE * (P::OUT / 8) + part * SIDE + quad % SIDE)];
        if (part != tiles.split) {
          send(to + slot(0, piece, quad) - slot(0, 0, 0), barrier, mine);
        } else {
#pragma unroll
          for (int i = 0; i < 4; ++i) total[piece][4 * quad + i] = mine[i];
        }
      }
    }
  }
  barrier_wait(shared.received(), 0);
#pragma unroll
  for (int other = 0; other < P::SPLIT - 1; ++other) {
#pragma unroll
    for (int piece = 0; piece < PIECES; ++piece) {
#pragma unroll
      for (int quad = 0; quad < QUADS; ++quad) {
        float4 theirs = read_shared(slot(other, piece, quad));
        float *all = &total[piece][4 * quad];
        all[0] += theirs.x, all[1] += theirs.y, all[2] += theirs.z, all[3] += theirs.w;
      }
    }
  }
}

/* x, as if it were new: products with it are then made where they are used, not kept in registers that sums need. */
__device__ __forceinline__ index_t anew(index_t x) {
  asm volatile("" : "+l"(x));
  return x;
}

__device__ __forceinline__ uint32_t pack(C low, C high) {
  C pair[2] = {low, high};
  uint32_t packed;
  memcpy(&packed, pair, 4);
  return packed;
}

/* Finish a warp's 16 rows of a chunk, and stage them; the sums of values are VALUES behind those of their gates. Bias and
 * residual are loaded for STEP sums at once: for more there are no registers, and fewer would be waited for more often. */
template <int CHUNK, int VALUES>
__device__ __forceinline__ void stage_chunk(
    uint32_t to, const float *sum, const Call &call, Factors factors, int batch, int m, int n, int lane) {
  using Chunk = staging::Chunk<C, CHUNK>;
  constexpr int MOST = 64 / int(sizeof(Beside)) / HALVES, STEP = CHUNK / 2 < MOST ? CHUNK / 2 : MOST;
  /* This lane's first element of the chunk, and how many rows and columns there are from it on. */
  int row = m + lane / 4, column = n + lane % 4 * 2, rows = int(call.m) - row, columns = int(call.n) - column;
  const Beside *bias = BIAS ? call.bias + column * call.of_bias : nullptr;
  const Beside *residual = RESIDUAL ? call.residual + call.of_residual.at(batch, row, column) : nullptr;
#pragma unroll
  for (int first = 0; first < CHUNK / 2; first += STEP) {
    Beside biases[HALVES][STEP / 2] = {}, residuals[STEP] = {};
    if constexpr (BIAS || RESIDUAL) __syncwarp(); /* or the loads of all steps would start here */
#pragma unroll
    for (int i = 0; i < STEP; ++i) { /* of the accumulator */
      int down = (i & 2) * 4, right = (first + i) / 4 * 8 + (i & 1);
      if constexpr (RESIDUAL) {
        index_t at = down * anew(call.of_residual.row) + right * anew(call.of_residual.column);
        residuals[i] = down < rows && right < columns ? residual[at] : Beside(0.f);
      }
#pragma unroll
      for (int half = 0; half < HALVES; ++half) {
        if (!BIAS || down > 0) continue;
        index_t at = (half ? right + anew(call.n) : right) * anew(call.of_bias);
        biases[half][i / 4 * 2 + (i & 1)] = right < columns ? bias[at] : Beside(0.f);
      }
    }
    auto element = [&](int i) {
      const float *at = sum + first + i;
      return epilogue(
          at[0], at[GLU ? VALUES : 0], factors, [&](int half) { return biases[half][i / 4 * 2 + (i & 1)]; },
          [&] { return residuals[i]; });
    };
#pragma unroll
    for (int i = 0; i < STEP; i += 8) {
      int left = 2 * (first + i); /* of 16 columns */
      if constexpr (sizeof(C) == 2) {
        uint32_t packed[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) packed[j] = pack(element(i + 2 * j), element(i + 2 * j + 1));
        store_matrix(to + Chunk::place(lane % 16, left + lane / 16 * 8), packed);
      } else {
#pragma unroll
        for (int j = 0; j < 8; j += 2) {
          Chunk::put(
              to, lane / 4 + (j & 2) * 4, left + j / 4 * 8 + lane % 4 * 2, element(i + j), element(i + j + 1));
        }
      }
    }
  }
}

/* Finish a consumer's rows, from row m and column n of C on, and store them. */
template <class P>
__device__ __forceinline__ void finish(
    const Finished<P> &sum, const TensorMap &map_c, const Call &call, bool direct, uint32_t staging, int batch, int m,
    int n) {
  int lane = threadIdx.x % 32, first = m + threadIdx.x / 32 % 4 * 16;
  Factors factors(call.alpha, call.out_scale);
  staging::store<C, P::ROWS / 64, P::COLUMNS / HALVES, P::CHUNK>(
      call, map_c, direct, staging, batch, first, n, [&](uint32_t chunk, int piece, int column) {
        const float *from = &sum[piece][column / 2];
        stage_chunk<P::CHUNK, P::COLUMNS / 4>(chunk, from, call, factors, batch, first + 64 * piece, n + column, lane);
      });
}

template <class P>
__device__ __forceinline__ void consume(
    const TensorMap &map_c, const Call &call, bool direct, const Tiles<P> &tiles, Shared<P> shared, int consumer) {
  int lane = threadIdx.x % 32;
  uint32_t staging = shared.staging(consumer * 4 + threadIdx.x / 32 % 4);
  Ring<P::STAGES> ring;
  int first = tiles.first, step = tiles.step, top = 0;
  if constexpr (P::SCHEME == COOPERATIVE) {
    top = consumer * P::ROWS;
  } else { /* every other tile, and none of the stages of those between */
    if (consumer == 1) ring.skip(tiles.blocks), give_turn(0);
    first += consumer * tiles.step, step *= 2;
  }
  for (int i = first; i < tiles.count; i += step) {
    Accumulator<P> sum;
    int m, n, batch;
    multiply<P>(sum, ring, shared, tiles, consumer, lane);
    if constexpr (P::SCHEME == PINGPONG) ring.skip(tiles.blocks);
    tiles.place(i, m, n, batch);
    if constexpr (P::SPLIT > 1) {
      Finished<P> total;
      add_up<P>(total, sum, shared, tiles);
      finish<P>(total, map_c, call, direct, staging, batch, m + top, n + tiles.split * (P::COLUMNS / HALVES));
    } else {
      finish<P>(sum, map_c, call, direct, staging, batch, m + top, n);
    }
  }
  if (lane == 0) store_wait<0>();
}

/* -- the kernel ---------------------------------------------------------------------------------- */

/* One call, by as many blocks as fit; with SPLIT, by a cluster a tile. `direct`: C has no tensor map, and map_c is any.
 * K is above BK * (SPLIT - 1); the extents, and a step past the last of all tiles, are ints. */
template <class P>
__device__ __forceinline__ void gemm(
    const TensorMap &map_a, const TensorMap &map_b, const TensorMap &map_c, bool direct, const Call &call) {
  extern __shared__ __align__(1024) uint8_t memory[];
  Shared<P> shared{shared_address(memory)};
  Tiles<P> tiles(call);
  if (threadIdx.x == 2 * GROUP) prefetch(map_a), prefetch(map_b), prefetch(map_c);
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < P::STAGES; ++stage) {
      barrier_init(shared.full(stage), 1);
      barrier_init(shared.empty(stage), P::READERS * P::SHARE);
    }
    if constexpr (P::SPLIT > 1) barrier_init(shared.received(), 1), barrier_expect(shared.received(), P::RECEIVED);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if constexpr (P::CLUSTER > 1) cluster_arrive();
  if constexpr (P::SHARE > 1) cluster_wait(); /* the others load into this block's ring, and arrive at its barriers */
  wait_for_previous();
  start_next();

  int group = __shfl_sync(0xffffffff, threadIdx.x / GROUP, 0);
  if (group == 2) {
    give_registers<PRODUCER_REGISTERS>();
    if (threadIdx.x == 2 * GROUP) produce<P>(map_a, map_b, tiles, shared, int(call.n));
    __syncwarp();
  } else {
    take_registers<CONSUMER_REGISTERS>();
    consume<P>(map_c, call, direct, tiles, shared, group);
  }
  /* no block leaves while another may still arrive at its barriers */
  if constexpr (P::SHARE > 1) cluster_arrive(), cluster_wait();
}

}  // namespace hopper

/* SHARED: the bytes of shared memory that a launch has; then the arguments of Plan. */
#define HOPPER(NAME, SHARED, ...)                                                                             \
  static_assert(hopper::Plan<__VA_ARGS__>::BYTES == SHARED, "Plan.shared has another layout");                \
  extern "C" __global__ void __launch_bounds__(hopper::THREADS, 1) NAME(                                      \
      const __grid_constant__ hopper::TensorMap map_a, const __grid_constant__ hopper::TensorMap map_b,       \
      const __grid_constant__ hopper::TensorMap map_c, int direct, CALL_PARAMETERS) {                         \
    hopper::gemm<hopper::Plan<__VA_ARGS__>>(map_a, map_b, map_c, direct, CALL);                                \
  }
