/* Products of narrow types, and of float32 as tf32, by mma.sync, for sm_80 and newer (float8: sm_89): asynchronous
 * copies through a ring of stages. All tiles lie in rows of 128 bytes of K, so whatever the type, a product is 32 bytes
 * deep, and ldmatrix has its operands.
 *
 * A block has a tile of C, each of its warps a part of it. Tensor cores keep about 14 bits of a sum of float8 products,
 * and truncate those of tf32. Where sums are PROMOTED, or the scales are of blocks, those of a stage are made in
 * registers of their own, and added up in float32. Floats are rounded to tf32 where they lie, by the threads that
 * copied them; the low parts of those that are SPLIT have a place of their own. In the end sums take the place of the
 * ring, and each thread finishes neighbours of a row of C.
 *
 * Its Python side (mma/program.py) writes ahead of this text, with call.cuh:
 *
 *     #define WARP_PRODUCT "m16n8k32.row.col.f32.e4m3.e4m3.f32"   the instruction
 *     constexpr int TF32 = 0;   products that make that of two floats, whose bits A and B are: 1, or 3 of parts
 */

namespace product {

using namespace tensor_cores;

constexpr int BYTES = 128, DEPTH = BYTES / int(sizeof(A)), STEPS = BYTES / 32; /* of K in a stage */
constexpr int CHUNK = 16, CHUNKS = BYTES / CHUNK;
constexpr int BLOCK = 128;          /* columns that share a scale where scales are of blocks */
constexpr int HALVES = GLU ? 2 : 1; /* gates and values are halves of a tile */
constexpr int EACH = 4;             /* columns of C that a thread finishes at once */
constexpr bool SPLIT = TF32 == 3;   /* operands are high and low parts */
using Rows = warp_mma::SharedTile<BYTES / 2>;

/* What a kernel is: Python's side of it is plan.py. */
template <int BM_, int BN_, int DOWN_, int ACROSS_, int STAGES_, int BAND_> struct Plan {
  static constexpr int BM = BM_, BN = BN_;             /* of a tile */
  static constexpr int DOWN = DOWN_, ACROSS = ACROSS_; /* warps below and beside each other */
  static constexpr int STAGES = STAGES_;
  static constexpr int BAND = BAND_; /* rows of tiles that are walked column by column, so that L2 is hit */

  static constexpr int THREADS = 32 * DOWN * ACROSS;
  static constexpr int WM = BM / DOWN, WN = BN / ACROSS, MT = WM / 16, NT = WN / 8;
  static constexpr int OUT = BN / HALVES; /* columns of C */
  static constexpr int AT_B = BM * BYTES, STAGE = (BM + BN) * BYTES;
  static constexpr int LOW = STAGES * STAGE, END = LOW + (SPLIT ? STAGE : 0); /* the low parts of a stage are there */
  static constexpr int PITCH = BN + 8; /* of sums in shared memory: without bank conflicts */
  static constexpr int SUMS = BM * PITCH * int(sizeof(Sum)), TOTAL = END > SUMS ? END : SUMS;
  static constexpr int UNROLLED = BM * BN > 4096 ? 1 : STEPS; /* steps; large tiles need registers for sums */

  static_assert(WM % 16 == 0 && WN % 16 == 0 && OUT % WN == 0 && BLOCK % WN == 0, "warps have whole products");
  static_assert(BM * CHUNKS % THREADS == 0 && BN * CHUNKS % THREADS == 0, "threads copy as many chunks each");
};

/* Rows along K, in bytes. */
struct Operand {
  const char *at;
  index_t batch, row;
};

/* Where a block's tile begins, in C. */
struct Place {
  int m, n, batch;
};

template <class P> __device__ __forceinline__ Place place_of(const Call &call, int i) {
  int down = (call.m + P::BM - 1) / P::BM, across = (call.n + P::OUT - 1) / P::OUT, batch = i / (down * across);
  i -= batch * (down * across);
  int band = i / (P::BAND * across), top = band * P::BAND, height = min(P::BAND, down - top);
  i -= band * P::BAND * across;
  return {(top + i % height) * P::BM, i / height * P::OUT, batch};
}

/* Sums of a warp: for 16 rows and 8 columns two of row lane / 4, and two of the row 8 below. */
template <class P> using Sums = Sum[P::MT][P::NT][4];

/* -- copies -------------------------------------------------------------------------------------- */

/* Start to copy a chunk, of which there are `bytes`; the rest is zeros. */
__device__ __forceinline__ void copy_chunk(uint32_t to, const char *from, int bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

/* Start to copy COUNT rows of an operand, of K from byte k to byte `end`. `row_of`: the number of a row of the tile, or
 * what is negative where there is none, which reads as zeros. */
template <class P, int COUNT, class RowOf>
__device__ __forceinline__ void load_rows(uint32_t to, const char *from, index_t step, int k, int end, RowOf row_of) {
  int chunk = threadIdx.x % CHUNKS, at = k + chunk * CHUNK, bytes = max(0, min(end - at, CHUNK));
#pragma unroll
  for (int first = 0; first < COUNT; first += P::THREADS / CHUNKS) {
    int place = first + threadIdx.x / CHUNKS, row = row_of(place);
    bool inside = row >= 0 && bytes > 0;
    copy_chunk(to + Rows::place(place, chunk), inside ? from + row * step + at : from, inside ? bytes : 0);
  }
}

/* Start to copy the tiles of a stage. */
template <class P>
__device__ __forceinline__ void load_stage(
    uint32_t to, const Operand &a, const Operand &b, const Call &call, const Place &tile, int number) {
  int k = number * BYTES, end = call.k * int(sizeof(A));
  load_rows<P, P::BM>(to, a.at + tile.batch * a.batch, a.row, k, end, [&](int place) {
    int row = tile.m + place;
    return row < call.m ? row : -1;
  });
  load_rows<P, P::BN>(to + P::AT_B, b.at + tile.batch * b.batch, b.row, k, end, [&](int place) {
    int half = place / P::OUT, column = tile.n + place % P::OUT;
    return column < call.n ? half * call.n + column : -1;
  });
}

/* -- products ------------------------------------------------------------------------------------ */

__device__ __forceinline__ void write_shared(uint32_t to, const float (&x)[4]) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3])
               : "memory");
}

