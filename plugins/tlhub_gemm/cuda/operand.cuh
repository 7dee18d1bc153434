/* The tiles of A and B in shared memory, as bulk tensor copies bring them and wgmma reads them. */

using namespace tensor_cores;

constexpr int BK = 64; /* elements of K in a stage: 128 bytes */

/* One operand's tile, EXTENT x BK, of which PARTS blocks each load a part. It lies in boxes: one with rows along K, or
 * one for each WIDTH elements along M or N, with BK rows. */
template <bool ALONG_K, int EXTENT, int PARTS> struct Operand {
  static constexpr int WIDTH = ALONG_K || EXTENT % 64 == 0 ? 64 : 32; /* elements of a row */
  static constexpr int ROW = WIDTH * int(sizeof(A));                  /* bytes, and of the swizzle */
  static constexpr int BOXES = ALONG_K ? 1 : EXTENT / WIDTH;
  static constexpr int PART = (ALONG_K ? EXTENT : BK) / PARTS; /* rows of a box that are loaded at once */
  static constexpr int NEXT = BK * ROW;                        /* bytes from a box to the next */

  static_assert(EXTENT % WIDTH == 0 || ALONG_K, "boxes are 32 or 64 elements wide");

  static __device__ __forceinline__ void load(
      uint32_t to, const TensorMap &map, uint32_t barrier, int first, int k, int batch, int part, int blocks) {
    to += part * PART * ROW;
#pragma unroll
    for (int i = 0; i < BOXES; ++i, to += NEXT, first += WIDTH) {
      int x = ALONG_K ? k : first, y = (ALONG_K ? first : k) + part * PART;
      if constexpr (PARTS > 1) {
        load_box_to(static_cast<uint16_t>(blocks), to, map, barrier, x, y, batch);
      } else {
        load_box(to, map, barrier, x, y, batch);
      }
    }
  }

  static __device__ __forceinline__ uint64_t describe(uint32_t address) {
    return tensor_cores::describe<ROW, ALONG_K ? 16 : NEXT>(address);
  }

  /* Bytes to `rows` rows of the operand (a multiple of 64) and 16 * step elements of K further. */
  static __device__ constexpr int offset(int rows, int step) {
    return ALONG_K ? rows * ROW + step * 32 : rows / WIDTH * NEXT + step * 16 * ROW;
  }
};
