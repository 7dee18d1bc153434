/* gemm_w4a16 and gemm_w8a16 by mma.sync, on any GPU that has it.
 *
 * For few rows of a, where reading the weights is what takes time. Weights are operand a of the product, 16 rows of w
 * at a time, and rows of a are its eight columns. The groups of a block's warps share K, step by step, and so do the
 * blocks of a cluster; what they have is added up in the end, in order. A lane copies 16 bytes of codes of each of its
 * rows, which are its 32 or 16 k of a step, to a place of its own in shared memory, some steps ahead; the elements of a
 * are the group's. Which k a product calls first does not matter, as long as both operands agree.
 */

namespace weights {

constexpr int CHUNKS = EACH * 2 / 16; /* of 16 bytes, of a row of a, that belong to a lane's codes of a step */

/* Bytes of codes in a row. */
__device__ __forceinline__ int row_bytes(const Weights &w) { return BITS == 4 ? (w.depth + 1) / 2 : w.depth; }
__device__ __forceinline__ int byte_of(int k) { return BITS == 4 ? unsigned(k) / 2 : k; }

__device__ __forceinline__ uint32_t word_of(const uint4 &four, int i) {
  return i == 0 ? four.x : i == 1 ? four.y : i == 2 ? four.z : four.w;
}

struct Few { /* rows of a, and how they lie */
  const A *at;
  index_t row, column;
};

/* What a kernel is: its Python side is in weights_program.py. A block multiplies 8 MT rows of a and ROWS of w; with
 * GLU half of these are gates, the others their values. WHOLE: 16 bytes in a row are copied at once. */
template <int MT_, bool WHOLE_> struct Plan {
  static constexpr int MT = MT_, TILES = 2; /* of 16 rows of w, of a warp */
  static constexpr bool WHOLE = WHOLE_;
  /* a step has one scale, and there are registers: sums are multiplied by it, not weights */
  static constexpr bool LATE = Groups<1>::KINDS == 1 && MT < 4;
  static constexpr int GROUPS = 2, WARPS = 4;           /* that share K, and of each, side by side */
  static constexpr int GROUP = 32 * WARPS, THREADS = GROUPS * GROUP;
  static constexpr int ROWS = 16 * TILES * WARPS, COLUMNS = 8 * MT, OUT = GLU ? ROWS / 2 : ROWS;
  static constexpr int CODES = 2 * TILES * 16 * THREADS; /* bytes of a stage, those of a after them */
  static constexpr int ELEMENTS = COLUMNS * STEP * 2;    /* of a group */
  static constexpr int STAGE = CODES + GROUPS * ELEMENTS;
  static constexpr int STAGES = 98304 / STAGE < 4 ? 98304 / STAGE : 4;
  static constexpr int BLOCKS = WHOLE ? 2 : 1; /* of a processor, at least */
  static constexpr int PITCH = ROWS + 4;       /* of sums in shared memory; without bank conflicts */
  static constexpr int TOTAL = STAGES * STAGE; /* bytes of shared memory */

  static_assert(STAGES > 1 && GROUPS * COLUMNS * PITCH * 4 <= TOTAL, "sums take the place of the ring");
};

/* Start to copy `bytes` of a chunk, the rest is zeros. */
__device__ __forceinline__ void copy_chunk(uint32_t to, const void *from, int bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

/* Copy to a place up to 16 bytes, COUNT elements from the first on, of which there are `left`; the rest is zeros. */
template <bool WHOLE, class E>
__device__ __forceinline__ void fetch(uint32_t to, const E *from, index_t step, int left) {
  constexpr int COUNT = 16 / sizeof(E);
  int count = max(0, min(left, COUNT));
  if constexpr (WHOLE) {
    copy_chunk(to, from, count * int(sizeof(E)));
  } else {
    E *place = static_cast<E *>(__cvta_shared_to_generic(to));
#pragma unroll 1
    for (int i = 0; i < COUNT; ++i) place[i] = i < count ? from[i * step] : E(0.f);
  }
}

/* The pairs of a that belong to those of word `word` of the codes: of a lane's chunks of a row. */
__device__ __forceinline__ void elements(const uint4 &chunk, int word, uint32_t (&pairs)[PAIRS]) {
  if constexpr (BITS == 4) { /* i and i + 4 */
    pairs[0] = __byte_perm(chunk.x, chunk.z, 0x5410), pairs[1] = __byte_perm(chunk.x, chunk.z, 0x7632);
    pairs[2] = __byte_perm(chunk.y, chunk.w, 0x5410), pairs[3] = __byte_perm(chunk.y, chunk.w, 0x7632);
  } else {
    pairs[0] = word % 2 ? chunk.z : chunk.x, pairs[1] = word % 2 ? chunk.w : chunk.y;
  }
}

/* Sums of 16 TILES x 8 MT: two of row lane / 4, two of the row 8 below, for each 8 columns. */
template <class P> using Sums = float[P::TILES][P::MT][4];

template <class P> struct Lane {
  const Call &call;
  const Few &a;
  const Weights &w;
  int across, top;       /* the block's place */
  Row rows[P::TILES][2]; /* of w: those past the end are the last, and never written */
  int group;             /* its group of warps */
  int first, steps;      /* the group's steps, one after the other */
  int start;             /* with which of them it begins: not all read the same of a at once */
  uint32_t shared;

  __device__ __forceinline__ Lane(const Call &call, const Few &a, const Weights &w, uint32_t shared)
      : call(call), a(a), w(w), shared(shared) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % P::WARPS, down = (call.m + P::COLUMNS - 1) / P::COLUMNS;
    across = blockIdx.x / down * P::OUT, top = blockIdx.x % down * P::COLUMNS;
    group = threadIdx.x / P::GROUP;
#pragma unroll
    for (int i = 0; i < P::TILES * 2; ++i) {
      int row = 16 * (warp * P::TILES + i / 2), part = row / P::OUT;
      row += part * (call.n - P::OUT) + across + i % 2 * 8 + lane / 4;
      rows[i / 2][i % 2] = row_of(w, min(row, w.rows - 1));
    }
    int all = (w.depth + STEP - 1) / STEP, parts = gridDim.y * P::GROUPS, share = (all + parts - 1) / parts;
    first = (blockIdx.y * P::GROUPS + group) * share;
    steps = max(0, min(share, all - first));
    start = steps ? blockIdx.x / down % steps : 0;
  }

  __device__ __forceinline__ int k_of(int k) const { return k + threadIdx.x % 4 * EACH; } /* this lane's, of a step's */

  /* Where codes are, and chunk `part` of those that belong to them of a row of a, which lane `quarter` of four has. */
  __device__ __forceinline__ uint32_t at_codes(int stage, int i) const {
    return shared + stage * P::STAGE + (i * P::THREADS + threadIdx.x) * 16;
  }
  __device__ __forceinline__ uint32_t at_elements(int stage, int row, int quarter, int part) const {
    int place = (part * 4 + quarter) ^ (row & 1) << 2; /* without bank conflicts */
    return shared + stage * P::STAGE + P::CODES + group * P::ELEMENTS + (row * 4 * CHUNKS + place) * 16;
  }

  /* The first k of its step number i. */
  __device__ __forceinline__ int k_at(int i) const {
    int at = start + i;
    return i < steps ? (first + (at < steps ? at : at - steps)) * STEP : w.depth;
  }

  /* Start to copy what is multiplied at the step from k on. */
  __device__ __forceinline__ void load(int stage, int k) const {
    int byte = min(byte_of(k_of(k)), row_bytes(w));
    index_t column = P::WHOLE ? 1 : w.column, column_of_a = P::WHOLE ? 1 : a.column;
#pragma unroll
    for (int i = 0; i < P::TILES * 2; ++i) {
      fetch<P::WHOLE>(at_codes(stage, i), rows[i / 2][i % 2].codes + byte * column, column, row_bytes(w) - byte);
    }
#pragma unroll
    for (int i = threadIdx.x % P::GROUP; i < P::COLUMNS * 4 * CHUNKS; i += P::GROUP) {
      int row = i / (4 * CHUNKS), chunk = i % (4 * CHUNKS), first = min(k + chunk * 8, w.depth);
      bool inside = top + row < call.m;
      const A *from = a.at + (inside ? (top + row) * a.row + first * column_of_a : 0);
      fetch<P::WHOLE>(
          at_elements(stage, row, chunk / CHUNKS, chunk % CHUNKS), from, column_of_a, inside ? w.depth - first : 0);
    }
  }

  /* Until what this group copied for a stage is there, and all of it are done with the stage before. */
  __device__ __forceinline__ void wait() const {
    warp_mma::wait_copies<P::STAGES - 2>();
    asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "n"(P::GROUP) : "memory");
  }

