/* gemm_w4a16 and gemm_w8a16: codes of weights become numbers in registers, on their way to mma.sync (sm_80 and newer).
 *
 * For few rows of a, where reading the weights is what takes time: weights are operand a of the product, 16 rows of w at a
 * time, and rows of a are its eight columns. A block has 32 rows of w, and its warps share K step by step; they add up in
 * shared memory, in order. A lane reads 16 bytes of codes of a row, and takes the elements of a for the same k: which k a
 * product calls first does not matter, as long as both operands agree.
 *
 * For many rows `unpack_weights` writes the numbers to scratch memory, for a product of that type.
 *
 * Its Python side (weights_program.py) writes ahead of this text, with call.cuh:
 *
 *     constexpr int BITS = 4;           of a code; of 4 bits a byte has two
 *     constexpr int GROUP_SIZE = 128;   k that share a scale, 0: all of them
 *     constexpr int ZEROS = 0;          1: groups have zero points, else it is 8, or codes of 8 bits are signed
 */

namespace weights {

using namespace tensor_cores;

constexpr int WARPS = 8, THREADS = 32 * WARPS;
constexpr int TILES = 2, ROWS = 16 * TILES;    /* of w, of a block */
constexpr int EACH = 16 * 8 / BITS;            /* k of a lane and a step */
constexpr int STEP = 4 * EACH;                 /* of a warp */
constexpr int WORD = 32 / BITS, PAIRS = WORD / 2; /* codes of 32 bits */

using Code = uint8_t; /* signed or not */

struct Weights {
  const Code *codes;
  index_t row, column;
  const A *scales;
  index_t scale_row, scale_group;
  const uint8_t *zeros;
  index_t zero_row, zero_group;
  int rows, depth;
};

#define WEIGHTS_PARAMETERS                                                                                    \
  const weights::Code *codes, index_t code_row, index_t code_column, const A *scales, index_t scale_row,              \
      index_t scale_group, const uint8_t *zeros, index_t zero_row, index_t zero_group, int weight_rows
#define WEIGHTS(DEPTH) \
  weights::Weights { codes, code_row, code_column, scales, scale_row, scale_group, zeros, zero_row, zero_group, weight_rows, DEPTH }

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

/* The zero point and the scale of a row's group. */
struct Group {
  float zero, scale;
};

__device__ __forceinline__ Group group_of(const Weights &w, int row, int k) {
  constexpr float MIDDLE = BITS == 4 ? 8 : 0;
  int group = GROUP_SIZE ? k / GROUP_SIZE : 0;
  if (k >= w.depth) return {MIDDLE, 0};
  return {
      ZEROS ? float(w.zeros[row * w.zero_row + group * w.zero_group]) : MIDDLE,
      to<float>(w.scales[row * w.scale_row + group * w.scale_group])};
}

/* (code - zero) scale of 32 bits of codes, or without the scale, in pairs: of 4 bits codes i and i + 4, of 8 bits
 * neighbours. */
template <bool SCALED> __device__ __forceinline__ void numbers(uint32_t word, Group group, uint32_t (&pairs)[PAIRS]) {
  if constexpr (BITS == 4) {
    Pair first = Two<A>::both(Two<A>::FIRST + group.zero), scale = Two<A>::both(group.scale);
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
      Pair x = __hsub2(pair_of((word >> 4 * i & 0x000f000f) | Two<A>::BASE), first);
      pairs[i] = bits_of(SCALED ? __hmul2(x, scale) : x);
    }
  } else {
    constexpr float BIAS_OF_SIGNED = ZEROS ? 0 : 128, FIRST = 8388608; /* 2^23: a byte is its lowest bits */
    if constexpr (!ZEROS) word ^= 0x80808080;
    float first = FIRST + BIAS_OF_SIGNED + group.zero, scale = SCALED ? group.scale : 1.f;
    float x[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = (__uint_as_float(__byte_perm(word, 0x4b000000, 0x7440 + i)) - first) * scale;
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

/* A lane's codes of a row, from k on: four words. Those past the row's end are any. */
template <bool WHOLE> __device__ __forceinline__ uint4 load_codes(const Weights &w, int row, int k) {
  int first = BITS == 4 ? k / 2 : k, count = BITS == 4 ? (w.depth + 1) / 2 : w.depth;
  const Code *from = w.codes + row * w.row + first * w.column;
  if (WHOLE && first + 16 <= count) return __ldcs(reinterpret_cast<const uint4 *>(from));
  uint32_t words[4] = {};
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    uint32_t code = first + i < count ? static_cast<uint8_t>(from[i * w.column]) : 0;
    words[i / 4] |= code << i % 4 * 8;
  }
  return {words[0], words[1], words[2], words[3]};
}

/* -- few rows of a ------------------------------------------------------------------------------- */

struct Few { /* rows of a, and how they lie */
  const A *at;
  index_t row, column;
};

/* WORD elements of row m of a, from k on, as the pairs of `numbers`; zeros outside. */
template <bool WHOLE>
__device__ __forceinline__ void load_elements(const Few &a, int rows, int depth, int m, int k, uint32_t (&pairs)[PAIRS]) {
  A x[WORD];
  const A *from = a.at + m * a.row + k * a.column;
  if (WHOLE && m < rows && k + WORD <= depth) {
    if constexpr (WORD == 8) {
      uint4 bits = __ldg(reinterpret_cast<const uint4 *>(from));
      memcpy(x, &bits, 16);
    } else {
      uint2 bits = __ldg(reinterpret_cast<const uint2 *>(from));
      memcpy(x, &bits, 8);
    }
  } else {
#pragma unroll
    for (int i = 0; i < WORD; ++i) x[i] = m < rows && k + i < depth ? from[i * a.column] : A(0.f);
  }
#pragma unroll
  for (int i = 0; i < PAIRS; ++i) {
    A two[2] = {x[BITS == 4 ? i : 2 * i], x[BITS == 4 ? i + PAIRS : 2 * i + 1]};
    memcpy(&pairs[i], two, 4);
  }
}

/* c of 8 MT rows of a and of the block's rows of w. */
template <int MT, bool WHOLE> __device__ __forceinline__ void multiply(const Call &call, const Few &a, const Weights &w) {
  extern __shared__ float shared[]; /* [WARPS][ROWS][8 MT] */
  constexpr int COLUMNS = 8 * MT;
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32, top = blockIdx.y * COLUMNS;
  auto first_row = [&](int tile) { return GLU ? tile * call.n + blockIdx.x * 16 : blockIdx.x * ROWS + 16 * tile; };
  int rows[TILES][2];
#pragma unroll
  for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
    for (int half = 0; half < 2; ++half) rows[tile][half] = min(int(first_row(tile)) + 8 * half + lane / 4, w.rows - 1);
  }
  float sum[TILES][MT][4] = {};
  uint4 codes[TILES][2];
  Group groups[TILES][2];
  auto load = [&](int base) {
    int k = base + lane % 4 * EACH;
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        codes[tile][half] = load_codes<WHOLE>(w, rows[tile][half], k);
        groups[tile][half] = group_of(w, rows[tile][half], k);
      }
    }
  };
  int base = warp * STEP;
  if (base < w.depth) load(base);
