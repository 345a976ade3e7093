// Sparse W (m, k) of a half type in canonical CSR order times a few batch rows on tensor cores:
//
//   Y[b, i] = sum_j W[i, j] X[b, j] + bias[i]      X (batch, k), Y (batch, m), both row-major
//
// Loaded sparse, multiplied dense: a block spreads 16 rows of W over a tile of zeros in shared
// memory, its warps multiply the tile by X, which they hold in registers, and the next 16 rows
// follow:
//
//   block = (tile of 8 kBatchTiles batch rows, group of tiles of 16 rows, slice of columns)
//   shared: tile[16][width + 8], then the sums of all warps
//
// A warp spreads one row of a tile: 8 neighbouring entries a lane, 512 or 256 in all, are in flight
// while the tile before is multiplied, and zeros are stored at the same places afterwards. It
// multiplies every 16th step of 32 columns of the tile, all rows. Lane t of 4 owns 8 neighbouring
// columns of a step, of W and of X alike: a product may take the columns in any order. So X crosses
// from the second-level cache to a multiprocessor once. Zeros cost shared memory, 2 bytes read for
// each element of W whatever the sparsity: at 4096 x 4096 1.05 microseconds on an H200.
//
// Sums of warps meet in their order, then those of the two slices of a cluster (the _pair kernel).
// Deterministic; summed in float by the tensor cores. As in any dense product an infinity or NaN in
// X reaches all of its batch row of Y.
//
// With kPermuted, W is given by the column-major view of another matrix: entry j has its value at
// values[permutation[j]].
//
// Columns of 16 bits; width, of a slice, a multiple of 64 and at most 512 kSteps; values, columns
// and X on 16-byte boundaries. Sizes first, then index arrays, values, dense operands, output. Row
// and entry numbers are 32 bits.
//
// Source: Xia et al., "Flash-LLM: Enabling Cost-Effective and Highly-Efficient Large Generative
// Model Inference with Unstructured Sparsity", VLDB 2023 (load sparse, compute dense); here from
// plain CSR, without a format of its own.
#include "cluster.cuh"
#include "mma.cuh"
#include "window.cuh"

namespace snack {

constexpr int kStep = 32;         // columns of two matrix instructions
constexpr int kTensorWarps = 16;  // as many as rows of a tile
constexpr int kTileRows = 16;

template <typename T, bool kPermuted, int kBatchTiles, int kSteps, int kCluster>
__device__ __forceinline__ void multiply_tiles(
    int m, int k, int batch, int nnz, int groups, int width, int tiles_per_group,
    const int* __restrict__ row_offsets, const unsigned short* __restrict__ columns,
    const int* __restrict__ permutation, const T* __restrict__ values_, const T* __restrict__ x,
    const T* __restrict__ bias, T* __restrict__ y) {
  constexpr int kBatch = 8 * kBatchTiles, kPlanes = 4 * kBatchTiles;
  constexpr int kSlots = kSteps > 4 ? 2 : 1;
  extern __shared__ __align__(128) char memory[];

  const auto* values = reinterpret_cast<const unsigned short*>(values_);
  const int slice = blockIdx.x % kCluster;
  const int group = blockIdx.x / kCluster % groups;
  const int first_batch = blockIdx.x / kCluster / groups * kBatch;
  const int slice_first = slice * width;
  const int tiles = (m + kTileRows - 1) / kTileRows;
  const int warp = __shfl_sync(kFullMask, threadIdx.x / kWarpSize, 0);  // known to be uniform
  const int g = lane_id() / 4, t = lane_id() % 4;
  const int pitch = 2 * width + 16;    // bytes: eight rows in other banks
  char* mine = memory + warp * pitch;  // the row this warp spreads
  float* sums = reinterpret_cast<float*>(memory + kTileRows * pitch);
  if constexpr (kCluster > 1) cluster_arrive();  // the other block's memory may be written soon

  // Everything that is needed first is asked for at once: bounds of rows, X, then entries.
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
    window.template load_values<kPermuted>(values, permutation, nnz);
  };
  bounds(group);
  Words operand[kSteps][kBatchTiles];
  auto load_x = [&]() {
    constexpr int kApart = kTensorWarps * kStep;
    const int at = slice_first + warp * kStep + t * 8;
    const int limit = min(k, slice_first + width) - at;
#pragma unroll
    for (int n = 0; n < kBatchTiles; ++n) {
      const int b = first_batch + n * 8 + g;
      const T* row = x + static_cast<Size>(b) * k + at;
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        operand[i][n] = {};
        if (b < batch && i * kApart < limit) {
          operand[i][n] = *reinterpret_cast<const Words*>(row + i * kApart);
        }
      }
    }
  };
  auto clear_row = [&]() {
#pragma unroll 4
    for (int c = lane_id() * 16; c < 2 * width; c += kWarpSize * 16) {
      *reinterpret_cast<Words*>(mine + c) = {};
    }
  };
  clear_row();  // while the bounds are on their way
  load_window();
  in_order();
  load_x();
  bounds(group + groups);

  int done = 0;
  for (int tile = group; tile < tiles; tile += groups, ++done) {
    if (kCluster > 1 && window.missed(slice_first, k, columns)) {
      window.load_columns(columns, nnz);
      window.template load_values<kPermuted>(values, permutation, nnz);
    }
    // Rows longer than a window take several, and are cleared as a whole.
    bool fits = true;
    __syncwarp();
    for (;;) {
      const bool more = window.base + Window<kSlots>::kEntries < window.end &&
                        window.last_column() < slice_first + width;
      window.template settle<true>(slice_first, width);
      window.spread(mine);
      if (!more) break;
      fits = false;
      window.base += Window<kSlots>::kEntries;
      window.load_columns(columns, nnz);
      window.template load_values<kPermuted>(values, permutation, nnz);
    }
    Window<kSlots> placed = window;
    load_window();  // of the next tile
    bounds(tile + 2 * groups);
    __syncthreads();

    // Sums of even and of odd instructions, which need not wait for each other.
    constexpr int kSums = kBatchTiles == 1 ? 2 : 1;
    float sum[kSums][kBatchTiles][4] = {};
    const char* source = memory + lane_id() % 16 * pitch + warp * kStep * 2 + lane_id() / 16 * 16;
    auto multiply = [&](int i) {
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        constexpr int kApart = kTensorWarps * kStep * 2;
        unsigned rows[4];
        load_matrices(rows, source + i * kApart + part * 32);
#pragma unroll
        for (int n = 0; n < kBatchTiles; ++n) {
          const Words& o = operand[i][n];
          mma_m16n8k16<T>(sum[part % kSums][n], rows, {o.at[2 * part], o.at[2 * part + 1]});
        }
      }
    };
    if (width == kSteps * kTensorWarps * kStep) {
#pragma unroll
      for (int i = 0; i < kSteps; ++i) multiply(i);
    } else {
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        if ((warp + i * kTensorWarps) * kStep < width) multiply(i);
      }
    }
    // sums[warp][plane][lane], lanes turned so that rows of one column lie in different banks.
