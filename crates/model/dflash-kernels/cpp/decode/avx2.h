// Level avx2: AVX2 and FMA, 16 registers of 8 floats, two multiply-adds a cycle with a latency of four
// or five. `product.h` says what a level provides.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace {

typedef __m256 Vec;
typedef uint32_t Words __attribute__((vector_size(sizeof(Vec))));
constexpr int kRegisters = 16;
constexpr int64_t kLanes = 8;

// Six to ten sums in flight, and registers left for the weights of a step, a factor and a mask.
constexpr int kMostRows = 5;
constexpr int tile_vectors(int rows) { return rows == 1 ? 8 : rows == 2 ? 4 : 2; }

inline Vec load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, Vec v) { _mm256_storeu_ps(p, v); }
inline Vec broadcast(const float* p) { return _mm256_broadcast_ss(p); }
// a * b + c
inline Vec multiply_add(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }

// Of pairs of bfloat16, the first of each as float32, and the second.
inline Vec first_of_pairs(const float* p) { return (Vec)((Words)load(p) << 16); }
inline Vec second_of_pairs(const float* p) { return (Vec)((Words)load(p) & 0xffff0000u); }

}  // namespace
