// Sparse W (m, k) in canonical CSR order times one vector:
//
//   y[i] = sum_j W[i, j] x[j] + bias[i]
//
// A block keeps x in shared memory; one warp = one row of W, lanes stride over its entries. The
// first entries are asked for before the barrier that waits for x, and with a warp for each row all
// that a launch reads is in flight at once.
//
// With kPermuted, W is given by the column-major view of another matrix: entry j has its value at
// values[permutation[j]].
//
// Deterministic: lanes meet in one butterfly. Half types are summed in float. Columns of 16 bits; x
// on a 16-byte boundary. Sizes first, then index arrays, values, dense operand, output.
//
// Source: Bell and Garland, "Implementing Sparse Matrix-Vector Multiplication on
// Throughput-Oriented Processors", SC 2009 (a warp a row).
#include "x_slice.cuh"

namespace snack {

constexpr int kAhead = 8;  // entries a lane has in flight

template <typename T, bool kPermuted>
__global__ void __launch_bounds__(1024, 1)
    spmm_csr_vector(Size m_, Size k_, const int* __restrict__ row_offsets,
                    const unsigned short* __restrict__ columns, const int* __restrict__ permutation,
                    const T* __restrict__ values, const T* __restrict__ x,
                    const T* __restrict__ bias, T* __restrict__ y) {
  extern __shared__ __align__(16) float xs[];
  const int m = m_, k = k_;
  const int warp = threadIdx.x / kWarpSize, block_warps = blockDim.x / kWarpSize;
  const int warps = gridDim.x * block_warps;
  // Values of neighbouring columns of the other matrix are neighbours: a block takes these.
  int row = kPermuted ? blockIdx.x * block_warps + warp : blockIdx.x + warp * gridDim.x;
  bool staged = false;
  do {
    int first = 0, end = 0;
    if (row < m) {
      first = row_offsets[row];
      end = row_offsets[row + 1];
    }
    const float shift = bias != nullptr && row < m ? widen(bias[row]) : 0.f;
    float sum = 0.f;
    do {
      float value[kAhead];
      int column[kAhead];
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        const int j = first + lane_id() + a * kWarpSize;
        value[a] = 0.f;
        column[a] = -1;
        if (j < end) {
          value[a] = widen(values[kPermuted ? permutation[j] : j]);
          column[a] = columns[j];
        }
      }
      if (!staged) {
        stage_vector(xs, x, k);
        __syncthreads();
        staged = true;
      }
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        if (column[a] >= 0) sum += value[a] * xs[column[a]];
      }
      first += kAhead * kWarpSize;
    } while (first < end);
    sum = warp_sum(sum);
    if (lane_id() == 0 && row < m) y[row] = narrow<T>(sum + shift);
    row += warps;
  } while (row < m);
}

}  // namespace snack
