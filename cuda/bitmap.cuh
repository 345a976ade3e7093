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
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();  // for the whole block, which has met at the barrier
    last = atomicAdd(arrivals, 1u) == gridDim.x - 1;
  }
  __syncthreads();
  if (last) __threadfence();
  return last;
}

// counts[0 .. n - 1] -> their exclusive sums, with the sum of all in counts[n]; for kLists such
// lists at once. By one block, of what others may have written.
template <int kLists>
__device__ __forceinline__ void scan_lists(unsigned* const (&lists)[kLists], Size n) {
  constexpr int kEach = 8;
  unsigned before[kLists] = {};
  for (Size first = 0; first < n; first += kThreads * kEach) {
    unsigned held[kLists][kEach], sum[kLists] = {};
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const Size at = first + threadIdx.x * kEach + i;
#pragma unroll
      for (int l = 0; l < kLists; ++l) {
        held[l][i] = at < n ? __ldcg(lists[l] + at) : 0;
        sum[l] += held[l][i];
      }
    }
#pragma unroll
    for (int l = 0; l < kLists; ++l) {
      unsigned total;
      unsigned running = before[l] + block_scan(sum[l], total);
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const Size at = first + threadIdx.x * kEach + i;
        if (at < n) lists[l][at] = running;
        running += held[l][i];
      }
      before[l] += total;
    }
  }
  if (threadIdx.x == 0) {
    for (int l = 0; l < kLists; ++l) lists[l][n] = before[l];
  }
}

__device__ __forceinline__ void scan_counts(unsigned* counts, Size n) {
  unsigned* const lists[1] = {counts};
  scan_lists<1>(lists, n);
}

// Kernels with little to do for a word take the same word of kParts chunks at once, to have as many
// loads in flight: chunk blockIdx.x * kParts + part.
constexpr int kParts = 4;

// before[part]: set bits in the chunk of that part before this thread's word. Two counts, which are
// at most kChunkBits, share a scan.
__device__ __forceinline__ void scan_bits(const unsigned (&bits)[kParts],
                                          unsigned (&before)[kParts]) {
  static_assert(kChunkBits < 65536, "the sum of a chunk must fit 16 bits");
#pragma unroll
  for (int part = 0; part < kParts; part += 2) {
    unsigned total;
    const unsigned both = static_cast<unsigned>(__popc(bits[part])) |
                          static_cast<unsigned>(__popc(bits[part + 1])) << 16;
    const unsigned scanned = block_scan(both, total);
    before[part] = scanned & 0xffff;
    before[part + 1] = scanned >> 16;
  }
}

// Adds the set bits of a warp, whose words are of one chunk, to its count, which starts at zero.
__device__ __forceinline__ void count_bits(unsigned bits, unsigned* count) {
  const unsigned sum = __reduce_add_sync(kFullMask, static_cast<unsigned>(__popc(bits)));
  if (lane_id() == 0 && sum) atomicAdd(count, sum);
}

}  // namespace snack
