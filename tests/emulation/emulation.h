// One CUDA block after another on one core of the host: what the kernels of cuda/ need, so that
// tests can run them where there is no GPU. Every CUDA thread is a fiber of its own; fibers change
// only at barriers and shuffles, warp by warp. Addresses, sizes and arithmetic are real; what is
// missing is concurrency, so races are left to compute-sanitizer on a GPU.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

using std::fma;
using std::max;
using std::min;

#define __global__
#define __device__
#define __forceinline__ inline
#define __noinline__
#define __restrict__
#define __launch_bounds__(...)
#define __shared__ static

struct Index {
  unsigned x = 0;
};
inline Index threadIdx, blockIdx, blockDim, gridDim;

struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

namespace emulation {

constexpr int kWarp = 32;
constexpr std::size_t kStack = 64 * 1024;

struct Barrier {
  int arrived = 0;
  long generation = 0;
};

// A context starts a fiber; after that jumps change between fibers, without a system call.
struct Fiber {
  ucontext_t context;
  jmp_buf place;
  bool started = false, finished = false, at_block_barrier = false;
};

struct Block {
  std::vector<Fiber> fibers;
  std::vector<Barrier> warps;
  std::vector<unsigned long long> slots;
  std::vector<char> stacks;
  std::function<void()> body;
  jmp_buf scheduler;
  int current = 0;
  char* shared = nullptr;
  int threads = 0;  // of one block of the cluster
  std::size_t shared_stride = 0;
};

inline Block* block = nullptr;

inline void yield() {
  if (_setjmp(block->fibers[block->current].place) == 0) _longjmp(block->scheduler, 1);
}

inline __attribute__((noinline)) void resume(Fiber& fiber) {
  if (_setjmp(block->scheduler) != 0) return;
  if (fiber.started) _longjmp(fiber.place, 1);
  fiber.started = true;
  setcontext(&fiber.context);
}

inline int live_lanes(int warp) {
  int live = 0;
  for (int l = 0; l < kWarp; ++l) live += !block->fibers[warp * kWarp + l].finished;
  return live;
}

inline void warp_barrier() {
  const int warp = block->current / kWarp;
  Barrier& barrier = block->warps[warp];
  const long generation = barrier.generation;
  ++barrier.arrived;
  while (barrier.generation == generation) {
    if (barrier.arrived >= live_lanes(warp)) {
      barrier.arrived = 0;
      ++barrier.generation;
    } else {
      yield();
    }
  }
}

template <typename T>
T exchange(T value, int from) {
  unsigned long long bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  const int first = block->current / kWarp * kWarp;
  block->slots[block->current] = bits;
  warp_barrier();
  bits = block->slots[first + (from & (kWarp - 1))];
  warp_barrier();
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// Which block of the cluster the current fiber is of.
inline int cluster_rank() { return block->current / block->threads; }

inline void enter() {
  block->body();
  Fiber& fiber = block->fibers[block->current];
  fiber.finished = true;
  _longjmp(block->scheduler, 1);
}

// Runs the fibers of one block, or of the blocks of a cluster, until all have finished. A warp goes
// on until its fibers wait for the block or have ended; then all that wait are let go. So all
// blocks of a cluster must come to as many barriers.
inline void run_blocks(int first_block, int blocks) {
  const int threads = blocks * block->threads;
  for (int t = 0; t < threads; ++t) {
    Fiber& fiber = block->fibers[t];
    fiber.started = fiber.finished = fiber.at_block_barrier = false;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = block->stacks.data() + t * kStack;
    fiber.context.uc_stack.ss_size = kStack;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, enter, 0);
  }
  for (Barrier& barrier : block->warps) barrier = Barrier();
  for (;;) {
    bool waiting = false;
    for (int first = 0; first < threads; first += kWarp) {
      for (bool ran = true; ran;) {
        ran = false;
        for (int t = first; t < first + kWarp; ++t) {
          Fiber& fiber = block->fibers[t];
          if (fiber.finished || fiber.at_block_barrier) continue;
          ran = true;
          block->current = t;
          threadIdx.x = t % block->threads;
          blockIdx.x = first_block + t / block->threads;
          resume(fiber);
        }
      }
      for (int t = first; t < first + kWarp; ++t) waiting |= block->fibers[t].at_block_barrier;
    }
    if (!waiting) return;
    for (Fiber& fiber : block->fibers) fiber.at_block_barrier = false;
  }
}

template <typename... P, std::size_t... I>
void call(void (*kernel)(P...), const long long* arguments, std::index_sequence<I...>) {
  kernel((P)(arguments[I])...);
}

// `arguments` are 8 bytes each: sizes, and addresses of the host.
template <typename... P>
void launch(void (*kernel)(P...), int grid, int threads, std::size_t shared_bytes,
            const long long* arguments, int cluster = 1) {
  Block made;
  made.threads = threads;
  made.fibers.resize(cluster * threads);
  made.warps.resize(cluster * threads / kWarp);
  made.slots.resize(cluster * threads);
  made.stacks.resize(cluster * threads * kStack);
  made.body = [=] { call(kernel, arguments, std::index_sequence_for<P...>()); };
  block = &made;
  blockDim.x = threads;
  gridDim.x = grid;
  // Poisoned, with nothing known beyond its end.
  const std::size_t bytes = (shared_bytes + 127) / 128 * 128 + 128;
  made.shared_stride = bytes;
  made.shared = static_cast<char*>(std::aligned_alloc(128, cluster * bytes));
  for (int b = 0; b < grid; b += cluster) {
    std::memset(made.shared, 0xff, cluster * bytes);
    run_blocks(b, cluster);
    for (int rank = 0; rank < cluster; ++rank) {
      for (std::size_t i = shared_bytes; i < bytes; ++i) {
        if (made.shared[rank * bytes + i] != static_cast<char>(0xff)) std::abort();  // past its end
      }
    }
  }
  std::free(made.shared);
  block = nullptr;
}

template <typename T>
T* shared() {
  return reinterpret_cast<T*>(block->shared + cluster_rank() * block->shared_stride);
}

}  // namespace emulation

