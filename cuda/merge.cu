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
constexpr int kSpan = 1024;  // words of the maps that a block holds at a time

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

// A block owns kThreads * kEntries neighbouring entries and takes the words of the maps that they
// fall into kSpan at a time: bits are united in shared memory, then a thread writes a word. Only
// the first and the last word may have bits of other blocks as well. Without values nothing is
// dropped. Maps and counts start at zero; the counts end as exclusive sums.
template <typename T, typename I>
__global__ void __launch_bounds__(kThreads)
    mark_entries(Size m, Size k, Size nnz, Size chunks, const int* __restrict__ row_offsets,
                 const I* __restrict__ columns, const T* __restrict__ values,
                 const Word* __restrict__ state, unsigned* old_map, unsigned* kept_map,
                 unsigned* old_counts, unsigned* kept_counts, unsigned* arrivals) {
  __shared__ int rows[2];
  __shared__ unsigned ends[2];  // first and last word
  __shared__ unsigned old_words[kSpan], kept_words[kSpan];
  const Size first = static_cast<Size>(blockIdx.x) * kThreads * kEntries;
  const Size end = min(first + kThreads * kEntries, nnz);
  const Drop<T> drop(values, state);
  unsigned position[kEntries];
  bool kept[kEntries];
#pragma unroll
  for (int i = 0; i < kEntries; ++i) {
    const Size e = first + i * kThreads + threadIdx.x;
    position[i] = e < end ? columns[e] : 0;
    kept[i] = e < end && !drop(e);
  }
  for (int w = threadIdx.x; w < kSpan; w += kThreads) old_words[w] = kept_words[w] = 0;
  if (threadIdx.x < 2 * kWarpSize) {
    const int last = threadIdx.x / kWarpSize;
    const int row = row_by_warp(row_offsets, last ? end - 1 : first, m);
    if (lane_id() == 0) rows[last] = row;
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kEntries; ++i) {
    const Size e = first + i * kThreads + threadIdx.x;
    if (e < end) {
      const unsigned row = row_of(row_offsets, e, rows[0], rows[1]);
      position[i] += row * static_cast<unsigned>(k);
      if (e == first) ends[0] = position[i] / kWordBits;
      if (e == end - 1) ends[1] = position[i] / kWordBits;
    } else {
      position[i] = ~0u;  // in no word
    }
  }
  __syncthreads();

  // Windows start at a multiple of the warp's size, so that a warp's words are of one chunk.
  const unsigned first_word = ends[0], last_word = ends[1];
  for (unsigned window = first_word / kWarpSize * kWarpSize; window <= last_word; window += kSpan) {
#pragma unroll
    for (int i = 0; i < kEntries; ++i) {
      const unsigned word = position[i] / kWordBits - window, bit = 1u << position[i] % kWordBits;
      if (word >= kSpan) continue;
      atomicOr(&old_words[word], bit);
      if (kept[i]) atomicOr(&kept_words[word], bit);
    }
    __syncthreads();
    for (int w = threadIdx.x; w < kSpan; w += kThreads) {
      const unsigned word = window + w, old_bits = old_words[w], kept_bits = kept_words[w];
      old_words[w] = kept_words[w] = 0;
      if (word == first_word || word == last_word) {
        if (old_bits) atomicOr(old_map + word, old_bits);
        if (kept_bits) atomicOr(kept_map + word, kept_bits);
      } else if (old_bits) {
        old_map[word] = old_bits;
        kept_map[word] = kept_bits;
      }
      const unsigned old_sum = __reduce_add_sync(kFullMask, __popc(old_bits) + 0u);
      const unsigned kept_sum = __reduce_add_sync(kFullMask, __popc(kept_bits) + 0u);
      if (lane_id() == 0 && old_sum) {
        atomicAdd(old_counts + word / kThreads, old_sum);
        if (kept_sum) atomicAdd(kept_counts + word / kThreads, kept_sum);
      }
    }
    __syncthreads();
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

// A block owns kParts chunks. `ranks` has a spare word behind its last one.
__global__ void __launch_bounds__(kThreads)
    expand_ranks(Size words, Size chunks, const unsigned* __restrict__ kept_map,
                 const unsigned* __restrict__ kept_sums, const unsigned* __restrict__ ranks,
                 unsigned* __restrict__ new_map, unsigned* new_counts, unsigned* arrivals) {
  unsigned kept[kParts], sums[kParts], before[kParts], ranks_there[kParts];
  const Size chunk = static_cast<Size>(blockIdx.x) * kParts;
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    const Size w = (chunk + part) * kThreads + threadIdx.x;
    kept[part] = w < words ? kept_map[w] : 0;
    sums[part] = chunk + part < chunks ? kept_sums[chunk + part] : 0;
  }
  scan_bits(kept, before);
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    const Size w = (chunk + part) * kThreads + threadIdx.x;
    const unsigned rank = static_cast<unsigned>(w) * kWordBits - sums[part] - before[part];
    const unsigned* at = ranks + rank / kWordBits;
    ranks_there[part] = w < words ? __funnelshift_r(at[0], at[1], rank % kWordBits) : 0;
  }
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    const Size w = (chunk + part) * kThreads + threadIdx.x;
    const unsigned made = w < words ? kept[part] | deposit(ranks_there[part], kept[part]) : 0;
    if (w < words) new_map[w] = made;
    count_bits(made, new_counts + chunk + part);
  }
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