#pragma unroll 1
  for (; base < w.depth; base += WARPS * STEP) {
    uint4 now[TILES][2];
    Group of[TILES][2];
#pragma unroll
    for (int i = 0; i < TILES * 2; ++i) now[i / 2][i % 2] = codes[i / 2][i % 2], of[i / 2][i % 2] = groups[i / 2][i % 2];
    if (base + WARPS * STEP < w.depth) load(base + WARPS * STEP); /* on their way while these are multiplied */
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      uint32_t left[TILES][2][PAIRS];
#pragma unroll
      for (int i = 0; i < TILES * 2; ++i) {
        const uint4 &four = now[i / 2][i % 2];
        numbers<(GROUP_SIZE > 0)>(word_of(four, word), of[i / 2][i % 2], left[i / 2][i % 2]); /* whole rows: the sums */
      }
#pragma unroll
      for (int mt = 0; mt < MT; ++mt) {
        uint32_t right[PAIRS];
        load_elements<WHOLE>(a, call.m, w.depth, top + 8 * mt + lane / 4, base + lane % 4 * EACH + word * WORD, right);
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
          for (int i = 0; i < PAIRS; i += 2) {
            uint32_t four[4] = {left[tile][0][i], left[tile][1][i], left[tile][0][i + 1], left[tile][1][i + 1]};
            warp_mma::multiply<A>(sum[tile][mt], four, right[i], right[i + 1]);
          }
        }
      }
    }
  }
