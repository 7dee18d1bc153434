/* gemm_w4a16 and gemm_w8a16: codes of weights become numbers in registers, on their way to mma.sync (sm_80 and newer).
 *
 * For few rows of a, where reading the weights is what takes time. Weights are operand a of the product, 16 rows of w
 * at a time, and rows of a are its eight columns. The groups of a block's warps share K, step by step, and so do the
 * blocks of a cluster; what they have is added up in the end, in order. A lane copies 16 bytes of codes of each of its
 * rows, which are its 32 or 16 k of a step, to a place of its own in shared memory, some steps ahead; the elements of a
 * are the group's. Which k a product calls first does not matter, as long as both operands agree.
 *
 * For many rows `unpack` writes the numbers to scratch memory, for a product of that type.
 *
 * Its Python side (weights_program.py) writes ahead of this text, with call.cuh:
 *
 *     constexpr int BITS = 4;           of a code; of 4 bits a byte has two
 *     constexpr int GROUP_SIZE = 128;   k that share a scale, 0: all of them
 *     constexpr int ZEROS = 0;          1: groups have zero points, else it is 8, or codes of 8 bits are signed
 */

namespace weights {

using namespace tensor_cores;

constexpr int EACH = 16 * 8 / BITS;               /* k of a lane and a step: those of 16 bytes of codes */
constexpr int STEP = 4 * EACH;                    /* of a warp */
constexpr int WORD = 32 / BITS, PAIRS = WORD / 2; /* codes of 32 bits */
constexpr int CHUNKS = EACH * 2 / 16;             /* of 16 bytes, of a row of a, that belong to them */

struct Weights {
  const uint8_t *codes; /* signed or not */
  index_t row, column;
  const A *scales;
  index_t scale_row, scale_group;
  const uint8_t *zeros;
  index_t zero_row, zero_group;
  int rows, depth;
};

#define WEIGHTS_PARAMETERS                                                                                    \
  const uint8_t *codes, index_t code_row, index_t code_column, const A *scales, index_t scale_row,            \
      index_t scale_group, const uint8_t *zeros, index_t zero_row, index_t zero_group, int weight_rows
#define WEIGHTS(DEPTH)                                                                                               \
  weights::Weights {                                                                                                 \
    codes, code_row, code_column, scales, scale_row, scale_group, zeros, zero_row, zero_group, weight_rows, DEPTH    \
  }

/* -- numbers of codes ---------------------------------------------------------------------------- */

template <class E> struct Two;
template <> struct Two<__half> {
  using type = __half2;
  static constexpr uint32_t BASE = 0x64006400; /* 1024, with room for 10 bits below */
  static constexpr float FIRST = 1024;
  static __device__ __forceinline__ __half2 both(float x) { return __float2half2_rn(x); }
};
template <> struct Two<__nv_bfloat16> {
  using type = __nv_bfloat162;
  static constexpr uint32_t BASE = 0x43004300; /* 128, with room for 7 */
  static constexpr float FIRST = 128;
  static __device__ __forceinline__ __nv_bfloat162 both(float x) { return __float2bfloat162_rn(x); }
};
using Pair = Two<A>::type;

__device__ __forceinline__ uint32_t bits_of(Pair x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits;
}
__device__ __forceinline__ Pair pair_of(uint32_t bits) {
  Pair x;
  memcpy(&x, &bits, 4);
  return x;
}

/* The bits of a mask, and the base: one instruction, which is not what the compiler makes of it. */
template <uint32_t MASK> __device__ __forceinline__ uint32_t masked(uint32_t word) {
  uint32_t bits;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(bits) : "r"(word), "n"(MASK), "r"(Two<A>::BASE));
  return bits;
}

/* The zero point and the scale of a row's group. */
struct Group {
  float zero, scale;
};

struct Row { /* where one is */
  const uint8_t *codes;
  const A *scales;
  const uint8_t *zeros;
};

/* A pointer that is kept in registers, not computed anew at each use. */
template <class T> __device__ __forceinline__ T *kept(T *pointer) {
  asm("" : "+l"(pointer));
  return pointer;
}

__device__ __forceinline__ Row row_of(const Weights &w, int row) {
  return {
      kept(w.codes + row * w.row), kept(w.scales + row * w.scale_row),
      ZEROS ? kept(w.zeros + row * w.zero_row) : nullptr};
}

/* A row's zero point and scale for k as they are stored, which need not have arrived yet; those past the end are the
 * last. */
struct Stored {
  uint8_t zero;
  A scale;
};

__device__ __forceinline__ Stored load_group(const Weights &w, const Row &row, int k) {
  index_t group = GROUP_SIZE ? unsigned(min(k, w.depth - 1)) / unsigned(GROUP_SIZE ? GROUP_SIZE : 1) : 0;
  return {ZEROS ? __ldg(row.zeros + group * w.zero_group) : uint8_t(0), __ldg(row.scales + group * w.scale_group)};
}

