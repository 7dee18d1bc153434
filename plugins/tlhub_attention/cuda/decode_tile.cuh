/* What a warp has of a tile of a decoding: 16 rows, by mma.sync: their queries, and their sums over some of the keys. */

#include <type_traits>

namespace decode {

using namespace accumulators;
using namespace tensor_cores;

constexpr int STEPS = (D + 15) / 16, CHANNELS = (D_V + 15) / 16 * 16;

/* Load four matrices of 8 x 8, a register each; lane 8 i + j has the address of row j of matrix i. */
template <bool TRANSPOSED> __device__ __forceinline__ void load_matrices(uint32_t (&r)[4], uint32_t row) {
  if constexpr (TRANSPOSED) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(row)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(row)
                 : "memory");
  }
}

/* sum += a b, of 16 x 16 and 16 x 8. */
#define MULTIPLY(PTX)                                                                                          \
  asm("mma.sync.aligned.m16n8k16.row.col.f32." PTX "." PTX                                                     \
      ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                                   \
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])                                                 \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
__device__ __forceinline__ void multiply(float *sum, const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (std::is_same_v<T, __half>) {
    MULTIPLY("f16");
  } else {
    MULTIPLY("bf16");
  }
}
#undef MULTIPLY

/* Whether pairs of elements that begin at an even channel can be accessed at once. */
template <class E> __device__ __forceinline__ bool pairs(const E *p, const Strides &s) {
  bool even = (s.batch | s.position | s.head) % 2 == 0;
  return s.channel == 1 && even && reinterpret_cast<uintptr_t>(p) % (2 * sizeof(E)) == 0;
}

/* This thread's share of 16 rows of q, from `row` on, as an operand: two channels of two rows, and of 8 channels on. */
__device__ __forceinline__ void load_queries(
    uint32_t (&q)[STEPS][4], const Call &call, int b, int kv_head, int row, bool paired) {
  int lane = threadIdx.x % 32;
#pragma unroll
  for (int low = 0; low < 2; ++low) {
    int r = row + lane / 4 + 8 * low;
    Row at(call, kv_head, r);
    const T *from = call.q + call.of_q.at(b, at.query, at.head);
#pragma unroll
    for (int i = 0; i < 2 * STEPS; ++i) {
      uint32_t &pair = q[i / 2][i % 2 * 2 + low];
      pair = 0;
      if (8 * i >= D || r >= rows_of(call)) continue;
      int channel = 8 * i + lane % 4 * 2;
      if (paired) {
        pair = *reinterpret_cast<const uint32_t *>(from + channel);
      } else {
        T each[2] = {from[channel * call.of_q.channel], from[(channel + 1) * call.of_q.channel]};
        memcpy(&pair, each, 4);
      }
    }
  }
}

/* The rows of a tile that a warp has, with its sums over some of the keys. */
template <class P> struct Rows {
  Softmax softmax;
  float sum[CHANNELS / 2];

  __device__ __forceinline__ Rows() : sum{} {}

  /* Multiply what a row has by a factor. */
  __device__ __forceinline__ void scale(const float (&by)[2]) {
#pragma unroll
    for (int j = 0; j < CHANNELS / 2; ++j) sum[j] *= by[row_of(j)];
  }

  /* Put everything in a slot of shared memory, 16 bytes of each lane side by side. */
  __device__ __forceinline__ void put(float4 *slot) const {
    slot += threadIdx.x % 32;
    *slot = {softmax.peak[0], softmax.peak[1], softmax.total[0], softmax.total[1]};
#pragma unroll
    for (int j = 0; j < CHANNELS / 2; j += 4) slot[(1 + j / 4) * 32] = {sum[j], sum[j + 1], sum[j + 2], sum[j + 3]};
  }

  /* Add what another warp has put in a slot. */
  __device__ __forceinline__ void add(const float4 *slot) {
    slot += threadIdx.x % 32;
    float4 state = *slot;
    float peaks[2] = {state.x, state.y}, totals[2] = {state.z, state.w}, mine[2], others[2];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      float peak = fmaxf(softmax.peak[row], peaks[row]), base = peak == -infinity() ? 0.f : peak;
      mine[row] = exp2_fast(softmax.peak[row] - base), others[row] = exp2_fast(peaks[row] - base);
      softmax.peak[row] = peak;
      softmax.total[row] = softmax.total[row] * mine[row] + totals[row] * others[row];
    }
#pragma unroll
    for (int j = 0; j < CHANNELS / 2; j += 4) {
      float4 v = slot[(1 + j / 4) * 32];
      sum[j] = sum[j] * mine[0] + v.x * others[0], sum[j + 1] = sum[j + 1] * mine[0] + v.y * others[0];
      sum[j + 2] = sum[j + 2] * mine[1] + v.z * others[1], sum[j + 3] = sum[j + 3] * mine[1] + v.w * others[1];
    }
  }

  /* Write a part of a tile: this thread's rows are `row` and the one 8 below. */
  __device__ __forceinline__ void write_part(const Parts<P> &parts, int slot, int row) const {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < CHANNELS / 2; j += 2) {
      int channel = column_of(j) + lane % 4 * 2, r = row + 8 * row_of(j);
      if (channel < D_V) *reinterpret_cast<float2 *>(parts.sum(slot, r) + channel) = {sum[j], sum[j + 1]};
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (lane % 4 == 0) parts.state(slot, row + 8 * i) = {softmax.peak[i], softmax.total[i]};
    }
  }

  /* Write rows of o and of lse, from `row` of the kv head on; then again those in which a hidden NaN may be. */
  __device__ __forceinline__ void write(const Sequence &s, int b, int kv_head, int row, bool paired) {
    int lane = threadIdx.x % 32;
    unsigned lost = 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      int r = row + lane / 4 + 8 * i;
      if (r >= rows_of(s)) continue;
      Row at(s, kv_head, r);
      O *o = s.o + s.of_o.at(b, at.query, at.head);
      float total = softmax.total[i], inverse = total == 0 ? 0.f : 1 / total, probe = 0;
#pragma unroll
      for (int j = 2 * i; j < CHANNELS / 2; j += 4) {
        int channel = column_of(j) + lane % 4 * 2;
        if (channel >= D_V) continue;
        float x = sum[j] * inverse, y = sum[j + 1] * inverse;
        probe += x + y;
        if (!paired) {
          o[channel * s.of_o.channel] = from_float<O>(x), o[(channel + 1) * s.of_o.channel] = from_float<O>(y);
        } else if constexpr (sizeof(O) == 2) {
          *reinterpret_cast<uint32_t *>(o + channel) = pack<O>(x, y);
        } else {
          *reinterpret_cast<float2 *>(o + channel) = {x, y};
        }
      }
      if (lane % 4 == 0) s.put_lse(b, at.head, at.query, (softmax.base(i, 1) + log2f(total)) * LN2);
      if (s.causal() && probe != probe && total == total) lost |= 1u << (lane / 4 + 8 * i);
    }
    lost = __reduce_or_sync(0xffffffff, lost);
    if (s.queries > 1) {
      __syncwarp();
      for (; lost; lost &= lost - 1) {
        Row at(s, kv_head, row + __ffs(lost) - 1);
        attend_row(s, b, at.head, at.query);
      }
    }
  }
};

}  // namespace decode
