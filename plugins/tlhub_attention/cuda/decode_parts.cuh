/* How parts of a tile of a decoding are added up: those of the warps of a block that share its keys, in shared memory;
 * then those of blocks, by the last of them, in scratch memory. Results repeat bit for bit.
 */

namespace decode {

/* A word of a part in scratch memory, which may hold anything, and is written and read at once: numbers with a tag, which
 * tells that they are there. Who has read them takes the tag away. Chance has it in one of 2**64 words. */
struct alignas(16) Tagged {
  static constexpr unsigned long long TAG = 0x9e3779b97f4a7c15;
  float2 numbers;
  unsigned long long tag;

  __device__ __forceinline__ void write(float2 pair) {
    asm volatile(
        "{\n.reg .b64 pair;\n.reg .b128 word;\nmov.b64 pair, {%1, %2};\nmov.b128 word, {pair, %3};\n"
        "st.relaxed.gpu.global.b128 [%0], word;\n}" ::"l"(this),
        "f"(pair.x), "f"(pair.y), "l"(TAG)
        : "memory");
  }

  /* Tell whether there are numbers. */
  __device__ __forceinline__ bool read(float2 &pair) const {
    unsigned long long found;
    asm volatile(
        "{\n.reg .b64 pair;\n.reg .b128 word;\nld.relaxed.gpu.global.b128 word, [%3];\n"
        "mov.b128 {pair, %2}, word;\nmov.b64 {%0, %1}, pair;\n}"
        : "=f"(pair.x), "=f"(pair.y), "=l"(found)
        : "l"(this)
        : "memory");
    return found == TAG;
  }
};

/* Scratch memory: of each block the part of the tile that ends in a block after, by the 16 rows of a warp. */
template <class P> struct Scratch {
  Tagged *memory;

  __device__ __forceinline__ Tagged *word(int block, int group, int i, int number) const {
    return memory + (((block * P::ROW_WARPS + group) * 2 + i) * WORDS + number) * 32 + threadIdx.x % 32;
  }
};

/* A warp's place among those of a block that compute: a group has the same rows of a tile, and shares the keys. */
template <class P> struct Place {
  int turn;         /* the set's */
  int group, chunk; /* of a unit */
  float2 *slots;    /* of the group, in shared memory: of all but its first warp */

  static constexpr int GROUPS = P::TURNS * P::ROW_WARPS;
  static constexpr int SLOT = 2 * WORDS * 32, BYTES = GROUPS * (P::CHUNKS - 1) * SLOT * 8;
  static constexpr int AT_GROUPS = 1, AT_TURNS = 1 + GROUPS, AT_CHUNKS = AT_TURNS + P::TURNS; /* named barriers */

  __device__ __forceinline__ Place(uint8_t *memory, int warp)
      : turn(P::TURNS == 1 ? 0 : warp / P::WARPS), group(warp % P::ROW_WARPS), chunk((P::TURNS == 1 ? warp : warp % P::WARPS) / P::ROW_WARPS),
        slots(reinterpret_cast<float2 *>(memory) + number() * (P::CHUNKS - 1) * SLOT) {}

  /* Wait for the warps that have rows of the same chunk. */
  __device__ __forceinline__ void sync_chunk() const {
    __syncwarp();
    if constexpr (P::ROW_WARPS > 1) {
      int barrier = AT_CHUNKS + turn * P::CHUNKS + chunk;
      asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(32 * P::ROW_WARPS) : "memory");
    }
  }

  /* Wait until the set before this one has read its tile's keys; and tell the next one that this one has. So none waits
   * for a stage more than a round of the ring ahead. */
  __device__ __forceinline__ void wait_for_turn() const {
    __syncwarp();
    if constexpr (P::TURNS > 1) {
      asm volatile("bar.sync %0, %1;" ::"r"(AT_TURNS + turn), "n"(2 * P::THREADS) : "memory");
    }
  }
  __device__ __forceinline__ void end_turn() const {
    __syncwarp();
    if constexpr (P::TURNS > 1) {
      asm volatile("bar.arrive %0, %1;" ::"r"(AT_TURNS + (turn + 1) % P::TURNS), "n"(2 * P::THREADS) : "memory");
    }
  }

