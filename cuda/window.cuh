// Entries of rows in flight, 16 bytes a lane: what the kernels share that spread rows over a tile
// in shared memory, or gather them from one. Values are moved as bits of 16.
#pragma once

#include "x_slice.cuh"

namespace snack {

// Loads are asked for in the order of the source across this.
__device__ __forceinline__ void in_order() { asm volatile("" ::: "memory"); }

using Words = Pack<unsigned, 4>;  // 8 elements of 16 bits, two in each word

// 8 neighbouring elements of an array of `size`, from `at` on, a multiple of 8. For the last ones,
// of which there are no 16 bytes to read: a loop, for code that is rarely run should be short.
__device__ __forceinline__ Words load_last(const unsigned short* __restrict__ array, int at,
                                           int size) {
  Words made = {};
#pragma unroll 1
  for (int e = 7; e >= 0; --e) {
#pragma unroll
    for (int i = 3; i > 0; --i) made.at[i] = made.at[i] << 16 | made.at[i - 1] >> 16;
    made.at[0] = made.at[0] << 16 | array[min(at + e, size - 1)];
  }
  return made;
}

// 8 elements that a permutation picks, of an array of `size`.
__device__ __forceinline__ Words load_permuted(const unsigned short* __restrict__ array,
                                               const int* __restrict__ permutation, int at,
                                               int size) {
  Words made;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const unsigned low = array[permutation[min(at + 2 * i, size - 1)]];
    made.at[i] = low | array[permutation[min(at + 2 * i + 1, size - 1)]] << 16;
  }
  return made;
}

// Entries of one row in flight: 8 neighbouring ones a lane and slot.
template <int kSlots>
struct Window {
  static constexpr int kEntries = kWarpSize * 8 * kSlots;

  int first = 0, end = 0;  // of the row
  int base = 0;            // first entry of the window, a multiple of 8
  Words values[kSlots];
  Words columns[kSlots];  // later the places in a row of a tile, in bytes

