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

struct Scaled : Call {
  Factors of_queries, of_keys, of_values;
};

#define FACTORS(NAME) const float *NAME, index_t NAME##_batch, index_t NAME##_head
#define SCALED_PARAMETERS CALL_PARAMETERS, FACTORS(q_scale), FACTORS(k_scale), FACTORS(v_scale)

#define FACTORS_OF(NAME) {NAME, NAME##_batch, NAME##_head}
#define SCALED_CALL                                                                                              \
  Scaled {                                                                                                       \
    CALL, FACTORS_OF(q_scale), FACTORS_OF(k_scale), FACTORS_OF(v_scale)                                          \
  }
