/* Tiles as operands of products by warps, mma.sync, and as their results: from shared memory, and to it. */

namespace backward {

using namespace tensor_cores;
using namespace warp_mma;

/* This lane's number, read anew: no address that depends on it is kept in a register from one product to the next. */
__device__ __forceinline__ int fresh_lane() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

/* sum += a b, over STEPS times 16: load(k, m, left) gives the operand of step k of rows 16 m and on, and b is from
 * `column` on in a tile B. ACROSS: its rows are what is summed over. UNROLL: how many steps are code side by side. */
template <class B, bool ACROSS, int STEPS, int UNROLL, int MS, int NS, class F>
__device__ __forceinline__ void add_product(float (&sum)[MS][NS], F load, uint32_t b, int column) {
  int lane = fresh_lane();
#pragma unroll UNROLL
  for (int k = 0; k < STEPS; ++k) {
    uint32_t left[MS][4];
#pragma unroll
    for (int m = 0; m < MS; ++m) load(k, m, left[m]);
#pragma unroll
    for (int n = 0; n < NS; n += 8) {
      uint32_t two[4];
      int at = column + 2 * n;
      load_matrices<ACROSS>(
          two, b + (ACROSS ? B::place(k * 16 + lane % 16, at / 8 + lane / 16)
                           : B::place(at + lane % 8 + lane / 16 * 8, 2 * k + lane / 8 % 2)));
#pragma unroll
      for (int m = 0; m < MS; ++m) {
        multiply<T>(sum[m] + n, left[m], two[0], two[1]);
        multiply<T>(sum[m] + n + 4, left[m], two[2], two[3]);
      }
    }
  }
}

/* Operands a from (row, column) on in a tile A. ACROSS: its rows are what is summed over. */
template <class A, bool ACROSS = false> __device__ __forceinline__ auto from_tile(uint32_t a, int row, int column = 0) {
  int lane = fresh_lane();
  return [=](int k, int m, uint32_t(&left)[4]) {
    load_matrices<ACROSS>(
        left, a + (ACROSS ? A::place(row + k * 16 + lane % 8 + lane / 16 * 8, column / 8 + 2 * m + lane / 8 % 2)
                          : A::place(row + 16 * m + lane % 16, column / 8 + 2 * k + lane / 16)));
  };
}

/* Operands a from sums. */
template <int MS, int NS> __device__ __forceinline__ auto from_sums(const uint32_t (&packed)[MS][NS]) {
  return [&](int k, int m, uint32_t(&left)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) left[i] = packed[m][4 * k + i];
  };
}

/* Sums times `factor`, packed; returned is what is not finite if one is not. */
template <int MS, int NS, int N>
__device__ __forceinline__ float pack_sums(uint32_t (&packed)[MS][N], const float (&x)[MS][NS], float factor = 1) {
  float probe = 0;
#pragma unroll
  for (int m = 0; m < MS; ++m) {
#pragma unroll
    for (int i = 0; i < NS; i += 2) {
      float low = x[m][i] * factor, high = x[m][i + 1] * factor;
      packed[m][i / 2] = pack<T>(low, high), probe += low + high;
    }
  }
  return probe;
}

/* Write packed sums to a tile from (row, column) on. */
template <class To, int MS, int NS>
__device__ __forceinline__ void put(uint32_t to, int row, int column, const uint32_t (&packed)[MS][NS]) {
  int lane = fresh_lane();
#pragma unroll
  for (int m = 0; m < MS; ++m) {
#pragma unroll
    for (int i = 0; i < NS; ++i) {
      int down = row + 16 * m + 8 * row_of(2 * i) + lane / 4, chunk = (column + column_of(2 * i)) / 8;
      asm volatile("st.shared.b32 [%0], %1;" ::"r"(to + To::place(down, chunk) + lane % 4 * 4), "r"(packed[m][i])
                   : "memory");
    }
  }
}

/* The one, and then the other. */
template <class To, int MS, int NS>
__device__ __forceinline__ float put_sums(
    uint32_t to, int row, int column, const float (&x)[MS][NS], float factor = 1) {
  uint32_t packed[MS][NS / 2];
  float probe = pack_sums(packed, x, factor);
  put<To>(to, row, column, packed);
  return probe;
}

/* Store rows of a tile, of N channels, those below `rows`, by a block; `whole`: 16 bytes of theirs are aligned. */
template <class From, int ROWS, int N, int THREADS>
__device__ __forceinline__ void store_rows(
    uint32_t from, T *to, index_t row_step, index_t channel_step, int rows, bool whole) {
#pragma unroll 4
  for (int i = threadIdx.x; i < ROWS * (N / 8); i += THREADS) {
    int row = i / (N / 8), chunk = i % (N / 8);
    if (row >= rows) break;
    float4 eight = read_shared(from + From::place(row, chunk));
    T *at = to + row * row_step + chunk * 8 * channel_step;
    if (whole) {
      *reinterpret_cast<float4 *>(at) = eight;
    } else {
      T x[8];
      memcpy(x, &eight, 16);
#pragma unroll
      for (int j = 0; j < 8; ++j) at[j * channel_step] = x[j];
    }
  }
}

}  // namespace backward
