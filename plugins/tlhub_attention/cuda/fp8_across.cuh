/* V across: values as an operand of 8-bit tensor cores, channel by channel, in scratch memory.
 *
 * It has V as stages of fp8_hopper.cuh's ring are to hold it, so that a block of keys is one copy: of each 32 keys, for a
 * step of a product, the channels one after the other, swizzled by the 32 bytes that a channel has.
 *
 * A thread has the weights of keys 8 j + 2 t and the one after, t being lane % 4, and is to give four side by side: those
 * of j = 0 and 1 for places 4 t to 4 t + 3. So it is 16 keys that change places among themselves. */

namespace fp8 {

constexpr int ACROSS_KEYS = 128, ACROSS_THREADS = 256; /* of a block */

struct Values { /* V across: of each head, places for so many keys, with zeros past the last, and past D_V */
  uint8_t *across;
  uint32_t places; /* of all heads an unsigned number, too */
};

/* The descriptor of 32 keys. */
__device__ __forceinline__ uint64_t describe_across(uint32_t address) {
  return 3ull << 62 | uint64_t(256 / 16) << 32 | uint64_t(1) << 16 | (address & 0x3ffff) >> 4;
}

/* Turn four words of four bytes about. */
__device__ __forceinline__ void turn(uint32_t (&out)[4], uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  uint32_t low = __byte_perm(a, b, 0x5140), high = __byte_perm(a, b, 0x7362);
  uint32_t low_after = __byte_perm(c, d, 0x5140), high_after = __byte_perm(c, d, 0x7362);
  out[0] = __byte_perm(low, low_after, 0x5410), out[1] = __byte_perm(low, low_after, 0x7632);
  out[2] = __byte_perm(high, high_after, 0x5410), out[3] = __byte_perm(high, high_after, 0x7632);
}

/* Lay a block's keys of one head across. */
__device__ __forceinline__ void lay_across(const Call &call, const Values &values) {
  constexpr int WORDS = D_V / 4, PARTS = D_V / 16, CHANNELS = (D_V + 31) / 32 * 32;
  __shared__ alignas(16) uint32_t tile[ACROSS_KEYS * WORDS + ACROSS_KEYS];
  auto place = [](int key) { return key * WORDS + key / 16 * 16; }; /* the next 16 keys are in other banks */
  int places = values.places, tiles = (places + ACROSS_KEYS - 1) / ACROSS_KEYS, head = blockIdx.x / tiles;
  int first = blockIdx.x % tiles * ACROSS_KEYS;
  const T *v = call.v + call.of_v.at(head / call.kv_heads, first, head % call.kv_heads);
#pragma unroll
  for (int i = threadIdx.x; i < ACROSS_KEYS * PARTS; i += ACROSS_THREADS) {
    int key = i / PARTS, part = i % PARTS;
    uint4 bytes = {};
    if (first + key < call.keys) {
      bytes = *reinterpret_cast<const uint4 *>(v + key * call.of_v.position + part * 16);
    }
    *reinterpret_cast<uint4 *>(&tile[place(key) + part * 4]) = bytes;
  }
  __syncthreads();
  uint8_t *across = values.across + (index_t(head) * places + first) * CHANNELS;
#pragma unroll
  for (int i = threadIdx.x; i < ACROSS_KEYS / 16 * (CHANNELS / 4); i += ACROSS_THREADS) {
    int half = i % 2, word = i / 2 % (CHANNELS / 4), key = i / 2 / (CHANNELS / 4) * 32 + half * 16;
    uint32_t channels[4][4] = {};
    auto at = [&](int of) { return tile[place(key) + of * WORDS + word]; };
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      if (word < WORDS) turn(channels[t], at(2 * t), at(2 * t + 1), at(2 * t + 8), at(2 * t + 9));
    }
    if (first + key >= places) continue;
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      uint8_t *to = across + key / 32 * (32 * CHANNELS) + (word * 4 + c) * 32 + (half ^ word % 2) * 16;
      *reinterpret_cast<uint4 *>(to) = {channels[0][c], channels[1][c], channels[2][c], channels[3][c]};
    }
  }
}

}  // namespace fp8

extern "C" __global__ void __launch_bounds__(fp8::ACROSS_THREADS) fp8_across(
    uint8_t *across, uint32_t places, CALL_PARAMETERS) {
  tensor_cores::wait_for_previous();
  tensor_cores::start_next();
  fp8::lay_across(CALL, {across, places});
}
