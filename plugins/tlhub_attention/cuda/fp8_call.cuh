/* A call of attention in 8-bit floats: one of attention, whose q, k and v may have factors, by heads.
 *
 * `SCALED` is among the options that Python writes.
 */

__device__ __forceinline__ float to_float(__nv_fp8_e4m3 x) { return float(x); }
__device__ __forceinline__ float to_float(__nv_fp8_e5m2 x) { return float(x); }

struct Factors { /* of [batch][head] */
  const float *of;
  index_t batch, head;

  __device__ __forceinline__ float at(int b, int h) const { return of[b * batch + h * head]; }
};

struct Scaled : Call {
  Factors of_queries, of_keys, of_values;

  /* The factors of the logits and of the values of a query head. */
  __device__ __forceinline__ float of_logits(int b, int h, int kv_head) const {
    return SCALED ? of_queries.at(b, h) * of_keys.at(b, kv_head) : 1.f;
  }
  __device__ __forceinline__ float of_output(int b, int kv_head) const {
    return SCALED ? of_values.at(b, kv_head) : 1.f;
  }
};

#define FACTORS(NAME) const float *NAME, index_t NAME##_batch, index_t NAME##_head
#define SCALED_PARAMETERS CALL_PARAMETERS, FACTORS(q_scale), FACTORS(k_scale), FACTORS(v_scale)

#define FACTORS_OF(NAME) {NAME, NAME##_batch, NAME##_head}
#define SCALED_CALL                                                                                              \
  Scaled {                                                                                                       \
    CALL, FACTORS_OF(q_scale), FACTORS_OF(k_scale), FACTORS_OF(v_scale)                                          \
  }
