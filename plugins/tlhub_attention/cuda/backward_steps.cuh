/* What a consumer of attention's gradients on Hopper does in a step: products, weights, slopes, and the end. */

namespace backward {

/* Named barriers: of both consumers; from a consumer to the warp that hands its part of dq on, and back; or of a wide
 * plan, from the values' consumer to the keys', back, and of a consumer alone. */
enum Barrier { ALL = 1, DQ_FULL = 2, DQ_EMPTY = 4, WEIGHTS = 2, SLOPES = 3, TURN = 4 };

template <int COUNT> __device__ __forceinline__ void meet(int barrier) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(COUNT) : "memory");
}
template <int COUNT> __device__ __forceinline__ void pass(int barrier) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "n"(COUNT) : "memory");
}

/* A warp: wait for a barrier in shared memory, and for all its threads: what comes next may have to be done by all. */
__device__ __forceinline__ void await(uint32_t barrier, uint32_t parity) {
  barrier_wait(barrier, parity);
  __syncwarp();
}

/* Numbers 4i to 4i + 3 of a thread, to and from a part in shared memory: of dq, or weights. */
__device__ __forceinline__ uint32_t four(uint32_t part, int i) { return part + (i * GROUP + threadIdx.x % GROUP) * 16; }
__device__ __forceinline__ void store_four(uint32_t part, int i, const float *x) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(four(part, i)), "f"(x[0]), "f"(x[1]), "f"(x[2]),
               "f"(x[3])
               : "memory");
}
__device__ __forceinline__ void load_four(float *x, uint32_t part, int i) {
  float4 v = read_shared(four(part, i));
  x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
}

template <bool VALUE> struct Constant {
  static constexpr bool value = VALUE;
};

/* Have operands whole before products begin. */
template <int N> __device__ __forceinline__ void settle(uint32_t (&x)[N][4]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+r"(x[i][0]), "+r"(x[i][1]), "+r"(x[i][2]), "+r"(x[i][3]));
}

/* Let numbers be any: what a product puts there does not depend on what was. */
template <int N> __device__ __forceinline__ void forget(float (&x)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "=f"(x[i]));
}

/* Where a lane's part of a matrix of 16 rows and 16 columns goes, in a box of 64 columns of 2 bytes. */
__device__ __forceinline__ uint32_t place(uint32_t box, int row, int column, int lane) {
  int at = (row + lane % 16) * 128 + (column + lane / 16 * 8) * 2;
  return box + (at ^ (at >> 3 & 112));
}

/* A consumer: its 64 of the tile's keys, from `first` on, its warp's 16, from `key` on, and where it is. CAPPED: with
 * and without a soft cap. */
