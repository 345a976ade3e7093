// Growth by gradient: the inactive positions of largest |G[i, j]|, G = Lᵀ R summed over the batch,
// L (batch, m) the gradient of a layer's result and R (batch, k) its input. G exists only tile by
// tile; what is large enough is listed.
//
// A position is scored by q = largest key - key of |G| as a float, so the best have the smallest q;
// any NaN comes first. Of equal scores the lower position grows.
//
//   gradient_tiles<T, kSample>   a histogram of the scores of some tiles gives a bound that about
//                                as many scores meet as shall grow, and some more
//   gradient_tiles<T, kList>     lists the scores of all tiles that meet the bound
//   (select.cu)                  finds the threshold among those that were listed
//   mark_listed                  scores below the threshold -> grown map, those equal to it -> tied
//                                map, and how many of these there are in each chunk
//   gradient_tiles<T, kAgain>    both for all scores, where the list was too short or too long:
//   three
//                                passes over all tiles, a digit each, and one that marks; else they
//                                return at once
//   expand_marked                kept map + grown map + the first of the tied map -> new map
//
// The product is that of a dense matrix in float32 (float64: rounded to float32 at the end), by
// fused multiply-adds in the order of the batch; subnormal sums count as zero. A block owns a tile
// of 128 x 128 positions, a thread 8 x 8 of them: two groups of 4 rows, two of 4 columns. The batch
// comes in slabs of kDepth rows through shared memory, the next one on its way in registers.
//
// Deterministic, though blocks append to the list in any order: what is selected is a set, and the
// selection does not depend on the order of the list. Source: Evci et al., "Rigging the lottery:
// making all tickets winners", ICML 2020 (RigL).
#include "keys.cuh"

namespace snack {

constexpr int kTile = 128;
constexpr int kMaskWords = kTile / kWordBits;
constexpr unsigned kLargestKey = 0x7fffffff;
constexpr unsigned kInfinity = 0x7f800000, kSmallestNormal = 0x00800000;
constexpr int kBoundBits = 13;  // of a score that the sample's histogram tells apart
constexpr int kBounds = 1 << kBoundBits;
constexpr int kBoundShift = 31 - kBoundBits;

constexpr int kStaged = 32;  // sums of a thread that go through shared memory at a time

enum Pass { kSample, kList, kAgain };

// found[0] bound of the list, [1] length of the list, [2] whether the list holds what is looked for
constexpr int kBound = 0, kLength = 1, kUsable = 2;

template <typename T>
using Quad = Pack<T, 4>;  // neighbouring rows or columns of a tile

constexpr int kQuads = kTile / 4;

// Two slabs of batch rows: one in use, one being filled.
template <typename T>
struct Slabs {
  static constexpr int kDepth = 64 / sizeof(T);  // 16 or 8 batch rows
  Quad<T> left[2][kDepth][kQuads], right[2][kDepth][kQuads];
};

// Blocks on a multiprocessor: sums in double leave registers for one.
template <typename T>
constexpr int kResident = sizeof(T) == 8 ? 1 : 2;

// A thread's part of the next slab of one operand, 4 columns of some batch rows, on its way from
// global memory.
template <typename T>
struct Carried {
  static constexpr int kAtOnce = kThreads / kQuads;  // batch rows that the block loads at once
  static constexpr int kRows = Slabs<T>::kDepth / kAtOnce;
  Quad<T> at[kRows];

  __device__ __forceinline__ void load(const T* __restrict__ dense, Size first_row, Size batch,
                                       Size column, Size width, bool vector) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const Size b = first_row + threadIdx.x / kQuads + i * kAtOnce;
      const T* source = dense + b * width + column;
      if (b < batch && vector && column + 4 <= width) {
        at[i] = *reinterpret_cast<const Quad<T>*>(source);
        continue;
      }
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        at[i].at[c] = b < batch && column + c < width ? source[c] : T(0);
      }
    }
  }

  __device__ __forceinline__ void store(Quad<T> (*slab)[kQuads]) const {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      slab[threadIdx.x / kQuads + i * kAtOnce][threadIdx.x % kQuads] = at[i];
    }
  }
};

__device__ __forceinline__ unsigned score_of(float g) {
  const unsigned key = static_cast<unsigned>(__float_as_int(g)) & kLargestKey;
  if (key > kInfinity) return 0;
  return key < kSmallestNormal ? kLargestKey : kLargestKey - key;
}

