/* GEMM of a few rows: C = A op(B) with at most 64 rows, bound by reading B once. For sm_80 and newer; Hopper has its
 * own main loop in skinny_hopper.cuh.
 *
 * Tensor cores multiply 16 x 8 tiles, and here the columns of op(B) are the 16 and the rows of A, the tokens, the 8. A
 * block computes ROWS columns of C for all its TOKENS rows. Tiles of B and A, DEPTH deep, go through a ring of STAGES
 * buffers in shared memory, so that enough bytes are on their way to keep the memory busy.
 *
 * Who adds up what is fixed, so results repeat bit for bit: WARPS_N x WARPS_K warps share a tile, the latter taking its
 * slices of 16 along K in turn, and from sm_90 on SPLIT blocks of a cluster share K. All of their sums meet in shared
 * memory, where every block of the cluster finishes its part of C.
 *
 * Rows of shared memory are 16 bytes longer than they need to be: ldmatrix then has no bank conflicts.
 */

namespace skinny {

using namespace tensor_cores;

/* -- one block's share of the work ------------------------------------------------------------- */

/* Where a block works: first come the parts of K, a cluster, then columns, then batches. With GLU a half of its rows is
 * gates, and the other the values that belong to them. */
template <int ROWS, int SPLIT, int DEPTH> struct Share {
  static constexpr int OUT = ROWS / HALVES; /* columns of C */
  int part;             /* of K */
  index_t batch, first; /* the first of its columns of C */
  int begin, count;     /* its tiles along K */

  __device__ __forceinline__ explicit Share(const Call &call) {
    unsigned across = (call.n + OUT - 1) / OUT, cluster = blockIdx.x / SPLIT;
    part = blockIdx.x % SPLIT;
    batch = cluster / across;
    first = cluster % across * index_t(OUT);
    index_t tiles = (call.k + DEPTH - 1) / DEPTH;
    begin = tiles * part / SPLIT;
    count = tiles * (part + 1) / SPLIT - begin;
  }
};

/* -- clusters: sm_90 and newer ------------------------------------------------------------------ */

/* Wait for all threads of the cluster, or where K is not split of the block. */
template <int SPLIT> __device__ __forceinline__ void cluster_sync() {
#if __CUDA_ARCH__ >= 900
  if constexpr (SPLIT > 1) {
    cluster_arrive(), cluster_wait();
    return;
  }
#endif
  __syncthreads();
}

/* The four floats at `p` in the shared memory of block `rank` of the cluster. */
template <int SPLIT> __device__ __forceinline__ float4 read_from(const float *p, int rank) {
#if __CUDA_ARCH__ >= 900
  if constexpr (SPLIT > 1) {
    float4 v;
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(address_in(shared_address(p), rank))
                 : "memory");
    return v;
  }
#endif
  return *reinterpret_cast<const float4 *>(p);
}

template <int ROWS> constexpr int PITCH = ROWS + 4;
template <int TOKENS, int ROWS> constexpr int SUMS = TOKENS * PITCH<ROWS> * int(sizeof(float)); /* bytes of one part */

/* Add up the sums of the blocks that split K, and write C. Each block has them in the same place of its shared memory:
 * PARTS times TOKENS rows of ROWS floats, a row PITCH<ROWS> behind the one before. */
template <int TOKENS, int ROWS, int SPLIT, int PARTS, class S>
__device__ __forceinline__ void finish(const Call &call, const float *sums, const S &share) {
  constexpr int QUADS = S::OUT / 4;
  cluster_sync<SPLIT>();
  Factors factors(call.alpha, call.out_scale);
  for (int i = share.part * blockDim.x + threadIdx.x; i < call.m * QUADS; i += SPLIT * blockDim.x) {
    int m = i / QUADS, n = i % QUADS * 4;
    float total[HALVES][4] = {};
#pragma unroll
    for (int half = 0; half < HALVES; ++half) {
#pragma unroll
      for (int j = 0; j < SPLIT * PARTS; ++j) {
        const float *at = sums + (j % PARTS * TOKENS + m) * PITCH<ROWS> + half * S::OUT + n;
        float4 part = read_from<SPLIT>(at, j / PARTS);
        float *all = total[half];
        all[0] += part.x, all[1] += part.y, all[2] += part.z, all[3] += part.w;
      }
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (share.first + n + j < call.n) {
        call.finish(share.batch, m, share.first + n + j, total[0][j], total[HALVES - 1][j], factors);
      }
    }
  }
  if constexpr (SPLIT > 1) cluster_sync<SPLIT>(); /* others may still read this block's sums */
}

