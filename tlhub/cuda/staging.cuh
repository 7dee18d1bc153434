/* Results on their way from a warp's registers to C: 16 rows of CHUNK columns at a time are staged in shared memory, in rows
 * of at most 128 bytes that are swizzled by their width, and leave as bulk tensor copies, or, where C is not aligned for
 * them, element by element. Follows tensor_cores.cuh.
 */

namespace staging {

using namespace tensor_cores;

template <class T, int CHUNK> struct Chunk {
  static constexpr int WIDTH = CHUNK * int(sizeof(T)), BYTES = 16 * WIDTH; /* of a row, and of the chunk */
  static_assert(WIDTH >= 16 && WIDTH <= 128, "a row is 16 to 128 bytes");

  /* Bytes to an element. */
  static __device__ __forceinline__ int place(int row, int column) {
    int at = row * WIDTH + column * int(sizeof(T));
    return at ^ (at >> 3 & (WIDTH - 16));
  }

  /* Write two elements that are beside each other; `column` is even. */
  static __device__ __forceinline__ void put(uint32_t chunk, int row, int column, T first, T second) {
    T pair[2] = {first, second};
    uint32_t to = chunk + place(row, column);
    if constexpr (sizeof(T) == 4) {
      uint2 bits;
      memcpy(&bits, pair, 8);
      asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(to), "r"(bits.x), "r"(bits.y) : "memory");
    } else if constexpr (sizeof(T) == 2) {
      uint32_t bits;
      memcpy(&bits, pair, 4);
      asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(bits) : "memory");
    } else {
      uint16_t bits;
      memcpy(&bits, pair, 2);
      asm volatile("st.shared.b16 [%0], %1;" ::"r"(to), "h"(bits) : "memory");
    }
  }

  /* Write a staged chunk to C, from row m and column n on, element by element. */
  template <class Call>
  static __device__ __forceinline__ void write(uint32_t chunk, const Call &call, int batch, int m, int n, int lane) {
#pragma unroll 1
    for (int i = lane; i < 16 * CHUNK; i += 32) {
      int row = i / CHUNK, column = i % CHUNK;
      if (m + row < call.m && n + column < call.n) {
        call.c[call.of_c.at(batch, m + row, n + column)] =
            *reinterpret_cast<const T *>(__cvta_shared_to_generic(chunk + place(row, column)));
      }
    }
  }
};

/* Store what a warp has of PIECES times 64 rows, from row m on (its own 16 of each 64), and COLUMNS columns from n on.
 * `stage(chunk, piece, column)` writes a chunk to shared memory; `at` has room for two, or for the only one. `direct`: C has
 * no tensor map. Copies that are on their way when it ends read what is staged until `store_wait`. */
template <class T, int PIECES, int COLUMNS, int CHUNK, class Call, class Stage>
__device__ __forceinline__ void store(
    const Call &call, const TensorMap &map, bool direct, uint32_t at, int batch, int m, int n, Stage stage) {
  using Staged = Chunk<T, CHUNK>;
  constexpr int ACROSS = COLUMNS / CHUNK, CHUNKS = PIECES * ACROSS, BUFFERS = CHUNKS == 1 ? 1 : 2;
  static_assert(COLUMNS % CHUNK == 0, "whole chunks are staged");
  int lane = threadIdx.x % 32;
#pragma unroll
  for (int number = 0; number < CHUNKS; ++number) {
    int piece = number / ACROSS, column = number % ACROSS * CHUNK, row = m + 64 * piece;
    uint32_t chunk = at + number % BUFFERS * Staged::BYTES;
    if (lane == 0) { /* until the buffer is free: of an odd number of chunks the last is in the first buffer, too */
      if (number == 0 && CHUNKS % 2) {
        store_wait<0>();
      } else {
        store_wait<BUFFERS - 1>();
      }
    }
    __syncwarp();
    stage(chunk, piece, column);
    if (direct) {
      __syncwarp();
      Staged::write(chunk, call, batch, row, n + column, lane);
      __syncwarp();
    } else {
      fence_copies();
      __syncwarp();
      if (lane == 0) store_box(map, chunk, n + column, row, batch);
    }
  }
}

}  // namespace staging
