/* The gradients of attention on the CUDA cores, a row of dq, or of dk and dv, by a warp: any strides, and only what a
 * row depends on is read.
 *
 * It serves arrays that bulk tensor copies cannot take, and rows that are not finite, in which a tensor core may have
 * multiplied a 0 by a NaN or an infinity: of a hidden pair, or of a weight too small for its dtype. It is slow, and
 * computes as the reference does, in float64.
 */

template <int N> __device__ __forceinline__ void read_row(Channels<N> &x, const T *row, index_t step) {
  each_channel<N>([&](int at, int d) { x[at] = to_float(row[d * step]); });
}

template <int N> __device__ __forceinline__ void write_row(T *row, index_t step, const Sums<N> &x, double factor) {
  each_channel<N>([&](int at, int d) { row[d * step] = from_float<T>(float(x[at] * factor)); });
}

template <int N> __device__ __forceinline__ void add_row(Sums<N> &sum, double factor, const Channels<N> &x) {
  each_channel<N>([&](int at, int) { sum[at] = fma(factor, double(x[at]), sum[at]); });
}

template <int N> __device__ __forceinline__ double dot(const Channels<N> &x, const Channels<N> &y) {
  double sum = 0;
  each_channel<N>([&](int at, int) { sum = fma(double(x[at]), double(y[at]), sum); });
#pragma unroll
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffff, sum, step);
  return sum;
}

/* What a query of a head has besides its rows. */
struct Query {
  int head, i;
  double lse, fall;

  __device__ __forceinline__ Query(const Call &call, int b, int head, int i)
      : head(head), i(i), lse(call.lse[b * call.lse_batch + head * call.lse_head + i * call.lse_query]),
        fall(ALIBI ? call.slopes[head * call.slopes_step] : 0.f) {}

  __device__ __forceinline__ bool sees_none() const { return lse == -infinity(); }
};

/* What a pair of a query and a key gives, of their product and that of dout and v: its weight P, and dS. */
struct Pair {
  double weight, slope = 1;

  __device__ __forceinline__ Pair(
      const Call &call, const Query &query, int key, double product, double gradient, double delta) {
    double logit = product * call.scale;
    if (call.softcap != 0) {
      double x = tanh(logit / call.softcap);
      logit = call.softcap * x, slope = 1 - x * x;
    }
    if constexpr (ALIBI) logit -= query.fall * abs(call.place(query.i) - key);
    weight = exp(logit - query.lse), slope *= weight * (gradient - delta);
  }
};

/* dq of query i. */
__device__ __forceinline__ void query_row(const Gradients &g, int b, int h, int i) {
  const Call &call = g.call;
  int kv_head = h / g.group();
  Keys seen = call.seen(i);
  Query query(call, b, h, i);
  if (query.sees_none()) seen.end = seen.begin;
  Channels<D> q = {}, k = {};
  Channels<D_V> o = {}, v = {}, dout = {};
  Sums<D> dq = {};
  read_row<D>(q, call.q + call.of_q.at(b, i, h), call.of_q.channel);
  read_row<D_V>(o, call.o + call.of_o.at(b, i, h), call.of_o.channel);
  read_row<D_V>(dout, g.dout + g.of_dout.at(b, i, h), g.of_dout.channel);
  double delta = dot<D_V>(dout, o);
#pragma unroll 1
  for (int key = seen.begin; key < seen.end; ++key) {
    read_row<D>(k, call.k + call.of_k.at(b, key, kv_head), call.of_k.channel);
    read_row<D_V>(v, call.v + call.of_v.at(b, key, kv_head), call.of_v.channel);
    Pair pair(call, query, key, dot<D>(q, k), dot<D_V>(dout, v), delta);
    add_row<D>(dq, pair.slope, k);
  }
  write_row<D>(g.dq + g.of_dq.at(b, i, h), g.of_dq.channel, dq, call.scale);
}

/* dk and dv of key j. */
__device__ __forceinline__ void key_row(const Gradients &g, int b, int kv_head, int j) {
  const Call &call = g.call;
  Queries seen = seen_by(call, j, j);
  Channels<D> q = {}, k = {};
  Channels<D_V> o = {}, v = {}, dout = {};
  Sums<D> dk = {};
  Sums<D_V> dv = {};
  read_row<D>(k, call.k + call.of_k.at(b, j, kv_head), call.of_k.channel);
  read_row<D_V>(v, call.v + call.of_v.at(b, j, kv_head), call.of_v.channel);
#pragma unroll 1
  for (int h = kv_head * g.group(); h < (kv_head + 1) * g.group(); ++h) {
#pragma unroll 1
    for (int i = seen.begin; i < seen.end; ++i) {
      Query query(call, b, h, i);
      if (query.sees_none()) continue;
      read_row<D>(q, call.q + call.of_q.at(b, i, h), call.of_q.channel);
      read_row<D_V>(o, call.o + call.of_o.at(b, i, h), call.of_o.channel);
      read_row<D_V>(dout, g.dout + g.of_dout.at(b, i, h), g.of_dout.channel);
      Pair pair(call, query, j, dot<D>(q, k), dot<D_V>(dout, v), dot<D_V>(dout, o));
      add_row<D>(dk, pair.slope, q);
      add_row<D_V>(dv, pair.weight, dout);
    }
  }
  write_row<D>(g.dk + g.of_dk.at(b, j, kv_head), g.of_dk.channel, dk, call.scale);
  write_row<D_V>(g.dv + g.of_dv.at(b, j, kv_head), g.of_dv.channel, dv, 1);
}

/* Whether a row holds what is not finite. */
template <int N> __device__ __forceinline__ bool is_odd(const T *row, index_t step) {
  float probe = 0;
  each_channel<N>([&](int, int d) { probe += to_float(row[d * step]); });
  return __any_sync(0xffffffff, !is_finite(probe));
}

/* Rows of dq, and then those of dk and dv: all, or where `lost` is given, and says that there are some, those that are
 * not finite. */
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
      if (lost && !is_odd<D>(dq + g.of_dq.at(b, i, h), dq_channel)) continue;
      Span span = VARLEN ? g.call.span(g.call.sequence_of(i)) : Span{};
      query_row(g.of(span), b, h, i - span.query);
    } else {
      index_t at = row - of_queries;
      int b = int(at / keys / kv_heads), h = int(at / keys % kv_heads), j = int(at % keys);
      bool hit = !lost || is_odd<D>(dk + g.of_dk.at(b, j, h), dk_channel) ||
                 is_odd<D_V>(dv + g.of_dv.at(b, j, h), dv_channel);
      if (!hit) continue;
      Span span = VARLEN ? span_by_keys(g.call, sequence_of_key(g.call, j)) : Span{};
      key_row(g.of(span), b, h, j - span.key);
    }
  }
}