/* sum += a b, of 16 rows and 8 columns, 32 bytes deep. */
#define MULTIPLY(TYPE, LETTER)                                                                                        \
  __device__ __forceinline__ void multiply(TYPE (&sum)[4], const uint32_t (&a)[4], const uint32_t *b) {               \
    asm("mma.sync.aligned." WARP_PRODUCT " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"           \
        : "+" LETTER(sum[0]), "+" LETTER(sum[1]), "+" LETTER(sum[2]), "+" LETTER(sum[3])                              \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));                                          \
  }
MULTIPLY(float, "f")
MULTIPLY(int, "r")
#undef MULTIPLY

/* Round the floats of a stage that this thread copied to tf32, and write the low parts of those that are SPLIT. Tells
 * whether all are numbers. The low part of what is none is 0. */
template <class P> __device__ __forceinline__ bool round_stage(uint32_t stage, uint32_t low) {
  bool numbers = true;
#pragma unroll
  for (int first = 0; first < P::BM + P::BN; first += P::THREADS / CHUNKS) {
    uint32_t at = Rows::place(first + threadIdx.x / CHUNKS, threadIdx.x % CHUNKS);
    float4 four = read_shared(stage + at);
    float x[4] = {four.x, four.y, four.z, four.w}, rounded[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) rounded[i] = to_tf32(x[i]);
    write_shared(stage + at, rounded);
    if constexpr (SPLIT) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        bool number = isfinite(x[i]);
        numbers &= number;
        x[i] = number ? to_tf32(x[i] - rounded[i]) : 0.f;
      }
      write_shared(low + at, x);
    }
  }
  return numbers;
}

/* Wait for all threads. Tells, where it matters, whether it is true of all of them. */
__device__ __forceinline__ bool all_threads(bool x) {
  if constexpr (SPLIT) return __syncthreads_and(x);
  __syncthreads();
  return x;
}

/* The operands of 32 bytes of K: rows, and pairs of 8 columns. */
template <class P> struct Operands {
  uint32_t left[P::MT][4], right[P::NT / 2][4];

  /* `a`, `b`: where this lane's first chunks are. */
  __device__ __forceinline__ Operands(uint32_t a, uint32_t b, int step) {
#pragma unroll
    for (int i = 0; i < P::MT; ++i) warp_mma::load_matrices(left[i], Rows::along(a + i * 16 * BYTES, 2 * step));
#pragma unroll
    for (int j = 0; j < P::NT / 2; ++j) warp_mma::load_matrices(right[j], Rows::along(b + j * 16 * BYTES, 2 * step));
  }

  /* Make what is no number 0. */
  __device__ __forceinline__ void keep_numbers() {
#pragma unroll
    for (int i = 0; i < 4 * P::MT; ++i) keep_number(left[i / 4][i % 4]);
#pragma unroll
    for (int i = 0; i < 2 * P::NT; ++i) keep_number(right[i / 4][i % 4]);
  }
  static __device__ __forceinline__ void keep_number(uint32_t &bits) {
    if (!isfinite(__uint_as_float(bits))) bits = 0;
  }
};

