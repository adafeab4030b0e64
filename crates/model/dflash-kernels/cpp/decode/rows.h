// Row operations other than products: norms, rotation, activation, and storing a panel's sums.
#pragma once

#include <cmath>
#include <cstring>

#include "product.h"

namespace {

typedef int32_t Ints __attribute__((vector_size(sizeof(Vec))));

// Gate columns, and up columns, per shared panel.
constexpr int64_t kHalfPanel = kPanel / 2;

inline Vec load_some(const float* p, int64_t count) {
  float lanes[kLanes] = {};
  std::memcpy(lanes, p, count * sizeof(float));
  return load(lanes);
}

// For an odd count one more element may be written, since products read bfloat16 in pairs.
template <typename Element>
inline void store_some(Element* p, Vec v, int64_t count) {
  Element lanes[kLanes];
  store(lanes, v);
  std::memcpy(p, lanes, (sizeof(Element) == 2 ? round_up(count, 2) : count) * sizeof(Element));
}

inline Vec larger(Vec a, Vec b) { return a > b ? a : b; }

// exp to about 1 ulp: 2^n times a polynomial on [-ln2/2, ln2/2] (coefficients: Cephes expf). 0
// below -87, where results approach subnormals.
inline Vec exponential(Vec x) {
  const Vec low = Vec{} - 87.0f, high = Vec{} + 88.0f;
  const Ints tiny = x < low;
  x = x > high ? high : x;
  // Adding 1.5 * 2^23 rounds to the nearest integer.
  const Vec n = (x * 1.44269504f + 12582912.0f) - 12582912.0f;
  const Vec r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  Vec p = Vec{} + 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = (p * r) * r + r + 1.0f;
  const Vec power = p * (Vec)((__builtin_convertvector(n, Ints) + 127) << 23);
  return tiny ? Vec{} : power;
}

inline float exponential(float x) {
  float lanes[kLanes];
  store(lanes, exponential(broadcast(&x)));
  return lanes[0];
}

// Reduces all lanes, first those four apart.
template <typename Join>
inline float join_lanes(Vec v, const Join& join) {
  typedef float Four __attribute__((vector_size(16)));
  Four parts[kLanes / 4];
  static_assert(sizeof parts == sizeof v, "whole parts");
  std::memcpy(parts, &v, sizeof v);
  for (int64_t width = kLanes / 8; width > 0; width /= 2)
    for (int64_t i = 0; i < width; ++i) parts[i] = join(parts[i], parts[i + width]);
  const Four last = parts[0];
  return join(join(last[0], last[2]), join(last[1], last[3]));
}

inline float total(Vec v) {
  return join_lanes(v, [](auto a, auto b) { return a + b; });
}

inline float largest_lane(Vec v) {
  return join_lanes(v, [](auto a, auto b) { return a > b ? a : b; });
}

inline float sum_of_squares(const float* x, int64_t dim) {
  Vec sums[4] = {};
  int64_t d = 0;
  for (; d + 4 * kLanes <= dim; d += 4 * kLanes)
    for (int64_t i = 0; i < 4; ++i) {
      const Vec part = load(x + d + i * kLanes);
      sums[i] = multiply_add(part, part, sums[i]);
    }
  for (; d < dim; d += kLanes) {
    const Vec rest = load_some(x + d, dim - d < kLanes ? dim - d : kLanes);
    sums[0] = multiply_add(rest, rest, sums[0]);
  }
  return total((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

// y = x converted to a product's element type.
template <typename Element>
inline void copy_row(const float* x, Element* y, int64_t dim) {
  int64_t d = 0;
  for (; d + kLanes <= dim; d += kLanes) store(y + d, load(x + d));
  if (d < dim) store_some(y + d, load_some(x + d, dim - d), dim - d);
}

template <typename Element>
inline void norm_row(const float* x, const float* weight, Element* y, int64_t dim, float eps) {
  const float scale = 1.0f / std::sqrt(sum_of_squares(x, dim) / static_cast<float>(dim) + eps);
  int64_t d = 0;
  for (; d + kLanes <= dim; d += kLanes) store(y + d, load(x + d) * scale * load(weight + d));
  const int64_t rest = dim - d;
  if (rest > 0) store_some(y + d, load_some(x + d, rest) * scale * load_some(weight + d, rest), rest);
}

// y = the head, normed (if there is a norm), rotated and multiplied by `scale`.
inline void rotate_head(const float* x, const float* norm, const float* cosine, const float* sine,
                        float* y, int64_t dim, float eps, float scale) {
  const int64_t half = dim / 2;
  if (norm != nullptr)
    norm_row(x, norm, y, dim, eps);
  else
    std::memcpy(y, x, dim * sizeof(float));
  const auto rotate = [&](int64_t d, Vec low, Vec high, Vec cos, Vec sin, auto put) {
    put(y + d, (low * cos - high * sin) * scale);
    put(y + d + half, (high * cos + low * sin) * scale);
  };
  int64_t d = 0;
  for (; d + kLanes <= half; d += kLanes)
    rotate(d, load(y + d), load(y + d + half), load(cosine + d), load(sine + d),
           [](float* p, Vec v) { store(p, v); });
  const int64_t rest = half - d;
  if (rest > 0)
    rotate(d, load_some(y + d, rest), load_some(y + d + half, rest), load_some(cosine + d, rest),
           load_some(sine + d, rest), [&](float* p, Vec v) { store_some(p, v, rest); });
}

// Adds a panel's sums (and bias) to up to 32 columns of `y`.
inline void add_panel(float* y, int64_t width, int64_t panel, const float* bias, const float* sums) {
  const int64_t column = panel * kPanel;
  for (int64_t i = 0; i < kPanel; i += kLanes) {
    const int64_t at = column + i, rest = width - at;
    if (rest <= 0) return;
    const Vec sum = bias == nullptr ? load(sums + i) : load(sums + i) + load(bias + at);
    if (rest >= kLanes)
      store(y + at, load(y + at) + sum);
    else
      store_some(y + at, load_some(y + at, rest) + sum, rest);
  }
}

// Writes a panel's sums (and bias) to 32 columns of `y`.
inline void set_panel(float* y, int64_t panel, const float* bias, const float* sums) {
  const int64_t column = panel * kPanel;
  for (int64_t i = 0; i < kPanel; i += kLanes) {
    const Vec sum = load(sums + i);
    store(y + column + i, bias == nullptr ? sum : sum + load(bias + column + i));
  }
}

// Writes silu(gate) * up of a panel's sums (and bias) to 16 columns of `y`.
template <typename Element>
inline void set_gated(Element* y, int64_t panel, const float* bias, const float* sums) {
  for (int64_t i = 0; i < kHalfPanel; i += kLanes) {
    Vec gate = load(sums + i), up = load(sums + kHalfPanel + i);
    if (bias != nullptr) {
      gate += load(bias + panel * kPanel + i);
      up += load(bias + panel * kPanel + kHalfPanel + i);
    }
    store(y + panel * kHalfPanel + i, gate / (1.0f + exponential(-gate)) * up);
  }
}

}  // namespace
