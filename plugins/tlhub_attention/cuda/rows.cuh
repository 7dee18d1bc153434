/* Attention on the CUDA cores: the kernel of a call all of whose rows row.cuh computes. */

extern "C" __global__ void __launch_bounds__(128) attend_rows(CALL_PARAMETERS) {
  Call call = CALL;
  index_t rows = index_t(batch) * heads * queries, warps = gridDim.x * 4;
  for (index_t row = blockIdx.x * 4 + threadIdx.x / 32; row < rows; row += warps) {
    attend_row(call, int(row / queries / heads), int(row / queries % heads), int(row % queries));
  }
}
