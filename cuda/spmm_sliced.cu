// Sparse W (m, k) in canonical CSR order times many batch rows, summed in float32 (no TF32):
//
//   Y[b, i] = sum_j W[i, j] X[b, j] + bias[i]      X (batch, k), Y (batch, m), both row-major
//
// A block holds a slice of X, kBatch batch rows of `width` columns, transposed in shared memory,
// and takes the entries of its rows of W that fall into these columns:
//
//   block = (row block, slice, tile of batch rows)
//   shared: xs[width + 1][kBatch] (the last row is zero), then the entries in hand of each warp
//
// A warp takes 64 entries a turn: every lane brings two, turns their columns into offsets in xs and
// leaves (value, offset) in shared memory. Then groups of kLanes lanes multiply one entry each with
// kBatch batch rows, kBatch / kLanes a lane, while the entries of the next turn are in flight. For
// long rows the groups of a warp share one row and their sums meet in a transposing butterfly; for
// short rows (kRowEach) each group has a row of its own.
//
// With kPermuted, W is given by the column-major view of another matrix: entry j has its value at
// values[permutation[j]].
//
// With more than one slice the sums go to partial[slice][row][padded batch] and reduce_slices adds
// them in the order of the slices. Deterministic: one fixed order for every sum.
//
// Columns of 16 bits; X on a 16-byte boundary. Sizes first, then index arrays, values, dense
// operands, output, workspace. Row and entry numbers are 32 bits, as row offsets are.
//
// Source: Gale et al., "Sparse GPU Kernels for Deep Learning", SC 2020 (a row split over slices).
#include "x_slice.cuh"

namespace snack {

constexpr int kTurn = 64;  // entries a warp takes at once

// How the lanes of a warp share the work.
template <int kBatch>
struct Team {
  static constexpr int kLanes = kBatch < 32 ? 4 : 8;  // lanes an entry
  static constexpr int kPer = kBatch / kLanes;        // batch rows a lane: 4 or 8
  static constexpr int kGroups = kWarpSize / kLanes;  // entries at once
  static constexpr int kSlots = kTurn / kGroups;      // entries of a group in a turn
  static constexpr int kStride = kSlots * 2 + (kGroups == 4 ? 8 : 4);  // floats; spreads banks
  static constexpr int kHand = kGroups * kStride;                      // floats of a warp
};

template <typename T, bool kPermuted, int kBatch, bool kRowEach>
__global__ void __launch_bounds__(1024, 1)
    spmm_csr_sliced(Size m_, Size k_, Size batch_, Size row_blocks_, Size rows_per_block,
                    Size slices_, Size slice_width, const int* __restrict__ row_offsets,
                    const unsigned short* __restrict__ columns, const int* __restrict__ permutation,
                    const T* __restrict__ values, const T* __restrict__ x,
                    const T* __restrict__ bias, T* __restrict__ y, float* __restrict__ partial) {
  using L = Team<kBatch>;
  constexpr int kLanes = L::kLanes, kRows = kRowEach ? L::kGroups : 1;  // rows a warp has at once
  extern __shared__ __align__(16) float xs[];

  const int m = m_, k = k_, row_blocks = row_blocks_, slices = slices_;
  const int row_block = blockIdx.x % row_blocks;
  const int slice = blockIdx.x / row_blocks % slices;
  const int tile = blockIdx.x / row_blocks / slices;
  const int first_column = slice * static_cast<int>(slice_width);
  const int width = min(k - first_column, static_cast<int>(slice_width));
  const int row_first = row_block * static_cast<int>(rows_per_block);
  const int row_end = min(m, row_first + static_cast<int>(rows_per_block));
  const int batch = min(static_cast<int>(batch_) - tile * kBatch, kBatch);
  const int warp = threadIdx.x / kWarpSize, warps = blockDim.x / kWarpSize;
  const int group = lane_id() / kLanes, part = lane_id() % kLanes;

  float* hand = xs + (slice_width + 1) * kBatch + warp * L::kHand;

  RowSlices<kRows> rows{row_first, row_end, first_column, width, k, row_offsets, columns};

  // What is in flight: two entries a lane, and what the warp must know of the turn.
  int done = 0;  // entries of the next set that are taken
  float value[2];
  int offset[2];
  int next_row, steps;  // row of this group; pairs of entries a group, -1 after the last
  bool last;
  auto fetch = [&]() {
    const bool more = rows.next();
    const int source = rows.set * kRows + (kRowEach ? group : 0);
    const int start = __shfl_sync(kFullMask, rows.start, source);
    const int length = __shfl_sync(kFullMask, rows.length, source);
    next_row = rows.row(source);
    int longest = length;
    if constexpr (kRowEach) longest = __reduce_max_sync(kFullMask, length);
    if (!more) {
      steps = -1;
      return;
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int e = done + (kRowEach ? part + kLanes * h : lane_id() + kWarpSize * h);
      value[h] = 0.f;
      offset[h] = width;
      if (e < length) {
        const int j = start + e;
        value[h] = widen(values[kPermuted ? permutation[j] : j]);
        offset[h] = columns[j] - first_column;
      }
    }
    constexpr int kTaken = kTurn / kRows;
    constexpr int kStep = kRowEach ? 2 : 2 * L::kGroups;
    steps = (min(longest - done, kTaken) + kStep - 1) / kStep;
    done += kTaken;
    last = done >= longest;
    if (last) {
      done = 0;
      ++rows.set;
    }
  };

  fetch();
  const Size first_row = static_cast<Size>(tile) * kBatch;
  const SliceCopy<T, kBatch> copy(xs, x + first_row * k + first_column, k, width, batch,
                                  k % 4 == 0);
  copy.template run<2>(copy.begin());
  __syncthreads();

  const Size padded = (batch_ + kBatch - 1) / kBatch * kBatch;
  const char* lane_xs = reinterpret_cast<const char*>(xs + part * 4);
  const float4* mine = reinterpret_cast<const float4*>(hand + group * L::kStride);
  float sum[L::kPer] = {};
  while (steps >= 0) {
    __syncwarp();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int to_group = kRowEach ? group : lane_id() % L::kGroups;
      const int slot = kRowEach ? part + kLanes * h : (lane_id() + kWarpSize * h) / L::kGroups;
      *reinterpret_cast<float2*>(hand + to_group * L::kStride + slot * 2) =
          make_float2(value[h], __int_as_float(offset[h] * (kBatch * 4)));
    }
    const int now = steps, row = next_row;
    const bool complete = last;
    fetch();
    __syncwarp();
#pragma unroll 2
    for (int i = 0; i < now; ++i) {
      const float4 pair = mine[i];
      const char* first = lane_xs + __float_as_int(pair.y);
      const char* second = lane_xs + __float_as_int(pair.w);
#pragma unroll
      for (int v = 0; v < L::kPer; v += 4) {
        const auto a = *reinterpret_cast<const Pack<float, 4>*>(first + v * kLanes * 4);
        const auto b = *reinterpret_cast<const Pack<float, 4>*>(second + v * kLanes * 4);
#pragma unroll
        for (int u = 0; u < 4; ++u) sum[v + u] += pair.x * a.at[u];
#pragma unroll
        for (int u = 0; u < 4; ++u) sum[v + u] += pair.z * b.at[u];
      }
    }
    if (!complete) continue;

    // Sums of one row: b is the batch row of the first of `held` sums a lane ends with.
    int b = opaque(part * 4), held = L::kPer;
    if constexpr (!kRowEach) {
#pragma unroll
      for (int mask = kLanes; mask < kWarpSize; mask *= 2) {
        const bool upper = lane_id() & mask;
        if (held > 1) {
          held /= 2;
#pragma unroll
          for (int i = 0; i < L::kPer / 2; ++i) {
            if (i < held) {
              const float keep = upper ? sum[i + held] : sum[i];
              const float give = upper ? sum[i] : sum[i + held];
              sum[i] = keep + __shfl_xor_sync(kFullMask, give, mask);
            }
          }
          if (upper) b += held < 4 ? held : held * kLanes;
        } else {
          sum[0] += __shfl_xor_sync(kFullMask, sum[0], mask);
          if (upper) b = kBatch;  // the lower lane writes it
        }
      }
    }
    constexpr int kHeld = kRowEach ? L::kPer : (L::kPer > L::kGroups ? L::kPer / L::kGroups : 1);
    constexpr int kVec = kHeld < 4 ? kHeld : 4;
    if (row < row_end && b < kBatch) {
      if (slices > 1) {
        float* out = partial + (static_cast<Size>(slice) * m + row) * padded + tile * kBatch + b;
#pragma unroll
        for (int v = 0; v < kHeld; v += 4) {
          Pack<float, kVec> packed;
#pragma unroll
          for (int u = 0; u < kVec; ++u) packed.at[u] = sum[v + u];
          *reinterpret_cast<Pack<float, kVec>*>(out + v * kLanes) = packed;
        }
      } else {
        const float shift = bias != nullptr ? widen(bias[row]) : 0.f;
#pragma unroll
        for (int v = 0; v < kHeld; ++v) {
          const int at = b + (v / 4) * 4 * kLanes + v % 4;
          if (at < batch) y[(first_row + at) * m + row] = narrow<T>(sum[v] + shift);
        }
      }
    }
#pragma unroll
    for (int v = 0; v < L::kPer; ++v) sum[v] = 0.f;
  }
}

