/* A call of attention_decode: one of attention, whose sequences have lengths of their own and may lie in pages.
 *
 * `PAGED` is among the options that Python writes. In pages, k and v are (pages, positions of a page, heads, channels).
 */

/* `keys`: how many a sequence has room for, or of the call of one sequence its length. */
struct Decode : Call {
  const int *lengths;
  index_t lengths_step;
  const int *table; /* null where there are no pages */
  index_t table_row, table_step;
  int page; /* positions of a page */

  __device__ __forceinline__ Decode sequence(int b) const {
    Decode one = *this;
    one.keys = max(0, min(lengths[b * lengths_step], keys));
    return one;
  }

  __device__ __forceinline__ int page_of(int b, int i) const { return table[b * table_row + i / page * table_step]; }

  __device__ __forceinline__ const T *key(int b, int i, int head) const {
    return PAGED ? k + of_k.at(page_of(b, i), i % page, head) : k + of_k.at(b, i, head);
  }
  __device__ __forceinline__ const T *value(int b, int i, int head) const {
    return PAGED ? v + of_v.at(page_of(b, i), i % page, head) : v + of_v.at(b, i, head);
  }
};

/* The row of query i, by a warp, in one pass: as rows.cuh's, wherever the keys lie. */
__device__ __forceinline__ void attend_row(const Decode &s, int b, int h, int i) {
  int kv_head = h / (s.heads / s.kv_heads);
  const T *q = s.q + s.of_q.at(b, i, h);
  Keys seen = s.seen(i);
  Logits logits(s);
  float slope = s.slope(h);
  Channels<D> query = {};
  Sums<D_V> sum = {};
  float peak = -infinity(), base = 0;
  double total = 0;
  each_channel<D>([&](int at, int d) { query[at] = to_float(q[d * s.of_q.channel]); });
#pragma unroll 1
  for (int key = seen.begin; key < seen.end; ++key) {
    const T *k = s.key(b, key, kv_head), *v = s.value(b, key, kv_head);
    float product = 0;
    each_channel<D>([&](int at, int d) { product = fmaf(query[at], to_float(k[d * s.of_k.channel]), product); });
    float logit = logits.of(warp_sum(product), slope, s.place(i) - key);
    if (!(logit <= peak)) { /* NaN, too, is weighed by itself */
      float next = fmaxf(logit, peak), next_base = next == -infinity() ? 0.f : next;
      double correction = exp2(double(peak - next_base));
      peak = next, base = next_base, total *= correction;
      each_channel<D_V>([&](int at, int) { sum[at] *= correction; });
    }
    double weight = exp2(double(logit - base));
    total += weight;
    each_channel<D_V>([&](int at, int d) {
      sum[at] = fma(weight, double(to_float(v[d * s.of_v.channel])), sum[at]);
    });
  }
  O *o = s.o + s.of_o.at(b, i, h);
  each_channel<D_V>([&](int at, int d) {
    o[d * s.of_o.channel] = from_float<O>(total == 0 ? 0.f : float(sum[at] / total));
  });
  if (threadIdx.x % 32 == 0) s.put_lse(b, h, i, (base + log2f(float(total))) * LN2);
}

#define DECODE_PARAMETERS                                                                                         \
  CALL_PARAMETERS, const int *lengths, index_t lengths_step, const int *table, index_t table_row, index_t table_step, \
      int page

#define DECODE \
  Decode { CALL, lengths, lengths_step, table, table_row, table_step, page }

extern "C" __global__ void __launch_bounds__(128) decode_rows(DECODE_PARAMETERS) {
  Decode call = DECODE;
  index_t rows = index_t(batch) * heads * queries, warps = gridDim.x * 4;
  for (index_t row = blockIdx.x * 4 + threadIdx.x / 32; row < rows; row += warps) {
    int b = int(row / queries / heads);
    attend_row(call.sequence(b), b, int(row / queries % heads), int(row % queries));
  }
}
