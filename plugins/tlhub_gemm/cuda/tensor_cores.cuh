/* What the kernels on tensor cores share: by its PTX what Hopper has for products of tiles (bulk tensor copies, the
 * barriers that they complete, wgmma, clusters), the tiles of an operand in shared memory, and the ring of stages that
 * they go through. What comes before sm_90a's part is for all from sm_80 on.
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

constexpr int BK = 64; /* elements of K in a stage: 128 bytes */

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

/* Load the box at (x, y, z) of a tensor to shared memory, or, if it is SHARED, to that place in each block of the
 * cluster that `blocks` has a bit for; the bytes count for the barrier at this address in each. */
template <bool SHARED>
__device__ __forceinline__ void load_box(
    uint32_t to, const TensorMap &map, uint32_t barrier, int x, int y, int z, int blocks) {
  if constexpr (!SHARED) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(to),
        "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z)
        : "memory");
  } else {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
        " [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(to),
        "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z), "h"(static_cast<uint16_t>(blocks))
        : "memory");
  }
}

__device__ __forceinline__ void store_box(const TensorMap &map, uint32_t from, int x, int y, int z) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(&map), "r"(from),
               "r"(x), "r"(y), "r"(z)
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

/* Make this thread's writes to shared memory visible to bulk copies. */
__device__ __forceinline__ void fence_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT> __device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

/* The product of two tiles, 64 x 16 and 16 x N, given by their descriptors: `add(sum, a, b, whether to add to sum)`.
 * ACROSS_A, ACROSS_B: that operand lies along M or N, not along K. Python writes it for each N (tensor_cores.py), since
 * it has N / 2 operands. */
template <int N, bool ACROSS_A, bool ACROSS_B> struct Wgmma;

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

/* -- tiles in shared memory ---------------------------------------------------------------------- */

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
    for (int i = 0; i < BOXES; ++i) {
      if constexpr (ALONG_K) {
        load_box<(PARTS > 1)>(to, map, barrier, k, first + part * PART, batch, blocks);
      } else {
        load_box<(PARTS > 1)>(to + i * NEXT, map, barrier, first + i * WIDTH, k + part * PART, batch, blocks);
      }
    }
  }

  /* wgmma's descriptor of the tile at an address: the bytes to the next box and to the next eight rows, the swizzle. */
  static __device__ __forceinline__ uint64_t describe(uint32_t address) {
    constexpr uint64_t LEADING = ALONG_K ? 1 : NEXT / 16, STRIDE = 8 * ROW / 16, SWIZZLE = ROW == 128 ? 1 : 2;
    return SWIZZLE << 62 | STRIDE << 32 | LEADING << 16 | (address & 0x3ffff) >> 4;
  }

  /* Bytes to `rows` rows of the operand (a multiple of 64) and 16 * step elements of K further. */
  static __device__ constexpr int offset(int rows, int step) {
    return ALONG_K ? rows * ROW + step * 32 : rows / WIDTH * NEXT + step * 16 * ROW;
  }
};

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
