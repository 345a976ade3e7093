// Sparse W (m, k) of a half type in canonical CSR order times one vector:
//
//   y[i] = sum_j W[i, j] x[j] + bias[i]
//
// A block keeps x in shared memory as it is, 2 bytes an element. kLanes lanes own a row of W; each
// has kVectors times 8 neighbouring entries in flight, moved 16 bytes at once, before x has come:
// with a group of lanes for each row all that a launch reads is asked for at once.
//
// Deterministic: lanes meet in one butterfly. Summed in float. Columns of 16 bits; values, columns
// and x on 16-byte boundaries. Sizes first, then index arrays, values, dense operand, output.
//
// Source: Bell and Garland, "Implementing Sparse Matrix-Vector Multiplication on
// Throughput-Oriented Processors", SC 2009 (a warp a row).
#include "common.cuh"

namespace snack {

template <typename T, int kLanes, int kVectors>
__global__ void __launch_bounds__(512)
    spmm_csr_vector_half(Size m_, Size k_, Size nnz_, const int* __restrict__ row_offsets,
                         const unsigned short* __restrict__ columns, const T* __restrict__ values,
                         const T* __restrict__ x, const T* __restrict__ bias, T* __restrict__ y) {
  extern __shared__ __align__(16) char memory[];
  T* xs = reinterpret_cast<T*>(memory);
  const int m = m_, k = k_, nnz = nnz_;
  const int groups = blockDim.x / kLanes, part = threadIdx.x % kLanes;
  int row = blockIdx.x * groups + threadIdx.x / kLanes;
  int first = 0, end = 0;
  auto find = [&]() {
    first = end = 0;
    if (row < m) {
      first = row_offsets[row];
      end = row_offsets[row + 1];
    }
  };
  find();
  const float shift_ahead = bias != nullptr && row < m ? widen(bias[row]) : 0.f;
  float shift = shift_ahead;

  // The first 16 bytes of x a thread brings wait in a register.
  const bool vector = k % 8 == 0;
  const int c = threadIdx.x * 8;
  Pack<T, 8> ahead = {};
  if (vector && c < k) ahead = *reinterpret_cast<const Pack<T, 8>*>(x + c);

  bool staged = false;
  do {
    int start = first & ~7;
    float sum = 0.f;
    do {
      Pack<T, 8> value[kVectors];
      Pack<unsigned, 4> column[kVectors];
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const int j = start + (v * kLanes + part) * 8;
        if (j >= end) continue;
        if (j + 8 <= nnz) {
          value[v] = *reinterpret_cast<const Pack<T, 8>*>(values + j);
          column[v] = *reinterpret_cast<const Pack<unsigned, 4>*>(columns + j);
        } else {
          // The last entries of the matrix: no 16 bytes to read.
          column[v] = {};
#pragma unroll
          for (int e = 0; e < 8; ++e) {
            const int safe = min(j + e, nnz - 1);
            value[v].at[e] = values[safe];
            column[v].at[e / 2] |= columns[safe] << (e % 2 * 16);
          }
        }
      }
      if (!staged) {
        if (vector) {
          if (c < k) *reinterpret_cast<Pack<T, 8>*>(xs + c) = ahead;
          for (int i = c + blockDim.x * 8; i < k; i += blockDim.x * 8) {
            *reinterpret_cast<Pack<T, 8>*>(xs + i) = *reinterpret_cast<const Pack<T, 8>*>(x + i);
          }
        } else {
          for (int i = threadIdx.x; i < k; i += blockDim.x) xs[i] = x[i];
        }
        __syncthreads();
        staged = true;
      }
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const int j = start + (v * kLanes + part) * 8;
        if (j >= end) continue;
        const bool whole = j >= first && j + 8 <= end;
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          if (whole || (j + e >= first && j + e < end)) {
            const int at = column[v].at[e / 2] >> (e % 2 * 16) & 0xffff;
            sum += widen(value[v].at[e]) * widen(xs[at]);
          }
        }
      }
      start += kVectors * kLanes * 8;
    } while (start < end);
#pragma unroll
    for (int mask = kLanes / 2; mask > 0; mask /= 2) sum += __shfl_xor_sync(kFullMask, sum, mask);
    if (part == 0 && row < m) y[row] = narrow<T>(sum + shift);
    row += gridDim.x * groups;
    find();
    if (bias != nullptr && row < m) shift = widen(bias[row]);
  } while (row - static_cast<int>(threadIdx.x % kWarpSize / kLanes) < m);
}

}  // namespace snack
