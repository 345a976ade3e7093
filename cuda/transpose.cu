// The column-major view of a structure without a sort, by masks of 32 rows:
//
//   transpose_masks   masks[s][c]: bit r set where entry (32 s + r, c) exists
//   transpose_counts  before[s][c]: entries of column c in strips before s; column offsets
//   transpose_place   entry (i, c) goes to column offset + before + bits of its mask below its row
//
// A block of the first and the last kernel owns a strip of 32 rows and a segment of kSegment
// columns, whose masks are in shared memory; a warp owns a row at a time. Deterministic: every
// place is computed, none is taken.
#include "bitmap.cuh"

namespace snack {

constexpr int kStrip = 32;
constexpr int kSegment = 4096;
constexpr int kAside = 32;  // columns of a block of transpose_counts

// What a block does for each entry of its strip and segment: visit(entry, row, row in the strip,
// column in the segment).
template <typename I, typename Visit>
__device__ __forceinline__ void visit_segment(Size m, Size k, Size strip, Size segment,
                                              const int* __restrict__ row_offsets,
                                              const I* __restrict__ columns, Visit visit) {
  const int left = static_cast<int>(segment * kSegment);
  const int right = static_cast<int>(min((segment + 1) * kSegment, k));
  for (int r = threadIdx.x / kWarpSize; r < kStrip; r += kThreads / kWarpSize) {
    const Size row = strip * kStrip + r;
    if (row >= m) return;
    int first = row_offsets[row];
    const int end = row_offsets[row + 1];
    if (left) {  // the first entry of the segment
      int high = end;
      while (first < high) {
        const int middle = first + (high - first) / 2;
        if (static_cast<int>(columns[middle]) < left) {
          first = middle + 1;
        } else {
          high = middle;
        }
      }
    }
    for (int e = first + lane_id(); e < end; e += kWarpSize) {
      const int column = columns[e];
      if (column >= right) break;
      visit(e, static_cast<int>(row), r, column - left);
    }
  }
}

template <typename I>
__global__ void __launch_bounds__(kThreads)
    transpose_masks(Size m, Size k, Size segments, const int* __restrict__ row_offsets,
                    const I* __restrict__ columns, unsigned* __restrict__ masks) {
  __shared__ unsigned held[kSegment];
  const Size strip = blockIdx.x / segments, segment = blockIdx.x % segments;
  for (int c = threadIdx.x; c < kSegment; c += kThreads) held[c] = 0;
  __syncthreads();
  visit_segment(m, k, strip, segment, row_offsets, columns,
                [&](int, int, int r, int c) { atomicOr(&held[c], 1u << r); });
  __syncthreads();
  const int width = static_cast<int>(min(k - segment * kSegment, static_cast<Size>(kSegment)));
  unsigned* target = masks + strip * k + segment * kSegment;
  for (int c = threadIdx.x; c < width; c += kThreads) target[c] = held[c];
}

// A block owns kAside columns; each group of kAside threads a share of the strips. The counts end
// as the column offsets. arrivals starts at zero.
__global__ void __launch_bounds__(kThreads)
    transpose_counts(Size k, Size strips, const unsigned* __restrict__ masks,
                     unsigned* __restrict__ before, unsigned* col_offsets, unsigned* arrivals) {
  constexpr int kGroups = kThreads / kAside;
  __shared__ unsigned sums[kGroups][kAside];
  const int x = threadIdx.x % kAside, group = threadIdx.x / kAside;
  const Size c = static_cast<Size>(blockIdx.x) * kAside + x;
  const Size share = (strips + kGroups - 1) / kGroups;
  const Size from = group * share, to = min(from + share, strips);
  unsigned sum = 0;
  if (c < k) {
#pragma unroll 8
    for (Size s = from; s < to; ++s) sum += __popc(masks[s * k + c]);
  }
  sums[group][x] = sum;
  __syncthreads();
  unsigned running = 0, total = 0;
  for (int g = 0; g < kGroups; ++g) {
    if (g < group) running += sums[g][x];
    total += sums[g][x];
  }
  if (c < k) {
#pragma unroll 8
    for (Size s = from; s < to; ++s) {
      before[s * k + c] = running;
      running += __popc(masks[s * k + c]);
    }
    if (group == 0) col_offsets[c] = total;
  }
  if (is_last_block(arrivals)) scan_counts(col_offsets, k);
}

template <typename I, typename R>
__global__ void __launch_bounds__(kThreads)
    transpose_place(Size m, Size k, Size segments, const int* __restrict__ row_offsets,
                    const I* __restrict__ columns, const unsigned* __restrict__ masks,
                    const unsigned* __restrict__ before, const unsigned* __restrict__ col_offsets,
                    R* __restrict__ rows, int* __restrict__ permutation) {
  __shared__ unsigned held[kSegment], places[kSegment];
  const Size strip = blockIdx.x / segments, segment = blockIdx.x % segments;
  const int width = static_cast<int>(min(k - segment * kSegment, static_cast<Size>(kSegment)));
  const Size start = strip * k + segment * kSegment;
  for (int c = threadIdx.x; c < width; c += kThreads) {
    held[c] = masks[start + c];
    places[c] = before[start + c] + col_offsets[segment * kSegment + c];
  }
  __syncthreads();
  visit_segment(m, k, strip, segment, row_offsets, columns, [&](int e, int row, int r, int c) {
    const unsigned place = places[c] + __popc(held[c] & ((1u << r) - 1));
    rows[place] = static_cast<R>(row);
    permutation[place] = e;
  });
}

}  // namespace snack
