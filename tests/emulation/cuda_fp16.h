// IEEE half precision as a type of 16 bits with the conversions that the kernels use.
#pragma once

#include <algorithm>
#include <cmath>

struct __half {
  unsigned short bits = 0;
  __half() = default;
  __half(float x);
};

inline float __half2float(__half x) {
  const int exponent = x.bits >> 10 & 31, fraction = x.bits & 1023;
  const float sign = x.bits & 0x8000 ? -1.f : 1.f;
  if (exponent == 31) return fraction ? NAN : sign * INFINITY;
  return sign * (exponent ? std::ldexp(1024.f + fraction, exponent - 25)
                          : std::ldexp(float(fraction), -24));
}

// To nearest, ties to even: nearbyint in units of the last place.
inline __half __float2half_rn(float x) {
  __half made;
  made.bits = std::signbit(x) ? 0x8000 : 0;
  const float magnitude = std::fabs(x);
  if (std::isnan(x)) {
    made.bits |= 0x7fff;
  } else if (magnitude >= 65520.f) {
    made.bits |= 0x7c00;
  } else if (magnitude > 0) {
    int exponent = std::max(std::ilogb(magnitude), -14);
    const int units = static_cast<int>(std::nearbyint(std::ldexp(magnitude, 10 - exponent)));
    made.bits += (exponent + 14) * 1024 + units;  // a fraction of 1024 and more counts the exponent
  }
  return made;
}

inline __half::__half(float x) { *this = __float2half_rn(x); }
