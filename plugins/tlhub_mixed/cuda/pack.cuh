/* Copies of operands that bulk tensor copies cannot take, or wgmma not as they lie: rows along K, one after the other,
 * whose pitch is a multiple of 128 bytes. */

constexpr int PACKED = 64; /* rows and columns of a tile that a block turns in shared memory */

/* x rounded to tf32's 11 bits, as a float; what would overflow is cut. The tensor core cuts what it is given, which
 * errs twice as far, and always towards 0. */
__device__ __forceinline__ float to_tf32(float x) {
  uint32_t bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
  float rounded = __uint_as_float(bits);
  return isinf(rounded) && !isinf(x) ? __uint_as_float(__float_as_uint(x) & 0xffffe000) : rounded;
}

/* Write an element as wgmma takes it. A float in PARTS is high, low, and high again, `padded` from one to the next;
 * the latter is for products with low ones, and 0 where it is no number, since the other operand's high part has met
 * that. */
template <class T> __device__ __forceinline__ void put(T *to, index_t padded, T x) { *to = x; }
__device__ __forceinline__ void put(float *to, index_t padded, float x) {
  float high = to_tf32(x);
  *to = high;
  if constexpr (PARTS > 1) {
    to[padded] = isfinite(x) ? to_tf32(x - high) : 0.f;
    to[2 * padded] = isfinite(x) ? high : 0.f;
  }
}

/* Copy [batches][rows][columns] of any strides to rows of `padded` elements, or of PARTS times so many. What is past
 * the columns is 0. */
template <class T>
__device__ __forceinline__ void pack(
    const T *from, Strides strides, T *to, index_t padded, index_t batches, index_t rows, index_t columns) {
  __shared__ T tile[PACKED][PACKED + 1];
  index_t down = (rows + PACKED - 1) / PACKED, across = (padded + PACKED - 1) / PACKED;
  bool turned = strides.row == 1; /* then neighbours in memory are rows */
  for (index_t i = blockIdx.x; i < batches * down * across; i += gridDim.x) {
    index_t batch = i / (down * across), row = i / across % down * PACKED, column = i % across * PACKED;
    __syncthreads();
    for (int j = threadIdx.x; j < PACKED * PACKED; j += blockDim.x) {
      int r = turned ? j % PACKED : j / PACKED, c = turned ? j / PACKED : j % PACKED;
      bool inside = row + r < rows && column + c < columns;
      tile[r][c] = inside ? from[strides.at(batch, row + r, column + c)] : T(0.f);
    }
    __syncthreads();
    for (int j = threadIdx.x; j < PACKED * PACKED; j += blockDim.x) {
      int r = j / PACKED, c = j % PACKED;
      if (row + r >= rows || column + c >= padded) continue;
      T *place = to + (batch * rows + row + r) * (PARTS * padded) + column + c;
      put(place, padded, tile[r][c]);
    }
  }
}

/* op(A) and op(B) transposed; one that stays where it is has no place to go to. */
extern "C" __global__ void __launch_bounds__(256) pack_operands(
    index_t batches, index_t columns, index_t padded, const A *a, index_t a_batch, index_t a_row, index_t a_column,
    A *to_a, index_t a_rows, const B *b, index_t b_batch, index_t b_row, index_t b_column, B *to_b, index_t b_rows) {
  if (to_a) pack(a, {a_batch, a_row, a_column}, to_a, padded, batches, a_rows, columns);
  if (to_b) pack(b, {b_batch, b_row, b_column}, to_b, padded, batches, b_rows, columns);
}