// Bit c of the result: position first + c of the map is set, or c >= width.
__device__ __forceinline__ unsigned taken_bits(const unsigned* __restrict__ map, Size words,
                                               unsigned first, int width) {
  if (width <= 0) return ~0u;
  const unsigned word = first / kWordBits;
  const unsigned low = map[word], high = word + 1 < words ? map[word + 1] : 0;
  const unsigned bits = __funnelshift_r(low, high, first % kWordBits);
  return width < kWordBits ? bits | ~0u << width : bits;
}

// Which tile is the sample's i-th: all of them, or diagonals, so that rows and columns come evenly.
__device__ __forceinline__ Size sampled_tile(Size i, Size samples, Size down, Size across) {
  if (samples == down * across) return i;
  const Size turns = (samples + down - 1) / down, step = max(across / turns, static_cast<Size>(1));
  return i % down * across + (i + i / down * step) % across;
}

// The bound, by one block: the last score of the bin up to which `rank` of the sampled scores lie.
__device__ __forceinline__ void find_bound(const unsigned* histogram, Size n, Size inactive,
                                           bool complete, unsigned* found) {
  constexpr int kOwn = kBounds / kThreads;
  unsigned own[kOwn], sum = 0, sampled;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    own[i] = __ldcg(histogram + threadIdx.x * kOwn + i);
    sum += own[i];
  }
  unsigned before = block_scan(sum, sampled);
  // A sample may err: some more, by six standard deviations and 4 percent.
  const float expected = static_cast<float>(n) * sampled / static_cast<float>(inactive);
  const float wanted = 1.04f * expected + 6.f * sqrtf(expected) + 16.f;
  unsigned rank = sampled;
  if (complete) {
    rank = static_cast<unsigned>(n);
  } else if (wanted < sampled) {
    rank = static_cast<unsigned>(wanted);
  }
  if (rank == sampled && threadIdx.x == 0) found[kBound] = kLargestKey;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    if (rank < sampled && before < rank && rank <= before + own[i]) {
      const unsigned bin = threadIdx.x * kOwn + i;
      found[kBound] = (bin << kBoundShift) + ((1u << kBoundShift) - 1);
    }
    before += own[i];
  }
}