#pragma unroll
    for (int n = 0; n < kBatchTiles; ++n) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        sums[(warp * kPlanes + n * 4 + c) * kWarpSize + (lane_id() + c / 2) % kWarpSize] =
            kSums == 1 ? sum[0][n][c] : sum[0][n][c] + sum[kSums - 1][n][c];
      }
    }
    __syncthreads();

    if (tile + groups < tiles) {
      if (fits) {
        placed.clear(mine);
      } else {
        clear_row();
      }
    }
    if (kCluster > 1 && done == 0) cluster_wait();
    if (threadIdx.x < kTileRows * kBatch) {
      const int row = threadIdx.x % kTileRows, b = threadIdx.x / kTileRows;
      const int plane = b / 8 * 4 + row / 8 * 2 + b % 2;
      const float* from =
          sums + plane * kWarpSize + (row % 8 * 4 + b % 8 / 2 + row / 8) % kWarpSize;
      float total = 0.f;
#pragma unroll
      for (int w = 0; w < kTensorWarps; ++w) total += from[w * kPlanes * kWarpSize];
      const int i = tile * kTileRows + row;
      if constexpr (kCluster == 1) {
        if (i < m && first_batch + b < batch) {
          if (bias != nullptr) total += widen(bias[i]);
          y[static_cast<Size>(first_batch + b) * m + i] = narrow<T>(total);
        }
      } else {
        // halves[slice][tile][b][8]: block s finishes the s-th eight rows of every tile.
        float* halves = sums + kTensorWarps * kPlanes * kWarpSize;
        float* half = halves + (slice * tiles_per_group + done) * 8 * kBatch + b * 8 + row % 8;
        if (row / 8 == slice) {
          *half = total;
        } else {
          store_in_cluster(half, 1 - slice, total);
        }
      }
    }
  }
  if constexpr (kCluster > 1) {
    if (done == 0) cluster_wait();
    cluster_arrive();
    cluster_wait();
    const float* halves = sums + kTensorWarps * kPlanes * kWarpSize;
    for (int o = threadIdx.x; o < done * 8 * kBatch; o += kTensorWarps * kWarpSize) {
      const int row = o % 8, b = o / 8 % kBatch;
      const int i = (group + o / (8 * kBatch) * groups) * kTileRows + slice * 8 + row;
      if (i < m && first_batch + b < batch) {
        float total = halves[o] + halves[tiles_per_group * 8 * kBatch + o];
        if (bias != nullptr) total += widen(bias[i]);
        y[static_cast<Size>(first_batch + b) * m + i] = narrow<T>(total);
      }
    }
  }
}

template <typename T, bool kPermuted, int kBatchTiles, int kSteps>
__global__ void __launch_bounds__(512, 1)
    spmm_csr_tensor(Size m, Size k, Size batch, Size nnz, Size groups, Size width,
                    Size tiles_per_group, const int* __restrict__ row_offsets,
                    const unsigned short* __restrict__ columns, const int* __restrict__ permutation,
                    const T* __restrict__ values, const T* __restrict__ x,
                    const T* __restrict__ bias, T* __restrict__ y) {
  multiply_tiles<T, kPermuted, kBatchTiles, kSteps, 1>(m, k, batch, nnz, groups, width,
                                                       tiles_per_group, row_offsets, columns,
                                                       permutation, values, x, bias, y);
}

// Two blocks of a cluster take half of the columns each: half of X in registers.
template <typename T, bool kPermuted, int kBatchTiles, int kSteps>
__global__ void SNACK_CLUSTER_OF_TWO __launch_bounds__(512, 1)
    spmm_csr_tensor_pair(Size m, Size k, Size batch, Size nnz, Size groups, Size width,
                         Size tiles_per_group, const int* __restrict__ row_offsets,
                         const unsigned short* __restrict__ columns,
                         const int* __restrict__ permutation, const T* __restrict__ values,
                         const T* __restrict__ x, const T* __restrict__ bias, T* __restrict__ y) {
  multiply_tiles<T, kPermuted, kBatchTiles, kSteps, 2>(m, k, batch, nnz, groups, width,
                                                       tiles_per_group, row_offsets, columns,
                                                       permutation, values, x, bias, y);
}

}  // namespace snack
