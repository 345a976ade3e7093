// Sampled dense-dense product of a half type on tensor cores: one dot product over the batch for
// each stored entry (i, j) of a sparse (m, k) matrix in canonical CSR order:
//
//   out[e] = sum_b L[b, i] R[b, j]      L (batch, m), R (batch, k), both row-major
//
// Multiplied dense, stored sparse: the warps of a block compute 16 rows of the dense product in
// shared memory, R in their registers, take from it what the matrix has, and the next 16 rows
// follow. It is the gradient of SpMM with respect to the values: L is that of Y, R is X.
//
//   block = (group of tiles of 16 rows, slice of columns)
//   shared: tile[16][width + 32] of T
//
// A warp computes every 16th chunk of 32 columns of a tile, all rows. Neighbouring rows of L and
// columns of R go to one lane: a product may take them in any order, this one needs no transpose,
// and a lane ends with 8 neighbouring columns of it. Then a warp owns one row: the columns of its
// entries are in flight while the tile is multiplied, 8 neighbouring ones a lane, and 8 results are
// stored at once. R crosses from the second-level cache to a multiprocessor once.
//
// Deterministic; summed in float by the tensor cores, rounded once. batch at most 16 kBatchSteps;
// columns of 16 bits; width, of a slice, a multiple of 64 and at most 512 kChunks; columns, L, R
// and out on 16-byte boundaries. Sizes first, then index arrays, dense operands, output. Row and
// entry numbers are 32 bits.
//
// Source: Gale et al., "Sparse GPU Kernels for Deep Learning", SC 2020 (SDDMM); Xia et al.,
// "Flash-LLM: Enabling Cost-Effective and Highly-Efficient Large Generative Model Inference with
// Unstructured Sparsity", VLDB 2023 (dense tiles for sparse weights).
#include "mma.cuh"
#include "window.cuh"