/* sum += x's left y's right. */
template <class P>
__device__ __forceinline__ void add_products(Sums<P> &sum, const Operands<P> &x, const Operands<P> &y) {
#pragma unroll
  for (int i = 0; i < P::MT; ++i) {
#pragma unroll
    for (int j = 0; j < P::NT; ++j) multiply(sum[i][j], x.left[i], y.right[j / 2] + j % 2 * 2);
  }
}

/* Add the products of a stage; `low`: how far on from its operands their low parts are. The small products come first;
 * what is no number meets low parts, which may be 0, as 0: the high parts meet it. */
template <class P>
__device__ __forceinline__ void add_stage(Sums<P> &sum, uint32_t a, uint32_t b, uint32_t low, bool numbers) {
#pragma unroll(P::UNROLLED)
  for (int step = 0; step < STEPS; ++step) {
    if constexpr (SPLIT) {
      Operands<P> high(a, b, step), lower(a + low, b + low, step);
      if (!numbers) high.keep_numbers();
      add_products<P>(sum, lower, high);
      add_products<P>(sum, high, lower);
      if (!numbers) high = Operands<P>(a, b, step);
      add_products<P>(sum, high, high);
    } else {
      Operands<P> both(a, b, step);
      add_products<P>(sum, both, both);
    }
  }
}

/* The scales of a thread's rows and columns, where they are of blocks. A warp's columns of B may begin anywhere, and so
 * lie in two blocks; `whole`: how many are in the first. */
template <class P> struct BlockScales {
  float rows[P::MT][2], columns[2];
  int top, left, last, whole;

  /* `m`, `n`: this lane's first row, and the warp's first column of B. */
  __device__ __forceinline__ BlockScales(const Call &call, int m, int n)
      : top(m), left(n / BLOCK), last((min(n + P::WN, HALVES * call.n) - 1) / BLOCK), whole(BLOCK - n % BLOCK) {}

  __device__ __forceinline__ void read(const Call &call, int block) {
#pragma unroll
    for (int i = 0; i < 2 * P::MT; ++i) rows[i / 2][i % 2] = call.of_a.of(min(top + 8 * i, call.m - 1), block);
    columns[0] = call.of_b.of(min(left, last), block);
    if constexpr (GLU) columns[1] = call.of_b.of(last, block);
  }

  /* That of a column of the warp's. */
  __device__ __forceinline__ float of(int column) const { return !GLU || column < whole ? columns[0] : columns[1]; }
};

/* sum = A B for this warp's part of a tile, from row `top` and column `left` of it on. */
template <class P>
__device__ __forceinline__ void multiply_tile(
    Sums<P> &sum, uint32_t shared, const Operand &a, const Operand &b, const Call &call, const Place &tile, int top,
    int left) {
  int lane = threadIdx.x % 32, stages = (call.k + DEPTH - 1) / DEPTH;
  uint32_t first_a = shared + Rows::place(top + lane % 16, lane / 16);
  uint32_t first_b = shared + P::AT_B + Rows::place(left + lane % 8 + lane / 16 * 8, lane / 8 % 2);
  BlockScales<P> scales(call, tile.m + top + lane / 4, left / P::OUT * call.n + tile.n + left % P::OUT);
#pragma unroll
  for (int stage = 0; stage < P::STAGES - 1; ++stage) {
    if (stage < stages) load_stage<P>(shared + stage * P::STAGE, a, b, call, tile, stage);
    warp_mma::commit_copies();
  }
  int stage = 0;
#pragma unroll 1
  for (int number = 0; number < stages; ++number) {
    warp_mma::wait_copies<P::STAGES - 2>();
    uint32_t here = stage * P::STAGE;
    bool numbers = true;
    if constexpr (SPLIT) __syncthreads(); /* all are done with low parts */
    if constexpr (TF32 > 0) numbers = round_stage<P>(shared + here, shared + P::LOW);
    numbers = all_threads(numbers); /* all have copied this stage, and are done with the one before */
    int next = number + P::STAGES - 1, free = stage == 0 ? P::STAGES - 1 : stage - 1;
    if (next < stages) load_stage<P>(shared + free * P::STAGE, a, b, call, tile, next);
    warp_mma::commit_copies();
    if constexpr (PROMOTED) {
      if constexpr (SCALES == OF_BLOCKS) scales.read(call, number); /* on their way while products are made */
      Sums<P> part = {};
      add_stage<P>(part, first_a + here, first_b + here, P::LOW - here, numbers);
#pragma unroll
      for (int i = 0; i < P::MT * P::NT * 4; ++i) {
        int mt = i / 4 / P::NT, nt = i / 4 % P::NT, half = i / 2 % 2;
        Sum &to = sum[mt][nt][i % 4];
        if constexpr (SCALES == OF_BLOCKS) {
          to = fmaf(part[mt][nt][i % 4], scales.rows[mt][half] * scales.of(8 * nt + lane % 4 * 2 + i % 2), to);
        } else {
          to += part[mt][nt][i % 4];
        }
      }
    } else {
      add_stage<P>(sum, first_a + here, first_b + here, P::LOW - here, numbers);
    }
    stage = stage == P::STAGES - 1 ? 0 : stage + 1;
  }
  warp_mma::wait_copies<0>();
}

