/* The second kernel of a decoding, which adds up parts of tiles. */

namespace decode {

constexpr int SLOTS = 4; /* rows that a block of this kernel adds up at once, each by two warps */

/* What a warp has of a row: four channels of each 128 a lane. */
struct Sum {
  static constexpr int COUNT = (D_V + 127) / 128;
  float peak, total;
  float4 of[COUNT];

  static __device__ __forceinline__ Sum none() { return {-infinity(), 0, {}}; }

  template <class F> static __device__ __forceinline__ void each(F f) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      int channel = (int(threadIdx.x) % 32 + 32 * i) * 4;
      if (D_V % 128 == 0 || channel < D_V) f(i, channel);
    }
  }

  __device__ __forceinline__ float base() const { return peak == -infinity() ? 0.f : peak; }

  /* Add N of them. */
  template <int N> __device__ __forceinline__ void add(const Sum (&more)[N]) {
    float before = peak;
#pragma unroll
    for (int j = 0; j < N; ++j) peak = fmaxf(peak, more[j].peak);
    float kept = exp2_fast(before - base());
    total *= kept;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) of[i] = {of[i].x * kept, of[i].y * kept, of[i].z * kept, of[i].w * kept};
#pragma unroll
    for (int j = 0; j < N; ++j) {
      float factor = exp2_fast(more[j].peak - base());
      total = fmaf(more[j].total, factor, total);
#pragma unroll
      for (int i = 0; i < COUNT; ++i) {
        of[i].x = fmaf(more[j].of[i].x, factor, of[i].x), of[i].y = fmaf(more[j].of[i].y, factor, of[i].y);
        of[i].z = fmaf(more[j].of[i].z, factor, of[i].z), of[i].w = fmaf(more[j].of[i].w, factor, of[i].w);
      }
    }
  }
};

/* Add up the parts of the tile that begins in block blockIdx.x and ends after it, if there is one. */
template <class P> __device__ __forceinline__ void combine(void *scratch, const Decode &call) {
  constexpr int AT_ONCE = 8 / Sum::COUNT; /* parts that a warp loads together */
  __shared__ Sum halves[SLOTS][32];
  int lane = threadIdx.x % 32, slot = threadIdx.x / 32 % SLOTS, half = threadIdx.x / 32 / SLOTS;
  start_next();
  /* lengths are complete, for the kernel before has waited for them with all its blocks before this one started */
  Units units(call, P::ROWS);
  int block = blockIdx.x / units.beside, side = blockIdx.x % units.beside;
  int first = units.share(block), end = units.share(block + 1);
  bool any = end > first;
  int b = 0, kv_head = 0, tile_row = 0, parts_end = 0;
  if (any) {
    Units::Place place = units.find(end - 1);
    int count = Blocks(call.sequence(place.b)).count, at = place.at % count;
    int tile = place.at / count * units.beside + side, tile_end = end + (count - 1 - at);
    b = place.b, kv_head = tile / units.down, tile_row = tile % units.down * P::ROWS;
    any = tile_end > end && end - 1 - at >= first;
    parts_end = units.block_after(tile_end - 1);
  }
  wait_for_previous();
  if (!any) return;
  Sequence s = call.sequence(b);
  Parts<P> parts(scratch);
  int rows = min(P::ROWS, rows_of(call) - tile_row);
  for (int top = blockIdx.y * SLOTS; top < rows; top += gridDim.y * SLOTS) {
    int i = min(top + slot, rows - 1);
    Sum sum = Sum::none();
    for (int from = block + half; from < parts_end; from += 2 * AT_ONCE) {
      Sum more[AT_ONCE];
#pragma unroll
      for (int j = 0; j < AT_ONCE; ++j) {
        int part = from + 2 * j;
        more[j] = Sum::none();
        if (part >= parts_end) continue;
        int at = parts.slot(part * units.beside + side, part == block);
        float2 state = parts.state(at, i);
        more[j].peak = state.x, more[j].total = state.y;
        Sum::each([&](int k, int d) { more[j].of[k] = *reinterpret_cast<const float4 *>(parts.sum(at, i) + d); });
      }
      sum.add(more);
    }
    __syncthreads(); /* the halves of the rows before have been read */
    if (half > 0) halves[slot][lane] = sum;
    __syncthreads();
    if (half > 0 || top + slot >= rows) continue;
    Sum other[1] = {halves[slot][lane]};
    sum.add(other);
    Row at(call, kv_head, tile_row + i);
    O *o = call.o + call.of_o.at(b, at.query, at.head);
    float inverse = sum.total == 0 ? 0.f : 1 / sum.total, probe = 0;
    Sum::each([&](int k, int d) {
      const float x[4] = {sum.of[k].x, sum.of[k].y, sum.of[k].z, sum.of[k].w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        o[(d + j) * call.of_o.channel] = from_float<O>(x[j] * inverse);
        probe += x[j] * inverse;
      }
    });
    if (lane == 0) call.put_lse(b, at.head, at.query, (sum.base() + log2f(sum.total)) * LN2);
    bool lost = __any_sync(0xffffffff, probe != probe) && sum.total == sum.total;
    if (lost && call.causal() && call.queries > 1) attend_row(s, b, at.head, at.query);
  }
}

}  // namespace decode
