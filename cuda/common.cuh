// What two kernels or more share: warp constants, type traits, conversions, warp reductions.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace snack {

constexpr int kWarpSize = 32;
constexpr unsigned kFullMask = 0xffffffffu;

// Sizes and offsets arrive as 8-byte integers, the width in which Python passes them.
using Size = long long;

// Type in which products of T are summed: float for the half types, else T itself.
template <typename T>
struct Accumulate {
  using type = T;
};
template <>
struct Accumulate<__half> {
  using type = float;
};
template <>
struct Accumulate<__nv_bfloat16> {
  using type = float;
};
template <typename T>
using Acc = typename Accumulate<T>::type;

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ double widen(double x) { return x; }
__device__ __forceinline__ float widen(__half x) { return __half2float(x); }
__device__ __forceinline__ float widen(__nv_bfloat16 x) { return __bfloat162float(x); }

// Acc<T> -> T with one rounding to nearest.
template <typename T>
__device__ __forceinline__ T narrow(Acc<T> x) {
  return x;
}
template <>
__device__ __forceinline__ __half narrow<__half>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ __forceinline__ __nv_bfloat16 narrow<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

// kVec neighbouring elements moved by few loads or stores of at most 16 bytes. The address must be
// aligned to the size, or to 16 bytes where that is less: newer architectures would move 32 at
// once.
template <typename T, int kVec>
struct alignas(sizeof(T) * kVec < 16 ? sizeof(T) * kVec : 16) Pack {
  T at[kVec];
};

__device__ __forceinline__ int lane_id() { return threadIdx.x % kWarpSize; }

// Index of this warp in the whole one-dimensional grid.
__device__ __forceinline__ Size global_warp_id() {
  return (static_cast<Size>(blockIdx.x) * blockDim.x + threadIdx.x) / kWarpSize;
}

// Sum over the lanes of a warp, in one fixed order; every lane receives it.
template <typename A>
__device__ __forceinline__ A warp_sum(A x) {
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
    x += __shfl_xor_sync(kFullMask, x, offset);
  }
  return x;
}

}  // namespace snack
