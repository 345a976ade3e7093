// The matrix instruction of the tensor cores for the half types, summed in float.
#pragma once

#include "common.cuh"

namespace snack {

// sum (16, 8) += a (16, 16) b (16, 8). Lane l holds, with g = l / 4 and t = l % 4, two neighbouring
// elements in each word:
//
//   a[0], a[1]: rows g and g + 8, columns 2t and 2t + 1;  a[2], a[3]: the same, 8 columns further
//   b[0]: rows 2t and 2t + 1 of column g;  b[1]: 8 rows further
//   sum[0], sum[1]: row g, columns 2t and 2t + 1;  sum[2], sum[3]: row g + 8
template <typename T>
__device__ __forceinline__ void mma_m16n8k16(float (&sum)[4], const unsigned (&a)[4],
                                             const unsigned (&b)[2]);

template <>
__device__ __forceinline__ void mma_m16n8k16<__half>(float (&sum)[4], const unsigned (&a)[4],
                                                     const unsigned (&b)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

template <>
__device__ __forceinline__ void mma_m16n8k16<__nv_bfloat16>(float (&sum)[4], const unsigned (&a)[4],
                                                            const unsigned (&b)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Four matrices of 8 x 8 elements of 16 bits from shared memory: lane l gives the address of row
// l % 8, 16 bytes, of matrix l / 8, and gets elements 2t and 2t + 1 of row g of all four.
__device__ __forceinline__ void load_matrices(unsigned (&made)[4], const char* row) {
  const unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(made[0]), "=r"(made[1]), "=r"(made[2]), "=r"(made[3])
               : "r"(at)
               : "memory");
}

// Two floats as T in one word, the first in its low half; each rounded once, to nearest.
template <typename T>
__device__ __forceinline__ unsigned pack_two(float low, float high);

template <>
__device__ __forceinline__ unsigned pack_two<__half>(float low, float high) {
  unsigned word;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}

template <>
__device__ __forceinline__ unsigned pack_two<__nv_bfloat16>(float low, float high) {
  unsigned word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}

}  // namespace snack