/* What is stored as numbers; the scale is 0 of what is not `inside`. */
__device__ __forceinline__ Group group_of(const Stored &stored, bool inside) {
  constexpr float MIDDLE = BITS == 4 ? 8 : 0;
  return {ZEROS ? float(stored.zero) : MIDDLE, inside ? to<float>(stored.scale) : 0};
}

/* (code - zero) scale of 32 bits of codes, or without the scale, which is exact, in pairs: of 4 bits codes i and i +
 * 4, of 8 bits neighbours. */
template <bool SCALED> __device__ __forceinline__ void numbers(uint32_t word, Group group, uint32_t (&pairs)[PAIRS]) {
  constexpr bool OF_HALVES = BITS == 4 || std::is_same_v<A, __half>; /* a code fits below the base */
  constexpr float MIDDLE_OF_SIGNED = BITS == 8 && !ZEROS ? 128 : 0;
  if constexpr (BITS == 8 && !ZEROS) word ^= 0x80808080;
  float first = MIDDLE_OF_SIGNED + group.zero;
  if constexpr (OF_HALVES) {
    constexpr bool TWICE = ZEROS && Two<A>::FIRST < 256; /* its sum with a zero point may have too many bits */
    constexpr bool HIGH = Two<A>::FIRST == 1024; /* there is room for 8 bits, which saves shifts */
    Pair from = Two<A>::both(Two<A>::FIRST + (TWICE ? 0 : first)), scale = Two<A>::both(group.scale);
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
      Pair x;
      if constexpr (BITS == 8) {
        x = __hsub2(pair_of(__byte_perm(word, Two<A>::BASE, 0x5150 + i * 0x0202)), from);
      } else if (HIGH && i % 2) { /* 16 times the code, above the base */
        x = __hfma2(pair_of(masked<0x00f000f0>(word >> i / 2 * 8)), Two<A>::both(0.0625f), Two<A>::both(-64 - first));
      } else {
        x = __hsub2(pair_of(masked<0x000f000f>(word >> 4 * i)), from);
      }
      if constexpr (TWICE) x = __hsub2(x, Two<A>::both(first));
      pairs[i] = bits_of(SCALED ? __hmul2(x, scale) : x);
    }
  } else {
    constexpr float FIRST = 8388608; /* 2^23: a byte is its lowest bits */
    float x[4], scale = SCALED ? group.scale : 1.f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[i] = (__uint_as_float(__byte_perm(word, 0x4b000000, 0x7440 + i)) - (FIRST + first)) * scale;
    }
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
      A two[2] = {to<A>(x[2 * i]), to<A>(x[2 * i + 1])};
      memcpy(&pairs[i], two, 4);
    }
  }
}

__device__ __forceinline__ uint32_t word_of(const uint4 &four, int i) {
  return i == 0 ? four.x : i == 1 ? four.y : i == 2 ? four.z : four.w;
}

/* Bytes of codes in a row. */
__device__ __forceinline__ int row_bytes(const Weights &w) { return BITS == 4 ? (w.depth + 1) / 2 : w.depth; }
__device__ __forceinline__ int byte_of(int k) { return BITS == 4 ? unsigned(k) / 2 : k; }

/* -- few rows of a ------------------------------------------------------------------------------- */

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
  static constexpr bool LATE = (GROUP_SIZE == 0 || GROUP_SIZE % STEP == 0) && MT < 4;
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

__device__ __forceinline__ void fetch_to_l2(const void *from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }

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

