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
 * is stored so, else along M or N; wgmma takes both. What is out of bounds arrives as zeros, and is not stored. With
 * GLU a tile of B is a half of gates and a half of the values that belong to them, so that a thread has the sums of both.
 *
 * The epilogue (hopper_finish.cuh) waits for no memory: a residual comes through the ring, in stages behind those of its
 * tile, a bias while the tile is multiplied, and what is finished leaves through shared memory (staging.cuh).
 */

namespace hopper {

/* -- the producer -------------------------------------------------------------------------------- */

template <class P>
__device__ __forceinline__ void produce(
    const TensorMap &map_a, const TensorMap &map_b, const TensorMap &map_residual, bool direct, const Tiles<P> &tiles,
    Shared<P> shared, int columns) {
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
    n += tiles.split * P::FINISHED;
    for (int box = 0; P::FURTHER > 0 && !direct && box < P::BOXES; box += P::PER) {
      uint32_t full = shared.full(ring.stage);
      int count = min(P::PER, P::BOXES - box);
      barrier_wait(shared.empty(ring.stage), ring.phase ^ 1);
      barrier_expect(full, count * P::BOX_BYTES);
      for (int i = 0; i < count; ++i) {
        load_box(shared.a(ring.stage) + i * P::BOX_BYTES, map_residual, full, n + (box + i) * P::CHUNK, m, batch);
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

/* sum = A B over the stages of a tile, at least one. While one stage is multiplied the next is waited for: a stage is
 * released when the one after it has been started. Consumers that ping-pong take turns, since a barrier tells only the
 * last two rounds of the ring apart. `count` stages of a residual follow. */
template <class P>
__device__ __forceinline__ void multiply(
    Accumulator<P> &sum, Ring<P::STAGES> &ring, Shared<P> shared, const Tiles<P> &tiles, int count, int consumer,
    int lane) {
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
  if constexpr (TURNS) { /* not before the residual is there: the other relies on every stage ahead of its own */
    Ring<P::STAGES> further = ring;
    for (int i = 0; i < count; ++i, further.next()) barrier_wait(shared.full(further.stage), further.phase);
    give_turn(1 - consumer);
  }
  wgmma_wait<0>();
  release<P>(shared, last, tiles.split, lane);
}

/* Add up what the blocks that split a tile have, each block its own columns: it sends what it has of the others'. With
 * GLU those are as many of the gates as of the values. */
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

template <class P>
__device__ __forceinline__ void consume(
    const TensorMap &map_c, const Call &call, bool direct, const Tiles<P> &tiles, Shared<P> shared, int consumer) {
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, row = 16 * warp;
  uint32_t staging = shared.staging(consumer * 4 + warp);
  Ring<P::STAGES> ring;
  int first = tiles.first, step = tiles.step, top = 0, count = direct ? 0 : P::FURTHER, stages = tiles.blocks + count;
  if constexpr (P::SCHEME == COOPERATIVE) {
    top = consumer * P::ROWS;
  } else { /* every other tile, and none of the stages of those between */
    if (consumer == 1) ring.skip(stages), give_turn(0);
    first += consumer * tiles.step, step *= 2;
  }
  for (int i = first; i < tiles.count; i += step) {
    Accumulator<P> sum;
    Added<P> added;
    int m, n, batch;
    tiles.place(i, m, n, batch);
    n += tiles.split * P::FINISHED;
    if constexpr (BIAS) added.bias.load(call, n, lane);
    multiply<P>(sum, ring, shared, tiles, count, consumer, lane);
    if constexpr (LOADED) {
      if (direct) {
        added.residual.load(staging, call, batch, m + top + row, n, lane);
      } else {
        added.residual.take(ring, shared, top + row, tiles.split, lane);
      }
    }
    if constexpr (P::SPLIT > 1) {
      Finished<P> total;
      add_up<P>(total, sum, shared, tiles);
      finish<P>(total, added, map_c, call, direct, staging, batch, m + top, n);
    } else {
      finish<P>(sum, added, map_c, call, direct, staging, batch, m + top, n);
    }
    if constexpr (P::SCHEME == PINGPONG) ring.skip(stages);
  }
  if (lane == 0) store_wait<0>();
}

/* -- the kernel ---------------------------------------------------------------------------------- */

/* One call, by as many blocks as fit; with SPLIT, by a cluster a tile. `direct`: C has no tensor map, and map_c is any.
 * K is above BK * (SPLIT - 1); the extents, and a step past the last of all tiles, are ints. */
template <class P>
__device__ __forceinline__ void gemm(
    const TensorMap &map_a, const TensorMap &map_b, const TensorMap &map_c, const TensorMap &map_residual, bool direct,
    const Call &call) {
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
    if (threadIdx.x == 2 * GROUP) produce<P>(map_a, map_b, map_residual, direct, tiles, shared, int(call.n));
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
      const __grid_constant__ hopper::TensorMap map_c, const __grid_constant__ hopper::TensorMap map_residual, \
      int direct, CALL_PARAMETERS) {                                                                           \
    hopper::gemm<hopper::Plan<__VA_ARGS__>>(map_a, map_b, map_c, map_residual, direct, CALL);                  \
  }
