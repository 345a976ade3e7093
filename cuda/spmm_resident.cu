// Sparse W (m, k) in canonical CSR order times few batch rows, summed in float32 (no TF32):
//
//   Y[b, i] = sum_j W[i, j] X[b, j] + bias[i]      X (batch, k), Y (batch, m), both row-major
//
// With kPermuted, W is given by the column-major view of another matrix: entry j has its value at
// values[permutation[j]].
//
// A block keeps kBatch rows of X in shared memory, transposed to [k][kBatch], and its warps walk
// the rows of W. One warp = one row: its lanes form groups of kSplit lanes, a group takes 4
// neighbouring entries at a time and a lane kPer of the kBatch batch rows, so one load of up to 16
// bytes a lane fetches what an entry needs.
//
//   shared: xs[0 .. k - 1][kBatch], then one zero row
//
// Values and columns are read in place, four by one load that starts at the aligned address
// below a row's first entry, and are issued before the barrier that waits for X. Entries of a
// neighbouring row that come along count as 0 times the zero row, so that nothing of another row
// (an infinity, say) takes part.
//
// Deterministic: one fixed order for every sum. Values, columns and permutation must start on
// 16-byte boundaries. Sizes first, then index arrays, values, dense operand, output.
#include "x_slice.cuh"

namespace snack {

// How the lanes of a warp share the work of kBatch batch rows.
template <int kBatch>
struct Lanes {
  static constexpr int kPer = 4;                      // batch rows a lane
  static constexpr int kSplit = kBatch / kPer;        // lanes an entry
  static constexpr int kGroups = kWarpSize / kSplit;  // groups of a warp
  static constexpr int kStep = kGroups * 4;           // entries a warp takes at a time
};

// Four neighbouring entries in flight, and what their consumer must know. Columns are 16-bit: X
// would not fit shared memory if there were more of them.
template <typename T>
struct Slot {
  Pack<T, 4> values;
  Pack<unsigned, 2> columns;  // two in each word
  int before;  // place in the row of the warp's first entry of this step; negative at the start
  int length;  // of the row
  bool last;   // whether the row ends with this step

  __device__ __forceinline__ int column(int e) const {
    return columns.at[e / 2] >> (e % 2 * 16) & 0xffff;
  }
};

template <bool kPermuted, typename T>
__device__ __forceinline__ void load_entries(Slot<T>& slot, int first, int nnz,
                                             const unsigned short* __restrict__ columns,
                                             const int* __restrict__ permutation,
                                             const T* __restrict__ values) {
  if (first + 4 <= nnz) {
    if constexpr (kPermuted) {
      const auto from = *reinterpret_cast<const Pack<int, 4>*>(permutation + first);
#pragma unroll
      for (int e = 0; e < 4; ++e) slot.values.at[e] = values[from.at[e]];
    } else {
      slot.values = *reinterpret_cast<const Pack<T, 4>*>(values + first);
    }
    slot.columns = *reinterpret_cast<const Pack<unsigned, 2>*>(columns + first);
    return;
  }
  // The last entries of the matrix: no 16 bytes to read. Entries past the end are masked later.
  unsigned column[4];
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const int j = min(first + e, nnz - 1);
    slot.values.at[e] = values[kPermuted ? permutation[j] : j];
    column[e] = columns[j];
  }
  slot.columns.at[0] = column[0] | column[1] << 16;
  slot.columns.at[1] = column[2] | column[3] << 16;
}

// Sum over the groups of a warp. While a lane holds several sums, the pair exchanges halves and
// each keeps one half; so few shuffles move many sums. What a lane ends with is in sum[0].
template <int kPer, int kSplit>
__device__ __forceinline__ void sum_groups(float (&sum)[kPer]) {
  int held = kPer;
#pragma unroll
  for (int mask = kSplit; mask < kWarpSize; mask *= 2) {
    const bool upper = lane_id() & mask;
    if (held > 1) {
      held /= 2;
#pragma unroll
      for (int i = 0; i < kPer / 2; ++i) {
        if (i < held) {
          const float keep = upper ? sum[i + held] : sum[i];
          const float give = upper ? sum[i] : sum[i + held];
          sum[i] = keep + __shfl_xor_sync(kFullMask, give, mask);
        }
      }
    } else {
      sum[0] += __shfl_xor_sync(kFullMask, sum[0], mask);
    }
  }
}

// The batch row whose sum is in `sum[0]` of this lane after sum_groups, -1 where another lane has
// it.
template <int kBatch>
__device__ __forceinline__ int first_sum() {
  using L = Lanes<kBatch>;
  int b = lane_id() % L::kSplit * L::kPer;
  int held = L::kPer;
#pragma unroll
  for (int mask = L::kSplit; mask < kWarpSize; mask *= 2) {
    const bool upper = lane_id() & mask;
    if (held > 1) {
      held /= 2;
      if (upper) b += held;
    } else if (upper) {
      b = -1;
      break;
    }
  }
  return b;
}

