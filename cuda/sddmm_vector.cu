// Outer product of two vectors at the stored entries (i, j) of a sparse (m, k) matrix in canonical
// CSR order:
//
//   out[e] = l[i] r[j]
//
// It is the gradient of SpMM with respect to the values where the batch is one row. A block keeps r
// in shared memory; a warp owns a row, a lane every 32nd of its entries. The columns of the first
// kAhead entries of a lane are on their way before r has come.
//
// Deterministic: one product for each element. Columns of 16 bits; r keeps the alignment of 4
// elements. Sizes first, then index arrays, dense operands, output.
#include "x_slice.cuh"

namespace snack {

constexpr int kAhead = 8;  // entries a lane has in flight

template <typename T>
__global__ void __launch_bounds__(512)
    sddmm_csr_vector(Size m_, Size k_, const int* __restrict__ row_offsets,
                     const unsigned short* __restrict__ columns, const T* __restrict__ left,
                     const T* __restrict__ right, T* __restrict__ out) {
  extern __shared__ __align__(16) float xs[];
  const int m = m_, k = k_;
  const int warps = gridDim.x * (blockDim.x / kWarpSize);
  int row = blockIdx.x + threadIdx.x / kWarpSize * gridDim.x;
  bool staged = false;
  do {
    int first = 0, end = 0;
    float factor = 0.f;
    if (row < m) {
      first = row_offsets[row];
      end = row_offsets[row + 1];
      factor = widen(left[row]);
    }
    do {
      int column[kAhead];
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        const int j = first + lane_id() + a * kWarpSize;
        if (j < end) column[a] = columns[j];
      }
      if (!staged) {
        stage_vector(xs, right, k);
        __syncthreads();
        staged = true;
      }
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        const int j = first + lane_id() + a * kWarpSize;
        if (j < end) out[j] = narrow<T>(factor * xs[column[a]]);
      }
      first += kAhead * kWarpSize;
    } while (first < end);
    row += warps;
  } while (row < m);
}

}  // namespace snack
