/* The epilogue of gemm and its conversions, shared by every CUDA schedule.
 *
 *     c = round(act(alpha * sum + bias) + residual)
 *
 * A program is one file: its Python side (cuda_code.py) writes the problem's types and options ahead of this text,
 * here those of float16:
 *
 *     using A = __half; using B = __half; using C = __half;   element types of a, b and c (bias, residual: C)
 *     using Sum = float;                                      the type that products are added up in
 *     #define PTX_A "f16"                                     A's name in PTX, where tensor cores take it
 *     #define ACTIVATION NONE                                 NONE, RELU, GELU, GELU_TANH or SILU
 *     constexpr bool TRANS_A = false, TRANS_B = false, BIAS = false, RESIDUAL = false;
 *
 * A kernel converts operands by `to<Sum>(x)`, reads the scalar once as `Real alpha = scale(alpha_)`, and ends with
 *
 *     c[i] = epilogue(sum, alpha, [&] { return bias[n]; }, [&] { return residual[i]; });
 *
 * whose last two arguments are called only where the problem has them.
 */

enum Activation { NONE, RELU, GELU, GELU_TANH, SILU };

/* What the epilogue is computed in: the type of the sums, float64 for integers. */
template <class T> struct RealOf { using type = T; };
template <> struct RealOf<int> { using type = double; };
using Real = RealOf<Sum>::type;

/* -- conversions: every one is exact, or rounds once to nearest even --------------------------- */

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
#ifdef __CUDA_FP8_H__ /* to saturates: beyond the range the largest finite value, and NaN stays NaN */
template <> __device__ __forceinline__ float to(__nv_fp8_e4m3 x) { return float(x); }
template <> __device__ __forceinline__ double to(__nv_fp8_e4m3 x) { return float(x); }
template <> __device__ __forceinline__ __nv_fp8_e4m3 to(float x) { return __nv_fp8_e4m3(x); }
template <> __device__ __forceinline__ __nv_fp8_e4m3 to(double x) { return __nv_fp8_e4m3(x); }
template <> __device__ __forceinline__ float to(__nv_fp8_e5m2 x) { return float(x); }
template <> __device__ __forceinline__ double to(__nv_fp8_e5m2 x) { return float(x); }
template <> __device__ __forceinline__ __nv_fp8_e5m2 to(float x) { return __nv_fp8_e5m2(x); }
template <> __device__ __forceinline__ __nv_fp8_e5m2 to(double x) { return __nv_fp8_e5m2(x); }
#endif
__device__ __forceinline__ int round_within(double x, double least, double most) {
  return __double2int_rn(fmin(fmax(x, least), most));
}
template <> __device__ __forceinline__ int to(double x) { return round_within(x, -2147483648., 2147483647.); }
template <> __device__ __forceinline__ signed char to(double x) { return round_within(x, -128., 127.); }

/* -- activations: x times a weight from 0 to 1, so an infinite x times 0 is NaN ------------------ */

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

/* -- the epilogue ------------------------------------------------------------------------------ */

__device__ __forceinline__ Real scale(double alpha) { return static_cast<Real>(alpha); }

/* One element of c; `bias` and `residual` give its C. */
template <class Bias, class Residual>
__device__ __forceinline__ C epilogue(Sum sum, Real alpha, Bias bias, Residual residual) {
  Real x = alpha * to<Real>(sum);
  if constexpr (BIAS) x += to<Real>(bias());
  x = activate<ACTIVATION>(x);
  if constexpr (RESIDUAL) x += to<Real>(residual());
  return to<C>(x);
}
