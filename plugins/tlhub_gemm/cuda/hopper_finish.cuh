/* The end of a tile: what is added to its sums, and their way through shared memory to C. Part of hopper.cuh. */

/* Activations of float are x / (1 + 2^power), by the fewest instructions: they are unrolled for all sums of a tile, and
 * what is long slows the main loop beside it. */
__device__ __forceinline__ float over_one_plus_exp2(float x, float power) {
  float odds, weight;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(odds) : "f"(power));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(weight) : "f"(1.f + odds));
  return x * weight;
}

template <> __device__ __forceinline__ float activate<SILU, float>(float x) {
  return over_one_plus_exp2(x, -1.4426950408889634f * x);
}

template <> __device__ __forceinline__ float activate<GELU_TANH, float>(float x) {
  return over_one_plus_exp2(x, x * fmaf(-0.10294324f, x * x, -2.3022082f)); /* 2 sqrt(2 / pi) log2(e) */
}

/* By the log-odds of the weight, x times a polynomial of x^2 that is fitted so that the weight errs by less than
 * 4.5 * 2^-24, and by less where it is near 0. The first coefficient has the sign that is right far from 0. */
template <> __device__ __forceinline__ float activate<GELU, float>(float x) {
  float square = x * x, power = -5.348347542621923e-9f;
  power = fmaf(power, square, 3.903726906173688e-7f);
  power = fmaf(power, square, -1.1521759915922303e-5f);
  power = fmaf(power, square, 1.5974311099853367e-4f);
  power = fmaf(power, square, 9.507098729955032e-5f);
  power = fmaf(power, square, -1.0483913868665695e-1f);
  power = fmaf(power, square, -2.30220627784729f);
  return over_one_plus_exp2(x, power * x);
}

namespace hopper {

/* x, as if it were new: products with it are then made where they are used, not kept in registers that sums need. */
__device__ __forceinline__ index_t anew(index_t x) {
  asm volatile("" : "+l"(x));
  return x;
}

/* A matrix of 16 rows and 16 columns from shared memory, as an accumulator has it; `row` is this lane's. */
__device__ __forceinline__ void load_matrix(uint32_t *packed, uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(packed[0]), "=r"(packed[1]), "=r"(packed[2]), "=r"(packed[3])
               : "r"(row)
               : "memory");
}

__device__ __forceinline__ uint32_t pack(C low, C high) {
  C pair[2] = {low, high};
  uint32_t packed;
  memcpy(&packed, pair, 4);
  return packed;
}

/* The residual of a consumer's rows, as an accumulator has them. */
template <class P> struct Residual {
  using Box = staging::Chunk<Beside, P::CHUNK>;

  uint32_t packed[P::ROWS / 64][P::FINISHED / 4];

  /* What a box has of a warp's rows of a piece, from `row` of the box and `column` of the block's on. */
  __device__ __forceinline__ void read(uint32_t box, int piece, int row, int column, int lane) {
#pragma unroll
    for (int n = 0; n < P::CHUNK; n += 16) {
      load_matrix(packed[piece] + (column + n) / 4, box + Box::place(row + lane % 16, n + lane / 16 * 8));
    }
  }

  /* Out of the stages behind those of its tile; `top` is this warp's first row there. */
  __device__ __forceinline__ void take(Ring<P::STAGES> &ring, Shared<P> shared, int top, int split, int lane) {
#pragma unroll
    for (int box = 0; box < P::BOXES; ++box) {
      if (box % P::PER == 0) barrier_wait(shared.full(ring.stage), ring.phase);
#pragma unroll
      for (int piece = 0; piece < P::ROWS / 64; ++piece) {
        read(shared.a(ring.stage) + box % P::PER * P::BOX_BYTES, piece, top + 64 * piece, box * P::CHUNK, lane);
      }
      if (box % P::PER == P::PER - 1 || box == P::BOXES - 1) {
        fence_copies(); /* an arrival does not wait for what is being read, and the next copy would overtake that */
        __syncwarp();
        release<P>(shared, ring.stage, split, lane);
        ring.next();
      }
    }
  }

  /* From memory, where no tensor map describes it, by way of this warp's `staging`; from row m and column n of C on. */
  __device__ __forceinline__ void load(uint32_t staging, const Call &call, int batch, int m, int n, int lane) {
#pragma unroll
    for (int piece = 0; piece < P::ROWS / 64; ++piece) {
#pragma unroll
      for (int first = 0; first < P::FINISHED; first += P::CHUNK) {
#pragma unroll 4
        for (int i = lane; i < 16 * P::CHUNK; i += 32) {
          int down = i / P::CHUNK, across = i % P::CHUNK, row = m + 64 * piece + down, column = n + first + across;
          *static_cast<Beside *>(__cvta_shared_to_generic(staging + Box::place(down, across))) =
              row < call.m && column < call.n ? call.residual[call.of_residual.at(batch, row, column)] : Beside(0.f);
        }
        __syncwarp();
        read(staging, piece, 0, first, lane);
        __syncwarp();
      }
    }
  }
};