// Y[b, i] = sum over the slices, in their order, of partial[slice][i][b], plus bias[i]. A block
// takes 32 rows x 32 batch rows and transposes them through shared memory.
template <typename T>
__global__ void __launch_bounds__(256)
    reduce_slices(Size m, Size batch, Size slices, Size padded, const T* __restrict__ bias,
                  T* __restrict__ y, const float* __restrict__ partial) {
  __shared__ float tile[32][33];
  const int row_tiles = (m + 31) / 32;
  const int first_row = blockIdx.x % row_tiles * 32, first_b = blockIdx.x / row_tiles * 32;
  {
    const int i = threadIdx.x / 8, b = threadIdx.x % 8 * 4;
    const int row = first_row + i;
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
    if (row < m && first_b + b < padded) {
      const float* source = partial + static_cast<Size>(row) * padded + first_b + b;
#pragma unroll 8
      for (int s = 0; s < static_cast<int>(slices); ++s) {
        const float4 part = *reinterpret_cast<const float4*>(source + s * m * padded);
        sum.x += part.x;
        sum.y += part.y;
        sum.z += part.z;
        sum.w += part.w;
      }
      if (bias != nullptr) {
        const float shift = widen(bias[row]);
        sum.x += shift;
        sum.y += shift;
        sum.z += shift;
        sum.w += shift;
      }
    }
    tile[b + 0][i] = sum.x;
    tile[b + 1][i] = sum.y;
    tile[b + 2][i] = sum.z;
    tile[b + 3][i] = sum.w;
  }
  __syncthreads();
#pragma unroll
  for (int b = threadIdx.x / 32; b < 32; b += 8) {
    const int row = first_row + threadIdx.x % 32;
    if (row < m && first_b + b < batch) {
      y[static_cast<Size>(first_b + b) * m + row] = narrow<T>(tile[b][threadIdx.x % 32]);
    }
  }
}

}  // namespace snack
