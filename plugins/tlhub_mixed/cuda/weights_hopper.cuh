/* gemm_w4a16 and gemm_w8a16 on Hopper (sm_90a), for any number of rows of a: codes become numbers in registers, which
 * tensor cores take as they are.
 *
 * Weights are operand a of the product, 16 rows of w of each of eight warps, and rows of a are its columns: up to 16 by
 * mma.sync, more by wgmma. A thread of another warp keeps a ring of stages filled, by bulk tensor copies: 64 bytes of
 * codes of each row of w, and of a the STEP elements that belong to them, in boxes of 128 bytes. The blocks of a
 * cluster share K; what they have is added up in the end.
 */

namespace weights {

/* What a kernel is: its Python side is hopper/weights_program.py. A block multiplies COLUMNS rows of a and ROWS of w;
 * with GLU half of these are gates, the others their values. */
template <int COLUMNS_, int STAGES_, int BLOCKS_> struct Tile {
  static constexpr int COLUMNS = COLUMNS_, STAGES = STAGES_;
  static constexpr int BLOCKS = BLOCKS_; /* that a processor has room for */
  static constexpr int CONSUMERS = 8, THREADS = 32 * CONSUMERS; /* warps that multiply, their threads */
  static constexpr int ALL = THREADS + 128;                     /* with the producer's warp group */
  /* of a thread; a processor has 65536, and a launch takes the same for all, a multiple of 8 */
  static constexpr int ALL_REGISTERS = 65536 / ALL / BLOCKS / 8 * 8 * 3, PRODUCER_REGISTERS = 40;
  static constexpr int CONSUMER_REGISTERS = (ALL_REGISTERS - PRODUCER_REGISTERS) / 2 / 8 * 8;
  static constexpr int ROWS = 16 * CONSUMERS, OUT = GLU ? ROWS / 2 : ROWS;
  static constexpr int BOX = 128 * COLUMNS, BOXES = STEP / 64; /* bytes, and how many a stage has of a */
  static constexpr int AT_CODES = BOX * BOXES, STAGE = AT_CODES + 64 * ROWS;
  static constexpr bool WGMMA = COLUMNS > 16; /* else mma.sync, which takes less time for so few */
  static constexpr int GROUPS = 1, PITCH = ROWS + 4; /* of sums in shared memory, as in Plan */
  static constexpr int AT_BARRIERS = STAGES * STAGE, TOTAL = AT_BARRIERS + 16 * STAGES;

  static_assert(COLUMNS * PITCH * 4 <= AT_BARRIERS, "sums take the place of the ring");
};

constexpr int CHUNK = 128 / BITS, SLICES = CHUNK / 16; /* k of 16 bytes of codes; products, of 16 k each */

/* Where things are: a block's tile of c, its steps, and addresses in shared memory. */
template <class P> struct Place {
  int across, top, from, to;
  uint32_t base;

  __device__ __forceinline__ Place(const Call &call, uint32_t base) : base(base) {
    int down = (call.m + P::COLUMNS - 1) / P::COLUMNS, steps = (call.k + STEP - 1) / STEP;
    int share = (steps + gridDim.y - 1) / gridDim.y;
    across = blockIdx.x / down * P::OUT, top = blockIdx.x % down * P::COLUMNS;
    from = min(int(blockIdx.y) * share, steps), to = min(from + share, steps);
  }

  __device__ __forceinline__ uint32_t elements(int stage) const { return base + stage * P::STAGE; }
  __device__ __forceinline__ uint32_t codes(int stage) const { return elements(stage) + P::AT_CODES; }
  __device__ __forceinline__ uint32_t full(int stage) const { return base + P::AT_BARRIERS + 8 * stage; }
  __device__ __forceinline__ uint32_t empty(int stage) const { return full(P::STAGES + stage); }

  /* The row of w that is this row of the block's. */
  __device__ __forceinline__ int row(const Call &call, int row) const {
    return across + row + row / P::OUT * (call.n - P::OUT);
  }
};

/* Do `use` for each box of codes of a block: its first row among the block's, and of w. */
template <class P, class Use>
__device__ __forceinline__ void each_box(const Call &call, const Place<P> &place, Use use) {
#pragma unroll
  for (int row = 0; row < P::ROWS; row += P::OUT) use(row, place.row(call, row));
}

template <class P>
__device__ __forceinline__ void produce(
    const TensorMap &map_a, const TensorMap &map_w, const Call &call, const Place<P> &place) {
  Ring<P::STAGES> ring;
  for (int step = place.from; step < place.to; ++step) {
    uint32_t full = place.full(ring.stage);
    barrier_wait(place.empty(ring.stage), ring.phase ^ 1);
    barrier_expect(full, P::STAGE);
    each_box(call, place, [&](int first, int row) {
      load_box(place.codes(ring.stage) + 64 * first, map_w, full, 64 * step, row, 0);
    });
#pragma unroll
    for (int box = 0; box < P::BOXES; ++box) {
      load_box(place.elements(ring.stage) + box * P::BOX, map_a, full, step * STEP + 64 * box, place.top, 0);
    }
    ring.next();
  }
}

/* Two pairs of numbers, of k 2 q and 2 q + 8 of 16, that lane q of four has of a row. `words`: the codes of these. */
template <bool SCALED, int N>
__device__ __forceinline__ void two_pairs(const uint32_t *words, Group group, uint32_t (&pairs)[N]) {
  static_assert(N == 2);
  int q = threadIdx.x % 4;
  if constexpr (BITS == 8) {
    uint32_t pick = 0x10 + 0x22 * q, low = __byte_perm(words[0], words[1], pick);
    numbers<SCALED>(__byte_perm(low, __byte_perm(words[2], words[3], pick), 0x5410), group, pairs);
  } else {
    constexpr bool HIGH = Two<A>::FIRST == 1024, TWICE = ZEROS && !HIGH; /* as in `numbers` */
    uint32_t twice = __byte_perm(words[0], words[1], 0x4040 + 0x1111 * q); /* a byte is a pair, and is in both halves */
    if constexpr (!HIGH) twice = __byte_perm(twice, twice >> 4, 0x7610);
    Pair scale = Two<A>::both(group.scale), zero = Two<A>::both(group.zero);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      Pair x;
      if constexpr (HIGH) { /* in the upper half is 16 times the code */
        x = pair_of(masked<0x00f0000f>(twice >> 8 * i));
        x = __hfma2(x, pair_of(0x2c003c00), __hsub2(pair_of(0xd400e400), zero)); /* 1 and 1/16, -1024 and -64 */
      } else {
        Pair from = Two<A>::both(Two<A>::FIRST + (TWICE ? 0 : group.zero));
        x = __hsub2(pair_of(masked<0x000f000f>(twice >> 8 * i)), from);
        if constexpr (TWICE) x = __hsub2(x, zero);
      }
      pairs[i] = bits_of(SCALED ? __hmul2(x, scale) : x);
    }
  }
}

