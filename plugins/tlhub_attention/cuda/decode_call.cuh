/* A call of attention_decode: one of attention, whose sequences have lengths of their own and may lie in pages.
 *
 * `PAGED` is among the options that Python writes. In pages, k and v are (pages, positions of a page, heads, channels).
 */

/* A sequence of a call: `keys` is its length. */
struct Sequence : Call {
  const int *pages; /* its row of the table */
  index_t pages_step;
  int page; /* positions of a page */

  __device__ __forceinline__ int page_of(int i) const { return pages[i / page * pages_step]; }

  __device__ __forceinline__ const T *key(int b, int i, int head) const {
    return PAGED ? k + of_k.at(page_of(i), i % page, head) : k + of_k.at(b, i, head);
  }
  __device__ __forceinline__ const T *value(int b, int i, int head) const {
    return PAGED ? v + of_v.at(page_of(i), i % page, head) : v + of_v.at(b, i, head);
  }
};

/* `keys` is how many a sequence has room for. */
struct Decode : Call {
  const int *lengths;
  index_t lengths_step;
  const int *table; /* null where there are no pages */
  index_t table_row, table_step;
  int page;

  __device__ __forceinline__ Sequence sequence(int b) const {
    Sequence s{*this, table + b * table_row, table_step, page};
    s.keys = max(0, min(lengths[b * lengths_step], keys));
    return s;
  }
};

#define DECODE_PARAMETERS                                                                                 \
  CALL_PARAMETERS, const int *lengths, index_t lengths_step, const int *table, index_t table_row, index_t table_step, \
      int page

#define DECODE \
  Decode { CALL, lengths, lengths_step, table, table_row, table_step, page }

extern "C" __global__ void __launch_bounds__(128) decode_rows(DECODE_PARAMETERS) {
  Decode call = DECODE;
  index_t rows = index_t(batch) * heads * queries, warps = gridDim.x * 4;
  for (index_t row = blockIdx.x * 4 + threadIdx.x / 32; row < rows; row += warps) {
    int b = int(row / queries / heads);
    attend_row(call.sequence(b), b, int(row / queries % heads), int(row % queries));
  }
}
