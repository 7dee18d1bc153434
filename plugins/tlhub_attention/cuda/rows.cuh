/* Attention on the CUDA cores, a row of o by a warp: any strides, and only the keys that a query sees are read.
 *
 * It serves arrays that bulk tensor copies cannot take, and rows in which a tensor core multiplied a weight of 0, of a
 * key that is hidden or too far below the maximum, by a NaN or an infinity of v. It is slow, and exact about those:
 * weights are in float64, as the reference's, in which they do not vanish.
 */

/* x[lane], x[lane + 32].. are a warp's numbers of N channels. */
template <int N> using Channels = float[(N + 31) / 32];
template <int N> using Sums = double[(N + 31) / 32];

template <int N, class F> __device__ __forceinline__ void each_channel(F f) {
#pragma unroll
  for (int i = 0; i < (N + 31) / 32; ++i) {
    int channel = int(threadIdx.x) % 32 + 32 * i;
    if (N % 32 == 0 || channel < N) f(i, channel);
  }
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffff, x, step);
  return x;
}

/* The row of query i, by a warp. */
__device__ __forceinline__ void attend_row(const Call &call, int b, int h, int i) {
  int kv_head = h / (call.heads / call.kv_heads);
  const T *q = call.q + call.of_q.at(b, i, h);
  const T *k = call.k + call.of_k.at(b, 0, kv_head), *v = call.v + call.of_v.at(b, 0, kv_head);
  Keys seen = call.seen(i);
  Logits logits(call);
  float slope = call.slope(h);
  Channels<D> query = {};
  Sums<D_V> sum = {};
  each_channel<D>([&](int at, int d) { query[at] = to_float(q[d * call.of_q.channel]); });
  auto logit = [&](int key) {
    const T *row = k + key * call.of_k.position;
    float product = 0;
    each_channel<D>([&](int at, int d) { product = fmaf(query[at], to_float(row[d * call.of_k.channel]), product); });
    return logits.of(warp_sum(product), slope, call.place(i) - key);
  };
  float peak = -infinity();
  double total = 0;
#pragma unroll 1
  for (int key = seen.begin; key < seen.end; ++key) peak = fmaxf(peak, logit(key));
  float base = peak == -infinity() ? 0.f : peak;
#pragma unroll 1
  for (int key = seen.begin; key < seen.end; ++key) {
    const T *row = v + key * call.of_v.position;
    double weight = exp2(double(logit(key) - base));
    total += weight;
    each_channel<D_V>([&](int at, int d) {
      sum[at] = fma(weight, double(to_float(row[d * call.of_v.channel])), sum[at]);
    });
  }
  O *o = call.o + call.of_o.at(b, i, h);
  each_channel<D_V>([&](int at, int d) {
    o[d * call.of_o.channel] = from_float<O>(total == 0 ? 0.f : float(sum[at] / total));
  });
  if (threadIdx.x % 32 == 0) call.put_lse(b, h, i, (base + log2f(float(total))) * LN2);
}

extern "C" __global__ void __launch_bounds__(128) attend_rows(CALL_PARAMETERS) {
  Call call = CALL;
  index_t rows = index_t(VARLEN ? 1 : batch) * heads * queries, warps = gridDim.x * 4;
  for (index_t row = blockIdx.x * 4 + threadIdx.x / 32; row < rows; row += warps) {
    int b = int(row / queries / heads), h = int(row / queries % heads), i = int(row % queries);
    if constexpr (VARLEN) {
      Span span = call.span(call.sequence_of(i));
      attend_row(call.of(span), 0, h, i - span.query);
    } else {
      attend_row(call, b, h, i);
    }
  }
}
