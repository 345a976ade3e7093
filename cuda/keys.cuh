// What selections share: the key that orders values, which is their bits without the sign, and the
// digit of a radix pass.
#pragma once

#include "bitmap.cuh"

namespace snack {

using Word = unsigned long long;

constexpr int kDigits = 2048;  // of a radix pass, at most

// By one block: the digit in which the key of that rank (from 1) lies, given how often each digit
// occurs among the keys that begin with `prefix`. Extends the threshold in `state` (select.cu).
__device__ __forceinline__ void find_digit(const unsigned* histogram, Word prefix, Size width,
                                           Word rank, Word* state) {
  constexpr int kOwn = kDigits / kThreads;
  unsigned own[kOwn], sum = 0, total;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    own[i] = __ldcg(histogram + threadIdx.x * kOwn + i);
    sum += own[i];
  }
  unsigned before = block_scan(sum, total);
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    if (before < rank && rank <= before + own[i]) {
      state[0] = prefix << width | (threadIdx.x * kOwn + i);
      state[1] = rank - before;
      state[2] = own[i];
    }
    before += own[i];
  }
}

template <typename T>
struct KeyOf;
template <>
struct KeyOf<float> {
  using type = unsigned;
};
template <>
struct KeyOf<double> {
  using type = unsigned long long;
};
template <>
struct KeyOf<__half> {
  using type = unsigned short;
};
template <>
struct KeyOf<__nv_bfloat16> {
  using type = unsigned short;
};
template <>
struct KeyOf<unsigned> {
  using type = unsigned;
};

template <typename T>
__device__ __forceinline__ Word key_of(const T* __restrict__ values, Size e) {
  using Key = typename KeyOf<T>::type;
  constexpr Key kMagnitude = static_cast<Key>(~static_cast<Key>(0)) >> 1;
  return reinterpret_cast<const Key*>(values)[e] & kMagnitude;
}

// Whether a selection took an entry: its threshold and the index of the last one that equals it.
__device__ __forceinline__ bool is_selected(Word key, Size e, Word threshold, Word cutoff) {
  return key < threshold || (key == threshold && static_cast<Word>(e) <= cutoff);
}

}  // namespace snack
