// Level avx2: AVX2 and FMA, 16 registers of 8 floats, two multiply-adds per cycle with a latency of
// four or five. The interface is described in `product.h`.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace {

typedef __m256 Vec;
typedef uint32_t Words __attribute__((vector_size(sizeof(Vec))));
constexpr int kRegisters = 16;
constexpr int64_t kLanes = 8;

// Six to ten sums in flight, leaving registers for a step's weights, a factor and a mask.
constexpr int kMostRows = 5;
constexpr int tile_vectors(int rows) { return rows == 1 ? 8 : rows == 2 ? 4 : 2; }

inline Vec load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, Vec v) { _mm256_storeu_ps(p, v); }
inline Vec broadcast(const float* p) { return _mm256_broadcast_ss(p); }
// a * b + c
inline Vec multiply_add(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }

// The first (second) bfloat16 of each pair as float32.
inline Vec first_of_pairs(const float* p) { return (Vec)((Words)load(p) << 16); }
inline Vec second_of_pairs(const float* p) { return (Vec)((Words)load(p) & 0xffff0000u); }

}  // namespace