#pragma unroll
  for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
    for (int mt = 0; mt < MT; ++mt) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        int row = 16 * tile + lane / 4 + i / 2 * 8, column = 8 * mt + lane % 4 * 2 + i % 2;
        shared[(warp * ROWS + row) * COLUMNS + column] = sum[tile][mt][i];
      }
    }
  }
  __syncthreads();
  /* x of a row of w within the block, and of a: with a scale of the whole row, and the bias */
  auto linear = [&](int row, int column, int n) {
    float x = 0;
#pragma unroll
    for (int part = 0; part < WARPS; ++part) x += shared[(part * ROWS + row) * COLUMNS + column];
    if (!GROUP_SIZE) x *= group_of(w, n, 0).scale;
    if constexpr (BIAS) x += to<float>(call.bias[n * call.of_bias]);
    return x;
  };
  constexpr int OUT = GLU ? 16 : ROWS;
  for (int i = threadIdx.x; i < OUT * COLUMNS; i += THREADS) {
    int row = i % OUT, column = i / OUT, n = blockIdx.x * OUT + row, m = top + column;
    if (n >= call.n || m >= call.m) continue;
    float y = activate<ACTIVATION>(linear(row, column, n));
    if constexpr (GLU) y *= linear(row + 16, column, n + call.n);
    if constexpr (RESIDUAL) y += to<float>(call.residual[call.of_residual.at(0, m, n)]);
    call.c[call.of_c.at(0, m, n)] = to<C>(y * static_cast<float>(call.out_scale));
  }
}

/* -- many rows of a ------------------------------------------------------------------------------ */

/* Write WORD aligned elements. */
__device__ __forceinline__ void put_word(A *to, const A (&x)[WORD]) {
  if constexpr (WORD == 8) {
    uint4 bits;
    memcpy(&bits, x, 16);
    *reinterpret_cast<uint4 *>(to) = bits;
  } else {
    uint2 bits;
    memcpy(&bits, x, 8);
    *reinterpret_cast<uint2 *>(to) = bits;
  }
}

/* Write the weights, rounded to a's type, as rows of `pitch` elements with zeros from K on: a warp a row. */
template <bool WHOLE> __device__ __forceinline__ void unpack(const Weights &w, A *to, index_t pitch) {
  for (int row = blockIdx.x * WARPS + threadIdx.x / 32; row < w.rows; row += gridDim.x * WARPS) {
    for (int k = threadIdx.x % 32 * EACH; k < pitch; k += 32 * EACH) {
      uint4 codes = load_codes<WHOLE>(w, row, k);
      Group group = group_of(w, row, k);
#pragma unroll
      for (int word = 0; word < 4; ++word) {
        uint32_t pairs[PAIRS];
        A x[WORD];
        numbers<true>(word_of(codes, word), group, pairs);
#pragma unroll
        for (int i = 0; i < PAIRS; ++i) {
          A two[2];
          memcpy(two, &pairs[i], 4);
          x[BITS == 4 ? i : 2 * i] = two[0], x[BITS == 4 ? i + PAIRS : 2 * i + 1] = two[1];
        }
        int at = k + word * WORD;
#pragma unroll
        for (int i = 0; i < WORD; ++i) x[i] = at + i < w.depth ? x[i] : A(0.f);
        if (at < pitch) put_word(to + row * pitch + at, x);
      }
    }
  }
}

}  // namespace weights

#define FEW_ROWS(NAME, MT, WHOLE)                                                                              \
  extern "C" __global__ void __launch_bounds__(weights::THREADS) NAME(                                         \
      const A *a, index_t a_row, index_t a_column, WEIGHTS_PARAMETERS, CALL_PARAMETERS) {                      \
    tensor_cores::wait_for_previous();                                                                         \
    tensor_cores::start_next();                                                                                \
    weights::multiply<MT, WHOLE>(CALL, {a, a_row, a_column}, WEIGHTS(k));                                      \
  }
#define UNPACK(NAME, WHOLE)                                                                                    \
  extern "C" __global__ void __launch_bounds__(weights::THREADS) NAME(                                         \
      WEIGHTS_PARAMETERS, A *to, int depth, index_t pitch) {                                                   \
    weights::unpack<WHOLE>(WEIGHTS(depth), to, pitch);                                                         \
  }
