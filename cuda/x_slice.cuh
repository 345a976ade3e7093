// What the kernels share that hold X (batch, k) in shared memory, whole or slice by slice: the
// transposed copy of a slice, and the search for the entries of a row of W that fall into it.
#pragma once

#include "common.cuh"

namespace snack {

// The same number, but the compiler cannot tell: what depends on it is computed where it is used
// and not kept in registers across a loop.
__device__ __forceinline__ int opaque(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

// xs[column] = x[column]. x must keep the alignment of 4 elements.
template <typename T>
__device__ __forceinline__ void stage_vector(float* __restrict__ xs, const T* __restrict__ x,
                                             int k) {
  if (k % 4 == 0) {
    for (int c = threadIdx.x * 4; c < k; c += blockDim.x * 4) {
      const auto in = *reinterpret_cast<const Pack<T, 4>*>(x + c);
      Pack<float, 4> out;
#pragma unroll
      for (int i = 0; i < 4; ++i) out.at[i] = widen(in.at[i]);
      *reinterpret_cast<Pack<float, 4>*>(xs + c) = out;
    }
  } else {
    for (int c = threadIdx.x; c < k; c += blockDim.x) xs[c] = widen(x[c]);
  }
}

// xs[column][kBatch] = X[b, first_column + column], then one zero row: xs[width][..] = 0.
//
// A thread moves 4 batch rows x 4 columns at a time: 4 loads of 4 neighbouring columns, a transpose
// in registers, 4 stores of 16 bytes. The 8 lanes of one store phase write 128 neighbouring bytes
// or to other banks. `x` points at the slice's first row and column; batch rows past `batch` are
// zero. Rows of X must keep the alignment of 4 elements if `vector`, and width be a multiple of 4
// then.
template <typename T, int kBatch>
struct SliceCopy {
  static constexpr int kQuads = kBatch / 4;              // groups of 4 batch rows
  static constexpr int kNear = kQuads < 8 ? kQuads : 8;  // of them in neighbouring lanes
  static constexpr int kFar = kQuads / kNear;
  static constexpr int kSpread = 8 / kNear;  // quads of columns in one store phase
  static constexpr int kAcross = kWarpSize / kNear;
  using Tile = Pack<T, 4>[4];

  float* xs;
  const T* source[4];  // the thread's batch rows
  int width, rows;     // rows: how many of them exist
  bool vector;

  __device__ __forceinline__ SliceCopy(float* xs, const T* x, int k, int width, int batch,
                                       bool vector)
      : xs(xs), width(width), rows(batch - first_row()), vector(vector) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      source[i] = x + static_cast<Size>(min(first_row() + i, batch - 1)) * k;
    }
  }
  static __device__ __forceinline__ int warp() { return threadIdx.x / kWarpSize; }
  static __device__ __forceinline__ int first_row() {
    return (lane_id() % kNear + warp() % kFar * kNear) * 4;
  }
  // First column of the thread, and the distance to its next one.
  static __device__ __forceinline__ int begin() {
    return (warp() / kFar * kAcross + lane_id() / kNear) * 4;
  }
  static __device__ __forceinline__ int step() {
    return blockDim.x / kWarpSize / kFar * kAcross * 4;
  }
  __device__ __forceinline__ void load(int c, Tile& in) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (vector) {
        in[i] = *reinterpret_cast<const Pack<T, 4>*>(source[i] + c);
      } else {
#pragma unroll
        for (int j = 0; j < 4; ++j) in[i].at[j] = source[i][min(c + j, width - 1)];
      }
    }
  }
  __device__ __forceinline__ void store(int c, const Tile& in) const {
    // The column, of 4, that a lane stores first: 4 columns are kQuads * 64 bytes, banks repeat
    // after 128. With one quad two lanes' columns differ in banks as they are.
    const int turn = kNear == 1 ? lane_id() / 2 % 4 : lane_id() / kNear % kSpread;
    Pack<float, 4> out[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) out[j].at[i] = i < rows ? widen(in[i].at[j]) : 0.f;
    }
    // Lanes of other columns in the same phase begin with another column: other banks.
    if constexpr (kSpread >= 2) {
      swap(out[0], out[1], turn & 1);
      swap(out[2], out[3], turn & 1);
    }
    if constexpr (kSpread >= 4) {
      swap(out[0], out[2], turn & 2);
      swap(out[1], out[3], turn & 2);
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int column = c + (j ^ turn);
      if (column < width) {
        *reinterpret_cast<Pack<float, 4>*>(xs + column * kBatch + first_row()) = out[j];
      }
    }
  }
  static __device__ __forceinline__ void swap(Pack<float, 4>& p, Pack<float, 4>& q, bool really) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float keep = p.at[i];
      p.at[i] = really ? q.at[i] : keep;
      q.at[i] = really ? keep : q.at[i];
    }
  }
  // The thread's columns from `c` on, kAtOnce of its parts in flight, and the zero row.
  template <int kAtOnce>
  __device__ __forceinline__ void run(int c) const {
    if (vector) {
#pragma unroll kAtOnce
      for (; c < width; c += step()) {
        Tile in;
        load(c, in);
        store(c, in);
      }
    } else {
#pragma unroll 1
      for (; c < width; c += step()) {
        Tile in;
        load(c, in);
        store(c, in);
      }
    }
    if (threadIdx.x < kBatch) xs[width * kBatch + threadIdx.x] = 0.f;
  }
};

