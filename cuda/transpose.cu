// The column-major view of a structure without a sort, by masks of 32 rows:
//
//   transpose_masks    masks[s][c]: bit r set where entry (32 s + r, c) exists; and for each row
//                      where its entries of each kColumns columns start
//   transpose_counts   before[s][c]: entries of column c in strips before s; column offsets
//   transpose_entries  entry (i, c) goes to column offset + before + bits of its mask below its row
//
// A block of the first kernel owns a strip of 32 rows and a segment of columns, whose masks are in
// shared memory; a warp owns a row. A block of the last kernel owns a tile of kTileRows x kColumns:
// it lists the tile's entries in shared memory in column-major order, then writes the list, so that
// neighbouring threads write neighbouring places.
//
// Deterministic: every place is computed, none is taken.
#include "bitmap.cuh"

namespace snack {

constexpr int kStrip = 32;
constexpr int kRowThreads = 1024;  // of transpose_masks: a warp for each row of a strip
constexpr int kSegment = 4096;
constexpr int kAside = 32;    // columns of a block of transpose_counts
constexpr int kColumns = 64;  // of a tile
constexpr int kTileStrips = 8;
constexpr int kTileRows = kTileStrips * kStrip;
constexpr int kListed = 3072;  // entries of a tile that are listed at a time

// starts[row][b] is the first entry of the row whose column is b * kColumns or more; b = 0 ..
// blocks.
template <typename I>
__global__ void __launch_bounds__(kRowThreads)
    transpose_masks(Size m, Size k, Size segments, const int* __restrict__ row_offsets,
                    const I* __restrict__ columns, unsigned* __restrict__ masks,
                    int* __restrict__ starts) {
  __shared__ unsigned held[kSegment];
  const Size strip = blockIdx.x / segments, segment = blockIdx.x % segments;
  const int left = static_cast<int>(segment * kSegment);
  const int width = static_cast<int>(min(k - left, static_cast<Size>(kSegment)));
  for (int c = threadIdx.x; c < width; c += kRowThreads) held[c] = 0;
  __syncthreads();

  const int r = threadIdx.x / kWarpSize;
  const Size row = strip * kStrip + r;
  if (row < m) {
    const int end = row_offsets[row + 1], blocks = static_cast<int>((k + kColumns - 1) / kColumns);
    int first = row_offsets[row];
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
    int* own = starts + row * (blocks + 1);
    int block = left / kColumns;  // the next one whose start is not known yet
    const int last_block = (left + width + kColumns - 1) / kColumns;
    bool over = false;
    constexpr int kEach = 4;
    for (int e = first + lane_id(); !over; e += kEach * kWarpSize) {
      int column[kEach];
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        column[i] =
            e + i * kWarpSize < end ? static_cast<int>(columns[e + i * kWarpSize]) - left : width;
      }
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        if (over) break;
        const bool inside = column[i] < width;
        if (inside) atomicOr(&held[column[i]], 1u << r);
        // A block starts at the first entry that is in it or beyond.
        const int here = inside ? (left + column[i]) / kColumns : last_block;
        int previous = __shfl_up_sync(kFullMask, here, 1);
        if (lane_id() == 0) previous = block - 1;
        for (int b = previous + 1; b <= min(here, last_block - 1); ++b) {
          own[b] = min(e + i * kWarpSize, end);
        }
        block = __shfl_sync(kFullMask, here, kWarpSize - 1) + 1;
        over = block > last_block;
      }
    }
    if (segment == segments - 1 && lane_id() == 0) own[blocks] = end;
  }
  __syncthreads();
  unsigned* target = masks + strip * k + left;
  for (int c = threadIdx.x; c < width; c += kRowThreads) target[c] = held[c];
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
#pragma unroll 16
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
#pragma unroll 16
    for (Size s = from; s < to; ++s) {
      before[s * k + c] = running;
      running += __popc(masks[s * k + c]);
    }
    if (group == 0) col_offsets[c] = total;
  }
  if (is_last_block(arrivals)) scan_counts(col_offsets, k);
}

template <typename I, typename R>
__global__ void __launch_bounds__(kThreads, 8)
    transpose_entries(Size m, Size k, const I* __restrict__ columns, const int* __restrict__ starts,
                      const unsigned* __restrict__ masks, const unsigned* __restrict__ before,
                      const unsigned* __restrict__ col_offsets, R* __restrict__ rows,
                      int* __restrict__ permutation) {
  __shared__ unsigned held[kTileStrips][kColumns];   // masks
  __shared__ unsigned place[kTileStrips][kColumns];  // in the list, of the first entry in the mask
  __shared__ unsigned moved[kColumns];               // place in the view less that in the list
  __shared__ int entry[kListed];
  __shared__ unsigned char row_in_tile[kListed], column_in_tile[kListed];
  const int across = static_cast<int>((k + kColumns - 1) / kColumns);
  const int tile_column = blockIdx.x % across;
  const Size strip0 = blockIdx.x / across * kTileStrips, row0 = strip0 * kStrip;
  const int column0 = tile_column * kColumns;
  const int strips = static_cast<int>(min((m + kStrip - 1) / kStrip - strip0, Size(kTileStrips)));
  const int width = static_cast<int>(min(k - column0, Size(kColumns)));

  // Where the entries of each mask go, in the list and beyond it.
  for (int i = threadIdx.x; i < kTileStrips * kColumns; i += kThreads) {
    const int s = i / kColumns, c = i % kColumns;
    const bool exists = s < strips && c < width;
    const Size at = (strip0 + s) * k + column0 + c;
    held[s][c] = exists ? masks[at] : 0;
    place[s][c] = exists ? before[at] : 0;
  }
  __syncthreads();
  unsigned count = 0, first = 0, total;
  if (threadIdx.x < width) {
    first = place[0][threadIdx.x];
    count = place[strips - 1][threadIdx.x] + __popc(held[strips - 1][threadIdx.x]) - first;
  }
  const unsigned start = block_scan(count, total);
  if (threadIdx.x < width) {
    moved[threadIdx.x] = col_offsets[column0 + threadIdx.x] + first - start;
    for (int s = 0; s < strips; ++s) place[s][threadIdx.x] += start - first;
  }
  __syncthreads();

  constexpr int kLanes = 8;  // that share a row
  for (unsigned skipped = 0; skipped < total; skipped += kListed) {
    for (int r = threadIdx.x / kLanes; r < kTileRows; r += kThreads / kLanes) {
      const Size row = row0 + r;
      if (row >= m) break;
      const int* own = starts + row * (across + 1) + tile_column;
      const int s = r / kStrip, end = own[1];
      for (int e = own[0] + threadIdx.x % kLanes; e < end; e += kLanes) {
        const int c = static_cast<int>(columns[e]) - column0;
        const unsigned below = held[s][c] & ((1u << r % kStrip) - 1);
        const unsigned at = place[s][c] + __popc(below) - skipped;
        if (at < kListed) {
          entry[at] = e;
          row_in_tile[at] = r;
          column_in_tile[at] = c;
        }
      }
    }
    __syncthreads();
    const unsigned listed = min(total - skipped, static_cast<unsigned>(kListed));
    for (unsigned i = threadIdx.x; i < listed; i += kThreads) {
      const unsigned target = moved[column_in_tile[i]] + skipped + i;
      rows[target] = static_cast<R>(row0 + row_in_tile[i]);
      permutation[target] = entry[i];
    }
    __syncthreads();
  }
}

}  // namespace snack
