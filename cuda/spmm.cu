// Sparse matrix W (m, k) in canonical CSR order times a dense operand.
//
//   batch-major    Y[b, i] = sum_j W[i, j] X[b, j] + bias[i]      X (batch, k), Y (batch, m)
//   feature-major  C[i, c] = sum_j W[i, j] D[j, c] + bias[i]      D (k, n),     C (m, n)
//
// Both layouts are row-major. With kPermuted the matrix given is the column-major view of another
// one (offsets per column, row indices) and entry j has its value at values[permutation[j]]: the
// same kernels then multiply by the transpose, with the values read in place.
//
// Deterministic: every output element is summed by one warp or one lane in one fixed order.
// Half types are summed in float. Sizes first, then index arrays, values, dense operand, output.
#include "common.cuh"

namespace snack {

template <bool kPermuted>
__device__ __forceinline__ Size value_index(const int* __restrict__ permutation, Size j) {
  if constexpr (kPermuted) return permutation[j];
  return j;
}

// One warp = one row of W and kBatch rows of X. Lanes stride over the non-zeros of the row, so
// values and columns are read coalesced; X is gathered through the caches; the lanes' partial sums
// meet in a butterfly. Warps of the same batch tile are neighbours and share its rows of X in L1.
//
//   warp w:  row = w % m,  batch rows (w / m) * kBatch ... + kBatch - 1
template <typename T, typename I, bool kPermuted, int kBatch>
__global__ void __launch_bounds__(256)
    spmm_csr_batch_major(Size m, Size k, Size batch, const int* __restrict__ row_offsets,
                         const I* __restrict__ columns, const int* __restrict__ permutation,
                         const T* __restrict__ values, const T* __restrict__ x,
                         const T* __restrict__ bias, T* __restrict__ y) {
  static_assert(kBatch <= kWarpSize, "lane t writes batch row t of the tile");
  const Size warp = global_warp_id();
  const Size tile = warp / m;
  const Size row = warp - tile * m;
  const Size first = tile * kBatch;
  if (first >= batch) return;

  // Rows past the end read row `first` again and are not written.
  const T* x_row[kBatch];
#pragma unroll
  for (int t = 0; t < kBatch; ++t) x_row[t] = x + (first + t < batch ? first + t : first) * k;

  Acc<T> sum[kBatch] = {};
  const Size end = row_offsets[row + 1];
  for (Size j = row_offsets[row] + lane_id(); j < end; j += kWarpSize) {
    const Size column = columns[j];
    const Acc<T> value = widen(values[value_index<kPermuted>(permutation, j)]);
#pragma unroll
    for (int t = 0; t < kBatch; ++t) sum[t] += value * widen(x_row[t][column]);
  }

  Acc<T> mine = 0;
#pragma unroll
  for (int t = 0; t < kBatch; ++t) {
    const Acc<T> total = warp_sum(sum[t]);
    if (lane_id() == t) mine = total;
  }
  if (lane_id() < kBatch && first + lane_id() < batch) {
    if (bias != nullptr) mine += widen(bias[row]);
    y[(first + lane_id()) * m + row] = narrow<T>(mine);
  }
}

// One warp = one row of W and 32 * kVec columns of D. A lane owns kVec neighbouring columns; every
// lane reads the same value and column index (one broadcast), so rows of D are read coalesced.
//
//   warp w:  chunk = w / m (outer),  row = w % m: neighbouring warps share the chunk's rows of D
template <typename T, typename I, bool kPermuted, int kVec>
__global__ void __launch_bounds__(256)
    spmm_csr_feature_major(Size m, Size k, Size n, const int* __restrict__ row_offsets,
                           const I* __restrict__ columns, const int* __restrict__ permutation,
                           const T* __restrict__ values, const T* __restrict__ dense,
                           const T* __restrict__ bias, T* __restrict__ out) {
  const Size warp = global_warp_id();
  const Size chunk = warp / m;
  const Size row = warp - chunk * m;
  const Size first = (chunk * kWarpSize + lane_id()) * kVec;
  if (first >= n) return;

  Acc<T> sum[kVec] = {};
  const Size end = row_offsets[row + 1];
  for (Size j = row_offsets[row]; j < end; ++j) {
    const Acc<T> value = widen(values[value_index<kPermuted>(permutation, j)]);
    const auto source = *reinterpret_cast<const Pack<T, kVec>*>(dense + columns[j] * n + first);
#pragma unroll
    for (int v = 0; v < kVec; ++v) sum[v] += value * widen(source.at[v]);
  }

  const Acc<T> shift = bias != nullptr ? widen(bias[row]) : Acc<T>(0);
  Pack<T, kVec> result;
#pragma unroll
  for (int v = 0; v < kVec; ++v) result.at[v] = narrow<T>(sum[v] + shift);
  *reinterpret_cast<Pack<T, kVec>*>(out + row * n + first) = result;
}

}  // namespace snack