  /* Add the products of a stage, whose codes are those from k on. */
  template <bool SCALED>
  __device__ __forceinline__ void multiply(Sums<P> &sum, int stage, Group (&groups)[P::TILES][2], int k) {
    uint4 codes[P::TILES][2], chunk[P::MT];
    int row = threadIdx.x % 32 / 4, quarter = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < P::TILES * 2; ++i) codes[i / 2][i % 2] = read_place(at_codes(stage, i));
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      uint32_t right[P::MT][PAIRS];
#pragma unroll
      for (int mt = 0; mt < P::MT; ++mt) {
        constexpr int WORDS = 4 / CHUNKS; /* of codes, for a chunk of a */
        if (word % WORDS == 0) chunk[mt] = read_place(at_elements(stage, 8 * mt + row, quarter, word / WORDS));
        elements(chunk[mt], word, right[mt]);
      }
#pragma unroll
      for (int tile = 0; tile < P::TILES; ++tile) {
        uint32_t left[2][PAIRS];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          numbers<SCALED>(word_of(codes[tile][half], word), groups[tile][half], left[half]);
          if constexpr (SCALED && GROUP_SIZE == 0) {
            cut<BITS == 4 ? 1 : 2, BITS == 4 ? 4 : 1>(left[half], w.depth - k_of(k) - word * WORD);
          }
        }
#pragma unroll
        for (int i = 0; i < PAIRS; i += 2) {
          uint32_t four[4] = {left[0][i], left[1][i], left[0][i + 1], left[1][i + 1]};
#pragma unroll
          for (int mt = 0; mt < P::MT; ++mt) {
            warp_mma::multiply<A>(sum[tile][mt], four, right[mt][i], right[mt][i + 1]);
          }
        }
      }
    }
  }
};

