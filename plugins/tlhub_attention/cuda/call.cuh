/* A call of attention as its kernels get it, and the numbers that they share.
 *
 * A program is one file: its Python side (code.py) writes the problem's types, dims and options ahead of this
 * text, here those of float16:
 *
 *     using T = __half; using O = __half;      element types of q, k and v, and of o
 *     constexpr int D = 128, D_V = 128;        channels
 *     constexpr bool CAUSAL = false, ALIBI = false;
 *     constexpr bool VARLEN = false;           whether sequences of various lengths lie end to end
 *
 * `CALL_PARAMETERS` are the parameters of a kernel (code.py has their values), `CALL` makes a Call of them.
 */

typedef long long index_t;

constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;

__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <class To> __device__ __forceinline__ To from_float(float x);
template <> __device__ __forceinline__ float from_float(float x) { return x; }
template <> __device__ __forceinline__ __half from_float(float x) { return __float2half_rn(x); }
template <> __device__ __forceinline__ __nv_bfloat16 from_float(float x) { return __float2bfloat16_rn(x); }

/* Two numbers side by side, rounded to nearest even. */
template <class To> __device__ __forceinline__ uint32_t pack(float low, float high) {
  To pair[2] = {from_float<To>(low), from_float<To>(high)};
  uint32_t packed;
  memcpy(&packed, pair, 4);
  return packed;
}

/* 2**x to 2 units in the last place; 0 of -inf. */
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/* tanh to about 1e-6, relative: by its series where the other form cancels. */
__device__ __forceinline__ float tanh_fast(float x) {
  float square = x * x, near = fmaf(x * square, fmaf(square, 2.f / 15, -1.f / 3), x);
  float far = 1 - __fdividef(2, 1 + exp2_fast(x * (2 * LOG2E)));
  return fabsf(x) < 0.15f ? near : far;
}

struct Strides { /* of [batch][position][head][channel], in elements */
  index_t batch, position, head, channel;

  __device__ __forceinline__ index_t at(index_t b, index_t s, index_t h) const {
    return b * batch + s * position + h * head;
  }
};

struct Keys { /* from begin up to end */
  int begin, end;
};

struct Span { /* a sequence among those that lie end to end: its first query and key, and how many it has */
  int query, queries, key, keys;
};

/* VARLEN: all sequences as one, whose strides of a batch are 0; `batch` says how many there are. */
struct Call {
  int batch, queries, heads, keys, kv_heads; /* twice the positions are ints */
  const T *q, *k, *v;
  Strides of_q, of_k, of_v;
  O *o;
  Strides of_o;
  float *lse; /* null where the problem has none */
  index_t lse_batch, lse_head, lse_query;
  const float *slopes; /* ALIBI */
  index_t slopes_step;
  const int *starts, *starts_kv; /* VARLEN: where sequences begin, and the last ends */
  index_t starts_step, starts_kv_step;
  double scale;
  int window;
  double softcap;

  /* Whether keys after a query are hidden. */
  __device__ __forceinline__ bool causal() const { return CAUSAL || window > 0; }

  /* The key that query i stands at: they are aligned at the end. */
  __device__ __forceinline__ int place(int i) const { return i + keys - queries; }

  /* The keys that query i sees. */
  __device__ __forceinline__ Keys seen(int i) const {
    return {window > 0 ? max(place(i) - window + 1, 0) : 0, causal() ? min(keys, place(i) + 1) : keys};
  }

  /* What a head's logits, in base 2, lose with each key between a query and a key. */
  __device__ __forceinline__ float slope(index_t h) const { return ALIBI ? slopes[h * slopes_step] * LOG2E : 0.f; }

  __device__ __forceinline__ void put_lse(index_t b, index_t h, index_t i, float value) const {
    if (lse) lse[b * lse_batch + h * lse_head + i * lse_query] = value;
  }

  /* -- VARLEN: sequences 0 to batch - 1. Queries before them are of -1, those after of batch; these have no keys -- */

  __device__ __forceinline__ int start(int n) const { return min(max(starts[n * starts_step], 0), queries); }
  __device__ __forceinline__ int start_kv(int n) const { return min(max(starts_kv[n * starts_kv_step], 0), keys); }

  __device__ __forceinline__ Span span(int n) const {
    int query = n < 0 ? 0 : start(n), end = n < batch ? start(n + 1) : queries;
    if (n < 0 || n == batch) return {query, end - query, 0, 0};
    int key = start_kv(n);
    return {query, max(end - query, 0), key, max(start_kv(n + 1) - key, 0)};
  }

  /* The sequence that a query, of all, is of. */
  __device__ __forceinline__ int sequence_of(int query) const {
    int below = -1, above = batch + 1; /* the last start up to the query is one of those from `below` up to `above` */
    while (above - below > 1) {
      int middle = (below + above) / 2;
      (start(middle) <= query ? below : above) = middle;
    }
    return below;
  }

  /* The call of one sequence alone. */
  __device__ __forceinline__ Call of(const Span &s) const {
    Call one = *this;
    one.queries = s.queries, one.keys = s.keys;
    one.q += s.query * of_q.position, one.o += s.query * of_o.position;
    one.k += s.key * of_k.position, one.v += s.key * of_v.position;
    if (lse) one.lse += s.query * lse_query;
    return one;
  }
};

/* Products of a query and a key to logits in base 2, of any scale, with and without a soft cap. */
struct Logits {
  bool capped;
  float factor, cap;

  __device__ __forceinline__ explicit Logits(const Call &call)
      : capped(call.softcap != 0),
        factor(static_cast<float>(capped ? call.scale / call.softcap : call.scale * double(LOG2E))),
        cap(static_cast<float>(call.softcap * double(LOG2E))) {}

  __device__ __forceinline__ float of(float product) const {
    float x = product * factor;
    return capped ? cap * tanh_fast(x) : x;
  }

  /* That of a query and a key so far apart, of a head with this slope. */
  __device__ __forceinline__ float of(float product, float slope, int apart) const {
    return ALIBI ? fmaf(-slope, fabsf(float(apart)), of(product)) : of(product);
  }
};

#define STRIDES(NAME) index_t NAME##_batch, index_t NAME##_position, index_t NAME##_head, index_t NAME##_channel
#define CALL_PARAMETERS                                                                                          \
  int batch, int queries, int heads, int keys, int kv_heads, const T *q, STRIDES(q),                             \
      const T *k, STRIDES(k), const T *v, STRIDES(v), O *o, STRIDES(o), float *lse, index_t lse_batch,           \
      index_t lse_head, index_t lse_query, const float *slopes, index_t slopes_step, const int *starts,          \
      index_t starts_step, const int *starts_kv, index_t starts_kv_step, double scale, int window, double softcap

#define STRIDES_OF(NAME) {NAME##_batch, NAME##_position, NAME##_head, NAME##_channel}
#define CALL                                                                                                     \
  Call {                                                                                                         \
    batch, queries, heads, keys, kv_heads, q, k, v, STRIDES_OF(q), STRIDES_OF(k), STRIDES_OF(v), o,              \
        STRIDES_OF(o), lse, lse_batch, lse_head, lse_query, slopes, slopes_step, starts, starts_kv, starts_step, \
        starts_kv_step, scale, window, softcap                                                                   \
  }