__device__ __forceinline__ uint4 read_place(uint32_t at) {
  return *static_cast<const uint4 *>(__cvta_shared_to_generic(at));
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

/* What block `rank` of the cluster has at this address of shared memory. */
__device__ __forceinline__ const float *shared_of(const float *here, int rank) {
#if __CUDA_ARCH__ >= 900
  uint64_t there;
  asm("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"(here), "r"(rank));
  return reinterpret_cast<const float *>(there);
#else
  return here;
#endif
}
__device__ __forceinline__ void wait_for_cluster() {
#if __CUDA_ARCH__ >= 900
  cluster_arrive(), cluster_wait();
#else
  __syncthreads();
#endif
}

/* Sums of 16 TILES x 8 MT: two of row lane / 4, two of the row 8 below, for each 8 columns. */
template <class P> using Sums = float[P::TILES][P::MT][4];

template <class P> struct Lane {
  const Call &call;
  const Few &a;
  const Weights &w;
  int across, top;       /* the block's place */
  Row rows[P::TILES][2]; /* of w: those past the end are the last, and never written */
  int group, first;      /* its group, and the group's first k */
  int step;              /* k from one of its steps to the next */
  int steps, start;      /* how many, and which is the first */
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
    first = (blockIdx.y * P::GROUPS + group) * STEP;
    step = gridDim.y * P::GROUPS * STEP;
    steps = max(0, (w.depth - first + step - 1) / step);
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

  /* The k of its step number i: it begins with one that depends on the block, since all read a, and not the same at
   * once. */
  __device__ __forceinline__ int k_at(int i) const {
    int at = start + i;
    return i < steps ? first + (at < steps ? at : at - steps) * step : w.depth;
  }

  /* Have L2 read the scales, which then do not wait behind many codes, and the codes of the first steps. No matter
   * who writes them until the end of the kernel before this one: L2 is where all see it. */
  __device__ __forceinline__ void prefetch() const {
    constexpr int AHEAD = P::WHOLE ? P::STAGES - 1 : 0, SECTOR = 32;
    int part = group * 4 + threadIdx.x % 4; /* which lanes have the same rows */
#pragma unroll
    for (int i = 0; i < P::TILES * 2; ++i) {
      const Row &row = rows[i / 2][i % 2];
      fetch_ahead<SECTOR / 2>(row.scales, w.scale_group, part);
      if (ZEROS) fetch_ahead<SECTOR>(row.zeros, w.zero_group, part);
    }
#pragma unroll
    for (int stage = 0; stage < AHEAD; ++stage) {
      int k = k_of(k_at(stage));
      if (k >= w.depth || threadIdx.x % 2) break; /* two lanes are 32 bytes */
#pragma unroll
      for (int i = 0; i < P::TILES * 2; ++i) fetch_to_l2(rows[i / 2][i % 2].codes + byte_of(k));
    }
  }

  /* A part of a row's groups, one of COUNT that are 32 bytes. */
  template <int COUNT, class E> __device__ __forceinline__ void fetch_ahead(const E *groups, index_t each, int part) const {
    int count = GROUP_SIZE ? w.depth / (GROUP_SIZE ? GROUP_SIZE : 1) : 0;
    for (int i = part * COUNT; each == 1 && i < count; i += 4 * P::GROUPS * COUNT) fetch_to_l2(groups + i);
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

  /* The k whose group it needs at the step from k on. */
  __device__ __forceinline__ int k_of_group(int k) const { return !P::LATE ? k_of(k) : GROUP_SIZE ? k : 0; }

  __device__ __forceinline__ void load_groups(Stored (&groups)[P::TILES][2], int k) const {
#pragma unroll
    for (int i = 0; i < P::TILES * 2; ++i) groups[i / 2][i % 2] = load_group(w, rows[i / 2][i % 2], k_of_group(k));
  }

  /* Until what this group copied for a stage is there, and all of it are done with the stage before. */
  __device__ __forceinline__ void wait() const {
    warp_mma::wait_copies<P::STAGES - 2>();
    asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "n"(P::GROUP) : "memory");
  }

  /* Add the products of a stage. */
  template <bool SCALED> __device__ __forceinline__ void multiply(Sums<P> &sum, int stage, Group (&groups)[P::TILES][2]) {
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
  Group groups[P::TILES][2];
  Stored next[P::TILES][2];
  if (lane.steps == 0) return;
#pragma unroll
  for (int stage = 0; stage < P::STAGES - 1; ++stage) {
    lane.load(stage, lane.k_at(stage));
    warp_mma::commit_copies();
  }
  lane.load_groups(next, lane.k_at(0));
  int stage = 0;
#pragma unroll 1
  for (int number = 0; number < lane.steps; ++number) {
    int k = lane.k_at(number);
    lane.wait();
    lane.load(stage == 0 ? P::STAGES - 1 : stage - 1, lane.k_at(number + P::STAGES - 1));
    warp_mma::commit_copies();
#pragma unroll
    for (int i = 0; i < P::TILES * 2; ++i) {
      groups[i / 2][i % 2] = group_of(next[i / 2][i % 2], lane.k_of_group(k) < lane.w.depth);
    }
    lane.load_groups(next, lane.k_at(number + 1)); /* on their way while these are multiplied */
    if constexpr (P::LATE) {
      bool finite = true; /* infinity times 0 is NaN of each weight, not of sums */
#pragma unroll
      for (int i = 0; i < P::TILES * 2; ++i) finite &= isfinite(groups[i / 2][i % 2].scale);
      if (__all_sync(0xffffffff, finite)) {
        Sums<P> part = {};
        lane.template multiply<false>(part, stage, groups);
#pragma unroll
        for (int i = 0; i < P::TILES * P::MT * 4; ++i) {
          float &total = sum[i / 4 / P::MT][i / 4 % P::MT][i % 4];
          total = fmaf(part[i / 4 / P::MT][i / 4 % P::MT][i % 4], groups[i / 4 / P::MT][i / 2 % 2].scale, total);
        }
      } else {
        lane.template multiply<true>(sum, stage, groups);
      }
    } else {
      lane.template multiply<true>(sum, stage, groups);
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
  mine.prefetch();
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
  wait_for_cluster();
  /* x of a row of w within the block, and of a, with the bias */
  auto linear = [&](int row, int column, int n) {
    float x = 0;
    for (int rank = 0; rank < gridDim.y; ++rank) {
      const float *from = shared_of(shared, rank);
#pragma unroll
      for (int part = 0; part < P::GROUPS; ++part) x += from[(part * P::COLUMNS + column) * P::PITCH + row];
    }
    if constexpr (BIAS) x += to<float>(call.bias[n * call.of_bias]);
    return x;
  };
  for (int i = blockIdx.y * P::THREADS + threadIdx.x; i < P::OUT * P::COLUMNS; i += gridDim.y * P::THREADS) {
    int row = i % P::OUT, column = i / P::OUT, n = mine.across + row, m = mine.top + column;
    if (n >= call.n || m >= call.m) continue;
    float y = activate<ACTIVATION>(linear(row, column, n));
    if constexpr (GLU) y *= linear(row + P::OUT, column, n + call.n);
    if constexpr (RESIDUAL) y += to<float>(call.residual[call.of_residual.at(0, m, n)]);
    call.c[call.of_c.at(0, m, n)] = to<C>(y * static_cast<float>(call.out_scale));
  }
  wait_for_cluster(); /* no block leaves while another may still read its sums */
}

/* -- many rows of a ------------------------------------------------------------------------------ */

[[maybe_unused]] constexpr int UNPACK_THREADS = 256;

/* The word of codes of a row from k on, a multiple of WORD. Those past the row's end are any. */
template <bool WHOLE> __device__ __forceinline__ uint32_t load_word(const Weights &w, const Row &row, int k) {
  int first = byte_of(k), count = row_bytes(w);
  const uint8_t *from = row.codes + first * (WHOLE ? 1 : w.column);
  if (WHOLE && first + 4 <= count) return __ldcs(reinterpret_cast<const uint32_t *>(from));
  uint32_t word = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) word |= uint32_t(first + i < count ? from[i * (WHOLE ? 1 : w.column)] : 0) << 8 * i;
  return word;
}

/* Write the numbers of a word of codes, of which there are `left`, and zeros after them. */
__device__ __forceinline__ void put_word(A *to, uint32_t word, Group group, int left) {
  uint32_t pairs[PAIRS], two[PAIRS]; /* two: neighbours */
  numbers<true>(word, group, pairs);
#pragma unroll
  for (int i = 0; i < PAIRS; ++i) {
    two[i] = BITS == 4 ? __byte_perm(pairs[i % 2 * 2], pairs[i % 2 * 2 + 1], i / 2 ? 0x7632 : 0x5410) : pairs[i];
    if (left < WORD) two[i] &= (2 * i < left ? 0xffff : 0) | (2 * i + 1 < left ? 0xffff0000 : 0);
  }
  if constexpr (PAIRS == 4) {
    *reinterpret_cast<uint4 *>(to) = {two[0], two[1], two[2], two[3]};
  } else {
    *reinterpret_cast<uint2 *>(to) = {two[0], two[1]};
  }
}

/* Write the weights, rounded to a's type, as rows of `pitch` elements with zeros from K on: a warp a row. */
template <bool WHOLE> __device__ __forceinline__ void unpack(const Weights &w, A *to, index_t pitch) {
  constexpr int WARPS = UNPACK_THREADS / 32, AHEAD = 4; /* loads that are under way */
  for (int number = blockIdx.x * WARPS + threadIdx.x / 32; number < w.rows; number += gridDim.x * WARPS) {
    Row row = row_of(w, number);
    for (int first = threadIdx.x % 32 * WORD; first < pitch; first += AHEAD * 32 * WORD) {
      uint32_t words[AHEAD];
      Stored groups[AHEAD];
#pragma unroll
      for (int i = 0; i < AHEAD; ++i) {
        int k = first + i * 32 * WORD;
        words[i] = load_word<WHOLE>(w, row, k), groups[i] = k < w.depth ? load_group(w, row, k) : Stored{};
      }
#pragma unroll
      for (int i = 0; i < AHEAD; ++i) {
        int k = first + i * 32 * WORD;
        if (k < pitch) put_word(to + number * pitch + k, words[i], group_of(groups[i], k < w.depth), w.depth - k);
      }
    }
  }
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
#define UNPACK(NAME, WHOLE)                                                                                    \
  extern "C" __global__ void __launch_bounds__(weights::UNPACK_THREADS) NAME(                                  \
      WEIGHTS_PARAMETERS, A *to, int depth, index_t pitch) {                                                   \
    weights::unpack<WHOLE>(WEIGHTS(depth), to, pitch);                                                         \
  }