/* The products of this warp's steps. */
template <class P> __device__ __forceinline__ void add_products(Sums<P> &sum, Lane<P> &lane) {
  constexpr int ROWS = P::TILES * 2, KINDS = Groups<ROWS>::KINDS;
  if (lane.steps == 0) return;
  auto k_at = [&](int i) { return lane.k_at(i); };
  Groups<ROWS> ahead;
  ahead.start(lane.w, lane.rows[0], k_at);
#pragma unroll
  for (int stage = 0; stage < P::STAGES - 1; ++stage) {
    lane.load(stage, lane.k_at(stage));
    warp_mma::commit_copies();
  }
  int stage = 0, part = threadIdx.x % 4 * KINDS / 4; /* of a step, which this lane's k are in */
#pragma unroll 1
  for (int number = 0; number < lane.steps; ++number) {
    lane.wait();
    lane.load(stage == 0 ? P::STAGES - 1 : stage - 1, lane.k_at(number + P::STAGES - 1));
    warp_mma::commit_copies();
    ahead.advance(number, lane.w, lane.rows[0], k_at);
    Group groups[P::TILES][2];
    int k = lane.k_at(number);
    bool inside = k + part * (STEP / KINDS) < lane.w.depth;
#pragma unroll
    for (int i = 0; i < ROWS; ++i) groups[i / 2][i % 2] = ahead.of(i, number, part, inside);
    if constexpr (P::LATE) {
      bool finite = true; /* infinity times 0 is NaN of each weight, not of sums */
#pragma unroll
      for (int i = 0; i < ROWS; ++i) finite &= isfinite(groups[i / 2][i % 2].scale);
      if (__all_sync(0xffffffff, finite)) {
        Sums<P> part = {};
        lane.template multiply<false>(part, stage, groups, k);
#pragma unroll
        for (int i = 0; i < P::TILES * P::MT * 4; ++i) {
          float &total = sum[i / 4 / P::MT][i / 4 % P::MT][i % 4];
          total = fmaf(part[i / 4 / P::MT][i / 4 % P::MT][i % 4], groups[i / 4 / P::MT][i / 2 % 2].scale, total);
        }
      } else {
        lane.template multiply<true>(sum, stage, groups, k);
      }
    } else {
      lane.template multiply<true>(sum, stage, groups, k);
    }
    if (++stage == P::STAGES) stage = 0;
  }
  warp_mma::wait_copies<0>();
}

/* c of COLUMNS rows of a and OUT rows of w. */
template <class P> __device__ __forceinline__ void multiply(const Call &call, const Few &a, const Weights &w) {
  extern __shared__ __align__(16) uint8_t memory[];
  Sums<P> sum = {};
  Lane<P> mine(call, a, w, shared_address(memory));
  wait_for_previous();
  start_next();
  add_products<P>(sum, mine);
  __syncthreads();
  float *shared = reinterpret_cast<float *>(memory); /* [GROUPS][COLUMNS][PITCH] */
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % P::WARPS;
#pragma unroll
  for (int i = 0; i < P::TILES * P::MT * 4; ++i) {
    int tile = i / 4 / P::MT, mt = i / 4 % P::MT;
    int row = 16 * (warp * P::TILES + tile) + lane / 4 + i / 2 % 2 * 8, column = 8 * mt + lane % 4 * 2 + i % 2;
    shared[(mine.group * P::COLUMNS + column) * P::PITCH + row] = sum[tile][mt][i % 4];
  }
  finish<P>(call, shared, mine.across, mine.top);
}

}  // namespace weights

/* SHARED: the bytes of shared memory that a launch has; then the arguments of Plan. */
#define FEW_ROWS(NAME, SHARED, ...)                                                                            \
  static_assert(weights::Plan<__VA_ARGS__>::TOTAL == SHARED, "weights_program.py has another layout");         \
  extern "C" __global__ void                                                                                   \
      __launch_bounds__(weights::Plan<__VA_ARGS__>::THREADS, weights::Plan<__VA_ARGS__>::BLOCKS) NAME(         \
      const A *a, index_t a_row, index_t a_column, WEIGHTS_PARAMETERS, CALL_PARAMETERS) {                      \
    weights::multiply<weights::Plan<__VA_ARGS__>>(CALL, {a, a_row, a_column}, WEIGHTS(k));                     \
  }
