/* GEMM on the CUDA cores: any types, strides and sizes, on any GPU; what the tensor core schedules fall back to.
 *
 * A block computes a tile of TILE_M x TILE_N elements of C, a thread SIDE_M x SIDE_N of them, in pieces of 16 bytes a
 * side, so that its reads of shared memory are vectors without bank conflicts. Tiles of A and B, DEPTH deep, lie in
 * shared memory as Sums, with K outermost, in two buffers: while one is multiplied the loads of the next are on their
 * way.
 *
 * Operands come as op(A), M x K, and op(B), N x K: a row of elements with a stride and a stride along K. A tile is read
 * along the stride that is 1: 16 bytes at once where everything is aligned for it (WIDE), else an element.
 */

namespace simt {

constexpr int DEPTH = 8;

/* The most elements that one load takes. */
template <class T> constexpr int WIDEST = 16 / sizeof(T) < DEPTH ? 16 / sizeof(T) : DEPTH;

template <class T, int N> struct alignas(sizeof(T) * N) Vector {
  T at[N];
};

/* The part of an operand's tile that a thread brings from global to shared memory. With two PARTS the tile is as many rows
 * of gates and of values, which are `all` rows apart. */
template <class T, int TILE, int VECTOR, int THREADS, int PARTS = 1> struct Loader {
  static constexpr int COUNT = TILE * DEPTH / VECTOR, EACH = (COUNT + THREADS - 1) / THREADS;
  static constexpr int PITCH = TILE + 16 / sizeof(Sum); /* of shared memory: columns of a tile start in other banks */

  bool deep;       /* vectors run along K, else along the rows */
  int row, depth;  /* of the thread's first vector in the tile */
  int rows;        /* of the tile, or of a part of it, that are in bounds */
  const T *from;   /* the thread's first vector in the next tile */
  index_t apart;   /* elements from one of the thread's vectors to its next */
  index_t advance; /* and from one tile to the next */
  index_t jump;    /* what lies between the parts of the tile */
  Vector<T, VECTOR> held[EACH];

  __device__ __forceinline__ Loader(const T *data, Strides s, index_t first, index_t all, bool deep_) : deep(deep_) {
    index_t stride = VECTOR > 1 && !deep ? 1 : s.row, along = VECTOR > 1 && deep ? 1 : s.column;
    row = deep ? threadIdx.x / (DEPTH / VECTOR) : threadIdx.x % (TILE / VECTOR) * VECTOR;
    depth = deep ? threadIdx.x % (DEPTH / VECTOR) * VECTOR : threadIdx.x / (TILE / VECTOR);
    rows = all - first < TILE / PARTS ? all - first : TILE / PARTS;
    from = data + (first + row) * stride + depth * along;
    apart = deep ? THREADS / (DEPTH / VECTOR) * stride : THREADS / (TILE / VECTOR) * along;
    advance = DEPTH * along;
    jump = (all - TILE / PARTS) * stride;
  }

  __device__ __forceinline__ int row_of(int i) const { return deep ? row + i * (THREADS / (DEPTH / VECTOR)) : row; }
  __device__ __forceinline__ int depth_of(int i) const {
    return deep ? depth : depth + i * (THREADS / (TILE / VECTOR));
  }

  /* Read the next tile, of which `left` columns are in bounds. What is out of bounds is 0. */
  __device__ __forceinline__ void load(index_t left) {
    int columns = left < DEPTH ? left : DEPTH;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      held[i] = {};
      bool second = PARTS > 1 && row_of(i) >= TILE / PARTS;
      int row_room = rows - row_of(i) + (second ? TILE / PARTS : 0), depth_room = columns - depth_of(i);
      if (row_room <= 0 || depth_room <= 0) continue;
      int room = deep ? depth_room : row_room;
      const T *at = from + i * apart + (second ? jump : 0);
      if (room >= VECTOR) {
        held[i] = *reinterpret_cast<const Vector<T, VECTOR> *>(at);
      } else {
#pragma unroll
        for (int j = 0; j < VECTOR - 1; ++j) {
          if (j < room) held[i].at[j] = at[j];
        }
      }
    }
    from += advance;
  }

  __device__ __forceinline__ void store(Sum (*tile)[PITCH]) const {
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      if (COUNT % THREADS && threadIdx.x >= COUNT) continue;
#pragma unroll
      for (int j = 0; j < VECTOR; ++j) {
        (deep ? tile[depth_of(i) + j][row_of(i)] : tile[depth_of(i)][row_of(i) + j]) = to<Sum>(held[i].at[j]);
      }
    }
  }
};

__device__ __forceinline__ float add_product(float sum, float a, float b) { return fmaf(a, b, sum); }
__device__ __forceinline__ double add_product(double sum, double a, double b) { return fma(a, b, sum); }
__device__ __forceinline__ int add_product(int sum, int a, int b) { return int(unsigned(sum) + unsigned(a * b)); }

