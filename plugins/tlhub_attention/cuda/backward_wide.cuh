/* The consumers of attention's gradients on Hopper for more than 128 channels, whose sums take the registers of two.
 *
 * Both have the same 64 keys: one has S' and dV, the other dP', dS' and dK. The weights go from the former to the
 * latter through shared memory, number by number in float32, and dS' back; the parts of dQ are dealt out to both, and
 * added to the sums from registers, in the step after. Under way together are the exponentials and dP', dS' and dV with
 * the next S'.
 *
 * Adding to the sums is what bounds it. Where there is room for it, two blocks of a cluster have 64 keys each of one tile,
 * send each other dS', and each adds half of the parts for both.
 */

namespace backward {

/* Add four floats to those at an address that is a multiple of 16. */
__device__ __forceinline__ void add_four(float *to, const float *x) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x[0]), "f"(x[1]), "f"(x[2]),
               "f"(x[3])
               : "memory");
}

/* Compute a consumer's parts of a step's dq and add them to the sums: every other one, and in the next step, which is
 * gone on to, the others. Where the order is given, a part takes its turn as those of `hand_on` do. */
template <class P, bool CAPPED>
__device__ __forceinline__ void give_dq(
    const Consumer<P, CAPPED> &c, Step<P> &step, Ring<P::STAGES> &ring, const Scratch &scratch, int group, int rank) {
  bool first = threadIdx.x % GROUP == 0;
  int begin = P::PAIRED ? (rank + ring.stage) % 2 + 2 * group : (group + ring.stage) % GROUPS;
#pragma unroll 1
  for (int part = begin; part < P::PARTS; part += P::PAIRED ? 2 * GROUPS : GROUPS) {
    float dq[32];
    c.start_dq(dq, part, ring);
    index_t number = step.number() * P::PARTS + part;
    float *to = scratch.sums + number * (64 * 64) + threadIdx.x % GROUP * 4;
    if constexpr (DETERMINISTIC) {
      if (first) await_count(scratch.turns + number, step.turn());
      meet<GROUP>(TURN + group);
    }
    wgmma_wait<0>(dq);
#pragma unroll
    for (int k = 0; k < 8; ++k) add_four(to + k * (GROUP * 4), &dq[4 * k]);
    if constexpr (DETERMINISTIC) {
      meet<GROUP>(TURN + group);
      if (first) add_count(scratch.turns + number);
    }
  }
  if constexpr (P::PAIRED) {
    await(c.shared.peer_full(ring.stage), ring.phase);
    if (c.lane == 0) barrier_arrive_there(address_in(c.shared.peer_empty(ring.stage), rank ^ 1));
  }
  step.next(), ring.next();
}

/* A thread: send dS' to the other block of the cluster. */
template <class P> __device__ __forceinline__ void send_ds(Shared<P> shared, int stage, int rank) {
  barrier_expect(shared.peer_full(stage), P::DS_BYTES);
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          address_in(shared.peer_ds(stage), rank ^ 1)),
      "r"(shared.ds(stage)), "r"(P::DS_BYTES), "r"(address_in(shared.peer_full(stage), rank ^ 1))
      : "memory");
}

