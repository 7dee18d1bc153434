/* What a warp has of a tile of a decoding: 16 rows, by mma.sync: their queries, and their sums over some of the keys. */

namespace decode {

using namespace accumulators;
using namespace warp_mma;

constexpr int STEPS = (D + 15) / 16, CHANNELS = (D_V + 15) / 16 * 16;

/* Keys or values of a chunk in shared memory, of N channels: a position is one row after the other of 64 channels each, 128
 * bytes, whose pieces of 16 bytes are swizzled by its number; where 64 divides no N, and for wgmma, the first 64
 * channels of all positions come before the next. */
template <class P, int N> struct Layout {
  static constexpr bool WHOLE = N % 64 == 0 && !P::WIDE;
  static constexpr int BOXES = (N + 63) / 64, BYTES = BOXES * P::CHUNK * 128;
  static constexpr int POSITION = WHOLE ? BOXES * 128 : 128, BOX = WHOLE ? 128 : P::CHUNK * 128; /* bytes to the next */

  /* Where a piece of a position lies, in bytes. */
  static __device__ __forceinline__ uint32_t at(int position, int piece) {
    int box = piece / 8, number = !WHOLE ? position : BOXES % 2 ? position * BOXES + box : position * BOXES | box;
    return position * POSITION + box * BOX + ((piece ^ number) & 7) * 16;
  }
};

template <class P> constexpr int CHUNK_BYTES = Layout<P, D>::BYTES + Layout<P, D_V>::BYTES;

/* Whether pairs of elements that begin at an even channel can be accessed at once. */
template <class E> __device__ __forceinline__ bool pairs(const E *p, const Strides &s) {
  bool even = (s.batch | s.position | s.head) % 2 == 0;
  return s.channel == 1 && even && reinterpret_cast<uintptr_t>(p) % (2 * sizeof(E)) == 0;
}

/* This thread's share of 16 rows of q, from `row` on, as an operand: two channels of two rows, and of 8 channels on. */
__device__ __forceinline__ void load_queries(
    uint32_t (&q)[STEPS][4], const Call &call, int b, int kv_head, int row, bool paired) {
  int lane = threadIdx.x % 32;
#pragma unroll
  for (int low = 0; low < 2; ++low) {
    int r = row + lane / 4 + 8 * low;
    Row at(call, kv_head, r);
    const T *from = call.q + call.of_q.at(b, at.query, at.head);
#pragma unroll
    for (int i = 0; i < 2 * STEPS; ++i) {
      uint32_t &pair = q[i / 2][i % 2 * 2 + low];
      pair = 0;
      if (8 * i >= D || r >= rows_of(call)) continue;
      int channel = 8 * i + lane % 4 * 2;
      if (paired) {
        pair = *reinterpret_cast<const uint32_t *>(from + channel);
      } else {
        T each[2] = {from[channel * call.of_q.channel], from[(channel + 1) * call.of_q.channel]};
        memcpy(&pair, each, 4);
      }
    }
  }
}

/* How a sequence's keys look: to the first and the last row of a tile, and to this thread's, which are a warp's from `row`
 * on, of the heads of a kv head. */
struct View {
  Keys first, last, seen[2];
  int place[2]; /* the key that a row stands at */
  float slope[2];

  __device__ __forceinline__ View(const Decode &s, int kv_head, int first_row, int last_row, int row)
      : first(s.seen(Row(s, 0, first_row).query)), last(s.seen(Row(s, 0, last_row).query)) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      Row own(s, kv_head, min(row + int(threadIdx.x) % 32 / 4 + 8 * i, last_row));
      seen[i] = s.seen(own.query), place[i] = s.place(own.query), slope[i] = s.slope(own.head);
    }
  }

  /* Whether any row sees a key. */
  __device__ __forceinline__ bool any(int key) const { return key >= first.begin && key < last.end; }
};

/* A part of a tile is by thread and row these pairs of numbers: a peak and a total, then sums. */
constexpr int WORDS = 1 + CHANNELS / 8;

/* What sums are multiplied by to be added: this thread's, and another part's. */
struct Factors {
  float kept, added;
};

/* The rows of a tile that a warp has, with its sums over some of the keys. */
template <class P> struct Rows {
  /* Products in turn, where registers are many. */
  static constexpr int SUMS = P::WARPS == 4 && CHANNELS <= 192 ? 2 : 1;
  static constexpr int N = P::CHUNK / 2; /* products that a thread has of a chunk */

  Softmax softmax;
  float sum[CHANNELS / 2];
  int count; /* of the 16 rows that there are */

  __device__ __forceinline__ explicit Rows(int count) : sum{}, count(count) {}

  /* Attend to the chunk of 16 keys that lies at an address, and begins with key `key` of the sequence; keys_read() once the
   * keys are in registers. */
  template <class F>
  __device__ __forceinline__ void attend(
      const uint32_t (&q)[STEPS][4], const Logits &logits, const View &view, int key, uint32_t chunk, F keys_read) {
    /* rows of matrices: 8 keys, and 8 on in the other half of the lanes (of K) or in every other 8 (of V) */
    int lane = threadIdx.x % 32, k_row = lane / 16 * 8 + lane % 8, v_row = lane % 16;
    float sums[SUMS][N] = {};
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      uint32_t k[4];
      load_matrices<false>(k, chunk + Layout<P, D>::at(k_row, 2 * step + lane / 8 % 2));
      multiply<T>(&sums[step % SUMS][0], q[step], k[0], k[1]);
      multiply<T>(&sums[step % SUMS][4], q[step], k[2], k[3]);
    }
    keys_read();
#pragma unroll
    for (int j = 0; SUMS > 1 && j < N; ++j) sums[0][j] += sums[SUMS - 1][j];
    uint32_t p[1][4], held[2] = {0xffffffff, 0xffffffff}; /* of two keys of v each: which any row sees */
    if (weigh(sums[0], p, logits, view, key)) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        int i = key + lane % 4 * 2 + 8 * j;
        held[j] = (view.any(i) ? 0xffff : 0) | (view.any(i + 1) ? 0xffff0000 : 0);
      }
    }
