// Sampled dense-dense product: one dot product for each stored entry (i, j) of a sparse (m, k)
// matrix in canonical CSR order. It is the gradient of SpMM with respect to the values.
//
//   batch-major    out[e] = sum_b L[b, i] R[b, j]      L (batch, m), R (batch, k)
//   feature-major  out[e] = sum_c L[i, c] R[j, c]      L (m, n),     R (k, n)
//
// Deterministic: one lane or one warp owns an entry and sums it in one fixed order. Half types are
// summed in float. Sizes first, then index arrays, dense operands, output.
#include "common.cuh"

namespace snack {

// One warp = one row of the matrix; a lane = one entry of it, so L[b, i] is one broadcast and
// R[b, j] a gather through the caches; entries are written coalesced.
template <typename T, typename I>
__global__ void __launch_bounds__(256)
    sddmm_csr_batch_major(Size m, Size k, Size batch, const int* __restrict__ row_offsets,
                          const I* __restrict__ columns, const T* __restrict__ left,
                          const T* __restrict__ right, T* __restrict__ out) {
  const Size row = global_warp_id();
  if (row >= m) return;
  const Size end = row_offsets[row + 1];
  for (Size j = row_offsets[row] + lane_id(); j < end; j += kWarpSize) {
    const Size column = columns[j];
    Acc<T> sum = 0;
#pragma unroll 4
    for (Size b = 0; b < batch; ++b) {
      sum += widen(left[b * m + row]) * widen(right[b * k + column]);
    }
    out[j] = narrow<T>(sum);
  }
}

// One warp = one row of the matrix, taking its entries in turn; lanes stride over the n columns of
// both operands and meet in a butterfly.
template <typename T, typename I>
__global__ void __launch_bounds__(256)
    sddmm_csr_feature_major(Size m, Size k, Size n, const int* __restrict__ row_offsets,
                            const I* __restrict__ columns, const T* __restrict__ left,
                            const T* __restrict__ right, T* __restrict__ out) {
  const Size row = global_warp_id();
  if (row >= m) return;
  const T* left_row = left + row * n;
  const Size end = row_offsets[row + 1];
  for (Size j = row_offsets[row]; j < end; ++j) {
    const T* right_row = right + columns[j] * n;
    Acc<T> sum = 0;
    for (Size c = lane_id(); c < n; c += kWarpSize) {
      sum += widen(left_row[c]) * widen(right_row[c]);
    }
    sum = warp_sum(sum);
    if (lane_id() == 0) out[j] = narrow<T>(sum);
  }
}

}  // namespace snack
