// Level baseline: what every processor of the architecture has, in compiler vector types. On x86-64
// that is SSE2: 16 registers of 4 floats, separate multiplication and addition. The interface is
// described in `product.h`.
#pragma once

#include <cstdint>
#include <cstring>

namespace {

typedef float Vec __attribute__((vector_size(16)));
typedef uint32_t Words __attribute__((vector_size(16)));
constexpr int kRegisters = 16;
constexpr int64_t kLanes = 4;

// Six sums, or eight for one row. The other registers hold weights, factors and products, since an
// addition overwrites its operand.
constexpr int kMostRows = 3;
constexpr int tile_vectors(int rows) { return rows == 1 ? 8 : 2; }

inline Vec load(const float* p) {
  Vec v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
inline void store(float* p, Vec v) { std::memcpy(p, &v, sizeof v); }
inline Vec broadcast(const float* p) { return Vec{*p, *p, *p, *p}; }
// a * b + c
inline Vec multiply_add(Vec a, Vec b, Vec c) { return a * b + c; }

// The first (second) bfloat16 of each pair as float32.
inline Vec first_of_pairs(const float* p) { return (Vec)((Words)load(p) << 16); }
inline Vec second_of_pairs(const float* p) { return (Vec)((Words)load(p) & 0xffff0000u); }

}  // namespace