template <int TILE_M, int TILE_N, int SIDE_M, int SIDE_N, bool WIDE>
__device__ __forceinline__ void multiply(const Call &call) {
  constexpr int PIECE = 16 / sizeof(Sum), LANES_M = TILE_M / SIDE_M, LANES_N = TILE_N / SIDE_N;
  constexpr int STEP_M = LANES_M * PIECE, STEP_N = LANES_N * PIECE; /* from a thread's piece to its next */
  constexpr int THREADS = LANES_M * LANES_N, OUT = TILE_N / HALVES; /* columns of C */
  using LoadA = Loader<A, TILE_M, WIDE ? WIDEST<A> : 1, THREADS>;
  using LoadB = Loader<B, TILE_N, WIDE ? WIDEST<B> : 1, THREADS, HALVES>;
  constexpr int PITCH_A = LoadA::PITCH, PITCH_B = LoadB::PITCH;
  static_assert(LANES_M * PITCH_B <= 2 * DEPTH * (PITCH_A + PITCH_B), "the buffers hold a row of C a thread");
  __shared__ alignas(16) Sum memory[2 * DEPTH * (PITCH_A + PITCH_B)];
  auto *tiles_a = reinterpret_cast<Sum(*)[DEPTH][PITCH_A]>(memory);
  auto *tiles_b = reinterpret_cast<Sum(*)[DEPTH][PITCH_B]>(memory + 2 * DEPTH * PITCH_A);
  auto *rows = reinterpret_cast<Sum(*)[PITCH_B]>(memory);

  /* A warp holds 4 x 8 threads, so that it reads 8 pieces of B's tile and 4 of A's at a time. */
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int own_row = warp / (LANES_N / 8) * 4 + lane / 8;
  int m0 = own_row * PIECE, n0 = (warp % (LANES_N / 8) * 8 + lane % 8) * PIECE;

  unsigned across = (call.n + OUT - 1) / OUT, down = (call.m + TILE_M - 1) / TILE_M; /* tiles of C */
  unsigned batch = blockIdx.x / across / down;
  index_t first_m = blockIdx.x / across % down * index_t(TILE_M), first_n = blockIdx.x % across * index_t(OUT);

  LoadA load_a(call.a + batch * call.of_a.batch, call.of_a, first_m, call.m, WIDE ? !TRANS_A : call.of_a.column == 1);
  LoadB load_b(call.b + batch * call.of_b.batch, call.of_b, first_n, call.n, WIDE ? TRANS_B : call.of_b.column == 1);
  Sum sum[SIDE_M][SIDE_N] = {};

  load_a.load(call.k);
  load_b.load(call.k);
  int buffer = 0;
  for (index_t left = call.k; left > 0; left -= DEPTH, buffer ^= 1) {
    load_a.store(tiles_a[buffer]);
    load_b.store(tiles_b[buffer]);
    __syncthreads(); /* whoever is past it has also left the other buffer */
    load_a.load(left - DEPTH);
    load_b.load(left - DEPTH);
#pragma unroll
    for (int d = 0; d < DEPTH; ++d) {
      Vector<Sum, PIECE> row[SIDE_M / PIECE], column[SIDE_N / PIECE];
#pragma unroll
      for (int p = 0; p < SIDE_M / PIECE; ++p) {
        row[p] = *reinterpret_cast<const Vector<Sum, PIECE> *>(&tiles_a[buffer][d][m0 + p * STEP_M]);
      }
#pragma unroll
      for (int p = 0; p < SIDE_N / PIECE; ++p) {
        column[p] = *reinterpret_cast<const Vector<Sum, PIECE> *>(&tiles_b[buffer][d][n0 + p * STEP_N]);
      }
#pragma unroll
      for (int i = 0; i < SIDE_M; ++i) {
#pragma unroll
        for (int j = 0; j < SIDE_N; ++j) {
          sum[i][j] = add_product(sum[i][j], row[i / PIECE].at[i % PIECE], column[j / PIECE].at[j % PIECE]);
        }
      }
    }
  }

  Factors factors(call.alpha, call.out_scale);
  /* One row of each thread at a time goes through shared memory, so that C is written along its rows. */
#pragma unroll 1
  for (int slab = 0; slab < SIDE_M; ++slab) {
    __syncthreads();
#pragma unroll
    for (int i = 0; i < SIDE_M; ++i) {
#pragma unroll
      for (int j = 0; j < SIDE_N; ++j) {
        if (i == slab) rows[own_row][n0 + j / PIECE * STEP_N + j % PIECE] = sum[i][j];
      }
    }
    __syncthreads();
#pragma unroll 1
    for (int e = threadIdx.x; e < LANES_M * OUT; e += THREADS) {
      int row = e / OUT, column = e % OUT;
      index_t m = first_m + row * PIECE + slab / PIECE * STEP_M + slab % PIECE, n = first_n + column;
      if (m < call.m && n < call.n) {
        call.finish(batch, m, n, rows[row][column], rows[row][TILE_N - OUT + column], factors);
      }
    }
  }
}

constexpr int LARGE = sizeof(Sum) == 8 ? 8 : 16; /* rows of a thread, as many as the registers hold */

}  // namespace simt

/* A kernel; RESIDENT of its blocks share a multiprocessor. */
#define SIMT(NAME, TILE_M, TILE_N, SIDE_M, SIDE_N, RESIDENT, WIDE)                                      \
  extern "C" __global__ void __launch_bounds__((TILE_M / SIDE_M) * (TILE_N / SIDE_N), RESIDENT)         \
      NAME(CALL_PARAMETERS) {                                                                           \
    simt::multiply<TILE_M, TILE_N, SIDE_M, SIDE_N, WIDE>(CALL);                                         \
  }

SIMT(simt_large, 16 * simt::LARGE, 128, simt::LARGE, 8, 1, true)
SIMT(simt_small, 64, 64, 4, 4, 2, true)
SIMT(simt_any, 64, 64, 4, 4, 2, false)
