/* A call of attention_bwd as its kernels get it: one of attention, whose o and lse are inputs, and the gradients.
 *
 * With P = exp(logits - lse), 0 where a key is hidden, and slope the derivative of the soft cap,
 *
 *     delta = rowsum(dout o)      dP = dout v^T      dS = P (dP - delta) slope
 *     dq = scale dS k             dk = scale dS^T q  dv = P^T dout
 */

struct Gradients {
  Call call;
  const T *dout;
  Strides of_dout;
  T *dq, *dk, *dv;
  Strides of_dq, of_dk, of_dv;

  __device__ __forceinline__ int group() const { return call.heads / call.kv_heads; } /* query heads of a key head */

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

/* A logit in base 2, and its derivative by the product before the cap, but for the scale. */
struct Logit {
  float value, slope;

  __device__ __forceinline__ Logit(const Logits &logits, float product) : value(product * logits.factor), slope(1) {
    if (logits.capped) {
      float x = tanh_fast(value);
      value = logits.cap * x, slope = fmaf(-x, x, 1.f);
    }
  }
};

#define GRADIENT_PARAMETERS                                                                                            \
  CALL_PARAMETERS, const T *dout, STRIDES(dout), T *dq, STRIDES(dq), T *dk, STRIDES(dk), T *dv, STRIDES(dv)

#define GRADIENTS                                                                                                      \
  Gradients { CALL, dout, STRIDES_OF(dout), dq, dk, dv, STRIDES_OF(dq), STRIDES_OF(dk), STRIDES_OF(dv) }