// Grid: any; sampled or all tiles in turn. `vector`: rows of L and R keep the alignment of 4
// elements. kSample uses a histogram of kBounds, kAgain one of kDigits, or none where width is 0:
// then it marks. found, state, histograms, maps, counts and arrivals start at zero.
template <typename T, int kPass>
__global__ void __launch_bounds__(kThreads, kResident<T>)
    gradient_tiles(Size m, Size k, Size batch, Size n, Size inactive, Size samples, Size capacity,
                   Size vector, Size shift, Size width, const T* __restrict__ left,
                   const T* __restrict__ right, const unsigned* __restrict__ kept_map,
                   unsigned* found, Word* state, unsigned* histogram, unsigned* scores,
                   unsigned* positions, unsigned* arrivals, unsigned* grown_map, unsigned* tied_map,
                   unsigned* tied_counts) {
  constexpr int kDepth = Slabs<T>::kDepth;
  __shared__ union {
    Slabs<T> slabs;
    unsigned counts[kPass == kSample ? kBounds : kDigits];
    float sums[kStaged][kThreads];
  } shared;
  __shared__ unsigned taken[kTile][kMaskWords];
  if (kPass == kAgain && found[kUsable]) return;
  const bool marks = kPass == kAgain && width == 0;

  const Size down = (m + kTile - 1) / kTile, across = (k + kTile - 1) / kTile;
  const Size tiles = kPass == kSample ? samples : down * across;
  const Size words = (m * k + kWordBits - 1) / kWordBits;
  const int tx = threadIdx.x % 8 + threadIdx.x / 128 * 8, ty = threadIdx.x / 8 % 16;
  // Of all digits found so far: a prefix, or the threshold.
  const Word known = kPass == kAgain && shift + width < 31 ? state[0] : 0;

  for (Size t = blockIdx.x; t < tiles; t += gridDim.x) {
    const Size tile = kPass == kSample ? sampled_tile(t, samples, down, across) : t;
    const Size row0 = tile / across * kTile, column0 = tile % across * kTile;
    for (int i = threadIdx.x; i < kTile * kMaskWords; i += kThreads) {
      const int r = i / kMaskWords, w = i % kMaskWords;
      const Size row = row0 + r, column = column0 + w * kWordBits;
      const int there = row < m ? static_cast<int>(min(k - column, Size(kWordBits))) : 0;
      taken[r][w] = taken_bits(kept_map, words, static_cast<unsigned>(row * k + column), there);
    }

    // Product of the tile.
    T sums[8][8] = {};
    Carried<T> next_left, next_right;
    const Size quad = threadIdx.x % kQuads * 4;
    next_left.load(left, 0, batch, row0 + quad, m, vector);
    next_right.load(right, 0, batch, column0 + quad, k, vector);
    int held = 0;
    for (Size b = 0; b < batch; b += kDepth) {
      next_left.store(shared.slabs.left[held]);
      next_right.store(shared.slabs.right[held]);
      __syncthreads();
      if (b + kDepth < batch) {
        next_left.load(left, b + kDepth, batch, row0 + quad, m, vector);
        next_right.load(right, b + kDepth, batch, column0 + quad, k, vector);
      }
#pragma unroll
      for (int d = 0; d < kDepth; ++d) {
        const Quad<T> l[2] = {shared.slabs.left[held][d][ty],
                              shared.slabs.left[held][d][kQuads / 2 + ty]};
        const Quad<T> r[2] = {shared.slabs.right[held][d][tx],
                              shared.slabs.right[held][d][kQuads / 2 + tx]};
#pragma unroll
        for (int i = 0; i < 8; ++i) {
#pragma unroll
          for (int j = 0; j < 8; ++j) {
            sums[i][j] = fma(l[i / 4].at[i % 4], r[j / 4].at[j % 4], sums[i][j]);
          }
        }
      }
      held ^= 1;
    }
    if (batch == 0) __syncthreads();

    // visit(i, j, score, row and column in the tile) for this thread's inactive positions.
    auto visit = [&](auto use) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int r = i / 4 * (kTile / 2) + ty * 4 + i % 4;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int c = half * (kTile / 2) + tx * 4;
          const unsigned bits = taken[r][c / kWordBits] >> c % kWordBits;
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            if (bits >> j & 1) continue;
            use(score_of(static_cast<float>(sums[i][half * 4 + j])), r, c + j);
          }
        }
      }
    };
    auto position_of = [&](int r, int c) {
      return static_cast<unsigned>((row0 + r) * k + column0 + c);
    };

    if (kPass == kSample || (kPass == kAgain && !marks)) {
      constexpr int kBins = kPass == kSample ? kBounds : kDigits;
      __syncthreads();  // the slabs are no longer needed
      for (int bin = threadIdx.x; bin < kBins; bin += kThreads) shared.counts[bin] = 0;
      __syncthreads();
      visit([&](unsigned score, int, int) {
        if (kPass == kSample) {
          atomicAdd(&shared.counts[score >> kBoundShift], 1u);
        } else if (static_cast<Word>(score) >> shift >> width == known) {
          atomicAdd(&shared.counts[score >> shift & ((1u << width) - 1)], 1u);
        }
      });
      __syncthreads();
      for (int bin = threadIdx.x; bin < kBins; bin += kThreads) {
        if (shared.counts[bin]) atomicAdd(histogram + bin, shared.counts[bin]);
      }
      __syncthreads();
    }
    if constexpr (kPass == kList) {
      // Few sums meet the bound: compare all, then let each thread walk its own few.
      const unsigned bound = found[kBound];
      const float least = __int_as_float(static_cast<int>(kLargestKey - bound));
      unsigned large[2] = {};
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int r = i / 4 * (kTile / 2) + ty * 4 + i % 4;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int c = half * (kTile / 2) + tx * 4, place = i % 4 * 8 + half * 4;
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const float g = static_cast<float>(sums[i][half * 4 + j]);
            if (!(fabsf(g) < least)) large[i / 4] |= 1u << (place + j);  // NaN is large
          }
          large[i / 4] &= ~((taken[r][c / kWordBits] >> c % kWordBits & 15u) << place);
        }
      }
      __shared__ unsigned base;
      unsigned total;
      unsigned place = block_scan(__popc(large[0]) + __popc(large[1]), total);
      if (threadIdx.x == 0 && total) base = atomicAdd(found + kLength, total);
      __syncthreads();  // nor are the slabs needed any more
      place += base;
