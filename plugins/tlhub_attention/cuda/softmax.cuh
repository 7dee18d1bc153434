/* The softmax of logits as tensor cores leave them: what a lane has of an accumulator, of mma.sync and of wgmma. */

namespace accumulators {

/* A thread has two rows of an accumulator: of each 8 columns two floats of row lane / 4, two of the row 8 below. */
__device__ constexpr int row_of(int i) { return i / 2 % 2; }
__device__ constexpr int column_of(int i) { return i / 4 * 8 + i % 2; }

/* The softmax of a thread's two rows: the logit that exponents are relative to, and this thread's part of the sum. */
struct Softmax {
  float peak[2] = {-infinity(), -infinity()}, total[2] = {}, correction[2];

  /* What is subtracted from exponents: the peak, or 0 where no key has been seen. */
  __device__ __forceinline__ float base(int row, float factor) const {
    return peak[row] == -infinity() ? 0.f : peak[row] * factor;
  }

  /* Make weights of logits. If it returns true, sums so far are to be multiplied by `correction`: a warp's peaks move
   * when a maximum is above one by so much that weights are large, up to 2**8. */
  template <int N> __device__ __forceinline__ bool weigh(float (&s)[N], float factor) {
    float most[2];
    bool moved = __any_sync(0xffffffff, exceeds(s, factor, most));
    if (moved) move(most, factor);
    make_weights(s, factor);
    return moved;
  }

  /* The steps of that: the largest of this thread's rows, and whether one is so far above a peak; to make them peaks;
   * and weights by the peaks that there are, 2**raise times as large. */
  template <int N>
  __device__ __forceinline__ bool exceeds(
      const float (&s)[N], float factor, float (&most)[2], float slack = 8) const {
    bool far = false;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      most[row] = peak[row];
#pragma unroll
      for (int i = 0; i < N; ++i) {
        if (row_of(i) == row) most[row] = fmaxf(most[row], s[i]);
      }
      most[row] = fmaxf(most[row], __shfl_xor_sync(0xffffffff, most[row], 1));
      most[row] = fmaxf(most[row], __shfl_xor_sync(0xffffffff, most[row], 2));
      far |= !((most[row] - peak[row]) * factor <= slack);
    }
    return far;
  }
  __device__ __forceinline__ void move(const float (&most)[2], float factor) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      float before = peak[row] * factor;
      peak[row] = most[row];
      correction[row] = exp2_fast(before - base(row, factor));
      total[row] *= correction[row];
    }
  }
  template <int N> __device__ __forceinline__ void make_weights(float (&s)[N], float factor, float raise = 0) {
    float subtract[2] = {base(0, factor) - raise, base(1, factor) - raise};
#pragma unroll
    for (int i = 0; i < N; ++i) {
      s[i] = exp2_fast(fmaf(s[i], factor, -subtract[row_of(i)]));
      total[row_of(i)] += s[i];
    }
  }
};

/* What of a block of keys this thread's two rows see: the columns from `low` up to `high`, counted from its first. */
template <int N> __device__ __forceinline__ void hide(float (&s)[N], const int (&low)[2], const int (&high)[2]) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    int row = row_of(i);
    if (column_of(i) < low[row] || column_of(i) >= high[row]) s[i] = -infinity();
  }
}

}  // namespace accumulators
