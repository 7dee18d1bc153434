/* A call of attention in 8-bit floats: one of attention, whose q, k and v may have factors, by heads.
 *
 * `SCALED` is among the options that Python writes.
 */

__device__ __forceinline__ float to_float(__nv_fp8_e4m3 x) { return float(x); }
__device__ __forceinline__ float to_float(__nv_fp8_e5m2 x) { return float(x); }

template <class X> constexpr bool holds_infinities = false;
template <> constexpr bool holds_infinities<__nv_fp8_e5m2> = true;

struct Factors { /* of [batch][head], or 1 */
  const float *of;
  index_t batch, head;

  __device__ __forceinline__ float at(int b, int h) const { return SCALED ? of[b * batch + h * head] : 1.f; }
};

__device__ __forceinline__ float nan() { return __int_as_float(0x7fffffff); }

struct Scaled : Call {
  Factors of_queries, of_keys, of_values;

  /* What multiplies a head's products in float32, as Logits has it; NaN, and so will be its rows, where float32 is not
   * enough for the head. CAPPED: there may be a soft cap, and the factor is of any sign; else it is above 0. */
  template <bool CAPPED> __device__ __forceinline__ float factor(int b, int h, int kv_head) const {
    constexpr float SMALL = 1e-30f, LARGE = 1e20f;
    Call of_head = *this;
    if (!CAPPED) of_head.softcap = 0;
    of_head.scale *= double(of_queries.at(b, h)) * of_keys.at(b, kv_head);
    float factor = Logits(of_head).factor, output = fabsf(of_values.at(b, kv_head));
    bool fits = fabsf(factor) <= LARGE && (output == 0 || output >= SMALL) && output <= LARGE;
    if (ALIBI) fits &= fabsf(slope(h)) <= 1 / SMALL;
    if (CAPPED) return fits && fabs(softcap) <= LARGE ? factor : nan();
    fits &= holds_infinities<T> ? factor > 0 : factor >= 0; /* SMALL for 0: an infinity times 0 would be none */
    return fits ? fmaxf(factor, SMALL) : nan();
  }
};

#define FACTORS(NAME) const float *NAME, index_t NAME##_batch, index_t NAME##_head
#define SCALED_PARAMETERS CALL_PARAMETERS, FACTORS(q_scale), FACTORS(k_scale), FACTORS(v_scale)

#define FACTORS_OF(NAME) {NAME, NAME##_batch, NAME##_head}
#define SCALED_CALL                                                                                              \
  Scaled {                                                                                                       \
    CALL, FACTORS_OF(q_scale), FACTORS_OF(k_scale), FACTORS_OF(v_scale)                                          \
  }
