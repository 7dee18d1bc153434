/* A call of gemm as its kernels get it: sizes, arrays and strides, however the operands are stored.
 *
 * `CALL_PARAMETERS` are the parameters of a kernel (cuda_code.py has their values), `CALL` makes a Call of them.
 */

typedef long long index_t;

struct Strides { /* of [batch][row][column], in elements */
  index_t batch, row, column;

  __device__ __forceinline__ index_t at(index_t b, index_t r, index_t c) const {
    return b * batch + r * row + c * column;
  }
};

struct Call {
  index_t batch, m, n, k; /* n: columns of c */
  const A *a; /* op(A): m rows, k columns */
  Strides of_a;
  const B *b; /* op(B), transposed: n rows, k columns; with GLU n rows of gates, and n of values */
  Strides of_b;
  const Beside *bias; /* null where the problem has none */
  index_t of_bias;
  const Beside *residual; /* likewise */
  Strides of_residual;
  C *c;
  Strides of_c;
  double alpha, out_scale;

  /* Write the element of c whose sum of products is `gate`, or with GLU those are `gate` and `value`. */
  __device__ __forceinline__ void finish(
      index_t lot, index_t row, index_t column, Sum gate, Sum value, Factors factors) const {
    c[of_c.at(lot, row, column)] = epilogue(
        gate, value, factors, [&](int half) { return bias[(column + half * n) * of_bias]; },
        [&] { return residual[of_residual.at(lot, row, column)]; });
  }
};

#define CALL_PARAMETERS                                                                                        \
  index_t batch, index_t m, index_t n, index_t k, const A *a, index_t a_batch, index_t a_row, index_t a_column, \
      const B *b, index_t b_batch, index_t b_row, index_t b_column, const Beside *bias, index_t of_bias,       \
      const Beside *residual, index_t residual_batch, index_t residual_row, index_t residual_column, C *c,     \
      index_t c_batch, index_t c_row, index_t c_column, double alpha, double out_scale

#define CALL                                                                                                   \
  Call {                                                                                                       \
    batch, m, n, k, a, {a_batch, a_row, a_column}, b, {b_batch, b_row, b_column}, bias, of_bias, residual,     \
        {residual_batch, residual_row, residual_column}, c, {c_batch, c_row, c_column}, alpha, out_scale       \
  }