#pragma unroll
    for (int channel = 0; channel < CHANNELS; channel += 16) {
      uint32_t v[4];
      load_matrices<true>(v, chunk + Layout<P, D>::BYTES + Layout<P, D_V>::at(v_row, channel / 8 + lane / 16));
      multiply<T>(&sum[channel / 2], p[0], v[0] & held[0], v[1] & held[1]);
      multiply<T>(&sum[channel / 2 + 4], p[0], v[2] & held[0], v[3] & held[1]);
    }
  }

  /* Make weights of products with the chunk that begins with key `key`, p as an operand, and scale the sums to them; tell
   * whether there may be a key that not all rows see. */
  __device__ __forceinline__ bool weigh(
      float (&x)[N], uint32_t (&p)[N / 8][4], const Logits &logits, const View &view, int key) {
    int first = key + int(threadIdx.x) % 4 * 2;
#pragma unroll
    for (int j = 0; j < N; ++j) {
      int i = row_of(j);
      x[j] = logits.of(x[j], view.slope[i], view.place[i] - first - column_of(j));
    }
    bool cut = key < view.last.begin || key + P::CHUNK > view.first.end;
    if constexpr (P::WIDE) cut = __any_sync(0xffffffff, cut); /* tells the compiler that warps agree, as wgmma needs */
    if (cut) {
      int low[2] = {view.seen[0].begin - first, view.seen[1].begin - first};
      int high[2] = {view.seen[0].end - first, view.seen[1].end - first};
      hide(x, low, high);
    }
    if (softmax.weigh(x, 1)) {
#pragma unroll
      for (int j = 0; j < CHANNELS / 2; ++j) sum[j] *= softmax.correction[row_of(j)];
    }
#pragma unroll
    for (int j = 0; j < N / 2; ++j) p[j / 4][j % 4] = pack<T>(x[2 * j], x[2 * j + 1]);
    return cut;
  }

  /* Add up the totals of the threads that share rows: each has those of some keys. */
  __device__ __forceinline__ void close() {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      softmax.total[i] += __shfl_xor_sync(0xffffffff, softmax.total[i], 1);
      softmax.total[i] += __shfl_xor_sync(0xffffffff, softmax.total[i], 2);
    }
  }

  /* Whether there is this thread's first or second row. */
  __device__ __forceinline__ bool there(int i) const { return int(threadIdx.x) % 32 / 4 + 8 * i < count; }

  /* Call f(word, pair) for all that this thread has of a row. */
  template <class F> __device__ __forceinline__ void each_word(int i, F f) const {
    f(0, float2{softmax.peak[i], softmax.total[i]});
#pragma unroll
    for (int j = 0; j < CHANNELS / 8; ++j) f(1 + j, float2{sum[4 * j + 2 * i], sum[4 * j + 2 * i + 1]});
  }

  /* Add a word of a part of a row; the first of them comes first, and sets the factors. */
  __device__ __forceinline__ void add(int i, int number, float2 pair, Factors &by) {
    if (number == 0) {
      float peak = fmaxf(softmax.peak[i], pair.x), base = peak == -infinity() ? 0.f : peak;
      by = {exp2_fast(softmax.peak[i] - base), exp2_fast(pair.x - base)};
      softmax.peak[i] = peak, softmax.total[i] = fmaf(pair.y, by.added, softmax.total[i] * by.kept);
    } else {
      float &x = sum[4 * number - 4 + 2 * i], &y = sum[4 * number - 3 + 2 * i];
      x = fmaf(pair.x, by.added, x * by.kept), y = fmaf(pair.y, by.added, y * by.kept);
    }
  }

  /* Write rows of o and of lse, from `row` of the kv head on; then again those that have a NaN that they need not. */
  __device__ __forceinline__ void write(const Decode &s, int b, int kv_head, int row, bool paired) {
    int lane = threadIdx.x % 32;
    unsigned lost = 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      int r = row + lane / 4 + 8 * i;
      if (r >= rows_of(s)) continue;
      Row at(s, kv_head, r);
      O *o = s.o + s.of_o.at(b, at.query, at.head);
      float total = softmax.total[i], inverse = total == 0 ? 0.f : 1 / total, probe = 0;
#pragma unroll
      for (int j = 2 * i; j < CHANNELS / 2; j += 4) {
        int channel = column_of(j) + lane % 4 * 2;
        if (channel >= D_V) continue;
        float x = sum[j] * inverse, y = sum[j + 1] * inverse;
        probe += x + y;
        if (!paired) {
          o[channel * s.of_o.channel] = from_float<O>(x), o[(channel + 1) * s.of_o.channel] = from_float<O>(y);
        } else if constexpr (sizeof(O) == 2) {
          *reinterpret_cast<uint32_t *>(o + channel) = pack<O>(x, y);
        } else {
          *reinterpret_cast<float2 *>(o + channel) = {x, y};
        }
      }
      if (lane % 4 == 0) s.put_lse(b, at.head, at.query, (softmax.base(i, 1) + log2f(total)) * LN2);
      if (probe != probe && total == total) lost |= 1u << (lane / 4 + 8 * i);
    }
    lost = __reduce_or_sync(0xffffffff, lost);
    __syncwarp();
    for (; lost; lost &= lost - 1) {
      Row at(s, kv_head, row + __ffs(lost) - 1);
      attend_row(s, b, at.head, at.query);
    }
  }
};

}  // namespace decode