inline void __syncthreads() {
  emulation::block->fibers[emulation::block->current].at_block_barrier = true;
  emulation::yield();
}
inline void __syncwarp(unsigned = ~0u) { emulation::warp_barrier(); }

template <typename T>
T __shfl_sync(unsigned, T value, int lane) {
  return emulation::exchange(value, lane);
}
template <typename T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  return emulation::exchange(value, (threadIdx.x % emulation::kWarp) ^ mask);
}
inline int __reduce_max_sync(unsigned, int value) {
  for (int mask = 1; mask < emulation::kWarp; mask *= 2) {
    value = max(value, __shfl_xor_sync(~0u, value, mask));
  }
  return value;
}
template <typename T>
T atomicAdd(T* address, T value) {
  const T old = *address;
  *address += value;
  return old;
}
inline unsigned __reduce_add_sync(unsigned, unsigned value) {
  for (int mask = 1; mask < emulation::kWarp; mask *= 2) {
    value += __shfl_xor_sync(~0u, value, mask);
  }
  return value;
}
inline unsigned __ballot_sync(unsigned, bool predicate) {
  using emulation::block;
  const int first = block->current / emulation::kWarp * emulation::kWarp;
  block->slots[block->current] = predicate;
  emulation::warp_barrier();
  unsigned votes = 0;
  for (int lane = 0; lane < emulation::kWarp; ++lane) {
    votes |= static_cast<unsigned>(block->slots[first + lane]) << lane;
  }
  emulation::warp_barrier();
  return votes;
}
template <typename T>
T __shfl_up_sync(unsigned, T value, int distance) {
  const int lane = threadIdx.x % emulation::kWarp;
  return emulation::exchange(value, lane < distance ? lane : lane - distance);
}
template <typename T>
T __shfl_down_sync(unsigned, T value, int distance) {
  const int lane = threadIdx.x % emulation::kWarp;
  return emulation::exchange(value, min(lane + distance, emulation::kWarp - 1));
}
inline unsigned atomicOr(unsigned* address, unsigned bits) {
  const unsigned old = *address;
  *address |= bits;
  return old;
}
template <typename T>
T __ldcg(const T* address) {
  return *address;
}
inline void __threadfence() {}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  const unsigned long long both = static_cast<unsigned long long>(high) << 32 | low;
  return static_cast<unsigned>(both >> (shift & 31));
}
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
inline float __fdividef(float a, float b) { return a / b; }
inline int __float_as_int(float x) {
  int bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}
inline float __int_as_float(int bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}
inline unsigned __funnelshift_lc(unsigned low, unsigned high, unsigned shift) {
  const unsigned long long both = static_cast<unsigned long long>(high) << 32 | low;
  return both << min(shift, 32u) >> 32;
}
inline unsigned __viaddmin_u16x2(unsigned a, unsigned b, unsigned c) {
  const unsigned low = min((a + b) & 0xffff, c & 0xffff);
  const unsigned high = min(((a >> 16) + (b >> 16)) & 0xffff, c >> 16);
  return low | high << 16;
}
