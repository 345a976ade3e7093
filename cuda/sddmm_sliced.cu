// Sampled dense-dense product: one dot product over the batch for each stored entry (i, j) of a
// sparse (m, k) matrix in canonical CSR order, summed in float32 (no TF32):
//
//   out[e] = sum_b L[b, i] R[b, j]      L (batch, m), R (batch, k), both row-major
//
// It is the gradient of SpMM with respect to the values: L is that of Y, R is X.
//
//   block = (row block, slice of columns, chunk of the batch)
//   shared: xs[width + 1][kBatch], a tile of R (its last row is zero), then the entries in hand of
//   each warp
//
// A block takes the tiles of kBatch batch rows of its chunk one after another and adds each to its
// entries; with several chunks add_chunks adds theirs, in the order of the batch. A
// warp takes 64 entries a turn; kLanes lanes multiply one entry, kBatch / kLanes batch rows a lane,
// and the sums of kLanes entries meet in a transposing butterfly, after which each lane holds that
// of one entry. With 8 lanes an entry each group of lanes has a row of its own, else they share
// one.
//
// Sums of earlier tiles wait in `sums` (chunks, nnz), which is `out` where T is float and the chunk
// is the whole batch. Deterministic: one fixed
// order for every sum. Columns of 16 bits; R on a 16-byte boundary. Sizes first, then index arrays,
// dense operands, output, workspace.
//
// Source: Gale et al., "Sparse GPU Kernels for Deep Learning", SC 2020 (SDDMM).
#include "x_slice.cuh"

