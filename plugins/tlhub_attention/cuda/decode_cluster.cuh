/* Decoding on Hopper of few tiles: the blocks of a cluster share the keys of one, and add up what they have in each
 * other's shared memory, which is sooner than through scratch memory. A tile is all rows of a kv head, of one query.
 */

namespace decode {

/* The stretch of a tile that this block of the cluster has, as a walk of one. */
template <class P> struct Slice {
  int b;
  Decode sequence;
  bool left = true;

  __device__ __forceinline__ explicit Slice(const Decode &call)
      : b(blockIdx.y / call.kv_heads), sequence(call.sequence(b)) {}

  __device__ __forceinline__ bool next(Stretch &t) {
    if (!left) return false;
    left = false;
    Blocks<P> blocks(sequence);
    auto border = [&](int rank) { return blocks.first + int(index_t(blocks.count) * rank / gridDim.x); };
    t = {int(blockIdx.y) % sequence.kv_heads, 0, border(blockIdx.x), border(blockIdx.x + 1), true, true};
    return true;
  }
};

/* Where the blocks' parts of rows meet: row r in block r % gridDim.x, by row and block a peak, a total and sums. */
struct Exchange {
  static constexpr int PART = 2 + CHANNELS, BYTES = 16 * PART * 4; /* as gridDim.x divides 16 */
  float *parts;

  /* Send the rows that a warp has to where they meet. */
  template <class P> __device__ __forceinline__ void send(const Rows<P> &rows) const {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (!rows.there(i)) continue;
      uint32_t there = address_in(shared_address(part(lane / 4 + 8 * i, blockIdx.x)), (lane / 4 + 8 * i) % gridDim.x);
      rows.each_word(i, [&](int number, float2 pair) {
        uint32_t to = there + (number == 0 ? 0 : 8 + (number - 1) * 32 + lane % 4 * 8);
        asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(pair.x), "f"(pair.y) : "memory");
      });
    }
  }

  /* Add up and write the rows that meet in this block, each channel by a thread; then again, by the warps that find
   * such channels, those that have a NaN that they need not. */
  template <class P> __device__ __forceinline__ void write(const Decode &s, int b, int kv_head) const {
    int blocks = gridDim.x;
    for (int r = blockIdx.x; r < rows_of(s); r += blocks) {
      float peak = -infinity();
      for (int i = 0; i < blocks; ++i) peak = fmaxf(peak, part(r, i)[0]);
      float base = peak == -infinity() ? 0.f : peak;
      Row at(s, kv_head, r);
      O *o = s.o + s.of_o.at(b, at.query, at.head);
      bool lost = false;
      for (int channel = threadIdx.x; channel < D_V; channel += P::THREADS) {
        float total = 0, sum = 0;
        for (int i = 0; i < blocks; ++i) {
          const float *p = part(r, i);
          float factor = exp2_fast(p[0] - base);
          total = fmaf(p[1], factor, total), sum = fmaf(p[2 + channel], factor, sum);
        }
        float x = total == 0 ? 0.f : sum * (1 / total);
        lost |= x != x && total == total;
        o[channel * s.of_o.channel] = from_float<O>(x);
        if (channel == 0) s.put_lse(b, at.head, at.query, (base + log2f(total)) * LN2);
      }
      if (__any_sync(0xffffffff, lost)) attend_row(s, b, at.head, at.query);
    }
  }

 private:
  __device__ __forceinline__ float *part(int row, int block) const {
    int blocks = gridDim.x;
    return parts + (row / blocks * blocks + block) * PART;
  }
};

template <class P>
__device__ __forceinline__ void decode_together(const TensorMap &map_k, const TensorMap &map_v, const Decode &call) {
  extern __shared__ __align__(1024) uint8_t memory[];
  Shared<P> shared{shared_address(memory)};
  int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
  begin(map_k, map_v, shared);
  cluster_arrive();
  wait_for_previous();
  start_next();
  Slice<P> slice(call);
  if (warp >= P::WARPS) {
    produce<P>(map_k, map_v, slice, shared);
    cluster_wait(); /* all blocks have begun */
    cluster_arrive();
  } else {
    Place<P> place(memory + Shared<P>::AT_PLACES, warp);
    Exchange exchange{reinterpret_cast<float *>(memory + Shared<P>::BYTES)};
    consume<P>(call, slice, shared, place, [&](Rows<P> &rows, const Stretch &t, int) {
      rows.close();
      place.add_up(rows);
      cluster_wait();
      if (place.chunk == 0) exchange.send(rows);
      cluster_arrive();
      cluster_wait();
      exchange.write<P>(slice.sequence, slice.b, t.kv_head);
    });
  }
}

}  // namespace decode

/* SHARED: the bytes of shared memory that a launch has; then the arguments of Plan. */
#define HOPPER_DECODE_TOGETHER(SHARED, ...)                                                                      \
  static_assert(decode::Shared<decode::Plan<__VA_ARGS__>>::BYTES + decode::Exchange::BYTES == SHARED,             \
                "Plan.shared has another layout");                                                               \
  extern "C" __global__ void                                                                                     \
      __launch_bounds__(decode::THREADS<decode::Plan<__VA_ARGS__>>, decode::Plan<__VA_ARGS__>::BLOCKS)           \
      decode_together(const __grid_constant__ decode::TensorMap map_k,                                           \
                      const __grid_constant__ decode::TensorMap map_v, DECODE_PARAMETERS) {                      \
    decode::decode_together<decode::Plan<__VA_ARGS__>>(map_k, map_v, DECODE);                                    \
  }