/* -- the end ------------------------------------------------------------------------------------- */

/* The element of C at (r, c), of its sum, and with GLU that of its value. */
__device__ __forceinline__ C element(const Call &call, int batch, int r, int c, Sum gate, Sum value) {
  auto linear = [&](int column, Sum total) { /* of B */
    Real x = static_cast<Real>(call.alpha) * Real(total);
    if constexpr (SCALES == OF_ROWS) x *= Real(call.of_a.of(r) * call.of_b.of(column));
    if constexpr (BIAS) x += to<Real>(call.bias[column * call.of_bias]);
    return x;
  };
  Real x = activate<ACTIVATION>(linear(c, gate));
  if constexpr (GLU) x *= linear(c + call.n, value);
  if constexpr (RESIDUAL) x += to<Real>(call.residual[call.of_residual.at(batch, r, c)]);
  return to<C>(x * static_cast<Real>(call.out_scale));
}

struct alignas(EACH * sizeof(C)) Neighbours {
  C at[EACH];
};

__device__ __forceinline__ void read_sums(Sum (&sums)[EACH], const Sum *from) {
  uint4 bits = *reinterpret_cast<const uint4 *>(from);
  memcpy(sums, &bits, sizeof(bits));
}

/* Finish the sums of a tile, and write them. */
template <class P> __device__ __forceinline__ void finish(const Sum *sums, const Call &call, const Place &tile) {
  bool beside = call.of_c.column == 1;
  for (int i = threadIdx.x; i < P::BM * P::OUT / EACH; i += P::THREADS) {
    int row = i / (P::OUT / EACH), column = i % (P::OUT / EACH) * EACH, r = tile.m + row, c = tile.n + column;
    if (r >= call.m || c >= call.n) continue;
    Sum gates[EACH], values[EACH] = {};
    read_sums(gates, sums + row * P::PITCH + column);
    if constexpr (GLU) read_sums(values, sums + row * P::PITCH + column + P::OUT);
    C *to = call.c + call.of_c.at(tile.batch, r, c);
    Neighbours four;
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
      if (c + e < call.n) four.at[e] = element(call, tile.batch, r, c + e, gates[e], values[e]);
    }
    if (beside && c + EACH <= call.n && reinterpret_cast<uintptr_t>(to) % sizeof(Neighbours) == 0) {
      *reinterpret_cast<Neighbours *>(to) = four;
    } else {
#pragma unroll
      for (int e = 0; e < EACH; ++e) {
        if (c + e < call.n) to[e * call.of_c.column] = four.at[e];
      }
    }
  }
}

template <class P> __device__ __forceinline__ void run(const Operand &a, const Operand &b, const Call &call) {
  extern __shared__ __align__(128) uint8_t memory[];
  Place tile = place_of<P>(call, blockIdx.x);
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int top = warp / P::ACROSS * P::WM, left = warp % P::ACROSS * P::WN;
  wait_for_previous();
  start_next();
  Sums<P> sum = {};
  multiply_tile<P>(sum, shared_address(memory), a, b, call, tile, top, left);
  __syncthreads(); /* all are done with the ring */
  Sum *sums = reinterpret_cast<Sum *>(memory) + (top + lane / 4) * P::PITCH + left + lane % 4 * 2;
#pragma unroll
  for (int i = 0; i < P::MT * P::NT * 2; ++i) { /* pairs */
    int mt = i / 2 / P::NT, nt = i / 2 % P::NT, half = i % 2;
    uint2 bits;
    memcpy(&bits, sum[mt][nt] + 2 * half, sizeof(bits));
    *reinterpret_cast<uint2 *>(sums + (16 * mt + 8 * half) * P::PITCH + 8 * nt) = bits;
  }
  __syncthreads();
  finish<P>(reinterpret_cast<const Sum *>(memory), call, tile);
}

}  // namespace product

/* SHARED: the bytes of shared memory that a launch has; then the arguments of Plan. */
#define PRODUCT(NAME, SHARED, ...)                                                                                    \
  static_assert(product::Plan<__VA_ARGS__>::TOTAL == SHARED, "plan.py has another layout");                           \
  extern "C" __global__ void __launch_bounds__(product::Plan<__VA_ARGS__>::THREADS) NAME(                             \
      const char *a, index_t a_batch, index_t a_row, const char *b, index_t b_batch, index_t b_row,                   \
      CALL_PARAMETERS) {                                                                                              \
    product::run<product::Plan<__VA_ARGS__>>({a, a_batch, a_row}, {b, b_batch, b_row}, CALL);                         \
  }
