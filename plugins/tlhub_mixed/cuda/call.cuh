/* A call of a product as its kernels get it: sizes, arrays and strides, however the operands are stored.
 *
 * A program is one file: its Python side (code.py) writes the problem's types and options ahead of this text, here
 * those of a product of float8:
 *
 *     using A = __nv_fp8_e4m3; using B = __nv_fp8_e4m3; using C = __nv_bfloat16;   elements of a, b and c
 *     using Beside = __nv_bfloat16; using Scale = float;                           of bias and residual, and of scales
 *     using Sum = float; using Real = float;   what products are added up in, and what the epilogue is computed in
 *     #define ACTIVATION NONE
 *     constexpr bool BIAS = false, RESIDUAL = false;
 *     constexpr bool GLU = false;      columns of b are gates and, after as many, values: act(gate) value is written
 *     constexpr int SCALES = 0;        what the operands' scales are: none, of rows, or of blocks of 128 along K
 *     constexpr bool PROMOTED = true;  sums of 128 bytes of K leave the tensor core, and are added up in float32
 *     constexpr int PARTS = 1;         3: an operand is two numbers, high and low, whose products are added up
 *
 * `CALL_PARAMETERS` are the parameters of a kernel (code.py has their values), `CALL` makes a Call of them.
 */

typedef long long index_t;

enum { NO_SCALES, OF_ROWS, OF_BLOCKS };

struct Strides { /* of [batch][row][column], in elements */
  index_t batch, row, column;

  __device__ __forceinline__ index_t at(index_t b, index_t r, index_t c) const {
    return b * batch + r * row + c * column;
  }
};

__device__ __forceinline__ float to_scale(float x) { return x; }
/* UE8M0: the exponent of a power of two, biased by 127, or NaN. */
__device__ __forceinline__ float to_scale(uint8_t x) {
  return __uint_as_float(x == 0 ? 0x00400000 : x == 255 ? 0x7fffffff : uint32_t(x) << 23);
}

struct Scales { /* of a row and a block of K, or of a row alone */
  const Scale *at;
  index_t row, block;

  __device__ __forceinline__ float of(int r, int k = 0) const { return to_scale(__ldg(at + r * row + k * block)); }
};

struct Call {
  int batch, m, n, k; /* n: columns of c */
  Scales of_a, of_b;  /* null where the problem has none, as what follows */
  const Beside *bias;
  index_t of_bias;
  const Beside *residual;
  Strides of_residual;
  C *c;
  Strides of_c;
  double alpha, out_scale;
};

#define CALL_PARAMETERS                                                                                              \
  int batch, int m, int n, int k, const Scale *a_scale, index_t a_scale_row, index_t a_scale_block,                  \
      const Scale *b_scale, index_t b_scale_row, index_t b_scale_block, const Beside *bias, index_t of_bias,         \
      const Beside *residual, index_t residual_batch, index_t residual_row, index_t residual_column, C *c,           \
      index_t c_batch, index_t c_row, index_t c_column, double alpha, double out_scale

#define CALL                                                                                                         \
  Call {                                                                                                             \
    batch, m, n, k, {a_scale, a_scale_row, a_scale_block}, {b_scale, b_scale_row, b_scale_block}, bias, of_bias,     \
        residual, {residual_batch, residual_row, residual_column}, c, {c_batch, c_row, c_column}, alpha, out_scale   \
  }