template <class P, bool CAPPED> struct Consumer {
  static constexpr int BM = P::BM;
  const Gradients &g;
  const Tile<P> &t;
  const Shared<P> shared;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, first, key;
  const Logits logits;
  Step<P> step;
  Ring<P::STAGES> ring, ahead; /* of this step, and of the products of the next */

  __device__ __forceinline__ Consumer(const Gradients &g, const Tile<P> &t, Shared<P> shared, int first)
      : g(g), t(t), shared(shared), first(first), key(t.key + first + warp * 16), logits(g.call), step(g, t) {}

  /* Tell that this warp reads no more of what a barrier is of. */
  __device__ __forceinline__ void release(uint32_t empty) const {
    __syncwarp();
    if (lane == 0) barrier_arrive(empty);
  }

  /* The call, or that of the tile's sequence alone: made anew where it is used, for want of registers. */
  __device__ __forceinline__ Call call() const { return g.of(t.span).call; }

  /* This warp's first row of tiles in shared memory. */
  __device__ __forceinline__ int row() const { return (P::WIDE ? 0 : first) + warp * 16; }

  __device__ __forceinline__ void next() {
    ring.next(), step.next();
  }

  /* -- products: each starts a group of its own, or the last of one ------------------------------- */

  /* S', of the stage ahead. */
  __device__ __forceinline__ void start_logits(float (&s)[BM / 2]) {
    await(shared.q_full(ahead.stage), ahead.phase);
    multiply<P::STEPS>(s, shared.k(), shared.q(ahead.stage));
    ahead.next();
  }

  /* dP', of a stage. */
  __device__ __forceinline__ void start_dp(float (&dp)[BM / 2], const Ring<P::STAGES> &of) const {
    await(shared.dout_full(of.stage), of.phase);
    multiply<P::V_STEPS>(dp, shared.v(), shared.dout(of.stage));
  }

  __device__ __forceinline__ void start_dv(float (&dv)[P::V_CHANNELS / 2], uint32_t (&p)[BM / 16][4]) const {
    settle(p);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < BM / 16; ++i) {
      uint64_t b = describe<128, P::QUERY_BOX>(shared.dout(ring.stage) + i * 16 * 128);
      FromRegisters<P::V_CHANNELS, true>::add(dv, p[i], b, true);
    }
    wgmma_commit();
  }

  __device__ __forceinline__ void start_dk(float (&dk)[P::CHANNELS / 2], uint32_t (&ds)[BM / 16][4]) const {
#pragma unroll
    for (int i = 0; i < BM / 16; ++i) {
      uint64_t b = describe<128, P::QUERY_BOX>(shared.q(ring.stage) + i * 16 * 128);
      FromRegisters<P::CHANNELS, true>::add(dk, ds[i], b, true);
    }
    wgmma_commit();
  }

  /* A part of dq, of a stage. */
  __device__ __forceinline__ void start_dq(float (&dq)[32], int part, const Ring<P::STAGES> &of) const {
    forget(dq);
    wgmma_fence();
    add_dq(dq, shared.ds(of.stage), shared.k(), part, false);
    if constexpr (P::PAIRED) {
      await(shared.peer_full(of.stage), of.phase);
      wgmma_fence();
      add_dq(dq, shared.peer_ds(of.stage), shared.peer_k(), part, true);
    }
    wgmma_commit();
  }

  /* -- numbers: what a thread has of keys and queries --------------------------------------------- */

  /* From products to weights, packed, and in s these times the slope of the cap. */
  __device__ __forceinline__ void weigh(float (&s)[BM / 2], uint32_t (&p)[BM / 16][4]) const {
    uint32_t stats = shared.stats(ring.stage) + lane % 4 * 8;
    Slope slope(*this);
    if constexpr (CAPPED) {
      Bounds seen = bounds();
#pragma unroll
      for (int i = 0; i < BM / 2; i += 2) {
        float2 base = load_pair(stats + i / 4 * 32);
        Logit one(logits, s[i]), other(logits, s[i + 1]);
        float weight = seen.hide(i) ? 0.f : exp2_fast(one.value - slope.above(base.x, i));
        float next = seen.hide(i + 1) ? 0.f : exp2_fast(other.value - slope.above(base.y, i + 1));
        s[i] = weight * one.slope, s[i + 1] = next * other.slope, p[i / 8][i / 2 % 4] = pack<T>(weight, next);
      }
    } else {
#pragma unroll
      for (int i = 0; i < BM / 2; i += 4) {
        float2 base = load_pair(stats + i * 8);
#pragma unroll
        for (int j = i; j < i + 4; ++j) {
          s[j] = exp2_fast(fmaf(s[j], logits.factor, -slope.above(j % 2 ? base.y : base.x, j)));
        }
      }
      if (is_cut()) hide(s);
#pragma unroll
      for (int j = 0; j < BM / 4; ++j) p[j / 4][j % 4] = pack<T>(s[2 * j], s[2 * j + 1]);
    }
  }

  /* From weights and dP to dS, packed, and in shared memory. */
  __device__ __forceinline__ void differentiate(
      const float (&s)[BM / 2], float (&dp)[BM / 2], uint32_t (&ds)[BM / 16][4]) const {
    uint32_t stats = shared.stats(ring.stage) + BM * 4 + lane % 4 * 8, to = shared.ds(ring.stage);
#pragma unroll
    for (int i = 0; i < BM / 2; i += 4) {
      float2 delta = load_pair(stats + i * 8);
#pragma unroll
      for (int j = i; j < i + 4; ++j) dp[j] = s[j] * (dp[j] - (j % 2 ? delta.y : delta.x));
    }
    if (is_cut()) hide(dp);
#pragma unroll
    for (int i = 0; i < BM / 16; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) ds[i][j] = pack<T>(dp[8 * i + 2 * j], dp[8 * i + 2 * j + 1]);
      store_matrix(place(to + i / 4 * P::KEY_BOX, row(), i % 4 * 16, lane), ds[i]);
    }
    fence_copies();
  }

  /* -- the end ------------------------------------------------------------------------------------ */

  /* Write this warp's rows, of sums that are multiplied by `factor`, to boxes, and from there to an array of WIDTH
   * channels, element by element where `direct`. */
  template <int WIDTH, int N>
  __device__ __forceinline__ void put(
      float (&sum)[N], float factor, uint32_t boxes, const TensorMap &map, bool direct, T *array, const Strides &of,
      const Scratch &scratch) const {
    int count = min(16, call().keys - key);
    if (count <= 0) return;
    uint32_t to = boxes + row() * 128;
    float probe = 0;
#pragma unroll
    for (int i = 0; i < N; ++i) sum[i] *= factor, probe += sum[i];
    if (!is_finite(probe)) *scratch.lost = true;
#pragma unroll
    for (int i = 0; i < N; i += 8) {
      uint32_t packed[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) packed[j] = pack<T>(sum[i + 2 * j], sum[i + 2 * j + 1]);
      store_matrix(place(to + i / 32 * P::KEY_BOX, 0, 2 * i % 64, lane), packed);
    }
    fence_copies();
    __syncwarp();
    if (!direct) {
      Corner at = corner<16>(t.span.key + key, count, t.batch);
#pragma unroll
      for (int i = 0; i < (WIDTH + 63) / 64; ++i) {
        if (lane == 0) store_box(map, to + i * P::KEY_BOX, 64 * i, at.y, t.kv_head, at.w);
      }
    } else {
#pragma unroll 1
      for (int i = lane; i < count * WIDTH; i += 32) {
        int down = i / WIDTH, channel = i % WIDTH, at = down * 128 + channel % 64 * 2;
        uint32_t from = to + channel / 64 * P::KEY_BOX + (at ^ (at >> 3 & 112));
        array[of.at(t.batch, t.span.key + key + down, t.kv_head) + channel * of.channel] =
            *reinterpret_cast<const T *>(__cvta_shared_to_generic(from));
      }
    }
  }

 private:
  /* ALiBi's part of this thread's logits in a tile: to what it adds where it is subtracted. */
  struct Slope {
    float fall, apart; /* with each place between a query and a key; between this thread's first */

    __device__ __forceinline__ explicit Slope(const Consumer &c) {
      if constexpr (ALIBI) {
        fall = c.g.call.slope(c.step.head);
        apart = float(c.call().place(c.step.tile * BM + c.lane % 4 * 2) - (c.key + c.lane / 4));
      }
    }
    __device__ __forceinline__ float above(float base, int i) const {
      return ALIBI ? fmaf(fall, fabsf(apart + float(column_of(i) - 8 * row_of(i))), base) : base;
    }
  };

  /* A product of this consumer's rows of one tile and all of another's, by channels. */
  template <int COUNT>
  __device__ __forceinline__ void multiply(float (&sum)[BM / 2], uint32_t keys, uint32_t queries) const {
    forget(sum);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      uint64_t a = describe<128>(keys + (P::WIDE ? 0 : first * 128) + i / 4 * P::KEY_BOX + i % 4 * 32);
      FromShared<BM>::add(sum, a, describe<128>(queries + i / 4 * P::QUERY_BOX + i % 4 * 32), i > 0);
    }
    wgmma_commit();
  }

  __device__ __forceinline__ void add_dq(float (&dq)[32], uint32_t ds, uint32_t k, int part, bool add) const {
    (P::BY_QUERIES ? ds : k) += part * P::KEY_BOX;
#pragma unroll
    for (int i = 0; i < P::KEYS / 16; ++i) {
      uint64_t a = describe<128>(ds + i * 16 * 128), b = describe<128>(k + i * 16 * 128);
      FromShared<64, true, true>::add(dq, a, b, add || i > 0);
    }
  }

  /* Whether the tile of queries is one that a mask, or an end, cuts. */
  __device__ __forceinline__ bool is_cut() const { return step.tile < t.whole || step.tile >= t.whole_end; }

  __device__ __forceinline__ Bounds bounds() const {
    return Bounds(call(), key + lane / 4, step.tile * BM + lane % 4 * 2);
  }

  __device__ __forceinline__ void hide(float (&x)[BM / 2]) const {
    Bounds seen = bounds();
#pragma unroll
    for (int i = 0; i < BM / 2; ++i) x[i] = seen.hide(i) ? 0.f : x[i];
  }
};

}  // namespace backward
