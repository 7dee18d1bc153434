/* Elements of arrays: conversions between their types, and the activations of epilogues.
 *
 * The file that comes before it includes the headers of the types that it uses (cuda_fp16.h and so on).
 */

/* -- conversions: every one is exact, or rounds once to nearest even; float8 and integers saturate, and a NaN of float8
 * stays one, and is 0 in integers ---------------------------------------------------------------------------------- */

template <class To, class From> __device__ __forceinline__ To to(From x) { return static_cast<To>(x); }

#ifdef __CUDA_FP16_H__
template <> __device__ __forceinline__ float to(__half x) { return __half2float(x); }
template <> __device__ __forceinline__ double to(__half x) { return __half2float(x); }
template <> __device__ __forceinline__ __half to(float x) { return __float2half_rn(x); }
template <> __device__ __forceinline__ __half to(double x) { return __double2half(x); }
#endif
#ifdef __CUDA_BF16_H__
template <> __device__ __forceinline__ float to(__nv_bfloat16 x) { return __bfloat162float(x); }
template <> __device__ __forceinline__ double to(__nv_bfloat16 x) { return __bfloat162float(x); }
template <> __device__ __forceinline__ __nv_bfloat16 to(float x) { return __float2bfloat16_rn(x); }
template <> __device__ __forceinline__ __nv_bfloat16 to(double x) { return __double2bfloat16(x); }
#endif
#ifdef __CUDA_FP8_H__
template <> __device__ __forceinline__ float to(__nv_fp8_e4m3 x) { return float(x); }
template <> __device__ __forceinline__ double to(__nv_fp8_e4m3 x) { return float(x); }
template <> __device__ __forceinline__ __nv_fp8_e4m3 to(float x) { return __nv_fp8_e4m3(x); }
template <> __device__ __forceinline__ __nv_fp8_e4m3 to(double x) { return __nv_fp8_e4m3(x); }
template <> __device__ __forceinline__ float to(__nv_fp8_e5m2 x) { return float(x); }
template <> __device__ __forceinline__ double to(__nv_fp8_e5m2 x) { return float(x); }
template <> __device__ __forceinline__ __nv_fp8_e5m2 to(float x) { return __nv_fp8_e5m2(x); }
template <> __device__ __forceinline__ __nv_fp8_e5m2 to(double x) { return __nv_fp8_e5m2(x); }
#endif
template <> __device__ __forceinline__ int to(double x) {
  return x == x ? __double2int_rn(fmin(fmax(x, -2147483648.), 2147483647.)) : 0;
}
template <> __device__ __forceinline__ signed char to(double x) {
  return x == x ? __double2int_rn(fmin(fmax(x, -128.), 127.)) : 0;
}
template <> __device__ __forceinline__ signed char to(float x) {
  return x == x ? __float2int_rn(fminf(fmaxf(x, -128.f), 127.f)) : 0;
}

/* -- activations: x times a weight from 0 to 1, so an infinite x times 0 is NaN -------------------- */

enum Activation { NONE, RELU, GELU, GELU_TANH, SILU };

__device__ __forceinline__ float over_one_plus_exp(float x, float y) { return __fdividef(x, 1.f + __expf(y)); }
__device__ __forceinline__ double over_one_plus_exp(double x, double y) { return x / (1. + exp(y)); }

template <Activation KIND, class T> __device__ __forceinline__ T activate(T x) {
  if constexpr (KIND == RELU) return x < T(0) ? T(0) : x;
  if constexpr (KIND == GELU) return T(0.5) * x * (T(1) + erf(x * T(0.70710678118654752440)));
  if constexpr (KIND == GELU_TANH) {
    return over_one_plus_exp(x, T(-1.5957691216057307118) * (x + T(0.044715) * x * x * x)); /* 2 sqrt(2 / pi) */
  }
  if constexpr (KIND == SILU) return over_one_plus_exp(x, -x);
  return x;
}
