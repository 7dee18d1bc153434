/* A call of attention_bwd as its kernels get it: one of attention, whose o and lse are inputs, and the gradients.
 *
 * With P = exp(logits - lse), 0 where a key is hidden, and slope the derivative of the soft cap,
 *
 *     delta = rowsum(dout o)      dP = dout v^T      dS = P (dP - delta) slope
 *     dq = scale dS k             dk = scale dS^T q  dv = P^T dout
 */

__device__ __forceinline__ bool is_finite(float x) { return fabsf(x) < infinity(); }

struct Gradients {
  Call call;
  const T *dout;
  Strides of_dout;
  T *dq, *dk, *dv;
  Strides of_dq, of_dk, of_dv;

  __device__ __forceinline__ int group() const { return call.heads / call.kv_heads; } /* query heads of a key head */

  /* Those of one sequence alone, where there are many. */
  __device__ __forceinline__ Gradients of(const Span &s) const {
    Gradients one = *this;
    if constexpr (VARLEN) {
      one.call = call.of(s);
      one.dout += s.query * of_dout.position, one.dq += s.query * of_dq.position;
      one.dk += s.key * of_dk.position, one.dv += s.key * of_dv.position;
    }
    return one;
  }

  /* The logarithm that exponents of a query are relative to, in base 2; -inf where it sees no key. */
  __device__ __forceinline__ float base(int b, int h, int i) const {
    return call.lse[b * call.lse_batch + h * call.lse_head + i * call.lse_query] * LOG2E;
  }
};

struct Queries { /* from begin up to end */
  int begin, end;
};

/* The queries that see a key of those from `first` to `last`. */
__device__ __forceinline__ Queries seen_by(const Call &call, int first, int last) {
  int shift = call.queries - call.keys;
  int begin = call.causal() ? min(max(first + shift, 0), call.queries) : 0;
  int end = call.window > 0 ? max(min(last + shift + call.window, call.queries), 0) : call.queries;
  return {begin, max(begin, end)};
}

/* A logit in base 2, of a query and a key so far apart in a head that loses `fall` with each place, and its derivative
 * by the product before the cap, but for the scale. */
struct Logit {
  float value, slope;

  __device__ __forceinline__ Logit(const Logits &logits, float product, float fall = 0, float apart = 0)
      : value(product * logits.factor), slope(1) {
    if (logits.capped) {
      float x = tanh_fast(value);
      value = logits.cap * x, slope = fmaf(-x, x, 1.f);
    }
    if constexpr (ALIBI) value = fmaf(-fall, fabsf(apart), value);
  }
};

/* -- VARLEN: sequences, and what is before the first, of -1, and after the last, of `batch` ----------------- */

/* The last of -1 to `batch` of which `holds` is true: as it is of -1, and of all up to that. */
template <class F> __device__ __forceinline__ int last_that(const Call &call, F holds) {
  int below = -1, above = call.batch + 1;
  while (above - below > 1) {
    int middle = (below + above) / 2;
    (holds(middle) ? below : above) = middle;
  }
  return below;
}

__device__ __forceinline__ int sequence_of_key(const Call &call, int key) {
  return last_that(call, [&](int n) { return call.start_kv(n) <= key; });
}

/* Call::span for who asks by keys: those of no sequence are seen by no query. */
__device__ __forceinline__ Span span_by_keys(const Call &call, int n) {
  if (n >= 0 && n < call.batch) return call.span(n);
  int key = n < 0 ? 0 : call.start_kv(n), end = n < 0 ? call.start_kv(0) : call.keys;
  return {0, 0, key, end - key};
}

#define GRADIENT_PARAMETERS                                                                                            \
  CALL_PARAMETERS, const T *dout, STRIDES(dout), T *dq, STRIDES(dq), T *dk, STRIDES(dk), T *dv, STRIDES(dv)

#define GRADIENTS                                                                                                      \
  Gradients { CALL, dout, STRIDES_OF(dout), dq, dk, dv, STRIDES_OF(dq), STRIDES_OF(dk), STRIDES_OF(dv) }
