// Level avx512: AVX-512 (F, BW, CD, DQ, VL), 32 registers of 16 floats, one or two multiply-adds
// per cycle with a latency of four. The interface is described in `product.h`.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace {

typedef __m512 Vec;
typedef uint32_t Words __attribute__((vector_size(sizeof(Vec))));
constexpr int kRegisters = 32;
constexpr int64_t kLanes = 16;

// Up to twenty sums in flight. More rows would only save loads, which are not the bottleneck, and
// six rows of four vectors would spill. A single row is memory-bound, which four panels at a time
// would slow down.
constexpr int kMostRows = 8;
constexpr int tile_vectors(int rows) { return rows <= 5 ? 4 : 2; }

inline Vec load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, Vec v) { _mm512_storeu_ps(p, v); }
inline Vec broadcast(const float* p) { return _mm512_set1_ps(*p); }
// a * b + c
inline Vec multiply_add(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }

// The first (second) bfloat16 of each pair as float32.
inline Vec first_of_pairs(const float* p) { return (Vec)((Words)load(p) << 16); }
inline Vec second_of_pairs(const float* p) { return (Vec)((Words)load(p) & 0xffff0000u); }

}  // namespace
