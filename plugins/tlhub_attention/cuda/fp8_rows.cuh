/* Attention of 8-bit floats in float64, a row of o by a warp: any strides and factors, and only the keys that a query
 * sees are read.
 *
 * It serves arrays that bulk tensor copies cannot take, and rows that tensor cores leave as NaN. It is slow, and exact
 * about NaN, infinities and numbers that float32 has no room for; logits that are NaN end it early.
 */

__device__ __forceinline__ double warp_sum(double x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffff, x, step);
  return x;
}

/* The row of query i, by a warp. */
__device__ __forceinline__ void attend_row(const Scaled &call, int b, int h, int i) {
  constexpr int CHANNELS = (D + 31) / 32, CHANNELS_V = (D_V + 31) / 32; /* of a lane, which has each 32nd */
  int lane = threadIdx.x % 32, kv_head = h / (call.heads / call.kv_heads);
  const T *q = call.q + call.of_q.at(b, i, h);
  const T *k = call.k + call.of_k.at(b, 0, kv_head), *v = call.v + call.of_v.at(b, 0, kv_head);
  double of_query = call.of_queries.at(b, h), of_key = call.of_keys.at(b, kv_head);
  double of_value = call.of_values.at(b, kv_head), slope = ALIBI ? call.slopes[h * call.slopes_step] : 0.f;
  Keys seen = call.seen(i);
  double query[CHANNELS], sum[CHANNELS_V] = {};
#pragma unroll
  for (int at = 0; at < CHANNELS; ++at) {
    int d = lane + 32 * at;
    query[at] = d < D ? to_float(q[d * call.of_q.channel]) * of_query * call.scale : 0.;
  }
  auto logit = [&](int key) {
    const T *row = k + key * call.of_k.position;
    double x = 0;
#pragma unroll
    for (int at = 0; at < CHANNELS; ++at) {
      int d = lane + 32 * at;
      if (d < D) x = fma(query[at], to_float(row[d * call.of_k.channel]) * of_key, x);
    }
    x = warp_sum(x);
    if (call.softcap != 0) x = call.softcap * tanh(x / call.softcap);
    return ALIBI ? x - slope * abs(call.place(i) - key) : x;
  };
  double peak = -infinity(), total = 0;
#pragma unroll 1
  for (int key = seen.begin; key < seen.end && total == total; ++key) {
    double x = logit(key);
    peak = fmax(peak, x);
    if (x != x) total = x;
  }
  double base = peak == -infinity() ? 0. : peak;
#pragma unroll 1
  for (int key = seen.begin; key < seen.end && total == total; ++key) {
    const T *row = v + key * call.of_v.position;
    double weight = exp(logit(key) - base);
    total += weight;
#pragma unroll
    for (int at = 0; at < CHANNELS_V; ++at) {
      int d = lane + 32 * at;
      if (d < D_V) sum[at] = fma(weight, to_float(row[d * call.of_v.channel]) * of_value, sum[at]);
    }
  }
  O *o = call.o + call.of_o.at(b, i, h);
#pragma unroll
  for (int at = 0; at < CHANNELS_V; ++at) {
    int d = lane + 32 * at;
    if (d < D_V) o[d * call.of_o.channel] = from_float<O>(total == 0 ? 0.f : static_cast<float>(sum[at] / total));
  }
  if (lane == 0) call.put_lse(b, h, i, static_cast<float>(base + log(total)));
}

extern "C" __global__ void __launch_bounds__(128) fp8_rows(SCALED_PARAMETERS) {
  Scaled call = SCALED_CALL;
  index_t rows = index_t(batch) * heads * queries, warps = gridDim.x * 4;
  for (index_t row = blockIdx.x * 4 + threadIdx.x / 32; row < rows; row += warps) {
    attend_row(call, int(row / queries / heads), int(row / queries % heads), int(row % queries));
  }
}