/* The bias of a tile's columns, loaded while they are multiplied: pairs of columns, of which a lane has every 32nd. */
template <class P> struct Bias {
  Beside pairs[HALVES][(P::FINISHED + 63) / 64][2];

  __device__ __forceinline__ void load(const Call &call, int n, int lane) {
#pragma unroll
    for (int half = 0; half < HALVES; ++half) {
#pragma unroll
      for (int i = 0; i < (P::FINISHED + 63) / 64; ++i) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          index_t column = n + (i * 32 + lane) * 2 + j;
          pairs[half][i][j] = column < call.n ? call.bias[(column + half * call.n) * call.of_bias] : Beside(0.f);
        }
      }
    }
  }

  /* The pair of this lane in the accumulator's columns from 8 * quad on. */
  __device__ __forceinline__ void read(Beside *to, int half, int quad, int lane) const {
    constexpr int WORDS = sizeof(Beside) * 2 / 4;
    uint32_t words[WORDS];
    memcpy(words, pairs[half][quad / 8], sizeof(words));
#pragma unroll
    for (int i = 0; i < WORDS; ++i) words[i] = __shfl_sync(0xffffffff, words[i], quad % 8 * 4 + lane % 4);
    memcpy(to, words, sizeof(words));
  }
};

/* What is added to the rows that a consumer finishes. */
template <class P> struct Added {
  Bias<P> bias;
  Residual<P> residual;
};

/* Finish a warp's 16 rows of a chunk of a piece, from row m and column n of C on, and stage them; `column` is that of
 * the block's. The sums of values are VALUES behind those of their gates. A residual of float32 is loaded here, for STEP
 * sums at once: for more there are no registers, and fewer would be waited for more often. */
template <class P>
__device__ __forceinline__ void stage_chunk(
    uint32_t to, const float *sum, const Added<P> &added, const Call &call, Factors factors, int batch, int m, int n,
    int piece, int column, int lane) {
  using Chunk = staging::Chunk<C, P::CHUNK>;
  constexpr int VALUES = P::COLUMNS / 4, STEP = LOADED || P::CHUNK == 16 ? 8 : 16;
  /* This lane's first element of the chunk, and how many rows and columns there are from it on. */
  int row = m + lane / 4, right = n + lane % 4 * 2, rows = int(call.m) - row, columns = int(call.n) - right;
  const Beside *residual = RESIDUAL ? call.residual + call.of_residual.at(batch, row, right) : nullptr;
#pragma unroll
  for (int first = 0; first < P::CHUNK / 2; first += STEP) {
    Beside residuals[STEP] = {};
    if constexpr (LOADED) {
      memcpy(residuals, added.residual.packed[piece] + (column / 2 + first) / 2, sizeof(residuals));
    } else if constexpr (RESIDUAL) {
      __syncwarp(); /* or the loads of all steps would start here */
#pragma unroll
      for (int i = 0; i < STEP; ++i) { /* of the accumulator */
        int down = (i & 2) * 4, across = (first + i) / 4 * 8 + (i & 1);
        index_t at = down * anew(call.of_residual.row) + across * anew(call.of_residual.column);
        residuals[i] = down < rows && across < columns ? residual[at] : Beside(0.f);
      }
    }
#pragma unroll
    for (int i = 0; i < STEP; i += 8) {
      int left = 2 * (first + i); /* of 16 columns */
      Beside biases[HALVES][4] = {};
#pragma unroll
      for (int pair = 0; BIAS && pair < 2 * HALVES; ++pair) {
        added.bias.read(biases[pair / 2] + pair % 2 * 2, pair / 2, (column + left) / 8 + pair % 2, lane);
      }
      auto element = [&](int j) {
        const float *at = sum + first + i + j;
        return epilogue(
            at[0], at[GLU ? VALUES : 0], factors, [&](int half) { return biases[half][j / 4 * 2 + (j & 1)]; },
            [&] { return residuals[i + j]; });
      };
      if constexpr (sizeof(C) == 2) {
        uint32_t packed[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) packed[j] = pack(element(2 * j), element(2 * j + 1));
        store_matrix(to + Chunk::place(lane % 16, left + lane / 16 * 8), packed);
      } else {
#pragma unroll
        for (int j = 0; j < 8; j += 2) {
          Chunk::put(to, lane / 4 + (j & 2) * 4, left + j / 4 * 8 + lane % 4 * 2, element(j), element(j + 1));
        }
      }
    }
  }
}

/* Finish a consumer's rows, from row m and column n of C on, and store them. */
template <class P>
__device__ __forceinline__ void finish(
    const Finished<P> &sum, const Added<P> &added, const TensorMap &map_c, const Call &call, bool direct,
    uint32_t staging, int batch, int m, int n) {
  int lane = threadIdx.x % 32, first = m + threadIdx.x / 32 % 4 * 16;
  Factors factors(call.alpha, call.out_scale);
  staging::store<C, P::ROWS / 64, P::FINISHED, P::CHUNK>(
      call, map_c, direct, staging, batch, first, n, [&](uint32_t chunk, int piece, int column) {
        stage_chunk<P>(chunk, &sum[piece][column / 2], added, call, factors, batch, first + 64 * piece, n + column,
                       piece, column, lane);
      });
}

}  // namespace hopper
