/* Products of tiles by a warp, mma.sync, and what feeds them: asynchronous copies to shared memory, and matrices from
 * there. For sm_80 and newer, of __half and __nv_bfloat16, summed in float; to follow tensor_cores.cuh.
 *
 * A chunk is 16 bytes, eight elements: what is copied, and a row of a matrix of 8 x 8 that ldmatrix loads.
 */

#include <climits>
#include <type_traits>

namespace warp_mma {

/* -- copies -------------------------------------------------------------------------------------------- */

/* Start to copy a chunk, or write zeros where it is not `valid`: nothing is read then. Both addresses are aligned. */
__device__ __forceinline__ void copy_async(uint32_t to, const void *from, bool valid) {
  int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

/* Close the group of copies that this thread has started; one may be empty. */
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

/* Wait until at most LEFT of this thread's groups are under way. A barrier then shows the others what it copied. */
template <int LEFT> __device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

/* -- tiles in shared memory ---------------------------------------------------------------------------- */

/* Rows of WIDTH elements, a multiple of 8, side by side. The chunks of a row are swizzled by its number, within the
 * largest power of two that divides them, so that a column of eight chunks has no bank conflicts where WIDTH is a
 * multiple of 16. The tile begins at a multiple of 128 bytes. */
template <int WIDTH_> struct SharedTile {
  static constexpr int WIDTH = WIDTH_, CHUNKS = WIDTH / 8, PITCH = 2 * WIDTH; /* bytes of a row */
  static constexpr int SPAN = CHUNKS % 8 == 0 ? 8 : CHUNKS % 4 == 0 ? 4 : CHUNKS % 2 == 0 ? 2 : 1;

  static_assert(WIDTH % 8 == 0, "a row is whole chunks");

  template <int ROWS> static constexpr int BYTES = ROWS * PITCH;

  /* Where a chunk is, in bytes from the tile's first. A multiple of 8 rows below is as many times PITCH. */
  static __device__ __forceinline__ uint32_t place(unsigned row, unsigned chunk) {
    return row * PITCH + (chunk ^ (row / (8 / SPAN) & (SPAN - 1))) * 16;
  }

  /* The address of the chunk an even number further, from the address of chunk 0 or 1 of a row. */
  static __device__ __forceinline__ uint32_t along(uint32_t address, int chunks) {
    return (address ^ chunks % SPAN * 16) + chunks / SPAN * (SPAN * 16);
  }

  /* Start to copy ROWS rows by THREADS threads, of which this is number `thread`: rows of CHANNELS elements, a multiple
   * of 8, that are `stride` elements apart. Rows from `rows` on, and the rest of each row, are filled with zeros:
   * INT_MAX where there are all. */
  template <int ROWS, int CHANNELS, int THREADS, class E>
  static __device__ __forceinline__ void copy(uint32_t to, const E *from, long long stride, int rows, unsigned thread) {
    static_assert(sizeof(E) == 2 && CHANNELS % 8 == 0 && CHANNELS <= WIDTH, "elements of two bytes, in whole chunks");
    constexpr bool COLUMNS = THREADS % CHUNKS == 0; /* each thread has one */
    constexpr int STEP = THREADS / CHUNKS;          /* rows */
    if constexpr (COLUMNS && ROWS % STEP == 0) {
      unsigned first = thread / CHUNKS, chunk = thread % CHUNKS;
      bool filled = CHANNELS == WIDTH || chunk < CHANNELS / 8;
      const E *at = from + first * stride + chunk * 8;
#pragma unroll
      for (int row = 0; row < ROWS; row += STEP, at += STEP * stride) {
        bool valid = filled && int(first) + row < rows;
        copy_async(to + place(first + row, chunk), valid ? at : from, valid);
      }
    } else {
#pragma unroll 4
      for (unsigned i = thread; i < ROWS * CHUNKS; i += THREADS) {
        int row = i / CHUNKS, chunk = i % CHUNKS;
        bool valid = row < rows && chunk < CHANNELS / 8;
        copy_async(to + place(row, chunk), valid ? from + row * stride + chunk * 8 : from, valid);
      }
    }
  }
};

/* -- products ------------------------------------------------------------------------------------------ */

/* Load four matrices of 8 x 8, a register each; lane 8 i + j has the address of row j of matrix i. A lane gets two
 * neighbours of row lane / 4, from column lane % 4 * 2 on; of the matrix TRANSPOSED, if it is.
 *
 *   operand a, from rows of M along K:  lane % 16 is the row, lane / 16 the chunk
 *   operand b of two n-tiles, from rows of N along K:  lane % 8 + lane / 16 * 8 is the row, lane / 8 % 2 the chunk;
 *     registers 0 and 1 are the first tile's
 *   operand b of two n-tiles, from rows of K along N, TRANSPOSED:  lane % 16 is the row, lane / 16 the chunk; likewise
 *   operand a, from rows of K along M, TRANSPOSED:  lane % 8 + lane / 16 * 8 is the row, lane / 8 % 2 the chunk */
template <bool TRANSPOSED = false> __device__ __forceinline__ void load_matrices(uint32_t (&r)[4], uint32_t row) {
  if constexpr (TRANSPOSED) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(row)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(row)
                 : "memory");
  }
}

/* sum += a b, of 16 x 16 and 16 x 8 elements of type E. A lane has of the sum two neighbours of row lane / 4, from
 * column lane % 4 * 2 on, then two of the row 8 below. */
#define WARP_MMA(PTX)                                                                                          \
  asm("mma.sync.aligned.m16n8k16.row.col.f32." PTX "." PTX                                                     \
      ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                                   \
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])                                                 \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
template <class E>
__device__ __forceinline__ void multiply(float *sum, const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  static_assert(std::is_same_v<E, __half> || std::is_same_v<E, __nv_bfloat16>, "of the types of tensor cores");
  if constexpr (std::is_same_v<E, __half>) {
    WARP_MMA("f16");
  } else {
    WARP_MMA("bf16");
  }
}
#undef WARP_MMA

}  // namespace warp_mma
