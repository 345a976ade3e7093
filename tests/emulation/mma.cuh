// In the place of cuda/mma.cuh: every lane computes its four sums from the words of all.
#pragma once

#include "common.cuh"

namespace snack {

template <typename T>
float element(unsigned word, int half) {
  T made;
  made.bits = static_cast<unsigned short>(word >> (16 * half));
  return widen(made);
}

template <typename T>
void mma_m16n8k16(float (&sum)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  const int g = lane_id() / 4, t = lane_id() % 4;
  float made[4] = {sum[0], sum[1], sum[2], sum[3]};
  for (int k = 0; k < 16; k += 2) {
    const int part = k / 8, owner = k % 8 / 2;  // which lane of four has these two of the sum
    unsigned left[2], right[2];
    for (int h = 0; h < 2; ++h) {
      // All lanes exchange all words: a shuffle gives one word of each.
      unsigned words[2];
      for (int w = 0; w < 2; ++w) words[w] = __shfl_sync(kFullMask, a[2 * w + h], g * 4 + owner);
      left[h] = words[part];
    }
    for (int h = 0; h < 2; ++h) {
      unsigned words[2];
      for (int w = 0; w < 2; ++w) words[w] = __shfl_sync(kFullMask, b[w], (2 * t + h) * 4 + owner);
      right[h] = words[part];
    }
    for (int e = 0; e < 2; ++e) {
      for (int c = 0; c < 4; ++c)
        made[c] += element<T>(left[c / 2], e) * element<T>(right[c % 2], e);
    }
  }
  for (int c = 0; c < 4; ++c) sum[c] = made[c];
}

inline void load_matrices(unsigned (&made)[4], const char* row) {
  for (int q = 0; q < 4; ++q) {
    const char* from = __shfl_sync(kFullMask, row, q * 8 + lane_id() / 4);
    made[q] = *reinterpret_cast<const unsigned*>(from + lane_id() % 4 * 4);
  }
  __syncwarp();
}

template <typename T>
unsigned pack_two(float low, float high) {
  return narrow<T>(low).bits | static_cast<unsigned>(narrow<T>(high).bits) << 16;
}

}  // namespace snack