// Words of up to 4 bytes that a thread of move_in_place carries, and entries of kTogether arrays.
constexpr int kCarried = 51;
template <typename W, int kTogether>
constexpr int kCarriedOfEach = kCarried / kTogether / (sizeof(W) == 8 ? 2 : 1);

// Waits until all blocks have come here. Only for cooperative launches, whose blocks all run at the
// same time.
__device__ __forceinline__ void wait_for_all(unsigned* arrivals) {
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    atomicAdd(arrivals, 1u);
    while (*static_cast<volatile unsigned*>(arrivals) < gridDim.x) {
    }
    __threadfence();
  }
  __syncthreads();
}

// The grid's threads carry kTogether whole arrays in registers: all read their new entries, wait,
// and write them. count <= gridDim.x * kThreads * kCarriedOfEach. A cooperative launch; arrivals
// starts at zero.
template <typename W, int kTogether>
__global__ void __launch_bounds__(kThreads, 3)
    move_in_place(Size count, const int* __restrict__ new_to_old, W* first, W* second, W* third,
                  unsigned* arrivals) {
  constexpr int kOfEach = kCarriedOfEach<W, kTogether>, kEach = 8;
  const Size stride = static_cast<Size>(gridDim.x) * kThreads;
  const Size start = static_cast<Size>(blockIdx.x) * kThreads + threadIdx.x;
  W* const arrays[3] = {first, second, third};
  W carried[kTogether][kOfEach];
#pragma unroll
  for (int i = 0; i < kOfEach; i += kEach) {
    if (i * stride >= count) break;
    int old[kEach];
#pragma unroll
    for (int j = 0; j < kEach && i + j < kOfEach; ++j) {
      const Size at = start + (i + j) * stride;
      old[j] = at < count ? new_to_old[at] : -1;
    }
#pragma unroll
    for (int j = 0; j < kEach && i + j < kOfEach; ++j) {
#pragma unroll
      for (int a = 0; a < kTogether; ++a) {
        carried[a][i + j] = old[j] < 0 ? W(0) : arrays[a][old[j]];
      }
    }
  }
  wait_for_all(arrivals);
#pragma unroll
  for (int i = 0; i < kOfEach; ++i) {
    const Size at = start + i * stride;
    if (at >= count) break;
#pragma unroll
    for (int a = 0; a < kTogether; ++a) arrays[a][at] = carried[a][i];
  }
}

}  // namespace snack