  __device__ __forceinline__ int at(int slot) const {
    return base + (slot * kWarpSize + lane_id()) * 8;
  }
  __device__ __forceinline__ unsigned column(int slot, int e) const {
    return columns[slot].at[e / 2] >> (e % 2 * 16) & 0xffff;
  }
  // A first window for the slice of columns from `slice_first` on, if these are spread evenly.
  __device__ __forceinline__ void guess(int slice_first, int k) {
    int begin = first;
    if (slice_first > 0) {
      const int length = end - first;
      const int near = static_cast<int>(__fdividef(slice_first, k) * length);
      begin += max(0, near - (3 << (kWarpSize - __clz(length)) / 2));
    }
    base = begin & ~7;
  }
  // Whether the guess was wrong: entries of the slice may lie before it. `base` is right then.
  __device__ __forceinline__ bool missed(int slice_first, int k,
                                         const unsigned short* __restrict__ all_columns) {
    if (slice_first == 0 || base <= first) return false;
    const int low = __shfl_sync(kFullMask, column(0, 0), 0);
    if (low <= slice_first) return false;
    base = first_entry(all_columns, first, end, slice_first, k) & ~7;
    return true;
  }
  __device__ __forceinline__ void load_columns(const unsigned short* __restrict__ all_columns,
                                               int nnz) {
    load(columns, all_columns, nnz);
  }
  template <bool kPermuted>
  __device__ __forceinline__ void load_values(const unsigned short* __restrict__ all_values,
                                              const int* __restrict__ permutation, int nnz) {
    if constexpr (!kPermuted) {
      load(values, all_values, nnz);
    } else {
#pragma unroll
      for (int s = 0; s < kSlots; ++s) {
        if (at(s) < end) values[s] = load_permuted(all_values, permutation, at(s), nnz);
      }
    }
  }
  // The last column of the window, where all of it is in the row.
  __device__ __forceinline__ int last_column() const {
    return __shfl_sync(kFullMask, column(kSlots - 1, 7), kWarpSize - 1);
  }
  // Turns columns into places: entries of the row among `width` columns from `from` on have their
  // distance from it, all others the place behind these. Waits for the columns. With kTurned bits
  // 4 3 2 1 0 of a place become 2 1 4 3 0: as a matrix load gives them, a lane has 8 neighbours.
  template <bool kTurned>
  __device__ __forceinline__ void settle(int from, int width) {
    const unsigned back = (-from & 0xffff) | -from << 16, most = width | width << 16;
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
      const int before = first - at(s), there = end - at(s);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        unsigned both = columns[s].at[i];
        // Low bits, as many as entries of this word are in front of the row, or not behind it.
        if (s == 0) both |= __funnelshift_lc(~0u, 0u, max(0, (before - 2 * i) * 16));
        both |= ~__funnelshift_lc(~0u, 0u, max(0, (there - 2 * i) * 16));
        unsigned place = __viaddmin_u16x2(both, back, most);
        if constexpr (kTurned) {
          place = (place & 0xffe1ffe1u) | (place << 2 & 0x00180018u) | (place >> 2 & 0x00060006u);
        }
        columns[s].at[i] = place + place;
      }
    }
  }
  // Stores the values at their places in `row`, which has one place more for entries of others.
  __device__ __forceinline__ void spread(char* row) const {
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
      if (at(s) >= end) continue;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const unsigned place = opaque(columns[s].at[i]), bits = values[s].at[i];
        *reinterpret_cast<unsigned short*>(row + (place & 0xffff)) = bits;
        *reinterpret_cast<unsigned short*>(row + (place >> 16)) = bits >> 16;
      }
    }
  }
  // The opposite: takes the values from their places in `row` and stores them in `all_values`.
  // `none` is the place for entries of others.
  __device__ __forceinline__ void gather(const char* row, unsigned none,
                                         unsigned short* __restrict__ all_values) const {
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
      if (at(s) >= end) continue;
      Words taken;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const unsigned place = columns[s].at[i];
        const unsigned low = *reinterpret_cast<const unsigned short*>(row + (place & 0xffff));
        const unsigned high = *reinterpret_cast<const unsigned short*>(row + (place >> 16));
        taken.at[i] = low | high << 16;
      }
      // Entries that are not of the row or the slice come first or last.
      if (column(s, 0) != none && column(s, 7) != none) {
        *reinterpret_cast<Words*>(all_values + at(s)) = taken;
      } else {
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          if (column(s, e) != none) all_values[at(s) + e] = taken.at[e / 2] >> (e % 2 * 16);
        }
      }
    }
  }
  // Stores zeros where `spread` stored.
  __device__ __forceinline__ void clear(char* row) const {
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
      if (at(s) >= end) continue;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const unsigned place = opaque(columns[s].at[i]);
        *reinterpret_cast<unsigned short*>(row + (place & 0xffff)) = 0;
        *reinterpret_cast<unsigned short*>(row + (place >> 16)) = 0;
      }
    }
  }

 private:
  __device__ __forceinline__ void load(Words (&to)[kSlots],
                                       const unsigned short* __restrict__ array, int size) const {
    if (base + kEntries <= size) {
#pragma unroll
      for (int s = 0; s < kSlots; ++s) {
        if (at(s) < end) to[s] = *reinterpret_cast<const Words*>(array + at(s));
      }
    } else {
#pragma unroll
      for (int s = 0; s < kSlots; ++s) {
        if (at(s) < end) to[s] = load_last(array, at(s), size);
      }
    }
  }
};

// kCount (2 or 4) neighbouring elements of a row, two in each word; zero where there are none.
template <int kCount>
__device__ __forceinline__ Pack<unsigned, kCount / 2> load_operand(
    const unsigned short* __restrict__ row, int at, bool there) {
  Pack<unsigned, kCount / 2> made = {};
  if (there) made = *reinterpret_cast<const Pack<unsigned, kCount / 2>*>(row + at);
  return made;
}

}  // namespace snack