  /* Add up what the group's warps have, in its first. */
  __device__ __forceinline__ void add_up(Rows<P> &rows) const {
    if constexpr (P::CHUNKS == 1) return;
    sync(); /* what was there has been read */
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (chunk > 0 && rows.there(i)) rows.each_word(i, [&](int number, float2 pair) { *word(chunk, i, number) = pair; });
    }
    sync();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (chunk > 0 || !rows.there(i)) continue;
#pragma unroll 1
      for (int other = 1; other < P::CHUNKS; ++other) {
        Factors by;
#pragma unroll
        for (int number = 0; number < WORDS; ++number) rows.add(i, number, *word(other, i, number), by);
      }
    }
  }

 private:
  __device__ __forceinline__ int number() const { return turn * P::ROW_WARPS + group; }
  __device__ __forceinline__ void sync() const {
    __syncwarp(); /* lanes without a row have gone ahead */
    asm volatile("bar.sync %0, %1;" ::"r"(AT_GROUPS + number()), "n"(32 * P::CHUNKS) : "memory");
  }
  __device__ __forceinline__ float2 *word(int chunk, int i, int number) const {
    return slots + (chunk - 1) * SLOT + (i * WORDS + number) * 32 + threadIdx.x % 32;
  }
};

/* Leave this block's part of a tile, which the group's first warp has, for the one in which the tile ends. */
template <class P>
__device__ __forceinline__ void leave(const Rows<P> &rows, const Place<P> &place, const Scratch<P> &scratch) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (!rows.there(i)) continue;
    rows.each_word(i, [&](int number, float2 pair) { scratch.word(blockIdx.x, place.group, i, number)->write(pair); });
  }
}

/* Add the parts that blocks before this one have of a tile, as they come: each warp of the group has some. These blocks
 * have begun, for a grid's do so in their order, and wait for none after them. */
template <class P>
__device__ __forceinline__ void gather(
    Rows<P> &rows, const Place<P> &place, const Scratch<P> &scratch, const Walk<P> &walk) {
  constexpr int AT_ONCE = P::WARPS == 4 && CHANNELS <= 128 ? WORDS : 6; /* words that are read, as registers allow */
  int first = walk.first_sharer(), own = walk.units.block();
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (!rows.there(i)) continue;
#pragma unroll 1
    for (int block = first + place.chunk; block < own; block += P::CHUNKS) {
      auto word = [&](int number) { return scratch.word(walk.units.in_grid(block), place.group, i, number); };
      Factors by;
#pragma unroll
      for (int from = 0; from < WORDS; from += AT_ONCE) {
        float2 pairs[AT_ONCE];
        auto each = [&](auto f) {
#pragma unroll
          for (int j = 0; j < AT_ONCE; ++j) {
            if (from + j < WORDS) f(from + j, pairs[j]);
          }
        };
        for (bool all = false; !all;) {
          all = true;
          each([&](int number, float2 &pair) { all &= word(number)->read(pair); });
        }
        each([&](int number, float2 pair) { word(number)->tag = 0, rows.add(i, number, pair, by); });
      }
    }
  }
}

/* Finish a block's stretch of a tile: leave it to another block, or write the tile. */
template <class P>
__device__ __forceinline__ void finish(
    Rows<P> &rows, const Place<P> &place, const Scratch<P> &scratch, const Walk<P> &walk, const Stretch &t, int row,
    bool paired) {
  rows.close();
  if (t.ends && !t.begins) gather(rows, place, scratch, walk);
  place.add_up(rows);
  if (place.chunk > 0) return;
  if (t.ends) {
    rows.write(walk.sequence, walk.b, t.kv_head, row, paired);
  } else {
    leave(rows, place, scratch);
  }
}

}  // namespace decode
