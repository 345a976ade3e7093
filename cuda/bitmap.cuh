// What the kernels of topology updates share: maps of one bit for each position, and block-wide
// scans.
//
// Position i * k + j of the matrix is bit i * k + j of a map: bit p % 32 of word p / 32. A chunk is
// the kChunkBits bits that one block of kThreads threads handles, a word each. For each chunk a
// count of set bits is kept; the exclusive sums of these counts turn a bit into its rank, that is a
// position into an entry, without any sort. There are fewer than 2^31 positions.
#pragma once

#include "common.cuh"

namespace snack {

constexpr int kThreads = 256;
constexpr int kWordBits = 32;
constexpr int kChunkBits = kThreads * kWordBits;

// Sum of x over the threads before this one; `total` becomes that over all. kThreads threads.
__device__ __forceinline__ unsigned block_scan(unsigned x, unsigned& total) {
  __shared__ unsigned sums[kThreads / kWarpSize];
  const int lane = lane_id(), warp = threadIdx.x / kWarpSize;
  unsigned inclusive = x;
#pragma unroll
  for (int distance = 1; distance < kWarpSize; distance *= 2) {
    const unsigned before = __shfl_up_sync(kFullMask, inclusive, distance);
    if (lane >= distance) inclusive += before;
  }
  if (lane == kWarpSize - 1) sums[warp] = inclusive;
  __syncthreads();
  unsigned offset = 0;
  total = 0;
#pragma unroll
  for (int w = 0; w < kThreads / kWarpSize; ++w) {
    if (w < warp) offset += sums[w];
    total += sums[w];
  }
  __syncthreads();
  return offset + inclusive - x;
}

// Whether this block is the last of its grid to come here: it sees what all have written before.
// `arrivals` starts at zero. Which block is last varies, but not what it then computes.
__device__ __forceinline__ bool is_last_block(unsigned* arrivals) {
  __shared__ bool last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last = atomicAdd(arrivals, 1u) == gridDim.x - 1;
  __syncthreads();
  if (last) __threadfence();
  return last;
}

// counts[0 .. n - 1] -> their exclusive sums, with the sum of all in counts[n]. By one block, of
// what others may have written.
__device__ __forceinline__ void scan_counts(unsigned* counts, Size n) {
  constexpr int kEach = 8;
  unsigned before = 0;
  for (Size first = 0; first < n; first += kThreads * kEach) {
    unsigned held[kEach], sum = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const Size at = first + threadIdx.x * kEach + i;
      held[i] = at < n ? __ldcg(counts + at) : 0;
      sum += held[i];
    }
    unsigned total;
    unsigned running = before + block_scan(sum, total);
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const Size at = first + threadIdx.x * kEach + i;
      if (at < n) counts[at] = running;
      running += held[i];
    }
    before += total;
  }
  if (threadIdx.x == 0) counts[n] = before;
}

}  // namespace snack
