/* What is after the products of attention's gradients on Hopper, and the kernels of both ends. */

namespace backward {

/* Write a tile of dq from its sums; `whole`: 16 bytes of its rows are aligned. */
template <class P> __device__ __forceinline__ void end(const Gradients &all, const Scratch &scratch, bool whole) {
  constexpr int PITCH = P::CHANNELS + 8; /* elements of a row */
  __shared__ __align__(16) T rows[P::BM][PITCH];
  Place<P> at(all.call);
  Gradients g = all.of(at.span);
  const Call &call = g.call;
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const float4 *sums =
      reinterpret_cast<const float4 *>(scratch.sums + index_t(blockIdx.x) * P::SUMS) + threadIdx.x % GROUP;
  float factor = float(call.scale), probe = 0;
#pragma unroll
  for (int part = threadIdx.x / GROUP; part < P::PARTS; part += ENDS / GROUP) {
    int row = (P::BY_QUERIES ? part * 64 : 0) + warp * 16 + lane / 4, column = P::BY_QUERIES ? 0 : part * 64;
    float4 x[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = sums[(part * 8 + i) * GROUP];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      uint32_t upper = pack<T>(x[i].x * factor, x[i].y * factor), lower = pack<T>(x[i].z * factor, x[i].w * factor);
      probe += x[i].x + x[i].y + x[i].z + x[i].w;
      *reinterpret_cast<uint32_t *>(&rows[row][column + 8 * i + lane % 4 * 2]) = upper;
      *reinterpret_cast<uint32_t *>(&rows[row + 8][column + 8 * i + lane % 4 * 2]) = lower;
    }
  }
  if (!is_finite(probe)) *scratch.lost = true;
  __syncthreads();
  constexpr int EIGHTS = (D + 7) / 8;
#pragma unroll 4
  for (int i = threadIdx.x; i < P::BM * EIGHTS; i += ENDS) {
    int down = i / EIGHTS, channel = i % EIGHTS * 8;
    if (at.query + down >= call.queries) break;
    T *to = g.dq + g.of_dq.at(at.batch, at.query + down, at.head) + channel * g.of_dq.channel;
    if (whole) {
      *reinterpret_cast<uint4 *>(to) = *reinterpret_cast<const uint4 *>(&rows[down][channel]);
    } else {
      for (int j = 0; j < 8; ++j) to[j * g.of_dq.channel] = rows[down][channel + j];
    }
  }
}

}  // namespace backward

#define BACKWARD_ENDS(BEGIN, END, ...)                                                                                 \
  extern "C" __global__ void __launch_bounds__(backward::ENDS) BEGIN(                                                  \
      int whole, float *sums, float *stats, int *counts, GRADIENT_PARAMETERS) {                                        \
    tensor_cores::wait_for_previous();                                                                                 \
    tensor_cores::start_next();                                                                                        \
    backward::begin<backward::Plan<__VA_ARGS__>>(GRADIENTS, backward::Scratch(sums, stats, counts), whole);            \
  }                                                                                                                    \
  extern "C" __global__ void __launch_bounds__(backward::ENDS) END(                                                    \
      int whole, float *sums, float *stats, int *counts, GRADIENT_PARAMETERS) {                                        \
    tensor_cores::wait_for_previous();                                                                                 \
    tensor_cores::start_next();                                                                                        \
    backward::end<backward::Plan<__VA_ARGS__>>(GRADIENTS, backward::Scratch(sums, stats, counts), whole);                  \
  }