/* The sums of a warp group: two of row lane / 4, two of the row 8 below, for each 8 rows of a. */
template <class P> using TileSums = float[P::COLUMNS / 2];

/* What a lane has of a's rows in two products by mma.sync, 16 k each: `first` is the number of their first 16 bytes. */
template <class P>
__device__ __forceinline__ void load_right(uint32_t (&right)[P::COLUMNS / 8][4], uint32_t elements, int first) {
  int lane = threadIdx.x % 32, chunk = first % 8 + lane / 8;
#pragma unroll
  for (int i = 0; i < P::COLUMNS / 8; ++i) {
    uint32_t row = elements + first / 8 * P::BOX + (8 * i + lane % 8) * 128;
    warp_mma::load_matrices(right[i], row + (chunk ^ lane % 8) * 16);
  }
}

/* sum = the products of this block's steps. By wgmma one chunk is multiplied while the next becomes numbers, and a
 * stage is released when two chunks of the one after it have been started. */
template <class P>
__device__ __forceinline__ void consume(
    TileSums<P> &sum, const Call &call, const Weights &w, const Place<P> &place) {
  constexpr int KINDS = Groups<2>::KINDS;
  int lane = threadIdx.x % 32, mine = threadIdx.x / 32 * 16 + lane / 4, last = -1;
  Row rows[2] = {
      row_of(w, min(place.row(call, mine), w.rows - 1)), row_of(w, min(place.row(call, mine + 8), w.rows - 1))};
  auto k_at = [&](int i) { return (place.from + i) * STEP; };
  Groups<2> ahead;
  ahead.start(w, rows, k_at);
  Ring<P::STAGES> ring;
  uint32_t left[2][SLICES][4];
  [[maybe_unused]] uint32_t right[P::COLUMNS / 8][4];
  Group groups[2][KINDS];
  /* Add the products of a stage whose first k is `first`. */
  auto multiply = [&](TileSums<P> &sum, int first, auto scaled) {
    constexpr bool SCALED = decltype(scaled)::value;
    uint32_t elements = place.elements(ring.stage);
#pragma unroll
    for (int chunk = 0; chunk < 4; ++chunk) {
      uint4 codes[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) { /* rows are 64 bytes, swizzled alike */
        codes[i] = read_place(place.codes(ring.stage) + 64 * mine + (chunk ^ mine / 2 % 4) * 16 + 8 * 64 * i);
      }
      if constexpr (P::WGMMA) {
        wgmma_wait<1>();
        if (chunk == 1 && last >= 0 && lane == 0) barrier_arrive(place.empty(last));
      } else if (chunk * SLICES % 2 == 0) {
        load_right<P>(right, elements, chunk * SLICES * 2);
      }
      uint32_t(&four)[SLICES][4] = left[chunk % 2];
#pragma unroll
      for (int i = 0; i < 2 * SLICES; ++i) {
        int slice = i / 2, k = chunk * CHUNK + slice * 16;
        uint32_t words[4] = {codes[i % 2].x, codes[i % 2].y, codes[i % 2].z, codes[i % 2].w}, pairs[2];
        two_pairs<SCALED>(words + slice * (4 / SLICES), groups[i % 2][k / (STEP / KINDS)], pairs);
        if constexpr (SCALED && GROUP_SIZE == 0) cut<8, 1>(pairs, w.depth - (first + k + lane % 4 * 2));
        four[slice][i % 2] = pairs[0], four[slice][2 + i % 2] = pairs[1];
      }
      if constexpr (P::WGMMA) wgmma_fence();
#pragma unroll
      for (int slice = 0; slice < SLICES; ++slice) {
        int number = chunk * SLICES + slice; /* of the step's products */
        if constexpr (P::WGMMA) {
          uint64_t from = describe<128>(elements) + (number / 4 * P::BOX + number % 4 * 32) / 16;
          FromRegisters<P::COLUMNS>::add(sum, four[slice], from, true);
        } else {
#pragma unroll
          for (int i = 0; i < P::COLUMNS / 8; ++i) {
            warp_mma::multiply<A>(sum + 4 * i, four[slice], right[i][number % 2 * 2], right[i][number % 2 * 2 + 1]);
          }
        }
      }
      if constexpr (P::WGMMA) wgmma_commit();
    }
  };
  if constexpr (P::WGMMA) wgmma_wait<0>(sum); /* zeros are there before the first product */
#pragma unroll 1
  for (int number = 0; number < place.to - place.from; ++number) {
    int first = k_at(number);
    ahead.advance(number, w, rows, k_at);
#pragma unroll
    for (int i = 0; i < 2 * KINDS; ++i) {
      groups[i % 2][i / 2] = ahead.of(i % 2, number, i / 2, first + i / 2 * (STEP / KINDS) < w.depth);
    }
    barrier_wait(place.full(ring.stage), ring.phase);
    bool finite = isfinite(groups[0][0].scale) && isfinite(groups[1][0].scale);
    if (!P::WGMMA && KINDS == 1 && __all_sync(0xffffffff, finite)) { /* as for few rows, sums are scaled */
      TileSums<P> part = {};
      multiply(part, first, std::false_type());
#pragma unroll
      for (int i = 0; i < P::COLUMNS / 2; ++i) sum[i] = fmaf(part[i], groups[i / 2 % 2][0].scale, sum[i]);
    } else {
      multiply(sum, first, std::true_type());
    }
    if constexpr (!P::WGMMA) {
      __syncwarp();
      if (lane == 0) barrier_arrive(place.empty(ring.stage));
    }
    last = ring.stage;
    ring.next();
  }
  if constexpr (P::WGMMA) wgmma_wait<0>(sum);
}