template <typename T, bool kPermuted, int kBatch>
__global__ void __launch_bounds__(1024, 1)
    spmm_csr_resident(Size m_, Size k_, Size batch_, Size nnz_, Size blocks_,
                      const int* __restrict__ row_offsets,
                      const unsigned short* __restrict__ columns,
                      const int* __restrict__ permutation, const T* __restrict__ values,
                      const T* __restrict__ x, const T* __restrict__ bias, T* __restrict__ y) {
  using L = Lanes<kBatch>;
  constexpr int kDepth = 2;  // steps in flight: what 64 registers hold
  extern __shared__ __align__(16) float xs[];

  const int m = m_, k = k_, nnz = nnz_, blocks = blocks_;
  const int tile = blockIdx.x / blocks, block = blockIdx.x - tile * blocks;
  const int first = tile * kBatch;
  const int batch = min(static_cast<int>(batch_) - first, kBatch);
  const int warps = blockDim.x / kWarpSize;
  const int group = lane_id() / L::kSplit, part = lane_id() % L::kSplit;
  // Neighbouring rows: where values are gathered they share what the cache brings.
  const int rows_per_block = (m + blocks - 1) / blocks;
  const int row_end = min(m, (block + 1) * rows_per_block);
  int row = block * rows_per_block + threadIdx.x / kWarpSize;

  struct Span {
    int start, length;
  };
  auto span_of = [&](int r) -> Span {
    if (r >= row_end) return {0, 0};
    const int start = row_offsets[r];
    return {start, row_offsets[r + 1] - start};
  };
  // The producer runs kDepth steps ahead of the consumer, across rows.
  int fetch_row = row, step = 0;
  Span fetched = span_of(row), upcoming = span_of(row + warps);
  auto fetch = [&](Slot<T>& slot) {
    const int skip = fetched.start & 3;
    slot.before = step * L::kStep - skip;
    slot.length = fetched.length;
    if (slot.before + group * 4 < slot.length) {
      load_entries<kPermuted>(slot, fetched.start + slot.before + group * 4, nnz, columns,
                              permutation, values);
    }
    ++step;
    slot.last = step * L::kStep >= skip + fetched.length;
    if (slot.last) {
      step = 0;
      fetch_row += warps;
      fetched = upcoming;
      upcoming = span_of(fetch_row + warps);
    }
  };
  // With few batch rows the first part of X is on its way while the row offsets are; with more,
  // the entries are asked for first.
  constexpr bool kEarly = kBatch == 4;
  const SliceCopy<T, kBatch> copy(xs, x + static_cast<Size>(first) * k, k, k, batch, k % 4 == 0);
  typename SliceCopy<T, kBatch>::Tile tile_of_x;
  int column = copy.begin();
  if (kEarly && column < k) copy.load(column, tile_of_x);
  Slot<T> slots[kDepth];
#pragma unroll
  for (int i = 0; i < kDepth; ++i) fetch(slots[i]);
  float shift = bias != nullptr && row < row_end ? widen(bias[row]) : 0.f;

  if (kEarly && column < k) copy.store(column, tile_of_x);
  copy.template run<1>(kEarly ? column + copy.step() : column);
  __syncthreads();

  const float* xs_part = xs + part * L::kPer;
  float sum[L::kPer] = {};
  while (row < row_end) {
#pragma unroll
    for (int i = 0; i < kDepth; ++i) {
      Slot<T>& slot = slots[i];
      const int before = slot.before + group * 4;
      if (before < slot.length) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const bool mine = static_cast<unsigned>(before + e) < static_cast<unsigned>(slot.length);
          const float value = mine ? widen(slot.values.at[e]) : 0.f;
          const auto rows = *reinterpret_cast<const Pack<float, L::kPer>*>(
              xs_part + (mine ? slot.column(e) : k) * kBatch);
#pragma unroll
          for (int v = 0; v < L::kPer; ++v) sum[v] += value * rows.at[v];
        }
      }
      if (slot.last && row < row_end) {
        sum_groups<L::kPer, L::kSplit>(sum);
        const int b = first_sum<kBatch>();
        if (b >= 0 && b < batch)
          y[static_cast<Size>(first + b) * m + row] = narrow<T>(sum[0] + shift);
#pragma unroll
        for (int v = 0; v < L::kPer; ++v) sum[v] = 0.f;
        row += warps;
        if (bias != nullptr && row < row_end) shift = widen(bias[row]);
      }
      fetch(slot);
    }
  }
}

}  // namespace snack
