// Blocks that run together and reach each other's shared memory: clusters, from sm_90 on.
#pragma once

#include "common.cuh"

// An attribute of kernels: their blocks come in clusters of two. Older devices ignore it, and must
// not be given such kernels.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define SNACK_CLUSTER_OF_TWO __cluster_dims__(2, 1, 1)
#else
#define SNACK_CLUSTER_OF_TWO
#endif

namespace snack {

// All threads of a cluster call both in turn; what was stored before an arrival, also into the
// other block, is seen after the wait.
__device__ __forceinline__ void cluster_arrive() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// Stores to the place in the shared memory of block `rank` of the cluster that `local` is here.
__device__ __forceinline__ void store_in_cluster(float* local, int rank, float value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  const unsigned here = static_cast<unsigned>(__cvta_generic_to_shared(local));
  unsigned there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(here), "r"(rank));
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(there), "f"(value) : "memory");
#endif
}

}  // namespace snack
