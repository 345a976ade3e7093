// Random ranks that grow, as bits of a map: the first n images of a keyed permutation of the ranks
// below `domain`, the same as snack_cupy.random.permuted_ranks computes.
//
// Rank = left * b + right with a * b >= domain. Round i adds to the left half (even i) or to the
// right one, modulo its radix, a hash of the other half and round key i. Images from the domain on
// go through the network again. As the map of ranks is a set, no order has to be established.
//
// A thread owns one number below n. Deterministic: a union of bits. domain < 2^31. Sources: Steele
// et al., OOPSLA 2014 (the hash); Black, Rogaway, CT-RSA 2002 (the network); Mitchell et al., ACM
// TOPC 2022 (permutation instead of shuffle).
#include "bitmap.cuh"

namespace snack {

constexpr int kMostRounds = 24;

__device__ __forceinline__ unsigned long long mix64(unsigned long long x) {
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ x >> 27) * 0x94D049BB133111EBull;
  return x ^ x >> 31;
}

// changed += hash(read) mod radix; the hash is the high word, scaled to [0, radix).
__device__ __forceinline__ unsigned turn(unsigned changed, unsigned read, unsigned long long key,
                                         unsigned radix) {
  const unsigned high = static_cast<unsigned>(mix64(read + key) >> 32);
  const unsigned step =
      changed + static_cast<unsigned>(static_cast<unsigned long long>(high) * radix >> 32);
  return min(step, step - radix);  // below the radix the difference wraps to a huge number
}

// The rank map starts at zero. `rounds` is even and at most kMostRounds.
__global__ void __launch_bounds__(kThreads)
    permuted_ranks(Size n, Size domain, Size a, Size b, Size rounds, Size key, unsigned* ranks) {
  __shared__ unsigned long long keys[kMostRounds];
  if (threadIdx.x < rounds) {
    constexpr unsigned long long kGolden = 0x9E3779B97F4A7C15ull;
    keys[threadIdx.x] = mix64(static_cast<unsigned long long>(key) + (threadIdx.x + 1) * kGolden);
  }
  __syncthreads();
  const Size i = static_cast<Size>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= n) return;
  const unsigned left_radix = static_cast<unsigned>(a), right_radix = static_cast<unsigned>(b);
  unsigned rank = static_cast<unsigned>(i);
  do {
    unsigned left = rank / right_radix, right = rank % right_radix;
    for (int r = 0; r < rounds; r += 2) {
      left = turn(left, right, keys[r], left_radix);
      right = turn(right, left, keys[r + 1], right_radix);
    }
    rank = left * right_radix + right;
  } while (rank >= domain);
  atomicOr(ranks + rank / kWordBits, 1u << rank % kWordBits);
}

}  // namespace snack