template <class P>
__device__ __forceinline__ void multiply_tile(
    const TensorMap &map_a, const TensorMap &map_w, const Call &call, const Weights &w) {
  extern __shared__ __align__(1024) uint8_t tile_memory[];
  Place<P> place(call, shared_address(tile_memory));
  int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  bool producer = warp >= P::CONSUMERS, first = threadIdx.x == 32 * P::CONSUMERS; /* of the producer's threads */
  if (first) prefetch(map_a), prefetch(map_w);
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < P::STAGES; ++stage) {
      barrier_init(place.full(stage), 1), barrier_init(place.empty(stage), P::CONSUMERS);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  wait_for_previous();
  start_next();
  if (producer) {
    give_registers<P::PRODUCER_REGISTERS>();
    if (first) produce(map_a, map_w, call, place);
    __syncwarp();
    wait_for_cluster(), wait_for_cluster(); /* as in `finish` */
  } else {
    take_registers<P::CONSUMER_REGISTERS>();
    TileSums<P> sum = {};
    consume(sum, call, w, place);
    asm volatile("bar.sync 1, %0;" ::"n"(P::THREADS) : "memory"); /* the ring is done with */
    float *shared = reinterpret_cast<float *>(tile_memory);       /* [COLUMNS][PITCH] */
#pragma unroll
    for (int i = 0; i < P::COLUMNS / 2; ++i) {
      int row = 16 * warp + lane / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
      shared[column * P::PITCH + row] = sum[i];
    }
    finish<P>(call, shared, place.across, place.top);
  }
}

}  // namespace weights

/* SHARED: the bytes of shared memory that a launch has; then the arguments of Tile. */
#define TILE_ROWS(NAME, SHARED, ...)                                                                           \
  static_assert(weights::Tile<__VA_ARGS__>::TOTAL == SHARED, "weights_program.py has another layout");         \
  extern "C" __global__ void                                                                                   \
      __launch_bounds__(weights::Tile<__VA_ARGS__>::ALL, weights::Tile<__VA_ARGS__>::BLOCKS) NAME(         \
      const __grid_constant__ weights::TensorMap map_a, const __grid_constant__ weights::TensorMap map_w,      \
      WEIGHTS_PARAMETERS, CALL_PARAMETERS) {                                                                   \
    weights::multiply_tile<weights::Tile<__VA_ARGS__>>(map_a, map_w, CALL, WEIGHTS(k));                        \
  }
