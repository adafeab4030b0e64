// What CUDA gives to the kernels of `cuda/kernels.cu`, for a CPU: each thread of a block is a fiber,
// and the fibers run one after the other up to where they wait for each other. Waits that a GPU would
// not survive (a barrier that some threads miss, a partner that has ended) are errors.
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

// The thread that runs, its place, and what its block shares.
struct Place {
  Index thread, block, threads, blocks;
  float* shared;
};

Place& place();

// Waits for the whole block.
void wait_for_block();

// Waits for the warp; returns the 32 bits that the partner brought.
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
