/* What a kernel of hopper.cuh is, its tiles, and where they are in shared memory. */

namespace hopper {

using namespace tensor_cores;

constexpr int GROUP = 128; /* threads */
constexpr int THREADS = 3 * GROUP;
constexpr int PRODUCER_REGISTERS = 40, CONSUMER_REGISTERS = 232; /* of a thread; at the launch all have 168 */

constexpr bool LOADED = RESIDUAL && sizeof(Beside) == 2; /* the residual by copies, where it has a tensor map */

enum Scheme { COOPERATIVE, PINGPONG };

/* What a kernel is: Python's side of it is hopper_plan.py. */
template <Scheme SCHEME_, int BM_, int BN_, int STAGES_, int SHARE_A_, int SHARE_B_, int SPLIT_, int BAND_, int CHUNK_>
struct Plan {
  static constexpr Scheme SCHEME = SCHEME_;
  static constexpr int BM = BM_, BN = BN_; /* of a tile */
  static constexpr int STAGES = STAGES_;
  static constexpr int SHARE_A = SHARE_A_; /* blocks beside each other that share A */
  static constexpr int SHARE_B = SHARE_B_; /* or below each other, and share B */
  static constexpr int SPLIT = SPLIT_;     /* blocks that share a tile, a part of K each */
  static constexpr int BAND = BAND_;       /* rows of clusters that are walked column by column, so that L2 is hit */

  static constexpr int SHARE = SHARE_A * SHARE_B, CLUSTER = SHARE * SPLIT;
  static constexpr int ROWS = SCHEME == COOPERATIVE ? BM / 2 : BM; /* of a consumer */
  static constexpr int READERS = SCHEME == COOPERATIVE ? 8 : 4;    /* warps that read a stage */
  static constexpr int OUT = BN / HALVES;                          /* columns of C of a tile */
  static constexpr int COLUMNS = BN / SPLIT;                       /* of sums, that a block finishes */
  static constexpr int FINISHED = COLUMNS / HALVES;                /* of C */

  static constexpr int CHUNK = CHUNK_; /* columns that a warp stages at once, in rows of at most 128 bytes */
  static constexpr int CHUNK_BYTES = staging::Chunk<C, CHUNK>::BYTES;
  static constexpr int CHUNKS = FINISHED / CHUNK * (ROWS / 64); /* of a warp and a tile */
  static constexpr int BUFFERS = CHUNKS == 1 ? 1 : 2;           /* one chunk is written while another leaves */

  static constexpr int A_BYTES = BM * BK * int(sizeof(A)), B_BYTES = BN * BK * int(sizeof(B));
  static constexpr int STAGE_BYTES = A_BYTES + B_BYTES, AT_STAGING = STAGES * STAGE_BYTES;

  static constexpr int BOX_BYTES = BM * CHUNK * int(sizeof(Beside)); /* of the residual: a chunk's columns, all rows */
  static constexpr int BOXES = FINISHED / CHUNK, PER = STAGE_BYTES / BOX_BYTES; /* of a tile, and of a stage */
  static constexpr int FURTHER = LOADED ? (BOXES + PER - 1) / PER : 0;          /* stages of a tile */

  static constexpr int AT_RECEIVED = AT_STAGING + 8 * BUFFERS * CHUNK_BYTES;
  static constexpr int RECEIVED = (SPLIT - 1) * BM * COLUMNS * int(sizeof(Sum)); /* bytes, from the others of a split */
  static constexpr int AT_BARRIERS = AT_RECEIVED + RECEIVED;                     /* `full`, `empty`, and `received` */
  static constexpr int BYTES = AT_BARRIERS + 8 * (2 * STAGES + 1);               /* of shared memory in all */