/* -- the main loop without bulk copies ---------------------------------------------------------- */

/* Copy `valid` elements from global memory, none if it is negative, and zeros up to eight. Both addresses are aligned
 * to 16 bytes. */
__device__ __forceinline__ void copy_async(A *to, const A *from, int valid) {
  int bytes = 2 * min(max(valid, 0), 8);
  asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
               "r"(bytes));
}
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;"); }
template <int PENDING> __device__ __forceinline__ void wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

/* Load 8 x 8 matrices, one a register; lane 8 i + j has the address of row j of matrix i. */
template <bool TRANSPOSED> __device__ __forceinline__ void load_matrices(unsigned (&r)[4], const A *row) {
  if constexpr (TRANSPOSED) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row)));
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row)));
  }
}

/* d += a b, of 16 x 16 and 16 x 8. */
__device__ __forceinline__ void multiply(float (&d)[4], const unsigned (&a)[4], const unsigned *b) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." PTX_A "." PTX_A
               ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

/* SHARED: the bytes of shared memory that a launch has. */
template <int SHARED, int TOKENS, int ROWS, int SPLIT, int WARPS_N, int WARPS_K, int DEPTH, int STAGES>
__device__ __forceinline__ void multiply_few(const Call &call) {
  constexpr int THREADS = 32 * WARPS_N * WARPS_K, TILES = ROWS / 16 / WARPS_N, EIGHTS = TOKENS / 8;
  constexpr int OUTER = TRANS_B ? ROWS : DEPTH, INNER = TRANS_B ? DEPTH : ROWS; /* of B's tile, as b is stored */
  constexpr int PITCH_B = INNER + 8, PITCH_A = DEPTH + 8, STAGE = OUTER * PITCH_B + TOKENS * PITCH_A;
  static_assert(SHARED >= STAGES * STAGE * int(sizeof(A)) && SHARED >= WARPS_K * SUMS<TOKENS, ROWS>,
                "Tile.shared has another layout");
  static_assert(!GLU || TRANS_B, "gates and values are rows along K");
  static_assert(ROWS == 16 * WARPS_N * TILES && DEPTH % (16 * WARPS_K) == 0, "warps share a tile evenly");
  extern __shared__ __align__(1024) unsigned char memory[];
  A *ring = reinterpret_cast<A *>(memory);
  float *sums = reinterpret_cast<float *>(memory); /* [WARPS_K][TOKENS][PITCH<ROWS>], once the ring is done */

  int lane = threadIdx.x % 32, warp_n = threadIdx.x / 32 % WARPS_N, warp_k = threadIdx.x / 32 / WARPS_N;
  Share<ROWS, SPLIT, DEPTH> share(call);
  index_t stride_a = call.of_a.row, stride_b = TRANS_B ? call.of_b.row : call.of_b.column;
  const A *a = call.a + share.batch * call.of_a.batch;
  const B *b = call.b + share.batch * call.of_b.batch;

  auto load = [&](int tile) {
    if (tile < share.count) {
      A *to = ring + tile % STAGES * STAGE;
      index_t k = index_t(share.begin + tile) * DEPTH;
      int columns = min(call.n - share.first, index_t(share.OUT)), depth = min(call.k - k, index_t(DEPTH)); /* in bounds */
      int outers = TRANS_B ? columns : depth, inners = TRANS_B ? depth : columns;
      const A *from = TRANS_B ? b + share.first * stride_b + k : b + k * stride_b + share.first;
#pragma unroll
      for (int c = threadIdx.x; c < OUTER * INNER / 8; c += THREADS) {
        int outer = c / (INNER / 8), inner = c % (INNER / 8) * 8;
        bool value = GLU && outer >= share.OUT;
        int row = value ? outer - share.OUT : outer, valid = row < outers ? inners - inner : 0;
        const A *at = from + (value ? row + call.n : row) * stride_b + inner;
        copy_async(to + outer * PITCH_B + inner, valid > 0 ? at : from, valid);
      }
      to += OUTER * PITCH_B;
#pragma unroll
      for (int c = threadIdx.x; c < TOKENS * DEPTH / 8; c += THREADS) {
        int m = c / (DEPTH / 8), inner = c % (DEPTH / 8) * 8, valid = m < call.m ? depth - inner : 0;
        copy_async(to + m * PITCH_A + inner, valid > 0 ? a + m * stride_a + k + inner : a, valid);
      }
    }
    commit();
  };

  float sum[TILES][EIGHTS][4] = {};
  start_next();
  wait_for_previous();
  for (int tile = 0; tile < STAGES - 1; ++tile) load(tile);

  for (int tile = 0; tile < share.count; ++tile) {
    wait<STAGES - 2>();
    __syncthreads(); /* this tile has arrived for all, and all have left the buffer that is filled next */
    load(tile + STAGES - 1);
    const A *tile_b = ring + tile % STAGES * STAGE, *tile_a = tile_b + OUTER * PITCH_B;
#pragma unroll
    for (int slice = 0; slice < DEPTH / 16 / WARPS_K; ++slice) {
      int k = (slice * WARPS_K + warp_k) * 16;
      unsigned token[(EIGHTS + 1) / 2][4]; /* of two times 8 tokens, the lower and the upper half of k */
#pragma unroll
      for (int e = 0; e < (EIGHTS + 1) / 2; ++e) {
        int m = e * 16 + lane / 16 * 8 + lane % 8;
        load_matrices<false>(token[e], tile_a + (m < TOKENS ? m : 0) * PITCH_A + k + lane / 8 % 2 * 8);
      }
#pragma unroll
      for (int t = 0; t < TILES; ++t) {
        int n = (warp_n * TILES + t) * 16;
        unsigned weight[4];
        if constexpr (TRANS_B) {
          load_matrices<false>(weight, tile_b + (n + lane % 16) * PITCH_B + k + lane / 16 * 8);
        } else {
          load_matrices<true>(weight, tile_b + (k + lane / 16 * 8 + lane % 8) * PITCH_B + n + lane / 8 % 2 * 8);
        }
#pragma unroll
        for (int e = 0; e < EIGHTS; ++e) multiply(sum[t][e], weight, token[e / 2] + e % 2 * 2);
      }
    }
  }

  wait<0>();
  __syncthreads(); /* the ring is free */
#pragma unroll
  for (int t = 0; t < TILES; ++t) {
#pragma unroll
    for (int e = 0; e < EIGHTS; ++e) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        int m = e * 8 + lane % 4 * 2 + i % 2, n = (warp_n * TILES + t) * 16 + lane / 4 + i / 2 * 8;
        sums[(warp_k * TOKENS + m) * PITCH<ROWS> + n] = sum[t][e][i];
      }
    }
  }
  finish<TOKENS, ROWS, SPLIT, WARPS_K>(call, sums, share);
}

}  // namespace skinny

#define SKINNY(SHARED, TOKENS, ROWS, SPLIT, WARPS_N, WARPS_K, DEPTH, STAGES)                       \
  extern "C" __global__ void __launch_bounds__(32 * WARPS_N * WARPS_K, 1)                          \
      skinny_##TOKENS(CALL_PARAMETERS) {                                                           \
    skinny::multiply_few<SHARED, TOKENS, ROWS, SPLIT, WARPS_N, WARPS_K, DEPTH, STAGES>(CALL);      \
  }
