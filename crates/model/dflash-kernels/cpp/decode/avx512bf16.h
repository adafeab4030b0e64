// Level avx512bf16: AVX-512 plus dot products of bfloat16 pairs accumulated in float32.
#pragma once

#include "avx512.h"

#define DFLASH_BFLOAT16_PAIRS

namespace {

// c plus the dot products of the pairs in a and b; each pair is as wide as a float.
inline Vec multiply_add_pairs(Vec a, Vec b, Vec c) {
  return _mm512_dpbf16_ps(c, (__m512bh)a, (__m512bh)b);
}

// Rounds to the nearest bfloat16, ties to even.
inline void store(uint16_t* p, Vec v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh(v));
}

}  // namespace
