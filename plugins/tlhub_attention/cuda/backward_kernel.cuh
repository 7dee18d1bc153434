/* The kernel of attention's gradients on Hopper: what its blocks and warp groups do. */

namespace backward {

/* Tell both blocks of a cluster the number that thread 0 of the first has; by then both have made their barriers. */
__device__ __forceinline__ int first_of_pair(uint32_t room, int number) {
  if (threadIdx.x == 0) asm volatile("st.shared.s32 [%0], %1;" ::"r"(room), "r"(number) : "memory");
  cluster_arrive();
  cluster_wait();
  if (threadIdx.x == 0) {
    asm volatile("ld.shared::cluster.s32 %0, [%1];" : "=r"(number) : "r"(address_in(room, 0)) : "memory");
  }
  return number;
}

/* A tile of keys. `direct`: dk or dv has no tensor map, and map_dk and map_dv are any. */
template <class P, bool CAPPED>
__device__ __forceinline__ void attend_backward(
    const TensorMap &map_q, const TensorMap &map_k, const TensorMap &map_v, const TensorMap &map_dout,
    const TensorMap &map_dk, const TensorMap &map_dv, bool direct, const Scratch &scratch, const Gradients &g) {
  extern __shared__ __align__(1024) uint8_t memory[];
  Shared<P> shared{shared_address(memory)};
  Tile<P> *tile = reinterpret_cast<Tile<P> *>(memory + P::AT_TILE);
  if (threadIdx.x == GROUPS * GROUP) {
    prefetch(map_q), prefetch(map_k), prefetch(map_v), prefetch(map_dout), prefetch(map_dk), prefetch(map_dv);
  }
  if (threadIdx.x == 0) {
    constexpr int READERS = 4 * GROUPS; /* warps */
    barrier_init(shared.k_full(), 1), barrier_init(shared.v_full(), 1);
    for (int stage = 0; stage < P::STAGES; ++stage) {
      barrier_init(shared.q_full(stage), 1), barrier_init(shared.dout_full(stage), 1);
      barrier_init(shared.q_empty(stage), READERS), barrier_init(shared.dout_empty(stage), READERS);
      barrier_init(shared.peer_full(stage), 1), barrier_init(shared.peer_empty(stage), READERS);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  wait_for_previous();
  start_next();
  int rank = P::PAIRED ? cluster_rank() : 0, number = int(blockIdx.x) / (P::PAIRED ? 2 : 1);
  if (DETERMINISTIC && threadIdx.x == 0 && rank == 0) number = atomicAdd(scratch.begun, 1);
  if constexpr (P::PAIRED) number = first_of_pair(shared.number(), number);
  if (threadIdx.x == 0) *tile = Tile<P>(g, number);
  __syncthreads();
  Tile<P> kept = *tile; /* in registers, where there are some left */
  const Tile<P> &t = VARLEN || CAPPED || P::WIDE ? *tile : kept;
  auto leave = [] { /* when neither of a cluster reaches for the other's memory any more */
    if constexpr (P::PAIRED) cluster_arrive(), cluster_wait();
  };
  if (VARLEN && t.key >= t.span.keys) return leave(); /* no tile has this number */

  int group = __shfl_sync(0xffffffff, threadIdx.x / GROUP, 0);
  if (group == GROUPS) {
    give_registers<P::PRODUCER_REGISTERS>();
    int warp = __shfl_sync(0xffffffff, threadIdx.x / 32 % 4, 0);
    if (!P::WIDE && warp < GROUPS) {
      hand_on<P>(g, scratch, t, shared, warp);
    } else if (threadIdx.x == GROUPS * GROUP + 96) {
      produce<P>(map_q, map_k, map_v, map_dout, g, scratch, t, shared, rank);
    }
    __syncwarp();
  } else {
    take_registers<P::CONSUMER_REGISTERS>();
    if constexpr (!P::WIDE) {
      consume<P, CAPPED>(map_dk, map_dv, direct, g, scratch, t, shared, group);
    } else if (group == 0) {
      consume_values<P, CAPPED>(map_dv, direct, g, scratch, t, shared, rank);
    } else {
      consume_keys<P, CAPPED>(map_dk, direct, g, scratch, t, shared, rank);
    }
  }
  leave();
}

}  // namespace backward

/* SHARED: the bytes of shared memory that a launch has; then the arguments of Plan. */
#define BACKWARD(NAME, SHARED, CAPPED, ...)                                                                            \
  static_assert(backward::Plan<__VA_ARGS__>::BYTES == SHARED, "Plan.shared has another layout");                       \
  extern "C" __global__ void __launch_bounds__(backward::Plan<__VA_ARGS__>::THREADS, 1) NAME(                          \
      const __grid_constant__ backward::TensorMap map_q, const __grid_constant__ backward::TensorMap map_k,            \
      const __grid_constant__ backward::TensorMap map_v, const __grid_constant__ backward::TensorMap map_dout,         \
      const __grid_constant__ backward::TensorMap map_dk, const __grid_constant__ backward::TensorMap map_dv,          \
      int direct, float *sums, float *stats, int *counts, GRADIENT_PARAMETERS) {                                       \
    backward::attend_backward<backward::Plan<__VA_ARGS__>, CAPPED>(                                                    \
        map_q, map_k, map_v, map_dout, map_dk, map_dv, direct, backward::Scratch(sums, stats, counts), GRADIENTS);     \
  }
