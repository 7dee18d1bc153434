/* gemm_w4a16 and gemm_w8a16: codes of weights become numbers in registers, on their way to tensor cores. What
 * weights_few.cuh (sm_80 and newer) and weights_hopper.cuh share.
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

/* The groups of ROWS rows of a lane, of the steps that its warp has one after the other. The four lanes that have these
 * rows read one each, of the next steps or of parts of them, and four steps or so ahead: behind the many codes that are
 * under way they take long. */
template <int ROWS> struct Groups {
  /* of a step */
  static constexpr int KINDS = GROUP_SIZE && GROUP_SIZE < STEP ? STEP / (GROUP_SIZE ? GROUP_SIZE : 1) : 1;
  static constexpr int BATCH = 4 / KINDS, DEPTH = KINDS > 1 ? 2 : 1; /* steps that are read at once; how often ahead */

  Stored next[DEPTH][ROWS];
  uint32_t now[ROWS];

  /* k_at(i): the first k of step number i. */
  template <class At>
  __device__ __forceinline__ void load(int depth, int number, const Weights &w, const Row *rows, At k_at) {
    int mine = threadIdx.x % 4, k = k_at(number + mine / KINDS) + mine % KINDS * (STEP / KINDS);
#pragma unroll
    for (int i = 0; i < ROWS; ++i) next[depth][i] = load_group(w, rows[i], k);
  }

  template <class At> __device__ __forceinline__ void start(const Weights &w, const Row *rows, At k_at) {
#pragma unroll
    for (int depth = 0; depth < DEPTH; ++depth) load(depth, depth * BATCH, w, rows, k_at);
  }

  /* Make ready for `of` at step number `number`. */
  template <class At>
  __device__ __forceinline__ void advance(int number, const Weights &w, const Row *rows, At k_at) {
    if (number % BATCH) return;
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
      uint16_t scale;
      memcpy(&scale, &next[0][i].scale, 2);
      now[i] = scale | next[0][i].zero << 16;
    }
#pragma unroll
    for (int depth = 1; depth < DEPTH; ++depth) memcpy(next[depth - 1], next[depth], sizeof next[0]);
    load(DEPTH - 1, number + DEPTH * BATCH, w, rows, k_at);
  }

  /* The group of row i for a part of the step, which is `inside` or past the end of K. */
  __device__ __forceinline__ Group of(int i, int number, int part, bool inside) const {
    uint32_t packed = __shfl_sync(0xffffffff, now[i], number % BATCH * KINDS + part, 4);
    uint16_t scale = packed;
    Stored stored{uint8_t(packed >> 16)};
    memcpy(&stored.scale, &scale, 2);
    return group_of(stored, inside);
  }
};

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

/* Zeros instead of numbers that are past the end of K, where an infinite scale makes NaN. Pair i has k i EACH and
 * i EACH + APART, of which the first `left` are inside. */
template <int EACH, int APART, int N> __device__ __forceinline__ void cut(uint32_t (&pairs)[N], int left) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    pairs[i] &= (i * EACH < left ? 0xffff : 0) | (i * EACH + APART < left ? 0xffff0000 : 0);
  }
}

__device__ __forceinline__ uint4 read_place(uint32_t at) {
  return *static_cast<const uint4 *>(__cvta_shared_to_generic(at));
}

/* -- sums -------------------------------------------------------------------------------------------- */

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

/* Write c of COLUMNS rows of a and OUT rows of w, from row `across` of w and `top` of a on, of sums that the blocks of
 * the cluster have in shared memory, [GROUPS][COLUMNS][PITCH], each a part. */
template <class P> __device__ __forceinline__ void finish(const Call &call, const float *shared, int across, int top) {
  wait_for_cluster();
  static_assert(P::THREADS % P::OUT == 0, "a thread has one row of w");
  constexpr int EACH = P::THREADS / P::OUT, MOST = P::COLUMNS / EACH; /* columns of all threads at once, of a thread */
  constexpr int TOGETHER = MOST < 8 ? MOST : 8, HALVES = GLU ? 2 : 1;
  int row = threadIdx.x % P::OUT, n = across + row, columns = min(P::COLUMNS, call.m - top), step = EACH * gridDim.y;
  float bias[2] = {};
  for (int i = 0; BIAS && n < call.n && i < HALVES; ++i) {
    bias[i] = to<float>(call.bias[(n + i * call.n) * call.of_bias]);
  }
  for (int first = blockIdx.y * EACH + threadIdx.x / P::OUT; first < columns; first += TOGETHER * step) {
    float x[TOGETHER][HALVES] = {}; /* of that row, and its value's, and of rows of a: they are read at once */
    for (int rank = 0; rank < gridDim.y; ++rank) {
      const float *from = shared_of(shared, rank) + row;
#pragma unroll
      for (int i = 0; i < TOGETHER * HALVES * P::GROUPS; ++i) {
        int part = i % P::GROUPS, half = i / P::GROUPS % HALVES, j = i / P::GROUPS / HALVES, column = first + j * step;
        if (column < columns) x[j][half] += from[(part * P::COLUMNS + column) * P::PITCH + half * P::OUT];
      }
    }
#pragma unroll
    for (int j = 0; j < TOGETHER; ++j) {
      int column = first + j * step;
      if (n >= call.n || column >= columns) break;
      float y = activate<ACTIVATION>(x[j][0] + bias[0]);
      if constexpr (GLU) y *= x[j][HALVES - 1] + bias[1];
      if constexpr (RESIDUAL) y += to<float>(call.residual[call.of_residual.at(0, top + column, n)]);
      call.c[call.of_c.at(0, top + column, n)] = to<C>(y * static_cast<float>(call.out_scale));
    }
  }
  wait_for_cluster(); /* no block leaves while another may still read its sums */
}

}  // namespace weights
