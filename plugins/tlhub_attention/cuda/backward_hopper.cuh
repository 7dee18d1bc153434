/* The gradients of attention on Hopper's tensor cores (sm_90a): bulk tensor copies and warp-specialised wgmma.
 *
 * A block has a tile of BN keys of one key head. A thread of its producer fills a ring with tiles of BM queries, and of
 * dout, of every query head that shares the keys; for each tile two consumers, a warp group each, compute
 *
 *     S' = K Q'           P' = 2**(S' - lse)      dV += P' dout
 *     dP' = V dout'       dS' = P' (dP' - delta)  dK += dS' Q       (' for transposed)
 *     dQ = dS K           into sums in float32
 *
 * P' and dS' stay in registers as operands; dS' goes to shared memory too, where both consumers have all of it for a
 * share of dQ each. In what order blocks add to the sums is left to chance, or where results are to have the same bits
 * on every call, given by a count of each part of the sums.
 *
 * Tiles that a mask hides are skipped, and only tiles that it cuts, or that have ends in them, are masked. Arrays lie
 * in shared memory in boxes of 64 channels; what is out of bounds arrives as zeros, and is not stored.
 *
 * Here is the plan for up to 128 channels: a consumer has 64 of 128 keys, and all of their products. Under way together
 * are dP' and the exponentials, dV and dS', dK and dQ's way out: two more warps of the producer's group add dQ to the
 * sums by bulk copies. The schedule is that of FlashAttention-3's backward pass (Shah et al., 2024), with dV beside dS'.
 */

namespace backward {

/* Add floats in shared memory, one by one, to those at an address that is a multiple of 16. */
__device__ __forceinline__ void add_bytes(float *to, uint32_t from, int bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to), "r"(from),
               "r"(bytes)
               : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

/* A warp: add a consumer's parts of dq to the sums. Where the order is given, a part takes its turn after those of the
 * keys after these, whose blocks all have begun before, so that they do end. */
template <class P>
__device__ __forceinline__ void hand_on(
    const Gradients &g, const Scratch &scratch, const Tile<P> &t, Shared<P> shared, int group) {
  bool first = threadIdx.x % 32 == 0;
  int count = t.steps(g);
  Step<P> step(g, t);
  if (count > 0) pass<GROUP + 32>(DQ_EMPTY + group);
#pragma unroll 1
  for (int i = 0; i < count; ++i, step.next()) {
    index_t part = step.number() * GROUPS + group;
    meet<GROUP + 32>(DQ_FULL + group);
    if (first) {
      float *to = scratch.sums + part * (64 * 64);
      if constexpr (DETERMINISTIC) {
        await_count(scratch.turns + part, step.turn());
        add_bytes(to, shared.handed(group), P::PART_BYTES);
        store_wait_whole();
        add_count(scratch.turns + part);
      } else {
        add_bytes(to, shared.handed(group), P::PART_BYTES);
        store_wait<0>();
      }
    }
    __syncwarp();
    if (i + 1 < count) pass<GROUP + 32>(DQ_EMPTY + group);
  }
  if (first) store_wait_whole();
}

template <class P, bool CAPPED>
__device__ __forceinline__ void consume(
    const TensorMap &map_dk, const TensorMap &map_dv, bool direct, const Gradients &g, const Scratch &scratch,
    const Tile<P> &t, Shared<P> shared, int group) {
  constexpr int BM = P::BM;
  Consumer<P, CAPPED> c(g, t, shared, group * 64);
  int count = t.steps(g);
  float s[BM / 2], dp[BM / 2], dq[32], dk[P::CHANNELS / 2] = {}, dv[P::V_CHANNELS / 2] = {};
  uint32_t p[BM / 16][4], ds[BM / 16][4];

  auto put_dq = [&] {
    meet<GROUP + 32>(DQ_EMPTY + group);
#pragma unroll
    for (int i = 0; i < 8; ++i) store_four(shared.handed(group), i, &dq[4 * i]);
    fence_copies();
    pass<GROUP + 32>(DQ_FULL + group);
  };
  auto advance = [&](auto more) { /* a step whose logits are there, and the logits of the next */
    if constexpr (CAPPED) { /* ordered by what registers there are beside the cap's */
      c.weigh(s, p);
      c.start_dv(dv, p);
      c.start_dp(dp, c.ring);
      wgmma_wait<0>(dp);
    } else {
      c.start_dp(dp, c.ring);
      c.weigh(s, p);
      c.start_dv(dv, p);
      wgmma_wait<1>(dp);
    }
    c.differentiate(s, dp, ds);
    meet<GROUPS * GROUP>(ALL);
    c.start_dq(dq, group, c.ring);
    c.start_dk(dk, ds);
    wgmma_wait<1>(dq); /* and dv */
    c.release(shared.dout_empty(c.ring.stage));
    put_dq();
    wgmma_wait<0>(dk);
    c.release(shared.q_empty(c.ring.stage));
    if constexpr (decltype(more)::value) {
      c.start_logits(s);
      wgmma_wait<0>(s);
    }
    c.next();
  };

  if (count > 0) {
    await(shared.k_full(), 0);
    await(shared.v_full(), 0);
    c.start_logits(s);
    wgmma_wait<0>(s);
#pragma unroll 1
    for (int i = 1; i < count; ++i) advance(Constant<true>());
    advance(Constant<false>());
    wgmma_wait<0>(dv);
  }
  meet<GROUPS * GROUP>(ALL); /* until nobody reads keys and values, whose places dk and dv take */
  c.template put<D>(dk, float(g.call.scale), shared.k(), map_dk, direct, g.dk, g.of_dk, scratch);
  c.template put<D_V>(dv, 1.f, shared.v(), map_dv, direct, g.dv, g.of_dv, scratch);
  if (c.lane == 0) store_wait<0>();
}

}  // namespace backward