namespace snack {

template <typename T, int kBatch>
__global__ void __launch_bounds__(1024, 1)
    sddmm_csr_sliced(Size m_, Size k_, Size batch_, Size nnz, Size row_blocks_, Size rows_per_block,
                     Size slices_, Size slice_width, Size chunk_,
                     const int* __restrict__ row_offsets,
                     const unsigned short* __restrict__ columns, const T* __restrict__ left,
                     const T* __restrict__ right, T* out, float* sums) {
  constexpr int kLanes = kBatch < 32 ? kBatch / 4 : 8;
  constexpr int kPer = kBatch / kLanes;
  constexpr int kGroups = kWarpSize / kLanes;
  constexpr int kStride = 2 * kLanes + (kLanes >= 4 ? 4 : 0);  // ints of a group, apart by banks
  constexpr int kHand = kGroups * kStride;
  constexpr bool kRowEach = kLanes == 8;
  constexpr int kRows = kRowEach ? kGroups : 1;  // rows a warp has at once
  extern __shared__ __align__(16) float xs[];

  const int m = m_, k = k_, row_blocks = row_blocks_, slices = slices_;
  const int row_block = blockIdx.x % row_blocks, slice = blockIdx.x / row_blocks % slices;
  const int chunk = blockIdx.x / row_blocks / slices;
  const int begin = chunk * static_cast<int>(chunk_);
  const int end = min(static_cast<int>(batch_), begin + static_cast<int>(chunk_));
  const bool whole = chunk_ >= batch_;
  if (!whole) sums += chunk * nnz;
  const int first_column = slice * static_cast<int>(slice_width);
  const int width = min(k - first_column, static_cast<int>(slice_width));
  const int row_first = row_block * static_cast<int>(rows_per_block);
  const int row_end = min(m, row_first + static_cast<int>(rows_per_block));
  const int warp = threadIdx.x / kWarpSize, warps = blockDim.x / kWarpSize;
  const int group = lane_id() / kLanes, part = lane_id() % kLanes;
  int* hand = reinterpret_cast<int*>(xs + (slice_width + 1) * kBatch) + warp * kHand;

  RowSlices<kRows> rows{row_first, row_end, first_column, width, k, row_offsets, columns};

  for (int first = begin; first < end; first += kBatch) {
    const int batch = min(end - first, kBatch);
    const bool opening = first == begin, finished = whole && first + kBatch >= end;

    // In flight: the columns of two entries a lane.
    rows.rewind();
    int done = 0, rounds = 0;
    bool last, fresh = true;
    int entry[2], offset[2];  // entry: its place in the matrix, -1 for none
    int next_row;
    auto fetch = [&]() {
      const bool more = rows.next();
      const int source = rows.set * kRows + (kRowEach ? group : 0);
      const int start = __shfl_sync(kFullMask, rows.start, source);
      const int length = __shfl_sync(kFullMask, rows.length, source);
      next_row = rows.row(source);
      int longest = length;
      if constexpr (kRowEach) longest = __reduce_max_sync(kFullMask, length);
      if (!more) {
        rounds = -1;
        return;
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int e = done + (kRowEach ? part + kLanes * h : lane_id() + kWarpSize * h);
        entry[h] = e < length ? start + e : -1;
        offset[h] = width;
        if (e < length) offset[h] = columns[start + e] - first_column;
      }
      constexpr int kRound = kRowEach ? kLanes : kWarpSize;
      rounds = min((longest - done + kRound - 1) / kRound, 2);
      done += 2 * kRound;
      last = done >= longest;
      if (last) {
        done = 0;
        ++rows.set;
      }
    };

    fetch();
    if (!opening) __syncthreads();  // all warps are done with the tile before
    const SliceCopy<T, kBatch> copy(xs, right + static_cast<Size>(first) * k + first_column, k,
                                    width, batch, k % 4 == 0);
    copy.template run<1>(copy.begin());
    __syncthreads();

    const char* lane_xs = reinterpret_cast<const char*>(xs + part * 4);
    const int* mine = hand + group * kStride;
    float row_of_left[kPer];
    while (rounds >= 0) {
      if (fresh) {
        const int b = opaque(part * 4);
        const T* source = left + static_cast<Size>(first + b) * m + min(next_row, row_end - 1);
#pragma unroll
        for (int v = 0; v < kPer; ++v) {
          const int to_b = (v / 4) * 4 * kLanes + v % 4;
          row_of_left[v] = b + to_b < batch ? widen(source[static_cast<Size>(to_b) * m]) : 0.f;
        }
      }
      const int now = rounds;
      const int at[2] = {entry[0], entry[1]};
      __syncwarp();
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        hand[group * kStride + h * kLanes + part] = offset[h] * (kBatch * 4);
      }
      fresh = last;
      fetch();
      __syncwarp();
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if (h >= now) break;
        float before = 0.f;
        if (!opening && at[h] >= 0) before = sums[at[h]];
        float dot[kLanes];
#pragma unroll
        for (int q = 0; q < kLanes; ++q) {
          const char* row = lane_xs + mine[h * kLanes + q];
          dot[q] = 0.f;
#pragma unroll
          for (int v = 0; v < kPer; v += 4) {
            const auto a = *reinterpret_cast<const Pack<float, 4>*>(row + v * kLanes * 4);
#pragma unroll
            for (int u = 0; u < 4; ++u) dot[q] += row_of_left[v + u] * a.at[u];
          }
        }
#pragma unroll
        for (int held = kLanes / 2; held >= 1; held /= 2) {
          const bool upper = part & held;
#pragma unroll
          for (int q = 0; q < held; ++q) {
            const float keep = upper ? dot[q + held] : dot[q];
            const float give = upper ? dot[q] : dot[q + held];
            dot[q] = keep + __shfl_xor_sync(kFullMask, give, held);
          }
        }
        if (at[h] >= 0) {
          const float total = before + dot[0];
          if (finished) {
            out[at[h]] = narrow<T>(total);
          } else {
            sums[at[h]] = total;
          }
        }
      }
    }
  }
}

// out[e] = sum over the chunks, in their order, of sums[chunk][e]. A thread owns an entry.
template <typename T>
__global__ void __launch_bounds__(256)
    add_chunks(Size nnz, Size chunks, T* __restrict__ out, const float* __restrict__ sums) {
  const Size e = static_cast<Size>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (e >= nnz) return;
  float total = 0.f;
#pragma unroll 8
  for (int c = 0; c < static_cast<int>(chunks); ++c) total += sums[c * nnz + e];
  out[e] = narrow<T>(total);
}

}  // namespace snack