template <class P, bool CAPPED>
__device__ __forceinline__ void consume_values(
    const TensorMap &map_dv, bool direct, const Gradients &g, const Scratch &scratch, const Tile<P> &t,
    Shared<P> shared, int rank) {
  Consumer<P, CAPPED> c(g, t, shared, rank * P::KEYS);
  int count = t.steps(g);
  float s[32], dv[P::V_CHANNELS / 2] = {};
  uint32_t p[4][4];
  Step<P> before(g, t); /* whose dq is given */
  Ring<P::STAGES> past;

  auto advance = [&](bool first, auto more) { /* a step whose logits are there, and the logits of the next */
    c.weigh(s, p);
    if (!first) meet<GROUPS * GROUP>(SLOPES); /* of the step before */
#pragma unroll
    for (int k = 0; k < 8; ++k) store_four(shared.handed(), k, &s[4 * k]);
    pass<GROUPS * GROUP>(WEIGHTS);
    c.release(shared.q_empty(c.ring.stage));
    await(shared.dout_full(c.ring.stage), c.ring.phase);
    c.start_dv(dv, p);
    if constexpr (decltype(more)::value) {
      c.start_logits(s);
      wgmma_wait<1>(dv);
    } else {
      wgmma_wait<0>(dv);
    }
    c.release(shared.dout_empty(c.ring.stage));
    if (!first) give_dq<P>(c, before, past, scratch, 0, rank);
    if constexpr (decltype(more)::value) wgmma_wait<0>(s);
    c.next();
  };

  if (count > 0) {
    await(shared.k_full(), 0);
    c.start_logits(s);
    wgmma_wait<0>(s);
#pragma unroll 1
    for (int i = 1; i < count; ++i) advance(i == 1, Constant<true>());
    advance(count == 1, Constant<false>());
    meet<GROUPS * GROUP>(SLOPES);
    give_dq<P>(c, before, past, scratch, 0, rank);
  }
  pass<GROUPS * GROUP>(WEIGHTS);
  meet<GROUPS * GROUP>(SLOPES); /* until nobody reads values, whose place dv takes */
  c.template put<D_V>(dv, 1.f, shared.v(), map_dv, direct, g.dv, g.of_dv, scratch);
  if (c.lane == 0) store_wait<0>();
}

template <class P, bool CAPPED>
__device__ __forceinline__ void consume_keys(
    const TensorMap &map_dk, bool direct, const Gradients &g, const Scratch &scratch, const Tile<P> &t,
    Shared<P> shared, int rank) {
  Consumer<P, CAPPED> c(g, t, shared, rank * P::KEYS);
  int count = t.steps(g);
  float dp[32], dk[P::CHANNELS / 2] = {};
  uint32_t ds[4][4];
  Step<P> before(g, t); /* whose dq is given */
  Ring<P::STAGES> past;

  auto start_dp = [&] {
    c.start_dp(dp, c.ahead);
    c.ahead.next();
  };
  auto advance = [&](bool first, auto more) { /* a step whose dP' is there, and that of the next */
    c.release(shared.dout_empty(c.ring.stage));
    await(shared.q_full(c.ring.stage), c.ring.phase);
    meet<GROUPS * GROUP>(WEIGHTS);
    float s[32];
#pragma unroll
    for (int k = 0; k < 8; ++k) load_four(&s[4 * k], shared.handed(), k);
    if constexpr (P::PAIRED) await(shared.peer_empty(c.ring.stage), c.ring.phase ^ 1);
    c.differentiate(s, dp, ds);
    pass<GROUPS * GROUP>(SLOPES);
    meet<GROUP>(TURN + 1); /* until dS' is there, whole */
    if (P::PAIRED && threadIdx.x % GROUP == 0) send_ds(shared, c.ring.stage, rank);
    __syncwarp();
    settle(ds);
    wgmma_fence();
    c.start_dk(dk, ds);
    if constexpr (decltype(more)::value) {
      start_dp();
      wgmma_wait<1>(dk);
    } else {
      wgmma_wait<0>(dk);
    }
    c.release(shared.q_empty(c.ring.stage));
    if (!first) give_dq<P>(c, before, past, scratch, 1, rank);
    if constexpr (decltype(more)::value) wgmma_wait<0>(dp);
    c.next();
  };

  if (count > 0) {
    await(shared.v_full(), 0);
    start_dp();
    wgmma_wait<0>(dp);
    await(shared.k_full(), 0);
#pragma unroll 1
    for (int i = 1; i < count; ++i) advance(i == 1, Constant<true>());
    advance(count == 1, Constant<false>());
    give_dq<P>(c, before, past, scratch, 1, rank);
  }
  meet<GROUPS * GROUP>(WEIGHTS); /* until nobody reads keys, whose place dk takes; and the other has met here before */
  pass<GROUPS * GROUP>(SLOPES);
  c.template put<D>(dk, float(g.call.scale), shared.k(), map_dk, direct, g.dk, g.of_dk, scratch);
  if (c.lane == 0) store_wait<0>();
}

}  // namespace backward
