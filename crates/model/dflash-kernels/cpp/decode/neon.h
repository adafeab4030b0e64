// Level neon: Advanced SIMD of every 64-bit Arm processor, 32 registers of 4 floats, two to four
// multiply-adds per cycle with a latency of four. The interface is described in `product.h`.
#pragma once

#include <arm_neon.h>

#include <cstdint>

namespace {

typedef float32x4_t Vec;
typedef uint32x4_t Words;
constexpr int kRegisters = 32;
constexpr int64_t kLanes = 4;

// Sixteen sums in flight given enough rows, leaving registers for a step's weights and a factor.
constexpr int kMostRows = 4;
constexpr int tile_vectors(int rows) { return rows <= 2 ? 8 : 4; }

inline Vec load(const float* p) { return vld1q_f32(p); }
inline void store(float* p, Vec v) { vst1q_f32(p, v); }
inline Vec broadcast(const float* p) { return vld1q_dup_f32(p); }
// a * b + c
inline Vec multiply_add(Vec a, Vec b, Vec c) { return vfmaq_f32(c, a, b); }

// The first (second) bfloat16 of each pair as float32.
inline Vec first_of_pairs(const float* p) { return (Vec)((Words)load(p) << 16); }
inline Vec second_of_pairs(const float* p) { return (Vec)((Words)load(p) & 0xffff0000u); }

}  // namespace