#pragma unroll
      for (int part = 0; part < 2; ++part) {
#pragma unroll
        for (int i = 0; i < kStaged; ++i) {
          shared.sums[i][threadIdx.x] = static_cast<float>(sums[part * 4 + i / 8][i % 8]);
        }
        for (unsigned rest = large[part]; rest; rest &= rest - 1, ++place) {
          const int i = __ffs(rest) - 1;
          if (place >= capacity) break;
          scores[place] = score_of(shared.sums[i][threadIdx.x]);
          const int r = part * (kTile / 2) + ty * 4 + i / 8;
          positions[place] = position_of(r, i / 4 % 2 * (kTile / 2) + tx * 4 + i % 4);
        }
      }
      __syncthreads();
    }
    if (marks) {
      visit([&](unsigned score, int r, int c) {
        if (score > known) return;
        const unsigned position = position_of(r, c), bit = 1u << position % kWordBits;
        if (score < known) {
          atomicOr(grown_map + position / kWordBits, bit);
        } else {
          atomicOr(tied_map + position / kWordBits, bit);
          atomicAdd(tied_counts + position / kChunkBits, 1u);
        }
      });
      __syncthreads();
    }
  }

  if (!is_last_block(arrivals)) return;
  if constexpr (kPass == kSample) {
    find_bound(histogram, n, inactive, samples == down * across, found);
  } else if constexpr (kPass == kList) {
    if (threadIdx.x == 0) {
      const unsigned length = __ldcg(found + kLength);
      found[kUsable] = length >= n && length <= capacity;
    }
  } else if (!marks) {
    find_digit(histogram, known, width, shift + width == 31 ? n : state[1], state);
  } else {
    scan_counts(tied_counts, (words + kThreads - 1) / kThreads);
  }
}

// What gradient_tiles<T, kMark> does, from the list.
__global__ void __launch_bounds__(kThreads)
    mark_listed(Size capacity, Size chunks, const unsigned* found, const Word* __restrict__ state,
                const unsigned* __restrict__ scores, const unsigned* __restrict__ positions,
                unsigned* grown_map, unsigned* tied_map, unsigned* tied_counts,
                unsigned* arrivals) {
  if (!found[kUsable]) return;
  const unsigned length = found[kLength], threshold = static_cast<unsigned>(state[0]);
  constexpr int kEach = 4;
  const unsigned first = blockIdx.x * kThreads * kEach + threadIdx.x;
  unsigned score[kEach], position[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const unsigned at = first + i * kThreads;
    score[i] = at < length ? scores[at] : ~0u;
    position[i] = at < length ? positions[at] : 0;
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const unsigned word = position[i] / kWordBits, bit = 1u << position[i] % kWordBits;
    if (score[i] < threshold) {
      atomicOr(grown_map + word, bit);
    } else if (score[i] == threshold) {
      atomicOr(tied_map + word, bit);
      atomicAdd(tied_counts + word / kThreads, 1u);
    }
  }
  if (is_last_block(arrivals)) scan_counts(tied_counts, chunks);
}

// A block owns kParts chunks; of the tied positions the first state[1] grow.
__global__ void __launch_bounds__(kThreads)
    expand_marked(Size words, Size chunks, const unsigned* __restrict__ kept_map,
                  const unsigned* __restrict__ grown_map, const unsigned* __restrict__ tied_map,
                  const unsigned* __restrict__ tied_sums, const Word* __restrict__ state,
                  unsigned* __restrict__ new_map, unsigned* new_counts, unsigned* arrivals) {
  unsigned tied[kParts], before[kParts], made[kParts];
  const Size chunk = static_cast<Size>(blockIdx.x) * kParts;
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    const Size w = (chunk + part) * kThreads + threadIdx.x;
    tied[part] = w < words ? tied_map[w] : 0;
    made[part] = w < words ? kept_map[w] | grown_map[w] : 0;
  }
  scan_bits(tied, before);
  const unsigned wanted = static_cast<unsigned>(state[1]);
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    const Size w = (chunk + part) * kThreads + threadIdx.x;
    if (tied[part]) {
      before[part] += tied_sums[chunk + part];
      unsigned left = wanted > before[part] ? wanted - before[part] : 0;
      for (unsigned rest = tied[part]; left && rest; --left, rest &= rest - 1) {
        made[part] |= rest & -rest;
      }
    }
    if (w < words) new_map[w] = made[part];
    count_bits(made[part], new_counts + chunk + part);
  }
  if (is_last_block(arrivals)) scan_counts(new_counts, chunks);
}

}  // namespace snack