  static_assert(ROWS % 64 == 0 && COLUMNS % 16 == 0, "a consumer multiplies 64 rows and 16 columns at a time");
  static_assert(!GLU || BN % 128 == 0, "gates and values are whole boxes");
  static_assert(SHARE_A == 1 || SHARE_B == 1, "one operand is shared");
  static_assert(FURTHER + (SCHEME == PINGPONG) <= STAGES, "stages of a residual, and one to start with");
  static_assert(SPLIT == 1 || SCHEME == COOPERATIVE, "a block that splits a tile has one tile");
};

/* -- tiles --------------------------------------------------------------------------------------- */

template <class P> using OperandA = Operand<!TRANS_A, P::BM, P::SHARE_A>;
template <class P> using OperandB = Operand<TRANS_B, P::BN, P::SHARE_B>;
template <class P> using HalfOfB = Operand<TRANS_B, P::OUT, P::SHARE_B>; /* gates or values; without GLU all of it */

/* The tiles of a call in the order in which they are worked on, counted in clusters, and what of them is this block's:
 * which of those that share, which part of K, from where, and how many stages a tile is. */
template <class P> struct Tiles {
  int across, down, count, first, step;
  int share, split, k_begin, blocks;

  __device__ __forceinline__ explicit Tiles(const Call &call) {
    int rank = P::CLUSTER > 1 ? cluster_rank() : 0;
    share = P::SPLIT > 1 ? rank % P::SHARE : rank;
    split = P::SPLIT > 1 ? rank / P::SHARE : 0;
    down = (int(call.m) + P::BM * P::SHARE_B - 1) / (P::BM * P::SHARE_B);
    across = (int(call.n) + P::OUT * P::SHARE_A - 1) / (P::OUT * P::SHARE_A);
    count = down * across * int(call.batch);
    first = blockIdx.x / P::CLUSTER;
    step = gridDim.x / P::CLUSTER;
    int all = (int(call.k) + BK - 1) / BK;
    int begin = P::SPLIT > 1 ? all * split / P::SPLIT : 0, end = P::SPLIT > 1 ? all * (split + 1) / P::SPLIT : all;
    k_begin = begin * BK;
    blocks = end - begin;
  }

  /* Where tile number i starts. */
  __device__ __forceinline__ void place(int i, int &m, int &n, int &batch) const {
    batch = i / (down * across);
    i -= batch * (down * across);
    int band = i / (P::BAND * across), top = band * P::BAND, height = min(P::BAND, down - top);
    i -= band * P::BAND * across;
    n = i / height, m = top + i % height;
    m = (m * P::SHARE_B + (P::SHARE_B > 1 ? share : 0)) * P::BM;
    n = (n * P::SHARE_A + (P::SHARE_A > 1 ? share : 0)) * P::OUT;
  }
};

/* Addresses in shared memory. */
template <class P> struct Shared {
  uint32_t base;

  __device__ __forceinline__ uint32_t a(int stage) const { return base + stage * P::STAGE_BYTES; }
  __device__ __forceinline__ uint32_t b(int stage) const { return a(stage) + P::A_BYTES; }
  __device__ __forceinline__ uint32_t staging(int warp) const {
    return base + P::AT_STAGING + warp * (P::BUFFERS * P::CHUNK_BYTES);
  }
  __device__ __forceinline__ uint32_t full(int stage) const { return base + P::AT_BARRIERS + 8 * stage; }
  __device__ __forceinline__ uint32_t empty(int stage) const { return full(P::STAGES + stage); }
  __device__ __forceinline__ uint32_t received() const { return full(2 * P::STAGES); }
};

/* An accumulator of 64 x N: two floats of row lane / 4, two of the row 8 below, for each 8 columns. */
template <class P> using Accumulator = float[P::ROWS / 64][P::BN / 2];
template <class P> using Finished = float[P::ROWS / 64][P::COLUMNS / 2];

/* This warp is done with a stage: tell the blocks that load into it. */
template <class P> __device__ __forceinline__ void release(Shared<P> shared, int stage, int split, int lane) {
  if constexpr (P::SHARE > 1) {
    if (lane < P::SHARE) barrier_arrive_there(address_in(shared.empty(stage), split * P::SHARE + lane));
  } else {
    if (lane == 0) barrier_arrive(shared.empty(stage));
  }
}

}  // namespace hopper
