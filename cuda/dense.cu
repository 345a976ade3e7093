// Between a sparse matrix W (m, k) in canonical CSR order and its dense form, row-major: what is
// needed around a product of the dense linear-algebra library.
//
//   scatter_rows:   dense[i, j] = W[i, j], and 0 where W has no entry
//   gather_entries: out[e] = dense[i, j] for entry e = (i, j)
//
// With kPermuted, W is given by the column-major view of another matrix: entry e has its value at
// values[permutation[e]].
//
// To scatter, a warp takes a part of a row: it lays it in shared memory, zeros and values, and
// copies it out 16 bytes a lane, so that every byte of the row is written once. To gather, a warp
// takes a row. Deterministic. Sizes first, then index arrays, values, dense operand, output.
#include "common.cuh"

namespace snack {

constexpr int kHand = 4096;  // bytes of a row that a warp has in hand
constexpr int kAhead = 4;    // entries a lane has in flight

template <typename T, typename I, bool kPermuted>
__global__ void __launch_bounds__(256, 6)
    scatter_rows(Size m, Size k_, Size parts, Size width_of_part,
                 const int* __restrict__ row_offsets, const I* __restrict__ columns,
                 const int* __restrict__ permutation, const T* __restrict__ values,
                 T* __restrict__ dense) {
  constexpr int kPack = 16 / sizeof(T);
  extern __shared__ __align__(16) char hands[];
  T* hand = reinterpret_cast<T*>(hands + threadIdx.x / kWarpSize * kHand);
  const Size row = global_warp_id() / parts;
  if (row >= m) return;
  const int k = k_, lane = lane_id(), end = row_offsets[row + 1];
  const int first =
      static_cast<int>(global_warp_id() - row * parts) * static_cast<int>(width_of_part);
  const int width = min(static_cast<int>(width_of_part), k - first);
  int start = row_offsets[row];
  if (first > 0) {
    // Columns rise along the row: of 32 samples those below the part tell where it may begin.
    const int stride = (end - start + kWarpSize - 1) / kWarpSize;
    const int e = start + lane * stride;
    const bool below = e < end && static_cast<int>(columns[e]) < first;
    start += max(__popc(__ballot_sync(kFullMask, below)) - 1, 0) * stride;
  }
  for (int c = lane * kPack; c < width; c += kWarpSize * kPack) {
    *reinterpret_cast<Pack<float, 4>*>(hand + c) = {};
  }
  __syncwarp();
  for (bool more = true; more; start += kAhead * kWarpSize) {
    int column[kAhead];
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      const int e = start + lane + a * kWarpSize;
      column[a] = e < end ? static_cast<int>(columns[e]) - first : width;
    }
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      const int e = start + lane + a * kWarpSize;
      if (column[a] >= 0 && column[a] < width) {
        hand[column[a]] = values[kPermuted ? permutation[e] : e];
      }
    }
    more = __ballot_sync(kFullMask, column[kAhead - 1] < width) == kFullMask;
  }
  __syncwarp();
  T* out = dense + row * k + first;
  if (k % kPack == 0) {
    for (int c = lane * kPack; c < width; c += kWarpSize * kPack) {
      *reinterpret_cast<Pack<float, 4>*>(out + c) =
          *reinterpret_cast<const Pack<float, 4>*>(hand + c);
    }
  } else {
    for (int c = lane; c < width; c += kWarpSize) out[c] = hand[c];
  }
}

template <typename T, typename I>
__global__ void __launch_bounds__(256)
    gather_entries(Size m, Size k, const int* __restrict__ row_offsets,
                   const I* __restrict__ columns, const T* __restrict__ dense,
                   T* __restrict__ out) {
  const Size row = global_warp_id();
  if (row >= m) return;
  const T* source = dense + row * k;
  const int end = row_offsets[row + 1];
#pragma unroll 8
  for (int e = row_offsets[row] + lane_id(); e < end; e += kWarpSize) {
    out[e] = source[columns[e]];
  }
}

}  // namespace snack
