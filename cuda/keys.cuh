// The key by which a selection orders values: the bits without the sign.
#pragma once

#include "bitmap.cuh"

namespace snack {

using Word = unsigned long long;

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
