/* The gradients of attention on the CUDA cores, a row of dq, or of dk and dv, by a warp: any strides, and only what a
 * row depends on is read.
 *
 * It serves arrays that bulk tensor copies cannot take, and rows in which a tensor core multiplied a 0 of a hidden key
 * by a NaN or an infinity. It is slow, and exact about those.
 */

template <int N> __device__ __forceinline__ void read_row(Channels<N> &x, const T *row, index_t step) {
  each_channel<N>([&](int at, int d) { x[at] = to_float(row[d * step]); });
}

template <int N> __device__ __forceinline__ void write_row(T *row, index_t step, const Channels<N> &x, float factor) {
  each_channel<N>([&](int at, int d) { row[d * step] = from_float<T>(x[at] * factor); });
}

template <int N> __device__ __forceinline__ float dot(const Channels<N> &x, const Channels<N> &y) {
  float sum = 0;
  each_channel<N>([&](int at, int) { sum = fmaf(x[at], y[at], sum); });
  return warp_sum(sum);
}

/* What a pair of a query and a key gives: its weight P, and dS. */
struct Pair {
  float weight, slope;

  __device__ __forceinline__ Pair(const Logit &logit, float base, float gradient, float delta) {
    weight = exp2f(logit.value - base);
    slope = weight * (gradient - delta) * logit.slope;
  }
};

/* dq of query i. */
__device__ __forceinline__ void query_row(const Gradients &g, int b, int h, int i) {
  const Call &call = g.call;
  int kv_head = h / g.group();
  Keys seen = call.seen(i);
  Logits logits(call);
  float base = g.base(b, h, i), fall = call.slope(h);
  if (base == -infinity()) seen.end = seen.begin;
  Channels<D> q = {}, k = {}, sum = {};
  Channels<D_V> o = {}, v = {}, dout = {};
  read_row<D>(q, call.q + call.of_q.at(b, i, h), call.of_q.channel);
  read_row<D_V>(o, call.o + call.of_o.at(b, i, h), call.of_o.channel);
  read_row<D_V>(dout, g.dout + g.of_dout.at(b, i, h), g.of_dout.channel);
  float delta = dot<D_V>(dout, o);
#pragma unroll 1
  for (int key = seen.begin; key < seen.end; ++key) {
    read_row<D>(k, call.k + call.of_k.at(b, key, kv_head), call.of_k.channel);
    read_row<D_V>(v, call.v + call.of_v.at(b, key, kv_head), call.of_v.channel);
    Logit logit(logits, dot<D>(q, k), fall, float(call.place(i) - key));
    Pair pair(logit, base, dot<D_V>(dout, v), delta);
    each_channel<D>([&](int at, int) { sum[at] = fmaf(pair.slope, k[at], sum[at]); });
  }
  write_row<D>(g.dq + g.of_dq.at(b, i, h), g.of_dq.channel, sum, float(call.scale));
}

/* dk and dv of key j. */
__device__ __forceinline__ void key_row(const Gradients &g, int b, int kv_head, int j) {
  const Call &call = g.call;
  Queries seen = seen_by(call, j, j);
  Logits logits(call);
  Channels<D> q = {}, k = {}, dk = {};
  Channels<D_V> o = {}, v = {}, dout = {}, dv = {};
  read_row<D>(k, call.k + call.of_k.at(b, j, kv_head), call.of_k.channel);
  read_row<D_V>(v, call.v + call.of_v.at(b, j, kv_head), call.of_v.channel);
#pragma unroll 1
  for (int h = kv_head * g.group(); h < (kv_head + 1) * g.group(); ++h) {
    float fall = call.slope(h);
#pragma unroll 1
    for (int i = seen.begin; i < seen.end; ++i) {
      float base = g.base(b, h, i);
      if (base == -infinity()) continue; /* it sees no key */
      read_row<D>(q, call.q + call.of_q.at(b, i, h), call.of_q.channel);
      read_row<D_V>(o, call.o + call.of_o.at(b, i, h), call.of_o.channel);
      read_row<D_V>(dout, g.dout + g.of_dout.at(b, i, h), g.of_dout.channel);
      Logit logit(logits, dot<D>(q, k), fall, float(call.place(i) - j));
      Pair pair(logit, base, dot<D_V>(dout, v), dot<D_V>(dout, o));
      each_channel<D>([&](int at, int) { dk[at] = fmaf(pair.slope, q[at], dk[at]); });
      each_channel<D_V>([&](int at, int) { dv[at] = fmaf(pair.weight, dout[at], dv[at]); });
    }
  }
  write_row<D>(g.dk + g.of_dk.at(b, j, kv_head), g.of_dk.channel, dk, float(call.scale));
  write_row<D_V>(g.dv + g.of_dv.at(b, j, kv_head), g.of_dv.channel, dv, 1.f);
}

/* Whether a row holds a NaN. */
template <int N> __device__ __forceinline__ bool has_nan(const T *row, index_t step) {
  float probe = 0;
  each_channel<N>([&](int, int d) { probe += to_float(row[d * step]); });
  return __any_sync(0xffffffff, probe != probe);
}

/* Rows of dq, and then those of dk and dv: all, or where `lost` is given, and has something in it, those with a NaN. */
extern "C" __global__ void __launch_bounds__(128) gradient_rows(const int *lost, GRADIENT_PARAMETERS) {
  Gradients g = GRADIENTS;
  tensor_cores::wait_for_previous();
  tensor_cores::start_next();
  if (lost && !*lost) return;
  index_t batches = VARLEN ? 1 : batch, of_queries = batches * heads * queries;
  index_t rows = of_queries + batches * kv_heads * keys;
  for (index_t row = blockIdx.x * 4 + threadIdx.x / 32; row < rows; row += gridDim.x * 4) {
    if (row < of_queries) {
      int b = int(row / queries / heads), h = int(row / queries % heads), i = int(row % queries);
      if (lost && !has_nan<D>(dq + g.of_dq.at(b, i, h), dq_channel)) continue;
      Span span = VARLEN ? g.call.span(g.call.sequence_of(i)) : Span{};
      query_row(g.of(span), b, h, i - span.query);
    } else {
      index_t at = row - of_queries;
      int b = int(at / keys / kv_heads), h = int(at / keys % kv_heads), j = int(at % keys);
      bool hit = !lost || has_nan<D>(dk + g.of_dk.at(b, j, h), dk_channel) ||
                 has_nan<D_V>(dv + g.of_dv.at(b, j, h), dv_channel);
      if (!hit) continue;
      Span span = VARLEN ? span_by_keys(g.call, sequence_of_key(g.call, j)) : Span{};
      key_row(g.of(span), b, h, j - span.key);
    }
  }
}
