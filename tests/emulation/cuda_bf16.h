// bfloat16 as a type of 16 bits with the conversions that the kernels use.
#pragma once

#include <cstring>

struct __nv_bfloat16 {
  unsigned short bits = 0;
};

inline float __bfloat162float(__nv_bfloat16 x) {
  const unsigned word = static_cast<unsigned>(x.bits) << 16;
  float made;
  std::memcpy(&made, &word, sizeof made);
  return made;
}

// To nearest, ties to even.
inline __nv_bfloat16 __float2bfloat16_rn(float x) {
  unsigned word;
  std::memcpy(&word, &x, sizeof word);
  __nv_bfloat16 made;
  made.bits = x != x ? 0x7fff : (word + 0x7fff + (word >> 16 & 1)) >> 16;
  return made;
}
