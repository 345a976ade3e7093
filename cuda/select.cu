// The entries of smallest key, exactly so many, without a sort and without asking the host.
//
// Keys are the bits of a value without its sign (float types: so magnitudes in order, infinities
// and NaN last), or unsigned integers as they are (below 2^31). A radix selection: `select_digit`,
// once for each group of bits from the highest, counts how often each digit occurs among the keys
// that agree with the bits found so far, and the last block to finish finds the digit in which the
// wanted rank lies. That leaves a threshold and how many of the keys equal to it are wanted too:
// `select_cutoff` finds the index up to which they are, so of equal keys the lower index goes
// first.
//
//   state[0] bits of the threshold found so far   state[2] keys that agree with them
//   state[1] how many of those are wanted         state[3] index of the last one of them
//
// Entry e is selected if key < state[0], or key == state[0] and e <= state[3].
//
// A block counts in shared memory. Deterministic: sums of integers. state, histograms and arrivals
// start at zero. Source: the radix selection of Alabi et al., "Fast k-selection algorithms for
// graphics processing units", ACM JEA 2012; the index as the last digits is added.
#include "keys.cuh"

namespace snack {

// Number of keys: what the device has counted, or the host.
__device__ __forceinline__ Size length_of(Size count, const unsigned* counted) {
  return counted ? min(count, static_cast<Size>(__ldcg(counted))) : count;
}

// One pass: the digit of `width` bits above `shift`. `wanted` counts for the first pass alone.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    select_digit(Size count, Size wanted, Size shift, Size width, Size first,
                 const unsigned* counted, const T* __restrict__ values, Word* state,
                 unsigned* histogram, unsigned* arrivals) {
  __shared__ unsigned digits[kDigits];
  constexpr int kEach = 8;
  const Size n = length_of(count, counted);
  const Word prefix = first ? 0 : state[0];
  for (int d = threadIdx.x; d < kDigits; d += kThreads) digits[d] = 0;
  __syncthreads();

  const unsigned mask = (1u << width) - 1;
  for (Size start = static_cast<Size>(blockIdx.x) * kThreads * kEach; start < n;
       start += static_cast<Size>(gridDim.x) * kThreads * kEach) {
    Word key[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const Size e = start + i * kThreads + threadIdx.x;
      key[i] = e < n ? key_of(values, e) : ~0ull;  // agrees with no prefix, not even the empty one
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (key[i] >> shift >> width == prefix) {
        atomicAdd(&digits[static_cast<unsigned>(key[i] >> shift) & mask], 1u);
      }
    }
  }
  __syncthreads();
  for (int d = threadIdx.x; d < kDigits; d += kThreads) {
    if (digits[d]) atomicAdd(histogram + d, digits[d]);
  }

  if (!is_last_block(arrivals)) return;
  find_digit(histogram, prefix, width, first ? wanted : state[1], state);
}

// A block counts the equal keys of its share of the entries; the last one finds the share in which
// the last wanted one lies, and it there.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    select_cutoff(Size count, Size share, const T* __restrict__ values, Word* state,
                  unsigned* counts, unsigned* arrivals) {
  const Word threshold = state[0], wanted = state[1];
  if (wanted == state[2]) {  // all of them
    if (blockIdx.x == 0 && threadIdx.x == 0) state[3] = count;
    return;
  }
  const Size from = blockIdx.x * share, to = min(from + share, count);
  unsigned equal = 0, total;
  for (Size e = from + threadIdx.x; e < to; e += kThreads) equal += key_of(values, e) == threshold;
  block_scan(equal, total);
  if (threadIdx.x == 0) counts[blockIdx.x] = total;

  if (!is_last_block(arrivals)) return;
  __shared__ Size where;
  __shared__ unsigned passed;
  scan_counts(counts, gridDim.x);
  __syncthreads();
  for (Size b = threadIdx.x; b < gridDim.x; b += kThreads) {
    const unsigned before = counts[b], after = counts[b + 1];
    if (before < wanted && wanted <= after) {
      where = b * share;
      passed = before;
    }
  }
  __syncthreads();
  unsigned before = passed;
  const Size end = min(where + share, count);
  for (Size first = where; first < end; first += kThreads) {
    const Size e = first + threadIdx.x;
    const bool is_equal = e < end && key_of(values, e) == threshold;
    const unsigned place = before + block_scan(is_equal, total);
    if (is_equal && place + 1 == wanted) state[3] = e;
    before += total;
  }
}

// dropped[e] = 1 for the selected entries, 0 for others.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    select_mask(Size count, const T* __restrict__ values, const Word* __restrict__ state,
                unsigned char* __restrict__ dropped) {
  const Size e = static_cast<Size>(blockIdx.x) * kThreads + threadIdx.x;
  if (e >= count) return;
  dropped[e] = is_selected(key_of(values, e), e, state[0], state[3]);
}

}  // namespace snack
