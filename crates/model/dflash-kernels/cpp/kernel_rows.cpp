// The row loops of `kernels.cpp`, compiled once per instruction-set level (build.rs).
//
// Plain loops, vectorised by the compiler. Nothing is shared with other files, not even inline
// standard library functions: the linker keeps one copy of such a function, possibly one with
// instructions that this machine lacks.
#include "kernel_rows.h"

#include <math.h>
#include <string.h>

#define JOINED(a, b) a##b
#define TABLE(level) JOINED(dflash_kernel_rows_, level)

namespace {

// exp to about 1 ulp: 2^n times a polynomial on [-ln2/2, ln2/2] (coefficients: Cephes expf).
inline float fast_exp(float x) {
  x = x < -87.0f ? -87.0f : x;
  x = x > 88.0f ? 88.0f : x;
  const float n = nearbyintf(x * 1.44269504f);
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = (p * r) * r + r + 1.0f;
  const int32_t bits = (static_cast<int32_t>(n) + 127) << 23;
  float scale;
  memcpy(&scale, &bits, sizeof scale);
  return p * scale;
}

inline float reciprocal_rms(const float* x, int64_t dim, float eps) {
  float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
  for (int64_t d = 0; d < dim; ++d) sum += x[d] * x[d];
  return 1.0f / sqrtf(sum / static_cast<float>(dim) + eps);
}

void norm_rows(const float* x, const float* weight, float* y, int64_t begin, int64_t end,
               int64_t dim, float eps) {
  for (int64_t row = begin; row < end; ++row) {
    const float* in = x + row * dim;
    float* out = y + row * dim;
    const float scale = reciprocal_rms(in, dim, eps);
#pragma omp simd
    for (int64_t d = 0; d < dim; ++d) out[d] = in[d] * scale * weight[d];
  }
}

// Per-row terms of the norm's gradient: scale * (dy * weight - x * scale^2 * mean(dy * weight *
// x)).
struct NormRow {
  float scale, pull;
};

inline NormRow norm_row(const float* dy, const float* x, const float* weight, int64_t dim,
                        float eps) {
  float square = 0.0f, dot = 0.0f;
#pragma omp simd reduction(+ : square, dot)
  for (int64_t d = 0; d < dim; ++d) {
    square += x[d] * x[d];
    dot += dy[d] * weight[d] * x[d];
  }
  const float scale = 1.0f / sqrtf(square / static_cast<float>(dim) + eps);
  return {scale, scale * scale * dot / static_cast<float>(dim)};
}

void norm_backward_rows(float* dy, const float* x, const float* weight, const float* residual,
                        float* y, float* dweight, int64_t begin, int64_t end, int64_t dim,
                        float eps) {
  for (int64_t row = begin; row < end; ++row) {
    float* slope = dy + row * dim;
    const float* in = x + row * dim;
    const NormRow norm = norm_row(slope, in, weight, dim, eps);
    if (y != nullptr) {
      float* out = y + row * dim;
#pragma omp simd
      for (int64_t d = 0; d < dim; ++d) out[d] = in[d] * norm.scale * weight[d];
    }
#pragma omp simd
    for (int64_t d = 0; d < dim; ++d) {
      dweight[d] += slope[d] * in[d] * norm.scale;
      slope[d] = norm.scale * (slope[d] * weight[d] - in[d] * norm.pull);
    }
    if (residual != nullptr) {
      const float* beside = residual + row * dim;
#pragma omp simd
      for (int64_t d = 0; d < dim; ++d) slope[d] += beside[d];
    }
  }
}

// First element of a head in the regrouped layout [rows][group][kv_heads][dim].
inline int64_t regrouped(const DflashHeads& heads, int64_t row, int64_t head) {
  const int64_t place = (row * heads.group + head % heads.group) * heads.kv_heads;
  return (place + head / heads.group) * heads.dim;
}

void head_rows(const float* x, int64_t x_stride, const float* weight, const float* cosine,
               const float* sine, float* y, const DflashHeads& heads, int64_t begin, int64_t end,
               float eps) {
  const int64_t dim = heads.dim, half = dim / 2;
  for (int64_t row = begin; row < end; ++row) {
    const float *c = cosine + row * half, *s = sine + row * half;
    for (int64_t head = 0; head < heads.kv_heads * heads.group; ++head) {
      const float* in = x + row * x_stride + head * dim;
      float* out = y + regrouped(heads, row, head);
      const float scale = reciprocal_rms(in, dim, eps);
#pragma omp simd
      for (int64_t d = 0; d < half; ++d) {
        const float low = in[d] * scale * weight[d];
        const float high = in[d + half] * scale * weight[d + half];
        out[d] = low * c[d] - high * s[d];
        out[d + half] = high * c[d] + low * s[d];
      }
    }
  }
}

void head_backward_rows(const float* dy, float* x, int64_t x_stride, const float* weight,
                        const float* cosine, const float* sine, float* dweight,
                        const DflashHeads& heads, int64_t begin, int64_t end, float eps,
                        float* scratch) {
  const int64_t dim = heads.dim, half = dim / 2;
  for (int64_t row = begin; row < end; ++row) {
    const float *c = cosine + row * half, *s = sine + row * half;
    for (int64_t head = 0; head < heads.kv_heads * heads.group; ++head) {
      const float* in = dy + regrouped(heads, row, head);
#pragma omp simd
      for (int64_t d = 0; d < half; ++d) {
        scratch[d] = in[d] * c[d] + in[d + half] * s[d];
        scratch[d + half] = in[d + half] * c[d] - in[d] * s[d];
      }
      float* raw = x + row * x_stride + head * dim;
      const NormRow norm = norm_row(scratch, raw, weight, dim, eps);
#pragma omp simd
      for (int64_t d = 0; d < dim; ++d) {
        dweight[d] += scratch[d] * raw[d] * norm.scale;
        raw[d] = norm.scale * (scratch[d] * weight[d] - raw[d] * norm.pull);
      }
    }
  }
}

void swiglu_rows(const float* gate_up, float* y, int64_t begin, int64_t end, int64_t dim) {
  for (int64_t row = begin; row < end; ++row) {
    const float *gate = gate_up + row * 2 * dim, *up = gate + dim;
    float* out = y + row * dim;
#pragma omp simd
    for (int64_t d = 0; d < dim; ++d) out[d] = gate[d] / (1.0f + fast_exp(-gate[d])) * up[d];
  }
}

void swiglu_backward_rows(float* dy, float* gate_up, int64_t begin, int64_t end, int64_t dim) {
  for (int64_t row = begin; row < end; ++row) {
    float *gate = gate_up + row * 2 * dim, *up = gate + dim, *slope = dy + row * dim;
#pragma omp simd
    for (int64_t d = 0; d < dim; ++d) {
      const float g = gate[d], u = up[d], upstream = slope[d];
      const float sigmoid = 1.0f / (1.0f + fast_exp(-g));
      const float silu = g * sigmoid;
      slope[d] = silu * u;
      up[d] = upstream * silu;
      gate[d] = upstream * u * (sigmoid + silu * (1.0f - sigmoid));
    }
  }
}

float row_maximum(const float* x, int64_t dim) {
  float maximum = x[0];
#pragma omp simd reduction(max : maximum)
  for (int64_t d = 0; d < dim; ++d) maximum = maximum < x[d] ? x[d] : maximum;
  return maximum;
}

float exponentiate(float* x, float maximum, int64_t dim) {
  float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
  for (int64_t d = 0; d < dim; ++d) {
    x[d] = fast_exp(x[d] - maximum);
    sum += x[d];
  }
  return sum;
}

void scale_row(float* x, float factor, int64_t dim) {
#pragma omp simd
  for (int64_t d = 0; d < dim; ++d) x[d] *= factor;
}

void merge_row(float* out, const float* part, float old_share, float new_share, int64_t dim) {
#pragma omp simd
  for (int64_t d = 0; d < dim; ++d) out[d] = out[d] * old_share + part[d] * new_share;
}

void adamw_range(float* parameter, const float* gradient, float* mean, float* variance,
                 int64_t begin, int64_t end, float beta1, float beta2, float epsilon,
                 float step_size, float root_correction2) {
#pragma omp simd
  for (int64_t i = begin; i < end; ++i) {
    const float g = gradient[i];
    mean[i] += (g - mean[i]) * (1.0f - beta1);
    variance[i] = variance[i] * beta2 + (1.0f - beta2) * g * g;
    const float divisor = sqrtf(variance[i]) / root_correction2 + epsilon;
    parameter[i] -= step_size * mean[i] / divisor;
  }
}

}  // namespace

extern "C" const DflashKernelRows TABLE(LEVEL) = {
    norm_rows,
    norm_backward_rows,
    head_rows,
    head_backward_rows,
    swiglu_rows,
    swiglu_backward_rows,
    row_maximum,
    exponentiate,
    scale_row,
    merge_row,
    adamw_range,
};
