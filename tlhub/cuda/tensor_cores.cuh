/* What kernels on tensor cores share: by its PTX what Hopper has for products of tiles (bulk tensor copies, the barriers
 * that they complete, wgmma, clusters), and the ring of stages that tiles go through. What comes before sm_90a's part is
 * for all from sm_80 on.
 */

namespace tensor_cores {

__device__ __forceinline__ uint32_t shared_address(const void *p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

/* Start work ahead of the end of the kernel before this one, and wait for that end before any access to memory: from
 * sm_90 on. */
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void start_next() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/* -- sm_90a: barriers, copies, products, clusters -------------------------------------------------- */

struct alignas(64) TensorMap { /* a CUtensorMap */
  char bytes[128];
};

__device__ __forceinline__ void barrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

__device__ __forceinline__ void barrier_expect(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

/* Arrive at a barrier of another block of the cluster, by an address as `address_in` gives it. */
__device__ __forceinline__ void barrier_arrive_there(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  do {
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
  } while (!done);
}

/* Load the box at (x, y, z), or (x, y, z, w), of a tensor to shared memory; its bytes count for the barrier. */
__device__ __forceinline__ void load_box(uint32_t to, const TensorMap &map, uint32_t barrier, int x, int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(to),
      "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z)
      : "memory");
}
__device__ __forceinline__ void load_box(
    uint32_t to, const TensorMap &map, uint32_t barrier, int x, int y, int z, int w) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(to),
      "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w)
      : "memory");
}

/* Load the box at (x, y, z) to that place in each block of the cluster that `blocks` has a bit for; the bytes count for
 * the barrier at this address in each. */
__device__ __forceinline__ void load_box_to(
    uint16_t blocks, uint32_t to, const TensorMap &map, uint32_t barrier, int x, int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(to),
      "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z), "h"(blocks)
      : "memory");
}

/* Store a box to (x, y, z), or (x, y, z, w), of a tensor. */
__device__ __forceinline__ void store_box(const TensorMap &map, uint32_t from, int x, int y, int z) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(&map), "r"(from),
               "r"(x), "r"(y), "r"(z)
               : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
__device__ __forceinline__ void store_box(const TensorMap &map, uint32_t from, int x, int y, int z, int w) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(&map),
               "r"(from), "r"(x), "r"(y), "r"(z), "r"(w)
               : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

/* Have a tensor map at hand when it is first used. */
__device__ __forceinline__ void prefetch(const TensorMap &map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

/* Wait until at most LEFT of this thread's stores have still to read their shared memory. */
template <int LEFT> __device__ __forceinline__ void store_wait() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(LEFT) : "memory");
}

/* Wait until this thread's stores are done, for any access to what they wrote. */
__device__ __forceinline__ void store_wait_whole() {
  asm volatile("cp.async.bulk.wait_group 0;\nfence.proxy.async;" ::: "memory");
}

/* Make this thread's writes to shared memory visible to bulk copies. */
__device__ __forceinline__ void fence_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

/* Wait until at most LEFT groups of products are under way; nothing is done with `sum`, of one that is done, before. */
template <int LEFT> __device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}
template <int LEFT, int N> __device__ __forceinline__ void wgmma_wait(float (&sum)[N]) {
  wgmma_wait<LEFT>();
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(sum[i])::"memory");
}

/* The product of two tiles, 64 x 16 and 16 x N, added to `sum` or put there. ACROSS: that operand lies along M or N, not
 * along K. Python writes them for each N (tensor_cores.py), since they have N / 2 operands and more.
 *
 *   FromShared<N, ACROSS_A, ACROSS_B>::add(sum, a, b, add)   both tiles in shared memory, by their descriptors
 *   FromRegisters<N, ACROSS_B>::add(sum, a, b, add)          a: four registers of two elements */
template <int N, bool ACROSS_A = false, bool ACROSS_B = false> struct FromShared;
template <int N, bool ACROSS_B = false> struct FromRegisters;

/* The descriptor of a tile at an address, whose rows are ROW bytes and swizzled by that: bytes to the next eight rows, and
 * NEXT bytes to the next tile across. */
template <int ROW, int NEXT = 16> __device__ __forceinline__ uint64_t describe(uint32_t address) {
  constexpr uint64_t SWIZZLE = ROW == 128 ? 1 : 2;
  return SWIZZLE << 62 | uint64_t(8 * ROW / 16) << 32 | uint64_t(NEXT / 16) << 16 | (address & 0x3ffff) >> 4;
}

template <int REGISTERS> __device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS> __device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

__device__ __forceinline__ int cluster_rank() {
  int rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

/* Wait until all threads of the cluster have arrived; what they wrote before is visible after. */
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }

/* The address by which the others of a cluster know what block `rank` has at this address. */
__device__ __forceinline__ uint32_t address_in(uint32_t address, int rank) {
  uint32_t there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}

/* Send four floats to another block; the bytes count for its barrier. */
__device__ __forceinline__ void send(uint32_t to, uint32_t barrier, const float *v) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%2, %3, %4, %5}, [%1];" ::"r"(to),
      "r"(barrier), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3])
      : "memory");
}

__device__ __forceinline__ float4 read_shared(uint32_t address) {
  float4 v;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

/* A matrix of 16 rows and 16 columns, as an accumulator has it, to shared memory; `row` is this lane's. */
__device__ __forceinline__ void store_matrix(uint32_t row, const uint32_t (&packed)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(packed[0]),
               "r"(packed[1]), "r"(packed[2]), "r"(packed[3])
               : "memory");
}

/* A place in the ring of stages. */
template <int STAGES> struct Ring {
  int stage = 0;
  uint32_t phase = 0;

  __device__ __forceinline__ void next() {
    if (++stage == STAGES) stage = 0, phase ^= 1;
  }
  __device__ __forceinline__ void skip(int stages) {
    stage += stages;
    phase ^= stage / STAGES & 1;
    stage %= STAGES;
  }
};

}  // namespace tensor_cores
