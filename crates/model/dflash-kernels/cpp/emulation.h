// CPU implementation of the CUDA features that `cuda/kernels.cu` uses. Each thread of a block is a
// fiber; fibers run in turn up to their next wait. Waits that would hang a GPU (a barrier that some
// threads skip, a shuffle with a finished thread) are errors.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#define __global__
#define __device__
#define __grid_constant__
#define __launch_bounds__(threads)

namespace emulation {

struct Index {
  unsigned x;
};

// The current thread's indices, and the shared memory of its block.
struct Place {
  Index thread, block, threads, blocks;
  float* shared;
};

Place& place();

// __syncthreads.
void wait_for_block();

// Warp shuffle: waits for the warp and returns the partner's 32 bits.
uint32_t exchange(uint32_t mine, unsigned partner);

template <typename To, typename From>
To bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

}  // namespace emulation

#define threadIdx (emulation::place().thread)
#define blockIdx (emulation::place().block)
#define blockDim (emulation::place().threads)
#define gridDim (emulation::place().blocks)
#define dynamic_shared (emulation::place().shared)

inline void __syncthreads() { emulation::wait_for_block(); }

template <typename T>
T __shfl_xor_sync(unsigned, T value, int distance) {
  const unsigned partner = threadIdx.x ^ static_cast<unsigned>(distance);
  return emulation::bits<T>(emulation::exchange(emulation::bits<uint32_t>(value), partner));
}

inline float __uint_as_float(unsigned x) { return emulation::bits<float>(x); }
inline unsigned __float_as_uint(float x) { return emulation::bits<unsigned>(x); }
inline float __int_as_float(int x) { return emulation::bits<float>(x); }
inline int __float_as_int(float x) { return emulation::bits<int>(x); }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
