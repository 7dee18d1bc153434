/* The epilogue of gemm, shared by every CUDA schedule:
 *
 *     c = round((act(alpha * sum + bias) + residual) * out_scale)
 *     c = round((act(alpha * gate + bias) * (alpha * value + bias) + residual) * out_scale)    with GLU
 *
 * A program is one file: its Python side (cuda_code.py) writes the problem's types and options ahead of elements.cuh and
 * this text, here those of float16:
 *
 *     using A = __half; using B = __half; using C = __half;   element types of a, b and c
 *     using Beside = __half;                                  that of bias and residual
 *     using Sum = float;                                      the type that products are added up in
 *     #define PTX_A "f16"                                     A's name in PTX, where tensor cores take it
 *     #define ACTIVATION NONE                                 NONE, RELU, GELU, GELU_TANH or SILU
 *     constexpr bool TRANS_A = false, TRANS_B = false, GLU = false, BIAS = false, RESIDUAL = false;
 *
 * A kernel converts operands by `to<Sum>(x)`, reads the scalars once as Factors, and ends with
 *
 *     c[i] = epilogue(gate, value, factors, [&](int half) { return bias[n + half * N]; }, [&] { return residual[i]; });
 *
 * where `gate` is the sum, and `value` another with GLU alone. The last two arguments are called only where the problem
 * has what they give.
 */

/* What the epilogue is computed in: the type of the sums, float64 for integers. */
template <class T> struct RealOf { using type = T; };
template <> struct RealOf<int> { using type = double; };
using Real = RealOf<Sum>::type;

[[maybe_unused]] constexpr int HALVES = GLU ? 2 : 1; /* parts of the columns of op(B): gates and values */
constexpr bool PLAIN = ACTIVATION == NONE && !GLU && !BIAS && !RESIDUAL; /* c is the product, but for a factor */

struct Factors { /* of a PLAIN c one is both */
  Real alpha, out_scale;

  __device__ __forceinline__ Factors(double alpha_, double out_scale_)
      : alpha(static_cast<Real>(PLAIN ? alpha_ * out_scale_ : alpha_)), out_scale(static_cast<Real>(out_scale_)) {}
};

/* One element of c; `bias` and `residual` give its Beside. */
template <class Bias, class Residual>
__device__ __forceinline__ C epilogue(Sum gate, Sum value, Factors factors, Bias bias, Residual residual) {
  auto linear = [&](Sum sum, int half) {
    Real x = factors.alpha * to<Real>(sum);
    if constexpr (BIAS) x += to<Real>(bias(half));
    return x;
  };
  Real x = activate<ACTIVATION>(linear(gate, 0));
  if constexpr (GLU) x *= linear(value, 1);
  if constexpr (RESIDUAL) x += to<Real>(residual());
  return to<C>(PLAIN ? x : x * factors.out_scale);
}