// First entry of a row, in [start, end), whose column is at least `column`. Columns rise along a
// row; where they are spread evenly over the k columns the search starts near its answer.
__device__ __forceinline__ int first_entry(const unsigned short* __restrict__ columns, int start,
                                           int end, int column, int k) {
  const int length = end - start;
  int low = start, high = end;
  const float share = __fdividef(static_cast<float>(column), static_cast<float>(k));
  int probe = min(start + static_cast<int>(length * share), end - 1);
  int reach = 2 << (kWarpSize - __clz(length)) / 2;  // about twice the square root
  bool rose = false, fell = false;
  while (low < high) {
    if (columns[probe] < column) {
      low = probe + 1;
      rose = true;
    } else {
      high = probe;
      fell = true;
    }
    if (rose && fell) {
      probe = (low + high) / 2;
    } else {
      probe = rose ? min(low + reach, high - 1) : max(high - reach, low);
      reach *= 2;
    }
  }
  return low;
}

// The rows of W that a warp of a block takes, kRows at once (a set), and where the slice of each
// is: lane l knows that of the row l % kRows of set `base` + l / kRows.
template <int kRows>
struct RowSlices {
  static constexpr int kSets = kWarpSize / kRows;  // whose slices are known at a time

  int row_first, row_end;      // of the block
  int first_column, width, k;  // of the slice
  const int* row_offsets;
  const unsigned short* columns;
  int base = -kSets, set = kSets;  // the next set is base + set
  int found = -1, start = 0, length = 0;

  __device__ __forceinline__ int row(int lane) const {
    const int warp = threadIdx.x / kWarpSize, warps = blockDim.x / kWarpSize;
    return row_first + (warp + (base + lane / kRows) * warps) * kRows + lane % kRows;
  }
  // Whether there is a next set; its slices are known then.
  __device__ __forceinline__ bool next() {
    if (set == kSets) {
      base += kSets;
      set = 0;
      if (found != base) find();
    }
    return row(set * kRows) < row_end;
  }
  // From the first set again. What is known of the first sets is kept where there are no others.
  __device__ __forceinline__ void rewind() {
    base = -kSets;
    set = kSets;
  }
  __device__ __forceinline__ void find() {
    const int mine = row(lane_id());
    found = base;
    start = length = 0;
    if (mine < row_end) {
      const int begin = row_offsets[mine], end = row_offsets[mine + 1];
      start = first_column > 0 ? first_entry(columns, begin, end, first_column, k) : begin;
      const int stop = first_column + width < k
                           ? first_entry(columns, begin, end, first_column + width, k)
                           : end;
      length = stop - start;
    }
  }
};

}  // namespace snack