namespace snack {

// Element `e` of two rows side by side: the first in the low half.
template <int kWords>
__device__ __forceinline__ unsigned side_by_side(const Pack<unsigned, kWords>& a,
                                                 const Pack<unsigned, kWords>& b, int e) {
  return e % 2 == 0 ? (a.at[e / 2] & 0xffff) | b.at[e / 2] << 16
                    : a.at[e / 2] >> 16 | (b.at[e / 2] & 0xffff0000u);
}

template <typename T, int kBatchSteps>
__global__ void __launch_bounds__(512, 1)
    sddmm_csr_tensor(Size m_, Size k_, Size batch_, Size nnz_, Size groups_, Size width_,
                     const int* __restrict__ row_offsets,
                     const unsigned short* __restrict__ columns, const T* __restrict__ left,
                     const T* __restrict__ right, T* __restrict__ out) {
  constexpr int kChunks = 8 / kBatchSteps, kChunk = 32;  // of a warp; columns of one
  constexpr int kWarps = 16, kTileRows = 16;             // a warp owns a row of the tile
  constexpr int kSlots = kChunks > 4 ? 2 : 1;
  extern __shared__ __align__(128) char memory[];

  const int m = m_, k = k_, batch = batch_, nnz = nnz_, groups = groups_, width = width_;
  const int group = blockIdx.x % groups;
  const int slice_first = blockIdx.x / groups * width;
  const int tiles = (m + kTileRows - 1) / kTileRows;
  const int warp = __shfl_sync(kFullMask, threadIdx.x / kWarpSize, 0);  // known to be uniform
  const int g = lane_id() / 4, t = lane_id() % 4;
  const int pitch = 2 * (width + 32);  // bytes: 64 more than a multiple of 128, rows in other banks
  const auto* left_bits = reinterpret_cast<const unsigned short*>(left);
  const auto* right_bits = reinterpret_cast<const unsigned short*>(right);
  auto* out_bits = reinterpret_cast<unsigned short*>(out);

  Window<kSlots> window;
  int next_first = 0, next_end = 0;
  auto bounds = [&](int tile) {
    const int row = tile * kTileRows + warp;
    next_first = next_end = 0;
    if (row < m) {
      next_first = row_offsets[row];
      next_end = row_offsets[row + 1];
    }
  };
  auto load_window = [&]() {
    window.first = next_first;
    window.end = next_end;
    window.guess(slice_first, k);
    window.load_columns(columns, nnz);
  };
  // L of batch rows 2t, 2t + 1 and 8 further: rows 2g and 2g + 1 of the tile.
  Pack<unsigned, 1> down[kBatchSteps][4];
  auto load_left = [&](int tile) {
#pragma unroll
    for (int s = 0; s < kBatchSteps; ++s) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int b = s * 16 + i / 2 * 8 + 2 * t + i % 2;
        const auto* source = left_bits + static_cast<Size>(b) * m;
        const int row = tile * kTileRows + 2 * g;
        down[s][i] = load_operand<2>(source, row, b < batch && row < m);
      }
    }
  };
  bounds(group);
  // R as the second operand of instructions: [..][e][h] is column 4 g + e of the chunk, batch rows
  // 2t and 2t + 1, or 8 further.
  unsigned operand[kChunks][kBatchSteps][4][2];
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    const int at = (warp + c * kWarps) * kChunk + g * 4;
#pragma unroll
    for (int s = 0; s < kBatchSteps; ++s) {
      Pack<unsigned, 2> across[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int b = s * 16 + i / 2 * 8 + 2 * t + i % 2;
        const auto* source = right_bits + static_cast<Size>(b) * k;
        const int column = slice_first + at;
        across[i] = load_operand<4>(source, column, b < batch && at < width && column < k);
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        operand[c][s][e][0] = side_by_side(across[0], across[1], e);
        operand[c][s][e][1] = side_by_side(across[2], across[3], e);
      }
    }
  }
  load_window();
  load_left(group);
  bounds(group + groups);

  const char* mine = memory + (warp % 2 * 8 + warp / 2) * pitch;  // row `warp` of the tile
  for (int tile = group; tile < tiles; tile += groups) {
    unsigned a[kBatchSteps][4];
#pragma unroll
    for (int s = 0; s < kBatchSteps; ++s) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        a[s][i] = side_by_side(down[s][i / 2 * 2], down[s][i / 2 * 2 + 1], i % 2);
      }
    }
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const int at = (warp + c * kWarps) * kChunk;
      if (at < width) {
        float sum[4][4] = {};
#pragma unroll
        for (int e = 0; e < 4; ++e) {
#pragma unroll
          for (int s = 0; s < kBatchSteps; ++s) {
            mma_m16n8k16<T>(sum[e], a[s], operand[c][s][e]);
          }
        }
        // A lane has columns 8t to 8t + 7 of two rows.
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const Words words = {pack_two<T>(sum[0][2 * h], sum[1][2 * h]),
                               pack_two<T>(sum[2][2 * h], sum[3][2 * h]),
                               pack_two<T>(sum[0][2 * h + 1], sum[1][2 * h + 1]),
                               pack_two<T>(sum[2][2 * h + 1], sum[3][2 * h + 1])};
          *reinterpret_cast<Words*>(memory + (h * 8 + g) * pitch + (at + 8 * t) * 2) = words;
        }
      }
    }
    load_left(tile + groups);
    __syncthreads();
    if (window.missed(slice_first, k, columns)) window.load_columns(columns, nnz);
    for (;;) {  // rows longer than a window take several
      const bool more = window.base + Window<kSlots>::kEntries < window.end &&
                        window.last_column() < slice_first + width;
      window.template settle<false>(slice_first, width);
      window.gather(mine, 2 * width, out_bits);
      if (!more) break;
      window.base += Window<kSlots>::kEntries;
      window.load_columns(columns, nnz);
    }
    load_window();  // of the next tile
    bounds(tile + 2 * groups);
    __syncthreads();
  }
}

}  // namespace snack
