// The COO SpMM of SNACK, as its paper describes it: batch rows are mapped to streaming
// multiprocessors, and one thread takes one non-zero of the batch row.
//
//   Y[b, i] = sum_j W[i, j] X[b, j] + bias[i]      X (batch, k), Y (batch, m), both row-major
//
// A reference point for comparisons, not a fast path: every product is a global atomic, and the
// whole matrix is read again for every batch row. NOT deterministic: the order of the atomics, and
// so the rounding, changes from run to run. Y must hold the bias or zero first: fill_rows.
//
// Source: SNACK, arXiv 2610.04093.
#include "common.cuh"

namespace snack {

// Y[b, i] = bias[i], or 0 without a bias.
template <typename T>
__global__ void __launch_bounds__(256)
    fill_rows(Size m, Size batch, const T* __restrict__ bias, T* __restrict__ y) {
  const Size i = static_cast<Size>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < m * batch) y[i] = bias != nullptr ? bias[i % m] : T(0);
}

// blockIdx.x counts (batch row, block of non-zeros), the batch row outermost.
template <typename T, typename R, typename I>
__global__ void __launch_bounds__(256)
    spmm_coo_atomic(Size m, Size k, Size nnz, Size blocks_per_row, const R* __restrict__ rows,
                    const I* __restrict__ columns, const T* __restrict__ values,
                    const T* __restrict__ x, T* __restrict__ y) {
  const Size b = blockIdx.x / blocks_per_row;
  const Size j = (blockIdx.x - b * blocks_per_row) * blockDim.x + threadIdx.x;
  if (j >= nnz) return;
  atomicAdd(y + b * m + rows[j], values[j] * x[b * k + columns[j]]);
}

}  // namespace snack
