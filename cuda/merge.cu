// From the entries of a structure to maps of bits, and from maps back to a structure: what remains
// after a drop and what grows are united without a sort.
//
//   mark_entries     entries -> old map (all of them), kept map (those not dropped), counts of both
//   expand_ranks     kept map + ranks that grow -> new map: bit r of the rank map set means that
//                    the inactive position of rank r grows
//   emit_structure   old and new map -> row offsets, columns, and for each new entry its old index
//   emit_positions   new map -> the positions of its bits
//   move_entries     out[j] = in[new_to_old[j]], or zero where that is negative
//   move_in_place    the same for several arrays that are rewritten where they are
//
// Positions, maps, chunks and counts are those of bitmap.cuh. A block of the kernels that start
// from maps owns a chunk, a thread one word of it; a rank within the map is the chunk's exclusive
// sum plus a scan of popcounts within the block. Deterministic: sums and unions of integers.
#include "keys.cuh"

namespace snack {

constexpr int kEntries = 8;  // that a thread of mark_entries takes

// The row of entry e, which lies in [low, high]: the last one that starts at e or before.
__device__ __forceinline__ int row_of(const int* __restrict__ row_offsets, Size e, int low,
                                      int high) {
  while (low < high) {
    const int middle = low + (high - low + 1) / 2;
    if (row_offsets[middle] <= e) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

// Whether entry e goes. Values are compared with the threshold of a selection (select.cu); a mask
// of bytes says so itself.
template <typename T>
struct Drop {
  const T* values;
  Word threshold, cutoff;
  __device__ __forceinline__ Drop(const T* values, const Word* state)
      : values(values), threshold(values ? state[0] : 0), cutoff(values ? state[3] : 0) {}
  __device__ __forceinline__ bool operator()(Size e) const {
    return values && is_selected(key_of(values, e), e, threshold, cutoff);
  }
};
template <>
struct Drop<unsigned char> {
  const unsigned char* dropped;
  __device__ __forceinline__ Drop(const unsigned char* dropped, const Word*) : dropped(dropped) {}
  __device__ __forceinline__ bool operator()(Size e) const { return dropped && dropped[e]; }
};

// The same for all rows, by a whole warp: its lanes probe 32 rows at a time.
__device__ __forceinline__ int row_by_warp(const int* __restrict__ row_offsets, Size e, Size m) {
  Size low = 0, high = m - 1;
  while (low < high) {
    const Size step = (high - low + kWarpSize - 1) / kWarpSize;
    const Size probe = low + (lane_id() + 1) * step;
    const bool starts = probe <= high && row_offsets[probe] <= e;
    low += __popc(__ballot_sync(kFullMask, starts)) * step;
    high = min(high, low + step - 1);
  }
  return static_cast<int>(low);
}

// A block owns kThreads * kEntries neighbouring entries, a warp 32 neighbouring ones at a time:
// lanes whose bits fall into one word unite them, and the last of them writes. Without values
// nothing is dropped. Maps and counts start at zero; the counts end as exclusive sums.
template <typename T, typename I>
__global__ void __launch_bounds__(kThreads)
    mark_entries(Size m, Size k, Size nnz, Size chunks, const int* __restrict__ row_offsets,
                 const I* __restrict__ columns, const T* __restrict__ values,
                 const Word* __restrict__ state, unsigned* old_map, unsigned* kept_map,
                 unsigned* old_counts, unsigned* kept_counts, unsigned* arrivals) {
  __shared__ int rows[2];
  const Size first = static_cast<Size>(blockIdx.x) * kThreads * kEntries;
  const Drop<T> drop(values, state);
  unsigned column[kEntries];
  bool kept[kEntries];
#pragma unroll
  for (int i = 0; i < kEntries; ++i) {
    const Size e = first + i * kThreads + threadIdx.x;
    column[i] = e < nnz ? columns[e] : 0;
    kept[i] = e < nnz && !drop(e);
  }
  if (threadIdx.x < 2 * kWarpSize) {
    const int last = threadIdx.x / kWarpSize;
    const Size e = last ? min(first + kThreads * kEntries, nnz) - 1 : first;
    const int row = row_by_warp(row_offsets, e, m);
    if (lane_id() == 0) rows[last] = row;
  }
  __syncthreads();

  const int lane = lane_id();
#pragma unroll
  for (int i = 0; i < kEntries; ++i) {
    const Size e = first + i * kThreads + threadIdx.x;
    const bool exists = e < nnz;
    unsigned word = ~0u, old_bits = 0;  // ~0u: no map has such a word
    if (exists) {
      const unsigned row = row_of(row_offsets, e, rows[0], rows[1]);
      const unsigned position = row * static_cast<unsigned>(k) + column[i];
      word = position / kWordBits;
      old_bits = 1u << position % kWordBits;
    }
    unsigned kept_bits = kept[i] ? old_bits : 0;
    const unsigned existing = __ballot_sync(kFullMask, exists);
    if (!existing) break;
    const unsigned all_kept = __ballot_sync(kFullMask, kept[i]);
    const unsigned chunk = word / kThreads;
    const int last = __popc(existing) - 1;
    if (__shfl_sync(kFullMask, chunk, 0) == __shfl_sync(kFullMask, chunk, last)) {
      if (lane == 0) {
        atomicAdd(old_counts + chunk, static_cast<unsigned>(last) + 1);
        if (all_kept) atomicAdd(kept_counts + chunk, static_cast<unsigned>(__popc(all_kept)));
      }
    } else if (exists) {
      atomicAdd(old_counts + chunk, 1u);
      if (kept_bits) atomicAdd(kept_counts + chunk, 1u);
    }
#pragma unroll
    for (int distance = 1; distance < kWarpSize; distance *= 2) {
      const unsigned other = __shfl_up_sync(kFullMask, word, distance);
      const unsigned others_old = __shfl_up_sync(kFullMask, old_bits, distance);
      const unsigned others_kept = __shfl_up_sync(kFullMask, kept_bits, distance);
      if (lane >= distance && other == word) {
        old_bits |= others_old;
        kept_bits |= others_kept;
      }
    }
    const unsigned next = __shfl_down_sync(kFullMask, word, 1);
    if (exists && (lane == kWarpSize - 1 || next != word)) {
      atomicOr(old_map + word, old_bits);
      if (kept_bits) atomicOr(kept_map + word, kept_bits);
    }
  }
  if (!is_last_block(arrivals)) return;
  unsigned* const lists[2] = {old_counts, kept_counts};
  scan_lists<2>(lists, chunks);
}

// The bits of `bits`, from the lowest, at the positions that are 0 in `holes`, from the lowest;
// what finds no place is lost.
__device__ __forceinline__ unsigned deposit(unsigned bits, unsigned taken) {
  while (taken) {
    const unsigned below = (taken & -taken) - 1;
    bits = (bits & below) | (bits & ~below) << 1;
    taken &= taken - 1;
  }
  return bits;
}

// `ranks` has a spare word behind its last one.
__global__ void __launch_bounds__(kThreads)
    expand_ranks(Size words, Size chunks, const unsigned* __restrict__ kept_map,
                 const unsigned* __restrict__ kept_sums, const unsigned* __restrict__ ranks,
                 unsigned* __restrict__ new_map, unsigned* new_counts, unsigned* arrivals) {
  const Size w = static_cast<Size>(blockIdx.x) * kThreads + threadIdx.x;
  const unsigned kept = w < words ? kept_map[w] : 0;
  unsigned total;
  const unsigned kept_before = kept_sums[blockIdx.x] + block_scan(__popc(kept), total);
  unsigned made = 0;
  if (w < words) {
    const unsigned rank = static_cast<unsigned>(w) * kWordBits - kept_before;
    const unsigned* at = ranks + rank / kWordBits;
    made = kept | deposit(__funnelshift_r(at[0], at[1], rank % kWordBits), kept);
    new_map[w] = made;
  }
  count_bits(made, new_counts);
  if (is_last_block(arrivals)) scan_counts(new_counts, chunks);
}

// What one block lists of its chunk: for each new bit its place, and that of its entry before.
struct Listed {
  unsigned short place[kChunkBits];
  unsigned short old[kChunkBits];
};
constexpr unsigned kNone = 0xffff;

// Entries whose bit is set in `base` keep their old index: `old_map` itself, or the kept map where
// what is dropped and grown again counts as new. Written in the order of the entries.
template <typename I>
__global__ void __launch_bounds__(kThreads)
    emit_structure(Size m, Size k, Size words, const unsigned* __restrict__ old_map,
                   const unsigned* __restrict__ old_sums, const unsigned* __restrict__ base,
                   const unsigned* __restrict__ new_map, const unsigned* __restrict__ new_sums,
                   int* __restrict__ row_offsets, I* __restrict__ columns,
                   int* __restrict__ new_to_old) {
  __shared__ Listed listed;
  __shared__ unsigned starts[kThreads], held[kThreads];
  const Size w = static_cast<Size>(blockIdx.x) * kThreads + threadIdx.x;
  unsigned old_bits = 0, base_bits = 0, new_bits = 0;
  if (w < words) old_bits = old_map[w], base_bits = base[w], new_bits = new_map[w];
  const unsigned first_old = old_sums[blockIdx.x], first_new = new_sums[blockIdx.x];
  // Both counts of a chunk fit 16 bits: one scan for the two.
  unsigned total;
  const unsigned before =
      block_scan(static_cast<unsigned>(__popc(new_bits)) << 16 | __popc(old_bits), total);
  unsigned place = before >> 16;
  const unsigned old_before = before & 0xffff;
  starts[threadIdx.x] = place;
  held[threadIdx.x] = new_bits;
  for (unsigned rest = new_bits; rest; rest &= rest - 1) {
    const unsigned bit = rest & -rest;
    listed.place[place] = threadIdx.x * kWordBits + __ffs(rest) - 1;
    listed.old[place] = base_bits & bit ? old_before + __popc(old_bits & (bit - 1)) : kNone;
    ++place;
  }
  __syncthreads();

  const unsigned chunk_start = blockIdx.x * static_cast<unsigned>(kChunkBits);
  const unsigned width = static_cast<unsigned>(k), count = total >> 16;
  for (unsigned i = threadIdx.x; i < count; i += kThreads) {
    const unsigned old = listed.old[i];
    columns[first_new + i] = static_cast<I>((chunk_start + listed.place[i]) % width);
    new_to_old[first_new + i] = old == kNone ? -1 : static_cast<int>(first_old + old);
  }
  // Rows that start in this chunk; the last offset is written by the last block.
  const Size from = (chunk_start + k - 1) / k;
  const Size end = min((static_cast<Size>(chunk_start) + kChunkBits + k - 1) / k, m);
  for (Size row = from + threadIdx.x; row < end; row += kThreads) {
    const unsigned bit = static_cast<unsigned>(row * k - chunk_start);
    const unsigned word = bit / kWordBits, below = (1u << bit % kWordBits) - 1;
    row_offsets[row] = static_cast<int>(first_new + starts[word] + __popc(held[word] & below));
  }
  if (blockIdx.x == gridDim.x - 1 && threadIdx.x == 0) {
    row_offsets[m] = static_cast<int>(first_new + count);
  }
}

// The positions of the bits that are set in `new_map` and not in `base`, of which there are
// new_sums - base_sums before each chunk.
__global__ void __launch_bounds__(kThreads)
    emit_positions(Size words, const unsigned* __restrict__ base,
                   const unsigned* __restrict__ base_sums, const unsigned* __restrict__ new_map,
                   const unsigned* __restrict__ new_sums, Size* __restrict__ positions) {
  const Size w = static_cast<Size>(blockIdx.x) * kThreads + threadIdx.x;
  unsigned bits = w < words ? new_map[w] & ~base[w] : 0, total;
  Size place = new_sums[blockIdx.x] - base_sums[blockIdx.x] + block_scan(__popc(bits), total);
  for (; bits; bits &= bits - 1) positions[place++] = w * kWordBits + __ffs(bits) - 1;
}

// Entries are words of 1, 2, 4 or 8 bytes; their bits are copied.
template <typename W>
__global__ void __launch_bounds__(kThreads)
    move_entries(Size count, const int* __restrict__ new_to_old, const W* __restrict__ in,
                 W* __restrict__ out) {
  constexpr int kEach = 4;
  const Size first = static_cast<Size>(blockIdx.x) * kThreads * kEach + threadIdx.x;
  int old[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const Size j = first + i * kThreads;
    old[i] = j < count ? new_to_old[j] : -1;
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const Size j = first + i * kThreads;
    if (j < count) out[j] = old[i] < 0 ? W(0) : in[old[i]];
  }
}

// Entries that the threads of move_in_place can carry, each.
template <typename W>
constexpr int kCarried = sizeof(W) == 8 ? 17 : 34;

// Waits until all blocks have come here `turns` times. Only for cooperative launches, whose blocks
// all run at the same time.
__device__ __forceinline__ void wait_for_all(unsigned* arrivals, unsigned turns) {
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    atomicAdd(arrivals, 1u);
    while (*static_cast<volatile unsigned*>(arrivals) < turns * gridDim.x) {
    }
    __threadfence();
  }
  __syncthreads();
}

// The grid's threads carry a whole array in registers: all read their new entries, wait, and write
// them. Up to four arrays one after another; count <= gridDim.x * kThreads * kCarried. A
// cooperative launch; arrivals starts at zero.
template <typename W>
__global__ void __launch_bounds__(kThreads, 4)
    move_in_place(Size count, Size arrays, const int* __restrict__ new_to_old, W* first, W* second,
                  W* third, W* fourth, unsigned* arrivals) {
  constexpr int kEach = 8;
  const Size stride = static_cast<Size>(gridDim.x) * kThreads;
  const Size start = static_cast<Size>(blockIdx.x) * kThreads + threadIdx.x;
  for (int a = 0; a < arrays; ++a) {
    W* array = a == 0 ? first : a == 1 ? second : a == 2 ? third : fourth;
    W carried[kCarried<W>];
#pragma unroll
    for (int i = 0; i < kCarried<W>; i += kEach) {
      if (i * stride >= count) break;
      int old[kEach];
#pragma unroll
      for (int j = 0; j < kEach && i + j < kCarried<W>; ++j) {
        const Size at = start + (i + j) * stride;
        old[j] = at < count ? new_to_old[at] : -1;
      }
#pragma unroll
      for (int j = 0; j < kEach && i + j < kCarried<W>; ++j) {
        carried[i + j] = old[j] < 0 ? W(0) : array[old[j]];
      }
    }
    wait_for_all(arrivals, a + 1);
#pragma unroll
    for (int i = 0; i < kCarried<W>; ++i) {
      const Size at = start + i * stride;
      if (at < count) array[at] = carried[i];
    }
  }
}

}  // namespace snack
