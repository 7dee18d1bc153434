/* Copies of operands whose rows do not start where bulk tensor copies can, in rows that do. */

struct alignas(16) Sixteen { /* bytes */
  static constexpr int COUNT = 16 / sizeof(A);
  A at[COUNT];
};

/* Copy [batches][rows][columns] of any strides to rows of `pitch` elements, whole Sixteens: a warp a row. What is past a
 * row is 0 up to the end of its last Sixteen, and anything after that. */
__device__ __forceinline__ void align(
    const A *from, Strides strides, A *to, index_t pitch, index_t batches, index_t rows, index_t columns) {
  index_t pieces = (columns + Sixteen::COUNT - 1) / Sixteen::COUNT, warps = gridDim.x * (blockDim.x / 32);
  for (index_t i = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32; i < batches * rows; i += warps) {
    const A *row = from + strides.at(i / rows, i % rows, 0);
    for (index_t piece = threadIdx.x % 32; piece < pieces; piece += 32) {
      Sixteen copied = {};
#pragma unroll
      for (int j = 0; j < Sixteen::COUNT; ++j) {
        index_t column = piece * Sixteen::COUNT + j;
        if (column < columns) copied.at[j] = row[column * strides.column];
      }
      reinterpret_cast<Sixteen *>(to + i * pitch)[piece] = copied;
    }
  }
}

/* a and b as they are stored; one that stays where it is has no place to go to. */
extern "C" __global__ void __launch_bounds__(256) align_operands(
    index_t batches, const A *a, index_t a_batch, index_t a_row, index_t a_column, A *to_a, index_t a_pitch,
    index_t a_rows, index_t a_columns, const B *b, index_t b_batch, index_t b_row, index_t b_column, B *to_b,
    index_t b_pitch, index_t b_rows, index_t b_columns) {
  if (to_a) align(a, {a_batch, a_row, a_column}, to_a, a_pitch, batches, a_rows, a_columns);
  if (to_b) align(b, {b_batch, b_row, b_column}, to_b, b_pitch, batches, b_rows, b_columns);
}
